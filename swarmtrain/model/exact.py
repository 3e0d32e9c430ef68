"""Sums that do not depend on order: gradients rounded to a common grid, added in fp64.

Every value is first rounded to a multiple of 2**-44 by adding and subtracting one large constant (fixed, so ties do not
depend on what has been added before). Sums of grid points are exact in fp64 below 2**53 grid steps, hence associative:
any order, grouping, replay or subtraction gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from swarmtrain.errors import DivergedError
from swarmtrain.native import native

GRID_EXPONENT = -44
_ROUNDER = 1.5 * 2.0**8  # x + _ROUNDER lies in [2**8, 2**9) for |x| < 128, where fp64 numbers are 2**-44 apart
VALUE_LIMIT = 2.0**7
SUM_LIMIT = 2.0 ** (53 + GRID_EXPONENT)
_NATIVE_FROM = 256  # elements
_NATIVE_TYPES = (torch.float32, torch.bfloat16)
_CHUNK = 1 << 17  # elements; its fp64 scratch stays in a core's L2 cache


class ExactSum:
    """A flat fp64 total of gradients on the grid. `capacity_used` bounds the magnitude of every element of it."""

    dtype = torch.float64

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.capacity_used = 0.0
        self._scratch = torch.empty(min(size, _CHUNK), dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Back to zero."""
        self.total.zero_()
        self.capacity_used = 0.0

    def copied(self) -> ExactSum:
        """Another one with the same content."""
        other = copy(self)
        other.total = self.total.clone()
        return other

    def add(self, offsets: Sequence[int], gradients: Sequence[Tensor | None], *, sign: int = 1) -> None:
        """Add (or with sign -1 take away) one microbatch's gradients, each at its offset; None counts as zeros.

        Either all of it is added or, when a value is not finite or leaves the grid, `DivergedError` and nothing.
        """
        step = self.reserve(largest_of(gradients, VALUE_LIMIT))
        for offset, gradient in zip(offsets, gradients, strict=True):
            if gradient is not None:
                self.put(offset, gradient, sign)
        self.capacity_used += step

    def reserve(self, largest: float) -> float:
        """What a microbatch whose largest magnitude this is takes of the capacity. `DivergedError` if none is left."""
        step = largest + 2.0**GRID_EXPONENT  # rounding to the grid may have raised it
        if self.capacity_used + step > SUM_LIMIT:
            # The bound takes every microbatch for the worst one; the total itself is mostly far smaller.
            self.capacity_used = largest_magnitude(self.total)
        if self.capacity_used + step > SUM_LIMIT:
            raise DivergedError(
                f"gradients add up to {self.capacity_used + step:g}, beyond the exact range of {SUM_LIMIT:g}",
                fix='lower the learning rate, or set batch.accumulate = "float"',
            )
        return step

    def put(self, offset: int, gradient: Tensor, sign: int = 1) -> None:
        """Add one tensor that was checked, and for which capacity was reserved."""
        self._add_flat(self.total[offset : offset + gradient.numel()], gradient.reshape(-1), sign)

    def _add_flat(self, into: Tensor, values: Tensor, sign: int) -> None:
        if values.numel() >= _NATIVE_FROM and values.dtype in _NATIVE_TYPES and values.device.type == "cpu":
            loops, values = native(), values.contiguous()
            if loops is not None:
                size = values.dtype.itemsize
                loops.put(values.data_ptr(), size, values.numel(), _ROUNDER, sign, into.data_ptr())
                return
        for start in range(0, values.numel(), _CHUNK):
            piece = values[start : start + _CHUNK]
            rounded = self._scratch[: piece.numel()]
            rounded.copy_(piece)
            rounded.add_(_ROUNDER).sub_(_ROUNDER)
            target = into[start : start + _CHUNK]
            target.add_(rounded) if sign > 0 else target.sub_(rounded)


class FloatSum:
    """The same interface in plain fp32: faster, and different in the last bits for every order."""

    dtype = torch.float32

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.total = torch.zeros(size, dtype=torch.float32, device=device)

    def clear(self) -> None:
        """Back to zero."""
        self.total.zero_()

    def copied(self) -> FloatSum:
        """Another one with the same content."""
        other = copy(self)
        other.total = self.total.clone()
        return other

    def add(self, offsets: Sequence[int], gradients: Sequence[Tensor | None], *, sign: int = 1) -> None:
        """Add (or take away) one microbatch's gradients; `DivergedError`, and nothing added, if one is not finite."""
        largest_of(gradients, math.inf)
        for offset, gradient in zip(offsets, gradients, strict=True):
            if gradient is not None:
                self.put(offset, gradient, sign)

    def put(self, offset: int, gradient: Tensor, sign: int = 1) -> None:
        """Add one tensor that was checked."""
        self.total[offset : offset + gradient.numel()].add_(gradient.reshape(-1), alpha=sign)


Accumulator = ExactSum | FloatSum


class Addition:
    """One microbatch's gradients, added one by one: each may be freed before the next one is computed.

    The same bits as `add` of all of them. `added` says which are in the sum when one cannot be added: whoever goes on
    must take these out again (`Removal`), and for that compute them again.
    """

    def __init__(self, total: Accumulator, sign: int = 1) -> None:
        self.total, self.sign = total, sign
        self._capacity = 0.0  # reserved for this microbatch
        self.added: list[int] = []  # offsets

    def add(self, offset: int, gradient: Tensor) -> None:
        """Add one. `DivergedError`, and this one not added, if a value is not finite or leaves the grid."""
        total = self.total
        if isinstance(total, ExactSum):
            largest = largest_of([gradient], VALUE_LIMIT)
            total.capacity_used -= self._capacity
            needed = total.reserve(largest)
            self._capacity = max(self._capacity, needed)
            total.capacity_used += self._capacity
        else:
            largest_of([gradient], math.inf)
        total.put(offset, gradient, self.sign)
        self.added.append(offset)


class Removal:
    """Takes out again what was added, one by one, from gradients that have the bits that they had before."""

    def __init__(self, addition: Addition) -> None:
        self._addition = addition

    def add(self, offset: int, gradient: Tensor) -> None:
        """Take this one out, if it is there."""
        addition = self._addition
        if offset in addition.added:
            addition.total.put(offset, gradient, -addition.sign)
            addition.added.remove(offset)


def make_accumulator(kind: str, size: int, device: torch.device | str = "cpu") -> Accumulator:
    """`kind` is the manifest's batch.accumulate."""
    return ExactSum(size, device) if kind == "exact" else FloatSum(size, device)


def largest_magnitude(values: Tensor) -> float:
    """max |x|; NaN if any element is."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return float(torch.maximum(-low, high))


def largest_of(gradients: Sequence[Tensor | None], limit: float) -> float:
    """The largest magnitude of all; `DivergedError` unless every one is a number below `limit`."""
    largest = 0.0
    for gradient in gradients:
        if gradient is None:
            continue
        magnitude = largest_magnitude(gradient)
        if not magnitude < limit:  # also true of NaN, which max() would lose
            raise DivergedError(
                f"a gradient element of {magnitude:g} cannot be added (limit {limit:g}): training diverged",
                fix='lower the learning rate, or set batch.accumulate = "float"'
                if math.isfinite(magnitude)
                else "lower the learning rate",
            )
        largest = max(largest, magnitude)
    return largest


def halving_sum(values: Tensor) -> Tensor:
    """Sum over dim 0 by repeated halving with element-wise additions only: the same bits on every device."""
    while values.shape[0] > 1:
        half = values.shape[0] // 2
        folded = values[:half] + values[half : 2 * half]
        if values.shape[0] % 2:
            folded[0] += values[-1]
        values = folded
    return values[0]


def squared_norm(values: Tensor) -> float:
    """Sum of squares in fp64, the same bits on every device and for every number of threads."""
    parts = []
    for start in range(0, values.numel(), _CHUNK):
        piece = values[start : start + _CHUNK].double()
        parts.append(float(halving_sum(piece * piece)))
    return math.fsum(parts)
