"""Products on a grid have the same bits whoever computes them in whatever order; plain products do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarmtrain.model.exact_matmul import (
    GRID_BITS,
    MAX_INNER,
    SLICE_BITS,
    Engine,
    engine_for,
    gram,
    grid_step,
    in_steps,
    product,
)
from swarmtrain.model.initial import draw_normal

SHAPES = [(1, 1, 1), (3, 5, 7), (8, 352, 8), (16, 16, 16), (17, 33, 65), (40, 700, 40), (64, 64, 200)]
LARGEST = float(1 << GRID_BITS)


def whole_numbers(name: str, *shape: int) -> Tensor:
    """As large as a grid's steps can be, with the ends of the range among them."""
    values = draw_normal(5, name, shape).double()
    found = in_steps(values, grid_step(values))
    found.view(-1)[0] = LARGEST
    found.view(-1)[-1] = -LARGEST
    return found


def by_plain_loops(left: Tensor, right: Tensor) -> Tensor:
    """In int64, which no library multiplies by blocks."""
    return (left.long() @ right.long()).double()


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_whole_numbers(shape: tuple[int, int, int], engine: Engine) -> None:
    rows, inner, columns = shape
    left, right = whole_numbers("left", rows, inner), whole_numbers("right", inner, columns)
    assert torch.equal(product(left, right, engine), by_plain_loops(left, right))
    assert torch.equal(product(left, right.t().contiguous().t(), engine), by_plain_loops(left, right))
    assert torch.equal(gram(left, engine), by_plain_loops(left, left.t()))


@pytest.mark.parametrize("engine", Engine)
def test_the_largest_numbers_overflow_nothing(engine: Engine) -> None:
    """Every slice at its limit, with both signs, and as many terms as there can be."""
    inner, double = MAX_INNER, torch.float64
    for value in (LARGEST, LARGEST - 64, LARGEST - 65, -LARGEST):
        left, right = torch.full((2, inner), value, dtype=double), torch.full((inner, 3), -value, dtype=double)
        wanted = torch.full((2, 3), value * value * inner, dtype=double)
        assert torch.equal(product(left, right, engine), -wanted)
        assert torch.equal(gram(left, engine), wanted[:, :2])


def test_no_sum_can_leave_the_exact_range() -> None:
    """Of fp64 and int32: the reason for the bound on a sum's terms."""
    assert 2.0 ** (2 * GRID_BITS) * MAX_INNER <= 2.0**53
    largest_slice = 1 << (SLICE_BITS - 1)
    assert largest_slice**2 * MAX_INNER < 1 << 31
    assert 2 * largest_slice * 255 < 1 << 15  # processors without VNNI add two products in int16


def test_the_order_of_a_sum_leaves_no_trace() -> None:
    left, right = whole_numbers("left", 48, 600), whole_numbers("right", 600, 32)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    for engine in Engine:
        assert torch.equal(product(left[:, order], right[order], engine), product(left, right, engine))


def test_control_the_order_of_a_plain_sum_does() -> None:
    left, right = draw_normal(5, "left", (48, 600)).double().exp(), draw_normal(5, "right", (600, 32)).double().exp()
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.float64):
        x, y = left.to(dtype), right.to(dtype)
        assert not torch.equal(x[:, order] @ y[order], x @ y)


def test_rounding_is_to_the_nearest_step_of_thirteen_bits() -> None:
    values = draw_normal(6, "values", (40, 40))
    for scale in (1.0, 2.0**-60, 3.7e9):
        step = grid_step(values * scale)
        steps = in_steps(values * scale, step)
        assert LARGEST / 2 <= float(steps.abs().max()) <= LARGEST
        assert float((steps * step - (values * scale).double()).abs().max()) <= step / 2
    assert torch.equal(in_steps(torch.tensor([0.5, 1.5, -2.5]), 1.0), torch.tensor([0.0, 2.0, -2.0]).double())


def test_zeros_have_a_grid() -> None:
    assert grid_step(torch.zeros(3, 3)) == 1.0
    for engine in Engine:
        assert not product(torch.zeros(3, 3).double(), torch.zeros(3, 3).double(), engine).any()


def test_rounding_does_not_change_its_argument() -> None:
    values = draw_normal(6, "values", (4, 4)).double()
    before = values.clone()
    in_steps(values, 0.25)
    assert torch.equal(values, before)


def test_a_graphics_card_multiplies_slices() -> None:
    assert engine_for(torch.device("cuda"), 8) is Engine.INT8
    assert engine_for(torch.device("cpu"), 8) is Engine.FP64
