"""AdamW is AdamW; on dense constrained tensors it stays in S, and the variants that would leave S do leave it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarmtrain.model.adamw import apply_adamw, project_gradient
from swarmtrain.model.buffers import Slot
from swarmtrain.model.initial import draw_normal
from swarmtrain.model.layout import MAPS_RATE, Role
from swarmtrain.model.state import StageState
from swarmtrain.model.subspace import projected
from swarmtrain.run.manifest import OptimizerSection

from .chains import Chain, relative, some_tokens, tiny

NEVER = "boundary.reproject_every=1000000"
CONSTRAINED = (Role.COLUMNS_IN_S, Role.ROWS_IN_S)


def gradient_of_step(state: StageState, step: int) -> Tensor:
    """Made-up gradients whose elements have very different sizes, as real ones do."""
    values = draw_normal(step, "gradient", (state.gradient_size,)).double()
    return values * draw_normal(9, "sizes", (state.gradient_size,)).double().exp()


def leak(role: Role, tensor: Tensor, basis: Tensor) -> float:
    """The share of a tensor that lies outside S."""
    return relative(tensor, projected(role, tensor, basis))


@pytest.mark.parametrize(("kind", "stages", "rates"), [("dense", 1, {1.0}), ("learned", 4, {1.0, MAPS_RATE})])
def test_free_tensors_follow_torch_adamw(kind: str, stages: int, rates: set[float]) -> None:
    manifest = tiny(f"boundary.kind={kind}", f"stages.count={stages}")
    state = StageState(manifest, stages // 2, dtype=torch.float64)
    section = state.manifest.optimizer
    assert {slot.spec.rate for slot in state.slots} == rates
    assert {slot.spec.decays for slot in state.slots} == {True, False}
    twins = {slot.spec.name: state.view(slot.spec.name).clone().requires_grad_(True) for slot in state.slots}
    groups = [
        {"params": [twins[slot.spec.name]], "weight_decay": section.weight_decay if slot.spec.decays else 0.0}
        for slot in state.slots
    ]
    oracle = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.epsilon)
    for step in range(20):
        gradient, rate = gradient_of_step(state, step), 1e-2 / (1 + step)
        for slot in state.slots:
            twins[slot.spec.name].grad = (gradient[slot.span] * 0.25).view(slot.spec.shape).clone()
        for slot, group in zip(state.slots, oracle.param_groups, strict=True):
            group["lr"] = rate * slot.spec.rate
        oracle.step()
        apply_adamw(state, gradient, 0.25, rate)
    assert state.step == 20
    for name, twin in twins.items():
        assert relative(state.view(name), twin.detach()) < 1e-12, name


def projected_state(*overrides: str) -> StageState:
    return StageState(tiny("boundary.kind=projected", "stages.count=1", NEVER, *overrides), 0, dtype=torch.float64)


def constrained_slots(state: StageState) -> list[Slot]:
    found = [slot for slot in state.slots if slot.spec.role in CONSTRAINED]
    assert {slot.spec.role for slot in found} == set(CONSTRAINED)
    return found


def test_row_averaged_adamw_stays_in_the_subspace() -> None:
    """A hundred steps without re-projection; the first moment stays there, too."""
    state = projected_state()
    assert state.basis is not None
    before = state.parameters.clone()
    for step in range(100):
        gradient = gradient_of_step(state, step)
        project_gradient(state, gradient)
        apply_adamw(state, gradient, 1.0, 1e-2)
    for slot in constrained_slots(state):
        role, shape = slot.spec.role, slot.spec.shape
        assert leak(role, state.view(slot.spec.name), state.basis) < 1e-12
        assert leak(role, state.first_moment[slot.span].view(shape), state.basis) < 1e-12
        assert relative(state.parameters[slot.span], before[slot.span]) > 0.1  # it did move


SecondMoment = Callable[[Slot, Tensor], Tensor]


def stock(slot: Slot, square: Tensor) -> Tensor:
    return square


def averaged_over_directions(slot: Slot, square: Tensor) -> Tensor:
    """Of the k directions that a column of the constrained matrix can have, whatever basis of S they are written in."""
    return square.sum(0 if slot.spec.role is Role.COLUMNS_IN_S else 1, keepdim=True) / projected_k()


def projected_k() -> int:
    basis = projected_state().basis
    assert basis is not None
    return int(basis.shape[1])


def averaged_over_wrong_axis(slot: Slot, square: Tensor) -> Tensor:
    return square.mean(1 if slot.spec.role is Role.COLUMNS_IN_S else 0, keepdim=True)


class TextbookAdamW:
    """AdamW on the constrained tensors, with the second moment's averaging left open."""

    def __init__(self, state: StageState, second_moment: SecondMoment) -> None:
        self.second_moment = second_moment
        self.values = {slot.spec.name: state.view(slot.spec.name).clone() for slot in constrained_slots(state)}
        self.first = {name: torch.zeros_like(value) for name, value in self.values.items()}
        self.second = {name: torch.zeros(()) for name in self.values}

    def step(self, state: StageState, gradient: Tensor, rate: float, number: int, section: OptimizerSection) -> None:
        for slot in constrained_slots(state):
            name, g = slot.spec.name, gradient[slot.span].view(slot.spec.shape)
            self.first[name] = section.beta1 * self.first[name] + (1 - section.beta1) * g
            self.second[name] = section.beta2 * self.second[name] + (1 - section.beta2) * self.second_moment(
                slot, g * g
            )
            first = self.first[name] / (1 - section.beta1**number)
            root = (self.second[name] / (1 - section.beta2**number)).sqrt() + section.epsilon
            if slot.spec.decays:
                self.values[name] = self.values[name] * (1 - rate * section.weight_decay)
            self.values[name] = self.values[name] - rate * first / root


def run_textbook(second_moment: SecondMoment, steps: int) -> tuple[TextbookAdamW, StageState]:
    state = projected_state()
    oracle = TextbookAdamW(state, second_moment)
    for step in range(steps):
        gradient = gradient_of_step(state, step)
        project_gradient(state, gradient)
        oracle.step(state, gradient, 1e-2, step + 1, state.manifest.optimizer)
        apply_adamw(state, gradient, 1.0, 1e-2)
    return oracle, state


def test_constrained_tensors_follow_the_textbook_with_averaging() -> None:
    oracle, state = run_textbook(averaged_over_directions, 20)
    for name, value in oracle.values.items():
        assert relative(state.view(name), value) < 1e-12, name


def test_a_step_is_as_long_as_that_of_the_same_model_in_coordinates() -> None:
    """AdamW's first step moves every coordinate by the learning rate: a column in S by sqrt(k) times that."""
    state = projected_state("optimizer.weight_decay=0.0")
    before = state.parameters.clone()
    gradient = gradient_of_step(state, 0)
    project_gradient(state, gradient)
    apply_adamw(state, gradient, 1.0, 1e-2)
    for slot in constrained_slots(state):
        moved = (state.parameters[slot.span] - before[slot.span]).view(slot.spec.shape)
        lengths = moved.norm(dim=0 if slot.spec.role is Role.COLUMNS_IN_S else 1)
        assert torch.allclose(lengths, torch.full_like(lengths, 1e-2 * projected_k() ** 0.5), rtol=1e-3)


@pytest.mark.parametrize("second_moment", [stock, averaged_over_wrong_axis])
def test_other_second_moments_leave_the_subspace(second_moment: SecondMoment) -> None:
    oracle, state = run_textbook(second_moment, 20)
    assert state.basis is not None
    for slot in constrained_slots(state):
        assert leak(slot.spec.role, oracle.values[slot.spec.name], state.basis) > 1e-2, slot.spec.name


def test_torch_adamw_leaves_the_subspace_in_one_step() -> None:
    state = projected_state()
    assert state.basis is not None
    gradient = gradient_of_step(state, 0)
    project_gradient(state, gradient)
    for slot in constrained_slots(state):
        value = state.view(slot.spec.name).clone().requires_grad_(True)
        value.grad = gradient[slot.span].view(slot.spec.shape).clone()
        torch.optim.AdamW([value], lr=1e-2).step()
        assert leak(slot.spec.role, value.detach(), state.basis) > 1e-2, slot.spec.name


def test_an_unprojected_gradient_leaves_the_subspace() -> None:
    state = projected_state()
    assert state.basis is not None
    apply_adamw(state, gradient_of_step(state, 0), 1.0, 1e-2)
    assert all(
        leak(slot.spec.role, state.view(slot.spec.name), state.basis) > 1e-2 for slot in constrained_slots(state)
    )


def test_whole_tensors_may_be_averaged_but_not_single_elements() -> None:
    """Why the projected form allows no element-wise sparse averaging of its weights."""
    first, second = projected_state(), projected_state("run.seed=4")
    assert first.basis is not None
    second_in_first = projected(Role.COLUMNS_IN_S, second.view("layers.0.mlp.down.weight"), first.basis)
    weight = first.view("layers.0.mlp.down.weight")
    assert leak(Role.COLUMNS_IN_S, 0.5 * (weight + second_in_first), first.basis) < 1e-12
    chosen = draw_normal(1, "chosen", (16, 24)) > 1.5
    assert leak(Role.COLUMNS_IN_S, torch.where(chosen, second_in_first, weight), first.basis) > 1e-2


def test_reprojection_brings_drift_back_and_happens_when_due() -> None:
    state = StageState(tiny("boundary.kind=projected", "boundary.reproject_every=3"), 0, dtype=torch.float64)
    assert state.basis is not None
    name = "layers.1.mlp.down.weight"
    leaks = []
    for step in range(6):
        state.view(name).add_(1e-3 * draw_normal(step, "drift", (16, 24)))
        gradient = gradient_of_step(state, step)
        project_gradient(state, gradient)
        apply_adamw(state, gradient, 1.0, 1e-3)
        leaks.append(leak(Role.COLUMNS_IN_S, state.view(name), state.basis))
    assert [value < 1e-12 for value in leaks] == [False, False, True, False, False, True]


def test_factored_form_stays_in_the_subspace_whatever_the_optimizer() -> None:
    """The dense matrix that Z stands for is U Z: there is nothing to leave."""
    chain = Chain(tiny())
    basis = chain.workers[0].state.basis
    assert basis is not None
    for step in range(3):
        chain.step(some_tokens(chain.manifest, step))
    dense = basis @ chain.parameters()["layers.1.mlp.down.weight"]
    assert leak(Role.COLUMNS_IN_S, dense, basis) < 1e-12


def test_norm_counts_what_the_optimizer_uses() -> None:
    """The squared norm is that of the projected gradient, and both constrained forms have the same."""
    norms = []
    for kind in ("subspace", "projected"):
        chain = Chain(tiny(f"boundary.kind={kind}"))
        tokens = some_tokens(chain.manifest)
        for worker, gradients in zip(chain.workers, chain.backward(chain.forward(tokens)), strict=True):
            worker.accumulate(gradients)
        found = math.fsum(worker.finish(worker.sum.total) for worker in chain.workers)
        expected = sum(float(value.square().sum()) for value in chain.gradients(tokens, project=True).values())
        assert found == pytest.approx(expected, rel=1e-9)  # the grid rounds at 2**-44
        norms.append(found)
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


def test_norm_counts_a_tied_embedding_where_it_is_told_to() -> None:
    chain = Chain(tiny("model.tie_embeddings=true"))
    worker = chain.workers[-1]
    worker.accumulate(chain.backward(chain.forward(some_tokens(chain.manifest)))[-1])
    slot = next(slot for slot in worker.state.slots if slot.spec.name == "embedding.weight")
    with_it = worker.finish(worker.sum.total)
    without = worker.finish(worker.sum.total, count_embedding=False)
    share = float(worker.sum.total[slot.span].square().sum())
    assert share > 0.0
    assert with_it - without == pytest.approx(share, rel=1e-9)


def test_a_step_in_fp32_stays_close_to_the_step_in_fp64() -> None:
    single, double = (StageState(tiny(), 0, dtype=dtype) for dtype in (torch.float32, torch.float64))
    for step in range(5):
        gradient = gradient_of_step(double, step)
        for state in (single, double):
            apply_adamw(state, gradient.clone(), 1.0, 1e-2)
    assert relative(single.parameters.double(), double.parameters) < 1e-5
