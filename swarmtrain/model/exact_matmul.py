"""Matrix products with the same bits on every machine: both factors are rounded to a grid, then no sum rounds at all.

A matrix is rounded to multiples of a power of two of which its largest magnitude is at most 2**13. The products of
two such whole numbers are at most 2**26, so that 2**27 of them add up exactly in fp64, in any order: blocking, threads,
vector instructions and fused multiply-adds of a library leave no trace. `Engine.INT8` computes the same sums from
slices of seven bits with int32 sums, which graphics cards and processors multiply several times faster than fp64.
"""

from __future__ import annotations

import math
import platform
from enum import Enum

import torch
from torch import Tensor

from swarmtrain.model.exact import largest_magnitude

GRID_BITS = 13
SLICE_BITS = 7
MAX_INNER = 1 << 17  # terms of a sum: int32 holds 2**18 of two products of slices each

# Slices are at most 64 in magnitude. Processors without VNNI add two products of eight bits in int16, which saturates
# for 127 * 255 * 2, and never for 64 * 255 * 2.
_SLICE = float(1 << SLICE_BITS)
_PAD = 8  # cuBLAS multiplies int8 matrices whose sides are multiples of 8, and which have more than 16 rows
_MIN_ROWS = 24
_MIN_ROWS_ON_CPU = 192  # below, making slices costs more than they save


class Engine(Enum):
    """What multiplies. The results have the same bits."""

    FP64 = "fp64"
    INT8 = "int8"


def engine_for(device: torch.device, rows: int) -> Engine:
    """The faster engine for matrices of so many rows: int8 where a library has kernels for it."""
    if device.type == "cuda":
        return Engine.INT8
    has_kernels = platform.machine().lower() in ("x86_64", "amd64") and torch._C._has_mkldnn
    return Engine.INT8 if has_kernels and rows >= _MIN_ROWS_ON_CPU else Engine.FP64


def grid_step(values: Tensor) -> float:
    """The power of two of which the largest magnitude of `values` is between 2**12 and 2**13. 1 if all are zero."""
    largest = largest_magnitude(values)
    return 2.0 ** (math.frexp(largest)[1] - GRID_BITS) if largest else 1.0


def in_steps(values: Tensor, step: float) -> Tensor:
    """`values` rounded to multiples of `step` (ties to even), as whole numbers in fp64."""
    return values.to(torch.float64, copy=True).mul_(1.0 / step).round_()


def product(left: Tensor, right: Tensor, engine: Engine) -> Tensor:
    """left @ right in fp64, exactly. Both hold whole numbers of at most 2**13, as `in_steps` makes them."""
    assert left.shape[1] <= MAX_INNER
    if engine is Engine.FP64:
        return left @ right
    high, low = _slices(left)
    right_high, right_low = _slices(right)
    middle = _multiplied(high, right_low).add_(_multiplied(low, right_high))
    return _joined(_multiplied(high, right_high), middle, _multiplied(low, right_low))


def gram(matrix: Tensor, engine: Engine) -> Tensor:
    """matrix @ matrix.T in fp64, exactly; of whole numbers as in `product`. One slice product fewer."""
    assert matrix.shape[1] <= MAX_INNER
    if engine is Engine.FP64:
        return matrix @ matrix.t()
    high, low = _slices(matrix)
    cross = _multiplied(high, low.t())
    return _joined(_multiplied(high, high.t()), cross + cross.t(), _multiplied(low, low.t()))


def _slices(steps: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) int8 with steps = 128 high + low, both between -64 and 64."""
    rounded = steps.mul(1.0 / _SLICE).round_()
    high = rounded.to(torch.int8)
    return high, rounded.mul_(-_SLICE).add_(steps).to(torch.int8)


def _multiplied(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of int8, summed in int32."""
    rows, columns = left.shape[0], right.shape[1]
    found = torch._int_mm(_padded(left, _MIN_ROWS), _padded(right, _PAD))
    return found[:rows, :columns]


def _padded(matrix: Tensor, min_rows: int) -> Tensor:
    """`matrix` with zeros below and to the right, where its sides are no multiples of 8."""
    rows, columns = (-(-side // _PAD) * _PAD for side in matrix.shape)
    rows = max(rows, min_rows)
    if (rows, columns) == tuple(matrix.shape):
        return matrix
    padded = matrix.new_zeros((rows, columns))
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def _joined(high: Tensor, middle: Tensor, low: Tensor) -> Tensor:
    """2**14 high + 2**7 middle + low in fp64: every sum is a whole number below 2**53."""
    total = high.to(torch.float64).mul_(_SLICE)
    total.add_(middle.to(torch.float64)).mul_(_SLICE)
    return total.add_(low.to(torch.float64))
