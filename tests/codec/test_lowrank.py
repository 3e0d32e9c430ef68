"""Low rank: the power iteration, its warm start, and what it survives."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import Direction, decode
from swarmtrain.codec.lowrank import orthonormal, power_step, residual_cosine
from swarmtrain.codec.payload import header_bytes
from swarmtrain.codec.watch import SAMPLE_EVERY, ResidualWatch

from .generators import Case, cases, context, encoder, numbers, round_trip, squared

BACKWARD = context(Direction.BACKWARD)


def spectrum(rows: int, columns: int, seed: int) -> torch.Tensor:
    """A matrix with singular values 1, 1/2, 1/3, …"""
    left = orthonormal(numbers("gaussian", (rows, rows), seed))
    right = orthonormal(numbers("gaussian", (columns, columns), seed + 1))
    size = min(rows, columns)
    return left[:, :size] @ torch.diag(1 / torch.arange(1.0, size + 1)) @ right[:, :size].T


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 60), columns=st.integers(1, 60), rank=st.integers(1, 8), seed=st.integers(0, 99))
def test_p_is_orthonormal_and_the_norm_identity_holds(rows: int, columns: int, rank: int, seed: int) -> None:
    rank = min(rank, rows, columns)
    matrix = numbers("gaussian", (rows, columns), seed)
    left, right = power_step(matrix, numbers("gaussian", (columns, rank), seed + 1))
    assert torch.allclose(left.T @ left, torch.eye(rank), atol=1e-5)
    identity = squared(matrix) - squared(right) - squared(matrix - left @ right.T)
    assert abs(identity) <= 1e-4 * squared(matrix)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    rank=st.integers(0, 4),
    seed=st.integers(0, 99),
    power=st.integers(-120, 100),
)
def test_a_matrix_of_small_enough_rank_is_exact_at_any_scale(
    rows: int, columns: int, rank: int, seed: int, power: int
) -> None:
    matrix = numbers("gaussian", (rows, rank), seed) @ numbers("gaussian", (rank, columns), seed + 1) * 2.0**power
    received = round_trip("lowrank4:factors=fp32", matrix).tensor
    assert (received - matrix).double().norm() <= 1e-5 * matrix.double().norm()


@pytest.mark.parametrize(("factors", "width"), [("fp32", 4), ("fp16", 2), ("bf16", 2)])
@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_sizes_to_the_byte(factors: str, width: int, case: Case) -> None:
    sender = encoder(f"lowrank4:factors={factors}", Direction.BACKWARD)
    columns = case.shape[-1] if case.shape else 1
    rows = case.tensor().numel() // columns if columns else 0
    rank = min(4, rows, columns)
    expected = header_bytes(len(case.shape)) + width * rank * (rows + columns)
    assert len(sender.encode(case.tensor(), BACKWARD).payload) == sender.max_bytes(case.shape) == expected


def error_of(sender_payload: bytes, matrix: torch.Tensor) -> float:
    return squared(decode(sender_payload, BACKWARD).tensor - matrix) / squared(matrix)


@pytest.mark.parametrize("seed", range(5))
def test_the_warm_start_improves_on_a_fixed_message_and_reaches_the_best_rank(seed: int) -> None:
    matrix = spectrum(48, 64, seed)
    sender = encoder("lowrank8:factors=fp32", Direction.BACKWARD)
    errors = []
    for _ in range(8):
        encoded = sender.encode(matrix, BACKWARD)
        sender.commit(encoded.ticket)
        errors.append(error_of(encoded.payload, matrix))
    assert all(later <= earlier * (1 + 1e-5) for earlier, later in itertools.pairwise(errors))
    singular = torch.linalg.svdvals(matrix)
    best = float((singular[8:] ** 2).sum() / (singular**2).sum())
    assert errors[-1] <= 1.05 * best
    assert errors[0] <= 1.5 * best  # the first message got an extra iteration


@pytest.mark.parametrize("spec", ["lowrank4", "lowrank4-lep"])
def test_a_message_of_zeros_does_not_change_the_next_one(spec: str) -> None:
    """With Gram-Schmidt it would silence the link for ever."""
    first, second = spectrum(24, 32, 1), spectrum(24, 32, 5)
    with_zeros, without = encoder(spec, Direction.BACKWARD), encoder(spec, Direction.BACKWARD)
    for sender, history in ((with_zeros, [first, torch.zeros(24, 32)]), (without, [first])):
        for message in history:
            sender.commit(sender.encode(message, BACKWARD).ticket)
    if spec == "lowrank4":
        assert with_zeros.encode(second, BACKWARD).payload == without.encode(second, BACKWARD).payload
    else:  # the residual of the first went out with the zeros
        assert error_of(with_zeros.encode(second, BACKWARD).payload, second) < 0.5


def test_a_message_of_smaller_rank_does_not_cost_the_next_one_its_directions() -> None:
    sender = encoder("lowrank4:factors=fp32", Direction.BACKWARD)
    line = numbers("gaussian", (24, 1), 1) @ numbers("gaussian", (1, 32), 2)
    full = spectrum(24, 32, 5)
    for message in (full, line, line, full, full, full):
        encoded = sender.encode(message, BACKWARD)
        sender.commit(encoded.ticket)
    singular = torch.linalg.svdvals(full)
    assert error_of(encoded.payload, full) <= 1.1 * float((singular[4:] ** 2).sum() / (singular**2).sum())


def test_the_shape_may_change_between_messages() -> None:
    sender = encoder("lowrank4", Direction.BACKWARD)
    for shape in ((8, 16), (3, 5, 7), (2,), (), (8, 16), (0, 4), (8, 2)):
        encoded = sender.encode(numbers("gaussian", shape, 1), BACKWARD)
        assert tuple(decode(encoded.payload, BACKWARD).tensor.shape) == shape


def test_tickets_that_were_never_closed_are_forgotten() -> None:
    for spec in ("lowrank4", "lowrank4-lep", "lowrank4:critical", "ef21-quant4"):
        sender = encoder(spec, Direction.BACKWARD)
        for step in range(20):
            sender.on_step(step)
            sender.encode(numbers("gaussian", (8, 16), step), context(Direction.BACKWARD, step=step))
        assert len(sender._open) <= 3  # type: ignore[attr-defined]


def test_signs_are_fixed() -> None:
    for seed in range(20):
        basis = orthonormal(numbers("gaussian", (9, 4), seed))
        assert torch.allclose(orthonormal(basis), basis, atol=1e-6)
        assert torch.equal(orthonormal(torch.zeros(9, 4)).T @ orthonormal(torch.zeros(9, 4)), torch.eye(4))


def test_the_diagnostic_is_a_cosine() -> None:
    residual, activation, following = (numbers("gaussian", (4, 8), seed) for seed in range(3))
    assert residual_cosine(activation - following, activation, following) == pytest.approx(1)
    assert residual_cosine(following - activation, activation, following) == pytest.approx(-1)
    assert abs(residual_cosine(residual, activation, following)) < 1
    assert residual_cosine(residual, activation, activation) == 0
    assert residual_cosine(torch.zeros(4, 8), activation, following) == 0


def test_the_watch_compares_a_residual_with_the_message_that_it_goes_into() -> None:
    watch = ResidualWatch()
    activations = [numbers("gaussian", (4, 8), seed) for seed in range(SAMPLE_EVERY + 2)]
    residuals = [numbers("gaussian", (4, 8), 1000 + seed) for seed in range(SAMPLE_EVERY + 2)]
    seen = []
    for activation, residual in zip(activations, residuals, strict=True):
        watch.look(activation, residual)
        seen.append(watch.cosine)
    first = residual_cosine(residuals[0], activations[0], activations[1])
    second = residual_cosine(residuals[SAMPLE_EVERY], activations[SAMPLE_EVERY], activations[SAMPLE_EVERY + 1])
    assert seen == [None, *[first] * SAMPLE_EVERY, second]


def test_without_feedback_there_is_nothing_to_watch() -> None:
    watch = ResidualWatch()
    for seed in range(3):
        watch.look(numbers("gaussian", (4, 8), seed), None)
    assert watch.cosine is None
