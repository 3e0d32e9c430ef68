"""Muon: the matrices of the blocks move by their orthogonalised momentum, everything else by AdamW.

m = momentum m + g;  u = momentum m + g (Nesterov);  W = (1 - rate decay) W - rate sqrt(max(1, out/in)) O(u), where O
brings all singular values of u near 1: five steps of X = a X + (b A + c A A) X with A = X Xᵀ, from X = u / |u|.
(Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)

The products are exact (exact_matmul.py), everything else is element-wise and separately rounded: the same bits on every
machine, and for every split into stages, since no matrix knows of another one.
A matrix whose columns lie in S is orthogonalised in the coordinates of S. There O(U Z) is U O(Z), so the update stays
in S and is that of the factored form; on the dense matrix the rounding errors outside S would grow 485-fold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarmtrain.errors import DivergedError
from swarmtrain.model.adamw import Factors, reproject, update_slot
from swarmtrain.model.buffers import Slot
from swarmtrain.model.exact import squared_norm
from swarmtrain.model.exact_matmul import MAX_INNER, Engine, engine_for, gram, grid_step, in_steps, product
from swarmtrain.model.layout import Role
from swarmtrain.model.sizes import MUON_BLOCK_ELEMENTS, MUON_MIN_COLUMNS
from swarmtrain.model.state import StageState

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def apply_muon(state: StageState, gradient_sum: Tensor, scale: float, learning_rate: float) -> None:
    """One update from the reduced gradient sum times `scale` (1/B and clipping). Advances `state.step`."""
    optimizer = state.manifest.optimizer
    others = Factors(optimizer, learning_rate * optimizer.adamw_rate, state.step + 1)
    for slot in state.slots:
        if slot.spec.by_muon:
            _update_matrix(state, slot, gradient_sum[slot.span].to(state.room.home), scale, learning_rate)
        else:
            update_slot(state, slot, gradient_sum[slot.span].to(state.room.home), scale, others)
    reproject(state, state.step + 1)
    state.step += 1


def _update_matrix(state: StageState, slot: Slot, gradient_sum: Tensor, scale: float, learning_rate: float) -> None:
    optimizer, spec = state.manifest.optimizer, slot.spec
    gradient = gradient_sum.mul(scale).to(state.dtype).view(spec.shape)
    momentum = state.first_moment[slot.span].view(spec.shape)
    momentum.mul_(optimizer.momentum).add_(gradient)
    direction = gradient.add_(momentum.mul(optimizer.momentum))
    if spec.role is Role.COLUMNS_IN_S:
        assert state.basis is not None
        basis = state.basis.double()
        coordinates = orthogonalized((basis.t() @ direction.double()).to(state.dtype))  # (k, in)
        shape, update = coordinates.shape, (basis @ coordinates.double()).to(state.dtype)
    else:
        update = orthogonalized(direction)
        shape = update.shape
    parameter = state.parameters[slot.span].view(spec.shape)
    if spec.decays:
        parameter.mul_(1.0 - learning_rate * optimizer.weight_decay)
    parameter.sub_(update.mul_(learning_rate * spec.rate * rate_scale(shape[0], shape[1])))


def rate_scale(rows: int, columns: int) -> float:
    """What a matrix's learning rate is multiplied by, so that outputs of every width move alike."""
    return math.sqrt(max(1.0, rows / columns))


def orthogonalized(matrix: Tensor, engine: Engine | None = None) -> Tensor:
    """A new matrix with the singular vectors of `matrix`, and singular values near 1; zeros for zeros.

    The bits do not depend on the engine. DivergedError if an element is not finite.
    """
    norm = math.sqrt(squared_norm(matrix.reshape(-1)))
    if not norm < math.inf:
        raise DivergedError("a momentum is not finite: training diverged", fix="lower optimizer.learning_rate")
    if norm == 0.0:
        return torch.zeros_like(matrix)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if is_tall else matrix).clone(memory_format=torch.contiguous_format)
    for block in _blocks(x):
        block.copy_(block.double().mul_(1.0 / norm))  # fp32 alone would overflow for tiny norms
    engine = engine or engine_for(x.device, x.shape[0])
    for _ in range(NUM_ITERATIONS):
        _iterate(x, engine)
    return x.t().contiguous() if is_tall else x


def _iterate(x: Tensor, engine: Engine) -> None:
    """x = a x + (b A + c A A) x with A = x xᵀ, in place. x is rounded for the products only: small singular values
    that the grid does not resolve grow by a x all the same."""
    a, b, c = COEFFICIENTS
    step = grid_step(x)
    squares = torch.zeros(x.shape[0], x.shape[0], dtype=torch.float64, device=x.device)  # A
    for block in _blocks(x):
        squares.add_(gram(in_steps(block, step), engine))
    squares.mul_(step * step)
    squares_step = grid_step(squares)
    squares = in_steps(squares, squares_step)
    fourth = gram(squares, engine).mul_(squares_step * squares_step)  # A A, as A is symmetric
    polynomial = squares.mul_(squares_step).mul_(b).add_(fourth.mul_(c))
    polynomial_step = grid_step(polynomial)
    polynomial = in_steps(polynomial, polynomial_step)
    for block in _blocks(x):
        moved = product(polynomial, in_steps(block, step), engine).mul_(polynomial_step * step)
        block.copy_(moved.add_(block.double().mul_(a)))


def _blocks(x: Tensor) -> list[Tensor]:
    """Views of some columns each: they bound the working space."""
    width = min(max(MUON_MIN_COLUMNS, MUON_BLOCK_ELEMENTS // x.shape[0]), MAX_INNER)
    return list(torch.split(x, width, dim=1))
