"""The bytes of an all-reduce: shares on their way to a piece's owner, and its answer. Exact, or through a codec.

In every format all peers, the owner included, compute the result from the same answer, so all replicas get the same
bits. A lossy format keeps what it left out in the sender's encoder (error feedback); only an applied step changes that.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from swarmtrain.codec import CodecError, Direction, Limits, MessageContext, decode
from swarmtrain.codec.gradient import GradientEncoder, GradientSpec
from swarmtrain.codec.lowrank import orthonormal
from swarmtrain.model.exact import SUM_LIMIT
from swarmtrain.reduce.packing import MAX_SHARES, Packed, pack, packed_share, rounded_sum
from swarmtrain.reduce.partition import Piece

Buffer = bytes | bytearray | memoryview
Numbers = npt.NDArray[Any]

_CONTEXT = MessageContext(0, Direction.BACKWARD)
_COUNT = struct.Struct("<I")


class BadShare(ValueError):
    """These bytes are not a share or an answer of this piece."""


@dataclass(frozen=True, slots=True)
class Share:
    """One contributor's numbers of a piece, and their bytes if the answer contains them."""

    numbers: Numbers | Packed
    raw: bytes = b""

    @staticmethod
    def empty() -> Share:
        """Stands for a share that has been added."""
        return Share(np.zeros(0))


class ShareFormat(Protocol):
    """Encodes and decodes shares (reduce-scatter) and answers (all-gather)."""

    def own(self, numbers: Numbers, start: int) -> Share:
        """The owner's own share, which does not travel."""

    def pack(self, numbers: Numbers, start: int) -> Buffer:
        """The bytes that go to the owner of the piece that begins at `start`."""

    def unpack(self, raw: Buffer, size: int) -> Share:
        """A share from its bytes, at the owner. Raises BadShare."""

    def answer(self, shares: Sequence[Share], piece: Piece) -> Buffer:
        """The bytes that go to every peer: the sum of all shares, which are in roster order."""

    def result(self, raw: Buffer, size: int) -> Numbers:
        """The reduced piece (fp32) from an answer. Raises BadShare."""


class ExactShares:
    """Lossless shares; the owner rounds the sum to fp32, once.

    On the exact grid they travel as integers of 5 to 7 bytes, otherwise as fp64 or fp32: the length tells which.
    """

    def own(self, numbers: Numbers, start: int) -> Share:
        """See ShareFormat."""
        return Share(numbers)

    def pack(self, numbers: Numbers, start: int) -> Buffer:
        """See ShareFormat."""
        numbers = np.ascontiguousarray(numbers)
        packed = pack(numbers) if numbers.dtype == np.float64 else None
        view: memoryview = (numbers.view(np.uint8) if packed is None else packed).data
        return view

    def unpack(self, raw: Buffer, size: int) -> Share:
        """See ShareFormat."""
        packed = packed_share(raw, size)
        if packed is not None:
            return Share(packed)
        if len(raw) not in (8 * size, 4 * size):
            raise BadShare(f"{len(raw)} bytes are not a share of {size} numbers")
        numbers: Numbers = np.frombuffer(raw, dtype=np.float64 if len(raw) == 8 * size else np.float32)
        if not math.isfinite(float(numbers.sum())):  # one pass: a single NaN or infinity makes the sum one
            raise BadShare("the share is not finite")
        return Share(numbers)

    def answer(self, shares: Sequence[Share], piece: Piece) -> Buffer:
        """See ShareFormat."""
        exact = [s.numbers for s in shares if isinstance(s.numbers, Packed) or s.numbers.dtype == np.float64]
        total = rounded_sum(exact) if len(exact) == len(shares) <= MAX_SHARES else None
        summed = add_shares(shares) if total is None else total
        view: memoryview = summed.astype("<f4", copy=False).view(np.uint8).data
        return view

    def result(self, raw: Buffer, size: int) -> Numbers:
        """See ShareFormat."""
        if len(raw) != 4 * size:
            raise BadShare(f"{len(raw)} bytes are not {size} numbers")
        return np.frombuffer(raw, dtype="<f4")


EXACT = ExactShares()


class OrthonormalShares(ExactShares):
    """PowerSGD's left factors: a piece is one matrix; its owner adds the shares and orthonormalizes the sum.

    Only the owner does so, because machines round a decomposition differently.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def answer(self, shares: Sequence[Share], piece: Piece) -> Buffer:
        """See ShareFormat."""
        total = torch.from_numpy(add_shares(shares).astype(np.float32)).view(-1, self._rank)  # (rows, rank)
        if not bool(torch.isfinite(total).all()):
            return total.numpy().astype("<f4").tobytes()  # the step's norm will show that training diverged
        return orthonormal(total).contiguous().numpy().astype("<f4").tobytes()


class FactorShares(ExactShares):
    """PowerSGD's lane STAGE: pieces of right factors, which are fp32 numbers, and then pieces on the exact grid."""

    def __init__(self, num_factors: int) -> None:
        """The first `num_factors` numbers are factors. No piece holds both kinds."""
        self._num_factors = num_factors

    def pack(self, numbers: Numbers, start: int) -> Buffer:
        """See ShareFormat."""
        return super().pack(numbers.astype("<f4") if start < self._num_factors else numbers, start)


class CodedShares:
    """Shares through a gradient codec: bf16 and int8 also encode the sum; topk answers with the bytes of all shares."""

    def __init__(self, encoder: GradientEncoder) -> None:
        self._encoder = encoder
        plain = encoder.spec if encoder.spec.kind != "topk" else GradientSpec("none")
        self._answers = GradientEncoder(plain, encoder.num_elements)  # never committed: no error feedback

    def own(self, numbers: Numbers, start: int) -> Share:
        """See ShareFormat. Encoded and decoded like a share that travels, so its error is kept, too."""
        return self.unpack(self.pack(numbers, start), numbers.size)

    def pack(self, numbers: Numbers, start: int) -> Buffer:
        """See ShareFormat."""
        return self._encoder.encode(torch.from_numpy(numbers).to(torch.float32), start)

    def unpack(self, raw: Buffer, size: int) -> Share:
        """See ShareFormat."""
        return Share(_decoded(raw, size), bytes(raw) if self._encoder.spec.kind == "topk" else b"")

    def answer(self, shares: Sequence[Share], piece: Piece) -> Buffer:
        """See ShareFormat."""
        if self._encoder.spec.kind == "topk":
            return b"".join([_COUNT.pack(len(shares)), *(_COUNT.pack(len(s.raw)) + s.raw for s in shares)])
        total = torch.from_numpy(add_shares(shares).astype(np.float32))
        return self._answers.encode(total, piece.start)

    def result(self, raw: Buffer, size: int) -> Numbers:
        """See ShareFormat."""
        if self._encoder.spec.kind == "topk":
            return add_shares([Share(_decoded(share, size)) for share in _shares_in(raw)]).astype(np.float32)
        return _decoded(raw, size)


def add_shares(shares: Sequence[Share]) -> Numbers:
    """The sum in roster order, in fp64 where a share is; NaN where exact sums have left their range."""
    numbers = [s.numbers.numbers() if isinstance(s.numbers, Packed) else s.numbers for s in shares]
    total = np.zeros(numbers[0].size, dtype=np.result_type(*[share.dtype for share in numbers]))
    for share in numbers:
        total += share
    if total.dtype == np.float64 and total.size and max(-total.min(), total.max()) > SUM_LIMIT:
        total[:] = np.nan  # no longer exact: the step's norm will show that training diverged
    return total


def _decoded(raw: Buffer, size: int) -> Numbers:
    try:
        tensor = decode(raw, _CONTEXT, limits=Limits.exactly((size,))).tensor
    except CodecError as error:
        raise BadShare(str(error)) from error
    return tensor.to(torch.float32).numpy()


def _shares_in(raw: Buffer) -> list[memoryview]:
    view, shares = memoryview(raw), []
    if len(view) < _COUNT.size:
        raise BadShare("the answer does not say how many shares it holds")
    (count,) = _COUNT.unpack_from(view)
    start = _COUNT.size
    for _ in range(min(count, len(view))):
        if len(view) - start < _COUNT.size:
            raise BadShare("the answer ends between two shares")
        (length,) = _COUNT.unpack_from(view, start)
        start += _COUNT.size
        if length > len(view) - start:
            raise BadShare("the answer ends within a share")
        shares.append(view[start : start + length])
        start += length
    if not shares or start != len(view):
        raise BadShare("the answer has bytes that belong to no share")
    return shares
