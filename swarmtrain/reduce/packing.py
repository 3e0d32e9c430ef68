"""Exact shares in fewer bytes: whole numbers of grid steps, as wide as the largest of a piece needs.

A number on the grid of exact sums (model/exact.py) is a multiple of 2**-44. A gradient below 2**-5 fits into 5 bytes
that way, below 8 into 6, all others into 7; fp64 takes 8. Nothing is lost, so nothing depends on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from swarmtrain.codec.native import native
from swarmtrain.model.exact import GRID_EXPONENT

WIDTHS = (5, 6, 7)
_STEP = 2.0**GRID_EXPONENT
_LIMITS = {5: 2.0**39, 6: 2.0**47, 7: 2.0**53}

Doubles = npt.NDArray[np.float64]


def pack(numbers: Doubles) -> npt.NDArray[np.uint8] | None:
    """`numbers` in 5, 6 or 7 bytes each, little-endian two's complement; None if one is not on the grid."""
    loops = native()
    if loops is None:
        return _pack(numbers)
    width = loops.width(numbers, _STEP)
    if not width:
        return None
    packed = np.empty(width * numbers.size, dtype=np.uint8)
    loops.pack(numbers, _STEP, width, packed)
    return packed


def unpack(raw: Any, size: int) -> Doubles:
    """What was packed; the length says how. Any bytes give finite numbers on the grid."""
    packed = np.frombuffer(raw, dtype=np.uint8)
    width = packed.size // size
    assert width in WIDTHS
    assert packed.size == width * size
    loops = native()
    if loops is None:
        return _unpack(packed, size, width)
    numbers = np.empty(size)
    loops.unpack(packed, _STEP, width, numbers)
    return numbers


def _pack(numbers: Doubles) -> npt.NDArray[np.uint8] | None:
    with np.errstate(over="ignore", invalid="ignore"):
        steps = numbers * (1.0 / _STEP)
        largest = float(np.max(np.abs(steps), initial=0.0))
    if not largest <= _LIMITS[7] or bool((steps != np.trunc(steps)).any()):
        return None
    width = 5 if largest < _LIMITS[5] else 6 if largest < _LIMITS[6] else 7
    wide = steps.astype("<i8").view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(wide[:, :width]).reshape(-1)


def _unpack(packed: npt.NDArray[np.uint8], size: int, width: int) -> Doubles:
    wide = np.zeros((size, 8), dtype=np.uint8)
    wide[:, 8 - width :] = packed.reshape(size, width)
    steps = wide.reshape(-1).view("<i8") >> (64 - 8 * width)  # the sign goes with it
    return steps.astype(np.float64) * _STEP
