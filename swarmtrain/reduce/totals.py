"""The exact sum of one piece's shares. Shares are added as they arrive: the sum depends neither on their order nor on
who added which of them first, so groups may add up their own and pass on the sums.

Shares on the grid of exact sums (model/exact.py) are added as whole numbers of grid steps. Any other floating-point
number x is cut into digits of 28 bits, x = d0 * 2^(28 t) + d1 * 2^(28 (t - 1)) + d2 * 2^(28 (t - 2)) + ..., and each
digit is added up by itself: fp64 holds the sum of 2^25 digits exactly. Three digits are kept, beginning with that of
the piece's largest number: at least 56 bits below its first one. A digit is a function of x alone, and one that is
dropped for a larger number's sake is dropped from all shares, so that the order makes no difference here either.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmtrain.model.exact import GRID_EXPONENT
from swarmtrain.reduce.packing import STEPS_LIMIT, Doubles, Floats, Packed, Steps, add_steps, rounded

Buffer = bytes | bytearray | memoryview
Numbers = npt.NDArray[Any]

DIGIT_BITS = 28
NUM_DIGITS = 3
_LOWEST, _HIGHEST = -10, 36  # exponents of the first digit, in digits: numbers below 2^-280 count as zero
_ROOM = 2**62  # steps that a total may reach before it counts as beyond the exact range

_HEAD = struct.Struct("<BBb")  # whether it is beyond the range, which blocks follow, exponent of the first digit
_HAS_STEPS, _HAS_DIGITS = 1, 2
_BLOCK = struct.Struct("<BBB")  # bytes left out below, bytes per number, whether zeros are left out


class BadShare(ValueError):
    """These bytes are not a share, a sum or an answer of this piece."""


@dataclass(frozen=True, slots=True)
class Share:
    """One contributor's numbers of a piece, and their bytes where the answer to a single share repeats them."""

    numbers: Numbers | Packed
    raw: bytes = b""


class Total:
    """The sum of the shares of one piece so far."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.only = b""  # the bytes of the share, as long as it is the only one
        self._num_added = 0
        self._steps: Steps | None = None
        self._reached = 0  # no element of the steps is larger
        self._is_over = False
        self._digits: list[Doubles] = []
        self._first = _LOWEST  # exponent of the first digit

    def add(self, share: Share) -> None:
        """Add one contributor's share, of finite numbers."""
        self.only = share.raw if not self._num_added else b""
        self._num_added += 1
        numbers = share.numbers
        if isinstance(numbers, Packed):
            self._add_steps(numbers, 1 << (8 * numbers.width - 1))
        elif numbers.dtype != np.float64 or not self._add_steps(numbers, STEPS_LIMIT):
            self._add_floats(numbers)

    def rounded(self) -> Floats:
        """The sum as fp32, rounded once; NaN everywhere if sums on the grid have left the exact range."""
        if self._is_over:
            return np.full(self.size, np.nan, dtype=np.float32)
        if not self._digits:
            return rounded(self._steps) if self._steps is not None else np.zeros(self.size, dtype=np.float32)
        total: Doubles = np.zeros(self.size)
        for digits in self._digits:
            total *= 2.0**DIGIT_BITS
            total += digits
        with np.errstate(over="ignore", invalid="ignore"):
            total *= 2.0 ** (DIGIT_BITS * (self._first + 1 - NUM_DIGITS))
            if self._steps is not None:
                total += self._steps * 2.0**GRID_EXPONENT
            return total.astype(np.float32)

    # -- from group to group

    def packed(self, start: int, stop: int) -> bytes:
        """The sum of a part of the piece as bytes, in as few as its largest number needs."""
        has = _HAS_STEPS * (self._steps is not None) + _HAS_DIGITS * bool(self._digits)
        parts = [_HEAD.pack(self._is_over, has, self._first)]
        if self._steps is not None:
            parts.append(_block(self._steps[start:stop]))
        parts += [_block(digits[start:stop].astype(np.int64)) for digits in self._digits]
        return b"".join(parts)

    def add_packed(self, raw: Buffer) -> None:
        """Add the sum of another group. Raises BadShare, and adds nothing, if the bytes are not one of this size."""
        if len(raw) < _HEAD.size:
            raise BadShare("a group's sum without its head")
        is_over, has, first = _HEAD.unpack_from(raw)
        if has > _HAS_STEPS + _HAS_DIGITS or not _LOWEST <= first <= _HIGHEST:
            raise BadShare("a group's sum of an unknown form")
        num_blocks = (has & _HAS_STEPS > 0) + NUM_DIGITS * (has & _HAS_DIGITS > 0)
        blocks, view = [], memoryview(raw)[_HEAD.size :]
        for _ in range(num_blocks):
            block, view = _unblocked(view, self.size)
            blocks.append(block)
        if len(view):
            raise BadShare("a group's sum with bytes that belong to no number")
        self._num_added, self.only = self._num_added + 1, b""
        self._is_over |= bool(is_over)
        if has & _HAS_STEPS:
            self._add_whole(blocks.pop(0))
        if blocks:
            self._add_digits([block.astype(np.float64) for block in blocks], first)

    # -- whole grid steps

    def _add_steps(self, share: Packed | Doubles, largest: int) -> bool:
        """False, and nothing is added, if a number is not on the grid."""
        total = self._steps if self._steps is not None else np.zeros(self.size, dtype=np.int64)
        if not self._has_room(largest):
            return True
        if not add_steps(share, total):
            return False
        self._steps = total
        self._reached += largest
        return True

    def _add_whole(self, steps: Steps) -> None:
        largest = _largest(steps)
        if self._has_room(largest):
            self._steps = steps if self._steps is None else self._steps + steps
            self._reached += largest

    def _has_room(self, more: int) -> bool:
        """Whether the total, 64 bits wide, stays in its range. Otherwise the sum is none any more."""
        if self._reached + more > _ROOM and self._steps is not None:
            self._reached = _largest(self._steps)  # the bound took every share for the worst one
        self._is_over |= self._reached + more > _ROOM
        return not self._is_over

    # -- digits

    def _add_floats(self, numbers: Numbers) -> None:
        left: Doubles = numbers.astype(np.float64)
        largest = max(-float(left.min()), float(left.max())) if left.size else 0.0
        if largest == 0.0:
            return
        first = max(_LOWEST, -(-math.frexp(largest)[1] // DIGIT_BITS) - 1)
        self._reach(first)
        left *= 2.0 ** (-DIGIT_BITS * self._first)
        for digits in self._digits:
            whole = np.trunc(left)
            digits += whole
            left -= whole
            left *= 2.0**DIGIT_BITS

    def _add_digits(self, more: Sequence[Doubles], first: int) -> None:
        self._reach(first)
        for digits, item in zip(self._digits[self._first - first :], more, strict=False):
            digits += item

    def _reach(self, first: int) -> None:
        """Make `first`, or a larger one, the exponent of the first digit."""
        if not self._digits:
            self._digits, self._first = [np.zeros(self.size) for _ in range(NUM_DIGITS)], first
        for _ in range(min(NUM_DIGITS, first - self._first)):
            self._digits = [np.zeros(self.size), *self._digits[:-1]]
        self._first = max(self._first, first)


def _largest(steps: Steps) -> int:
    return max(-int(steps.min()), int(steps.max())) if steps.size else 0


def _block(numbers: Steps) -> bytes:
    """Whole numbers without the bytes that all of them lack, below and above (but for the sign), and without zeros."""
    used = int(np.bitwise_or.reduce(numbers)) if numbers.size else 0
    if not used:
        return _BLOCK.pack(0, 0, False)
    reach = max(~int(numbers.min()), int(numbers.max()))
    below, above = ((used & -used).bit_length() - 1) // 8, reach.bit_length() // 8 + 1  # one bit is the sign
    kept = numbers.astype("<i8").view(np.uint8).reshape(-1, 8)[:, below:above]  # (numbers, width), lowest byte first
    width, is_there = above - below, numbers != 0
    is_sparse = int(is_there.sum()) * width + -(-numbers.size // 8) < numbers.size * width
    bits = np.packbits(is_there).tobytes() if is_sparse else b""
    return _BLOCK.pack(below, width, is_sparse) + bits + (kept[is_there] if is_sparse else kept).tobytes()


def _unblocked(view: memoryview, size: int) -> tuple[Steps, memoryview]:
    """The next block's numbers, and what follows it."""
    if len(view) < _BLOCK.size:
        raise BadShare("a group's sum that ends before a block")
    below, width, is_sparse = _BLOCK.unpack_from(view)
    view = view[_BLOCK.size :]
    num_bits = -(-size // 8) if is_sparse else 0
    if below + width > 8 or is_sparse > 1 or len(view) < num_bits:
        raise BadShare("a group's sum with a block of an unknown form")
    rows: Any = slice(None)
    count = size
    if is_sparse:
        rows = np.unpackbits(np.frombuffer(view[:num_bits], dtype=np.uint8), count=size).view(np.bool_)
        count = int(rows.sum())
    end = num_bits + count * width
    if len(view) < end:
        raise BadShare("a group's sum that ends within a block")
    wide = np.zeros((size, 8), dtype=np.uint8)
    if width:
        wide[rows, 8 - width :] = np.frombuffer(view[num_bits:end], dtype=np.uint8).reshape(count, width)
    numbers: Steps = wide.reshape(-1).view("<i8") >> (64 - 8 * width) if width else np.zeros(size, dtype=np.int64)
    return numbers << (8 * below), view[end:]
