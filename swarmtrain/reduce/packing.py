"""Exact shares in fewer bytes: integers (multiples of the grid step), as wide as the largest of a piece needs.

A number on the grid of exact sums (model/exact.py) is a multiple of 2**-44. A gradient below 2**-5 fits into 5 bytes
that way, below 8 into 6, all others into 7; fp64 takes 8. It is lossless, so results do not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmtrain.model.exact import GRID_EXPONENT
from swarmtrain.native import native

WIDTHS = (5, 6, 7)
_STEP = 2.0**GRID_EXPONENT

STEPS_LIMIT = 2**53  # beyond it fp64 is no longer exact

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Steps = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """Numbers on the grid as bytes. Any bytes are valid."""

    raw: npt.NDArray[np.uint8]
    width: int


def pack(numbers: Doubles) -> npt.NDArray[np.uint8] | None:
    """`numbers` in 5, 6 or 7 bytes each, little-endian two's complement; None if one is not on the grid."""
    loops = native()
    if loops is None:
        return _pack(numbers)
    width, needed = 0, WIDTHS[0]
    packed = np.empty(0, dtype=np.uint8)
    while needed > width:  # nearly always once: it stops where the first number does not fit
        width = needed
        packed = np.empty(width * numbers.size, dtype=np.uint8)
        needed = loops.pack(numbers, _STEP, width, packed)
    return packed if needed else None


def packed_share(raw: Any, size: int) -> Packed | None:
    """The bytes of a share of `size` numbers, if that is what their length says."""
    for width in WIDTHS:
        if len(raw) == width * size:
            return Packed(np.frombuffer(raw, dtype=np.uint8), width)
    return None


def add_steps(share: Packed | Doubles, total: Steps) -> bool:
    """Add a share to `total`, in grid steps; False, and nothing, if a number of it is not on the grid."""
    loops = native()
    if loops is None:
        return _add_steps(share, total)
    if isinstance(share, Packed):
        return loops.add(share.raw, share.width, _STEP, total)
    return loops.add(np.ascontiguousarray(share), 8, _STEP, total)


def rounded(total: Steps) -> Floats:
    """A sum in grid steps, rounded to fp32 once; NaN everywhere if it has left the exact range."""
    loops = native()
    if loops is None:
        return _rounded(total)
    numbers = np.empty(total.size, dtype=np.float32)
    if not loops.round(total, _STEP, numbers):
        numbers[:] = np.nan
    return numbers


def _pack(numbers: Doubles) -> npt.NDArray[np.uint8] | None:
    steps = _whole_steps(numbers)
    if steps is None:
        return None
    largest = int(np.max(np.abs(steps), initial=0))
    width = 5 if largest < 2**39 else 6 if largest < 2**47 else 7
    wide = steps.astype("<i8").view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(wide[:, :width]).reshape(-1)


def _add_steps(share: Packed | Doubles, total: Steps) -> bool:
    steps = _steps_of(share) if isinstance(share, Packed) else _whole_steps(share)
    if steps is None:
        return False
    total += steps
    return True


def _rounded(total: Steps) -> Floats:
    if total.size and max(-int(total.min()), int(total.max())) > STEPS_LIMIT:
        return np.full(total.size, np.nan, dtype=np.float32)
    return (total.astype(np.float64) * _STEP).astype(np.float32)


def _whole_steps(numbers: Doubles) -> Steps | None:
    with np.errstate(over="ignore", invalid="ignore"):
        steps = numbers * (1.0 / _STEP)
        largest = float(np.max(np.abs(steps), initial=0.0))
    if not largest <= STEPS_LIMIT or bool((steps != np.trunc(steps)).any()):
        return None
    return steps.astype(np.int64)


def _steps_of(share: Packed) -> Steps:
    rows = share.raw.reshape(-1, share.width)
    wide = np.zeros((len(rows), 8), dtype=np.uint8)
    wide[:, 8 - share.width :] = rows
    steps: Steps = wide.reshape(-1).view("<i8") >> (64 - 8 * share.width)  # the sign goes with it
    return steps
