"""Muon is Muon up to its grid, stays in S, sees no split; what diverges is an error, and nothing is silently NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swarmtrain.errors import DivergedError
from swarmtrain.model.adamw import apply_adamw, project_gradient
from swarmtrain.model.buffers import Slot
from swarmtrain.model.exact_matmul import Engine
from swarmtrain.model.initial import draw_normal
from swarmtrain.model.layout import Role
from swarmtrain.model.muon import COEFFICIENTS, NUM_ITERATIONS, apply_muon, orthogonalized, rate_scale
from swarmtrain.model.state import StageState
from swarmtrain.model.subspace import projected

from .chains import Chain, relative, some_tokens, tiny

MUON = ("optimizer.kind=muon", "optimizer.learning_rate=0.02")
NEVER = "boundary.reproject_every=1000000"
SHAPES = [(16, 16), (4, 24), (24, 16), (200, 300), (500, 200), (1, 7), (7, 1)]


def plain(matrix: Tensor) -> Tensor:
    """Newton-Schulz as it is published, in fp64."""
    x = matrix.double()
    x = x.t() if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm()
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


def hidden_slots(state: StageState) -> list[Slot]:
    found = [slot for slot in state.slots if slot.spec.by_muon]
    assert len(found) == 7 * len(state.plan.layers)
    return found


def gradient_of_step(state: StageState, step: int) -> Tensor:
    """The same for a tensor in every split and on every machine."""
    total = torch.zeros(state.gradient_size, dtype=torch.float64)
    for slot in state.slots:
        total[slot.span] = draw_normal(step, slot.spec.name, slot.spec.shape).double().view(-1)
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_the_update_has_the_direction_of_a_plain_one(shape: tuple[int, int]) -> None:
    matrix = draw_normal(1, "matrix", shape)
    found, wanted = orthogonalized(matrix).double(), plain(matrix)
    assert relative(found, wanted) < 1e-2
    assert 1.0 - float((found * wanted).sum() / found.norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("shape", [(64, 64), (64, 176), (176, 64)])
def test_small_singular_values_are_not_lost_on_the_grid(shape: tuple[int, int]) -> None:
    """A thousandth of the largest: what a grid of thirteen bits for the whole matrix would barely see."""
    left, right = (draw_normal(seed, "side", (64, 64)).double() for seed in (1, 2))
    middle = torch.diag(torch.logspace(0, -3, 64, dtype=torch.float64))
    matrix = left @ middle @ right
    matrix = matrix.repeat(1, 3)[:, : shape[1]] if shape[1] > 64 else matrix.repeat(3, 1)[: shape[0]]
    assert relative(orthogonalized(matrix.float()).double(), plain(matrix)) < 1e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_both_engines_give_the_same_bits(shape: tuple[int, int]) -> None:
    for seed in range(3):
        matrix = draw_normal(seed, "matrix", shape) * draw_normal(seed, "sizes", shape).exp()
        assert torch.equal(orthogonalized(matrix, Engine.FP64), orthogonalized(matrix, Engine.INT8))


def test_blocks_of_columns_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = draw_normal(1, "matrix", (64, 2000))
    whole = orthogonalized(matrix)
    monkeypatch.setattr("swarmtrain.model.muon.MUON_BLOCK_ELEMENTS", 1)  # 256 columns at once
    assert torch.equal(orthogonalized(matrix), whole)


def test_control_a_plain_iteration_in_fp32_has_other_bits_in_another_order() -> None:
    matrix = draw_normal(1, "matrix", (64, 176))
    order = torch.randperm(176, generator=torch.Generator().manual_seed(1))

    def fp32(x: Tensor) -> Tensor:
        x = x / x.norm()
        a, b, c = COEFFICIENTS
        for _ in range(NUM_ITERATIONS):
            square = x @ x.t()
            x = a * x + (b * square + c * square @ square) @ x
        return x

    assert not torch.equal(fp32(matrix[:, order]), fp32(matrix)[:, order])
    scale = math.sqrt(2.0**30)  # a norm that no order changes: only the products are in question
    assert torch.equal(orthogonalized(matrix[:, order] * scale), orthogonalized(matrix * scale)[:, order])


def test_a_state_follows_the_textbook() -> None:
    """Momentum, Nesterov, decay, rates by shape; AdamW for all else, at its own rate."""
    state = StageState(tiny(*MUON, "boundary.kind=dense", "stages.count=1"), 0)
    others = StageState(tiny("boundary.kind=dense", "stages.count=1"), 0)
    section = state.manifest.optimizer
    values = {slot.spec.name: state.view(slot.spec.name).double() for slot in hidden_slots(state)}
    momenta = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(5):
        gradient, rate = gradient_of_step(state, step), 0.02 / (1 + step)
        for slot in hidden_slots(state):
            name, g = slot.spec.name, 0.25 * gradient[slot.span].view(slot.spec.shape)
            momenta[name] = section.momentum * momenta[name] + g
            update = plain(g + section.momentum * momenta[name]) * rate_scale(*g.shape)
            values[name] = values[name] * (1 - rate * section.weight_decay) - rate * update
        apply_muon(state, gradient, 0.25, rate)
        apply_adamw(others, gradient, 0.25, rate * section.adamw_rate)
    assert state.step == 5
    for slot in state.slots:
        name = slot.spec.name
        if slot.spec.by_muon:
            assert relative(state.view(name).double(), values[name]) < 1e-3, name
        else:
            assert torch.equal(state.view(name), others.view(name)), name


def test_embedding_head_norms_and_maps_learn_by_adamw() -> None:
    for kind in ("subspace", "projected", "dense", "learned"):
        for worker in Chain(tiny(*MUON, f"boundary.kind={kind}")).workers:
            for slot in worker.state.slots:
                in_block = slot.spec.name.startswith("layers.") and len(slot.spec.shape) == 2
                assert slot.spec.by_muon == in_block, slot.spec.name
                assert (slot.moment_size == 0) == in_block


def test_a_matrix_of_muon_has_one_moment() -> None:
    state, twin = StageState(tiny(*MUON), 1), StageState(tiny(), 1)
    names = {name for name, _ in state.named_tensors()}
    assert "first_moment/layers.2.mlp.up.weight" in names
    assert "second_moment/layers.2.mlp.up.weight" not in names
    assert "second_moment/layers.2.mlp_norm.weight" in names
    assert state.layout.num_bytes < 0.75 * twin.layout.num_bytes


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_updates_stay_in_the_subspace_without_reprojection(kind: str) -> None:
    """The dense form as well: it is orthogonalised in the coordinates of S."""
    state = StageState(tiny(*MUON, f"boundary.kind={kind}", "stages.count=1", NEVER), 0, dtype=torch.float64)
    assert state.basis is not None
    for step in range(30):
        gradient = gradient_of_step(state, step)
        project_gradient(state, gradient)
        apply_muon(state, gradient, 1.0, 0.02)
    constrained = [slot for slot in hidden_slots(state) if slot.spec.role in (Role.COLUMNS_IN_S, Role.FACTOR)]
    assert len(constrained) == 2 * 7  # the last layer is a tail layer
    for slot in constrained:
        dense = state.view(slot.spec.name)
        dense = dense if kind == "projected" else state.basis @ dense
        assert relative(dense, projected(Role.COLUMNS_IN_S, dense, state.basis)) < 1e-12


def test_control_orthogonalising_the_dense_matrix_leaves_the_subspace() -> None:
    """Rounding errors are singular directions of their own, and grow."""
    state = StageState(tiny(*MUON, "boundary.kind=projected"), 0)
    assert state.basis is not None
    basis = state.basis.double()
    gradient = basis @ draw_normal(3, "coordinates", (4, 24)).double()
    update = orthogonalized(gradient.float()).double()
    leak = relative(update, projected(Role.COLUMNS_IN_S, update, basis))
    inside = orthogonalized((basis.t() @ gradient).float()).double()
    assert leak > 1e-4
    assert relative(update, basis @ inside) < 1e-2  # otherwise it is the same update


def test_the_two_constrained_forms_make_the_same_steps() -> None:
    tokens = [some_tokens(tiny(), seed) for seed in range(3)]
    chains = []
    for kind in ("subspace", "projected"):
        chain = Chain(tiny(*MUON, f"boundary.kind={kind}"))
        for microbatch in tokens:
            chain.step(microbatch, learning_rate=0.02)
        chains.append(chain)
    basis = chains[0].workers[0].state.basis
    assert basis is not None
    factored, dense = chains[0].parameters(), chains[1].parameters()
    for name, role in chains[0].roles().items():
        if role is Role.FACTOR:
            assert relative(basis @ factored[name], dense[name]) < 1e-3, name
        elif role is Role.FREE:
            assert relative(factored[name], dense[name]) < 1e-3, name


@pytest.mark.parametrize("kind", ["subspace", "dense"])
def test_the_split_into_stages_leaves_no_trace(kind: str) -> None:
    found = []
    for stages in (1, 2, 4, 8):
        chain = Chain(tiny(*MUON, f"boundary.kind={kind}", f"stages.count={stages}"), torch.float32)
        for step in range(3):
            for worker in chain.workers:
                apply_muon(worker.state, gradient_of_step(worker.state, step), 0.3, 0.02)
        found.append(chain.parameters())
    for other in found[1:]:
        assert all(torch.equal(found[0][name], value) for name, value in other.items())


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_the_momentum_moves_with_the_subspace(kind: str) -> None:
    """Z becomes U'ᵀ U Z: what of the momentum lies in the new S, in its coordinates."""
    chain = Chain(tiny(*MUON, f"boundary.kind={kind}", "boundary.track_every=1", "boundary.track_rate=3.0"))
    for seed in range(2):
        chain.step(some_tokens(chain.manifest, seed))
    old, new = chain.workers[0].state.basis, chain.workers[-1].proposed_basis()
    assert old is not None
    assert relative(new, old) > 1e-3
    old = old.clone()
    role = Role.FACTOR if kind == "subspace" else Role.COLUMNS_IN_S
    before = {
        slot.spec.name: worker.state.first_moment[slot.span].view(slot.spec.shape).clone()
        for worker in chain.workers
        for slot in worker.state.slots
        if slot.spec.role is role
    }
    assert len(before) == 14
    for worker in chain.workers:
        worker.move_basis(new)
        for slot in worker.state.slots:
            if slot.spec.name not in before:
                continue
            was, now = before[slot.spec.name], worker.state.first_moment[slot.span].view(slot.spec.shape)
            wanted = new.t() @ old @ was if kind == "subspace" else new @ new.t() @ was
            assert relative(now, wanted) < 1e-12
    chain.step(some_tokens(chain.manifest, 2))  # and goes on


def test_tied_copies_stay_equal() -> None:
    chain = Chain(tiny(*MUON, "boundary.kind=dense", "model.tie_embeddings=true"), torch.float32)
    for seed in range(2):
        chain.step(some_tokens(chain.manifest, seed))
    chain.parameters()  # holds the copies of a tensor against each other


def test_a_zero_gradient_moves_no_matrix_but_by_its_decay() -> None:
    state = StageState(tiny(*MUON), 0)
    before = {slot.spec.name: state.view(slot.spec.name).clone() for slot in hidden_slots(state)}
    apply_muon(state, torch.zeros(state.gradient_size, dtype=torch.float64), 1.0, 0.02)
    decay = 1.0 - 0.02 * state.manifest.optimizer.weight_decay
    for name, value in before.items():
        assert torch.equal(state.view(name), value.mul(decay)), name


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    """From denormal numbers to the end of fp32: finite, and the same direction."""
    matrix = draw_normal(1, "matrix", (40, 60))
    found = orthogonalized(matrix * size)
    assert bool(torch.isfinite(found).all())
    assert relative(found.double(), plain(matrix)) < 1e-2


def test_a_single_huge_element_is_no_harm() -> None:
    matrix = draw_normal(1, "matrix", (40, 60))
    matrix[3, 4] = 1e25
    found = orthogonalized(matrix)
    assert bool(torch.isfinite(found).all())
    assert abs(float(found[3, 4])) > 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_error(value: float) -> None:
    state = StageState(tiny(*MUON), 0)
    gradient = gradient_of_step(state, 0)
    gradient[hidden_slots(state)[0].span.start] = value
    with pytest.raises(DivergedError, match="momentum is not finite"):
        apply_muon(state, gradient, 1.0, 0.02)
