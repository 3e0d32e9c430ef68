"""PowerSGD over several peers, with the sums done here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import CodecError, NonFiniteTensor
from swarmtrain.codec.lowrank import power_step
from swarmtrain.codec.powersgd import (
    PowerSGDRound,
    PowerSGDState,
    initial_right_factor,
    is_worth_it,
    matrix_shape,
    orthonormal_left,
)

from .generators import numbers, same_bits, squared

SHAPES = {"attention": (48, 64), "expert": (40, 6, 10), "norm": (64,), "small": (8, 8)}
RANK = 4
Gradients = dict[str, torch.Tensor]


def gradients_of(peer: int, step: int = 0) -> Gradients:
    return {
        name: numbers("gaussian", shape, 1000 * step + 10 * peer + index)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def total(parts: list[Gradients]) -> Gradients:
    return {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]}


def reduce_once(states: list[PowerSGDState], gradients: list[Gradients]) -> tuple[Gradients, list[PowerSGDRound]]:
    """One reduction among all peers, not committed."""
    rounds = [PowerSGDRound(state, gradient) for state, gradient in zip(states, gradients, strict=True)]
    left = orthonormal_left(total([one.left() for one in rounds]))
    right = total([one.right(left) for one in rounds])
    results = [one.result(right) for one in rounds]
    for other in results[1:]:
        assert all(same_bits(other[name], results[0][name]) for name in other)
    return results[0], rounds


def fresh(num_peers: int) -> list[PowerSGDState]:
    return [PowerSGDState.fresh(SHAPES, RANK) for _ in range(num_peers)]


def test_vectors_and_matrices_that_would_save_less_than_half_are_left_alone() -> None:
    assert set(fresh(1)[0].right) == {"attention", "expert"}
    assert matrix_shape(SHAPES["expert"]) == (40, 60)
    assert is_worth_it((64, 64), 16)
    assert not is_worth_it((64, 64), 17)
    assert not is_worth_it((4096,), 1)


def test_one_peer_alone_is_a_plain_low_rank_step() -> None:
    states, gradients = fresh(1), [gradients_of(0)]
    result, _ = reduce_once(states, gradients)
    for name, reduced in result.items():
        matrix = gradients[0][name].reshape(matrix_shape(SHAPES[name]))
        left = orthonormal_left({name: matrix @ states[0].right[name]})[name]
        assert torch.allclose(reduced, left @ (left.T @ matrix), atol=1e-4)


@settings(max_examples=10, deadline=None)
@given(num_peers=st.integers(1, 4), steps=st.integers(1, 3))
def test_the_result_is_the_projected_sum_and_errors_add_up_to_the_rest(num_peers: int, steps: int) -> None:
    states = fresh(num_peers)
    for step in range(steps):
        gradients = [gradients_of(peer, step) for peer in range(num_peers)]
        wanted = {
            name: sum(
                g[name].reshape(s.error[name].shape) + s.error[name] for g, s in zip(gradients, states, strict=True)
            )
            for name in states[0].error
        }
        result, rounds = reduce_once(states, gradients)
        for one in rounds:
            one.commit()
            one.commit()  # the second has no effect
        for name, matrix in wanted.items():
            assert isinstance(matrix, torch.Tensor)
            left = rounds[0]._left[name]
            assert squared(result[name] - left @ (left.T @ matrix)) <= 1e-9 * squared(matrix)
            rest = matrix - result[name]
            errors = torch.stack([state.error[name] for state in states]).sum(dim=0)
            assert squared(errors - rest) <= 1e-9 * squared(matrix)


def test_the_mean_of_errors_is_the_same_with_own_and_with_shared_right_factors() -> None:
    states = fresh(3)
    result, rounds = reduce_once(states, [gradients_of(peer) for peer in range(3)])
    wanted = [{name: matrix.clone() for name, matrix in one._wanted.items()} for one in rounds]
    for one in rounds:
        one.commit()
    for name, reduced in result.items():
        own = torch.stack([state.error[name] for state in states]).mean(dim=0)
        shared = torch.stack([one[name] - reduced / 3 for one in wanted]).mean(dim=0)
        assert torch.allclose(own, shared, atol=1e-5)


def test_a_round_that_is_not_committed_leaves_no_trace() -> None:
    states, witness = fresh(2), fresh(2)
    reduce_once(states, [gradients_of(peer, 7) for peer in range(2)])
    for half_done in (PowerSGDRound(states[0], gradients_of(0)),):
        half_done.left()
        half_done.commit()  # before `result`: nothing
    for one, other in zip(states, witness, strict=True):
        for kept, untouched in ((one.error, other.error), (one.right, other.right)):
            assert all(same_bits(kept[name], untouched[name]) for name in kept)


def test_a_newcomer_with_the_shared_factor_and_no_error_fits_in() -> None:
    states = fresh(2)
    for step in range(3):
        _, rounds = reduce_once(states, [gradients_of(peer, step) for peer in range(2)])
        for one in rounds:
            one.commit()
    newcomer = PowerSGDState.fresh(SHAPES, RANK)
    newcomer.right = dict(states[0].right)
    everybody = [*states, newcomer]
    shared, carried = dict(states[0].right), [dict(state.error) for state in everybody]
    gradients = [gradients_of(peer, 3) for peer in range(3)]
    result, rounds = reduce_once(everybody, gradients)
    for name, reduced in result.items():
        parts = [g[name].reshape(e[name].shape) + e[name] for g, e in zip(gradients, carried, strict=True)]
        wanted = torch.stack(parts).sum(dim=0)
        left = orthonormal_left({name: wanted @ shared[name]})[name]  # as if one peer had it all
        assert squared(reduced - left @ (left.T @ wanted)) <= 1e-9 * squared(wanted)
    for one in rounds:
        one.commit()
    for state in everybody[1:]:
        assert all(same_bits(state.right[name], states[0].right[name]) for name in state.right)


def test_warm_factors_approach_the_best_rank() -> None:
    """A gradient that stays the same, without error: only Q improves."""
    matrix = (
        torch.linalg.qr(numbers("gaussian", (48, 48), 1)).Q
        @ torch.diag(1 / torch.arange(1.0, 49))
        @ (torch.linalg.qr(numbers("gaussian", (64, 64), 2)).Q[:48])
    )
    state = PowerSGDState.fresh({"attention": (48, 64)}, RANK)
    errors = []
    for _ in range(8):
        result, rounds = reduce_once([state], [{"attention": matrix}])
        rounds[0].commit()
        state.error["attention"].zero_()
        errors.append(squared(result["attention"] - matrix) / squared(matrix))
    singular = torch.linalg.svdvals(matrix)
    assert errors[-1] <= 1.02 * float((singular[RANK:] ** 2).sum() / (singular**2).sum())
    assert errors[-1] < errors[0]


def test_with_error_feedback_a_constant_gradient_arrives_in_the_mean() -> None:
    states = fresh(2)
    gradients = [gradients_of(peer) for peer in range(2)]
    wanted = total(gradients)
    sums = {name: torch.zeros(matrix_shape(SHAPES[name])) for name in states[0].right}
    for _ in range(60):
        result, rounds = reduce_once(states, gradients)
        for one in rounds:
            one.commit()
        for name, reduced in result.items():
            sums[name] += reduced / 60
    for name, mean in sums.items():
        assert squared(mean - wanted[name].reshape(mean.shape)) < 0.1 * squared(wanted[name])


def test_a_flipped_sign_at_one_peer_would_be_caught() -> None:
    """Everyone must use the owner's P: with one column negated at one peer, sums cancel and the result is off."""
    states, gradients = fresh(2), [gradients_of(peer) for peer in range(2)]
    exact, _ = reduce_once(states, gradients)
    rounds = [PowerSGDRound(state, gradient) for state, gradient in zip(states, gradients, strict=True)]
    left = orthonormal_left(total([one.left() for one in rounds]))
    flipped = {name: factor * torch.tensor([-1.0] + [1.0] * (RANK - 1)) for name, factor in left.items()}
    right = total([rounds[0].right(left), rounds[1].right(flipped)])
    results = [one.result(right) for one in rounds]
    assert not same_bits(results[0]["attention"], results[1]["attention"])
    assert squared(results[0]["attention"] - exact["attention"]) > 0.01 * squared(exact["attention"])


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scales_do_not_matter(scale: float) -> None:
    states, scaled = fresh(1), fresh(1)
    for step in range(3):
        plain = gradients_of(0, step)
        result, rounds = reduce_once(states, [plain])
        tiny, tiny_rounds = reduce_once(scaled, [{name: value * scale for name, value in plain.items()}])
        rounds[0].commit()
        tiny_rounds[0].commit()
        for name in result:
            assert torch.allclose(tiny[name] / scale, result[name], atol=1e-3)


def test_a_gradient_of_zeros_keeps_the_factor() -> None:
    state = fresh(1)[0]
    before = dict(state.right)
    _, rounds = reduce_once([state], [{name: torch.zeros(shape) for name, shape in SHAPES.items()}])
    rounds[0].commit()
    assert all(state.right[name] is before[name] for name in before)


def test_factors_start_from_the_name_alone() -> None:
    first, second = (initial_right_factor("layers.3.mlp.up", (64, 32), 4) for _ in range(2))
    assert same_bits(first, second)
    assert not same_bits(first, initial_right_factor("layers.4.mlp.up", (64, 32), 4))
    left, _ = power_step(numbers("gaussian", (64, 32), 1), first)
    assert left.shape == (64, 4)


def test_wrong_shapes_and_nan_are_refused() -> None:
    state = fresh(1)[0]
    poisoned = gradients_of(0)
    poisoned["attention"][0, 0] = float("nan")
    with pytest.raises(NonFiniteTensor):
        PowerSGDRound(state, poisoned)
    one = PowerSGDRound(state, gradients_of(0))
    left = orthonormal_left(one.left())
    with pytest.raises(CodecError):
        one.right({name: factor[:-1] for name, factor in left.items()})
    right = one.right(left)
    with pytest.raises(CodecError):
        one.result({name: factor[:-1] for name, factor in right.items()})
