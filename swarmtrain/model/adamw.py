"""AdamW made of separately rounded element-wise operations (multiply, add, square root, divide).

No fused kernel, no multiply-add: a CPU and any GPU give the same bits from the same gradient, so replicas stay equal.
Tensors that live in S as dense matrices have one second moment for each column (or row), so the update stays in S. It
is the mean over the k directions of S that the column can have: over all d numbers it would be d/k times smaller, and
these tensors' steps sqrt(d/k) times as long as those of the same model in coordinates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarmtrain.model.buffers import Slot
from swarmtrain.model.exact import halving_sum
from swarmtrain.model.layout import Role
from swarmtrain.model.state import StageState
from swarmtrain.model.subspace import projected
from swarmtrain.run.manifest import OptimizerSection

_CHUNK = 1 << 16
_DENSE_IN_S = (Role.COLUMNS_IN_S, Role.ROWS_IN_S)


def apply_adamw(state: StageState, gradient_sum: Tensor, scale: float, learning_rate: float) -> None:
    """One update from the reduced gradient sum times `scale` (1/B and clipping). Advances `state.step`."""
    factors = Factors(state.manifest.optimizer, learning_rate, state.step + 1)
    for slot in state.slots:
        update_slot(state, slot, gradient_sum[slot.span].to(state.room.home), scale, factors)
    reproject(state, state.step + 1)
    state.step += 1


class Factors:
    """The step's scalars, computed once in fp64. `step` counts from 1."""

    def __init__(self, optimizer: OptimizerSection, learning_rate: float, step: int) -> None:
        self.beta1, self.beta2 = optimizer.beta1, optimizer.beta2
        self.keep1, self.keep2 = 1.0 - optimizer.beta1, 1.0 - optimizer.beta2
        self.root_correction = 1.0 / math.sqrt(1.0 - optimizer.beta2**step)
        self.epsilon = optimizer.epsilon
        self.rate = learning_rate / (1.0 - optimizer.beta1**step)
        self.decay = 1.0 - learning_rate * optimizer.weight_decay


def update_slot(state: StageState, slot: Slot, gradient_sum: Tensor, scale: float, factors: Factors) -> None:
    """Update one tensor and its moments; `gradient_sum` is its part of the sum."""
    if slot.spec.role in _DENSE_IN_S:
        _update_in_subspace(state, slot, gradient_sum, scale, factors)
    else:
        _update_free(state, slot, gradient_sum, scale, factors)


def reproject(state: StageState, step: int) -> None:
    """Take out what rounding has left outside S, if that is due after `step` steps."""
    if step % state.manifest.boundary.reproject_every == 0:
        for slot in state.slots:
            if slot.spec.role in _DENSE_IN_S:
                assert state.basis is not None
                view = state.parameters[slot.span].view(slot.spec.shape)
                view.copy_(projected(slot.spec.role, view, state.basis))


def _update_free(state: StageState, slot: Slot, gradient_sum: Tensor, scale: float, factors: Factors) -> None:
    size, start = slot.spec.num_elements, slot.offset
    for low in range(0, size, _CHUNK):
        high = min(low + _CHUNK, size)
        gradient = gradient_sum[low:high].mul(scale).to(state.dtype)
        first = state.first_moment[start + low : start + high]
        second = state.second_moment[slot.moment_offset + low : slot.moment_offset + high]
        parameter = state.parameters[start + low : start + high]
        first.mul_(factors.beta1).add_(gradient.mul(factors.keep1))
        second.mul_(factors.beta2).add_(gradient.mul_(gradient).mul_(factors.keep2))
        root = second.sqrt().mul_(factors.root_correction).add_(factors.epsilon)
        if slot.spec.decays:
            parameter.mul_(factors.decay)
        parameter.sub_(first.div(root).mul_(factors.rate * slot.spec.rate))


def _update_in_subspace(state: StageState, slot: Slot, gradient_sum: Tensor, scale: float, factors: Factors) -> None:
    shape = slot.spec.shape
    gradient = gradient_sum.mul(scale).to(state.dtype).view(shape)
    first = state.first_moment[slot.span].view(shape)
    second = state.second_moment[slot.moment_span]  # (in,) or (V,)
    parameter = state.parameters[slot.span].view(shape)
    hidden_first = slot.spec.role is Role.COLUMNS_IN_S
    squares = gradient * gradient if hidden_first else (gradient * gradient).t()  # (d, in) or (d, V)
    assert state.basis is not None
    mean_square = halving_sum(squares.contiguous()).div_(state.basis.shape[1])
    first.mul_(factors.beta1).add_(gradient.mul(factors.keep1))
    second.mul_(factors.beta2).add_(mean_square.mul_(factors.keep2))
    root = second.sqrt().mul_(factors.root_correction).add_(factors.epsilon)
    if slot.spec.decays:
        parameter.mul_(factors.decay)
    parameter.sub_(first.div(root if hidden_first else root.unsqueeze(1)).mul_(factors.rate * slot.spec.rate))


def project_gradient(state: StageState, gradient_sum: Tensor) -> None:
    """Bring the gradients of dense constrained tensors into S, in place, before norm and moments see them."""
    for slot in state.slots:
        if slot.spec.role in _DENSE_IN_S:
            assert state.basis is not None
            view = gradient_sum[slot.span].view(slot.spec.shape)
            view.copy_(projected(slot.spec.role, view, state.basis.to(view.device, torch.float64)).to(view.dtype))
