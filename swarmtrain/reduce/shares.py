"""The bytes of an all-reduce: shares on their way to a piece's owner, and its answer. Exact, or through a codec.

In every format all peers, the owner included, compute the result from the same answer, so all replicas get the same
bits. A lossy format keeps what it left out in the sender's encoder (error feedback); only an applied step changes that.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from swarmtrain.codec import CodecError, Direction, Limits, MessageContext, decode
from swarmtrain.codec.chunktopk import CHUNK, decode_chunk_sum, encode_chunk_sum
from swarmtrain.codec.gradient import GradientEncoder, GradientSpec
from swarmtrain.codec.lowrank import orthonormal
from swarmtrain.reduce.packing import pack, packed_share
from swarmtrain.reduce.totals import BadShare, Buffer, Numbers, Share, Total

SUM_KEPT = 4  # topk: of the sum of several shares, so many times as many values travel as of a share

_CONTEXT = MessageContext(0, Direction.BACKWARD)
_ONE_SHARE, _SUM = b"\0", b"\1"  # topk: what an answer is


class ShareFormat(Protocol):
    """Encodes and decodes shares (reduce-scatter) and answers (all-gather)."""

    unit: int  # a piece may be divided between groups after every so many numbers; 0: nowhere

    def own(self, numbers: Numbers, start: int) -> Share:
        """The owner's own share, which does not travel."""

    def pack(self, numbers: Numbers, start: int) -> Buffer:
        """The bytes that go to the owner of the piece that begins at `start`."""

    def unpack(self, raw: Buffer, size: int) -> Share:
        """A share from its bytes, at the owner. Raises BadShare."""

    def answer(self, total: Total, start: int) -> Buffer:
        """The bytes that go to every peer: the sum of all shares."""

    def result(self, raw: Buffer, size: int) -> Numbers:
        """The reduced piece (fp32) from an answer. Raises BadShare."""

    def settle(self, reduced: Numbers, start: int) -> None:
        """This peer has the sum of a piece of which it sent a share."""


class ExactShares:
    """Lossless shares; the sum is rounded to fp32, once.

    On the exact grid they travel as integers of 5 to 7 bytes, otherwise as fp64 or fp32: the length tells which.
    """

    unit = CHUNK

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

    def answer(self, total: Total, start: int) -> Buffer:
        """See ShareFormat."""
        view: memoryview = total.rounded().astype("<f4", copy=False).view(np.uint8).data
        return view

    def result(self, raw: Buffer, size: int) -> Numbers:
        """See ShareFormat."""
        if len(raw) != 4 * size:
            raise BadShare(f"{len(raw)} bytes are not {size} numbers")
        return np.frombuffer(raw, dtype="<f4")

    def settle(self, reduced: Numbers, start: int) -> None:
        """See ShareFormat. Nothing was left out."""


EXACT = ExactShares()


class OrthonormalShares(ExactShares):
    """PowerSGD's left factors: a piece is one matrix; its owner adds the shares and orthonormalizes the sum.

    Only the owner does so, because machines round a decomposition differently.
    """

    unit = 0

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def answer(self, total: Total, start: int) -> Buffer:
        """See ShareFormat."""
        factor = torch.from_numpy(total.rounded()).view(-1, self._rank)  # (rows, rank)
        if not bool(torch.isfinite(factor).all()):
            return factor.numpy().astype("<f4").tobytes()  # the step's norm will show that training diverged
        return orthonormal(factor).contiguous().numpy().astype("<f4").tobytes()


class FactorShares(ExactShares):
    """PowerSGD's lane STAGE: pieces of right factors, which are fp32 numbers, and then pieces on the exact grid."""

    def __init__(self, num_factors: int) -> None:
        """The first `num_factors` numbers are factors. No piece holds both kinds."""
        self._num_factors = num_factors

    def pack(self, numbers: Numbers, start: int) -> Buffer:
        """See ShareFormat."""
        return super().pack(numbers.astype("<f4") if start < self._num_factors else numbers, start)


class CodedShares:
    """Shares through a gradient codec. bf16 and int8 also encode the sum.

    topk keeps the largest values of the sum, as many whatever the number of peers. A value of a share that is not among
    them stays with its sender, as if it had not been sent. The answer to a single share is that share.
    """

    unit = CHUNK

    def __init__(self, encoder: GradientEncoder) -> None:
        self._encoder, self._spec = encoder, encoder.spec
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
        return Share(_decoded(raw, size), bytes(raw) if self._spec.kind == "topk" else b"")

    def answer(self, total: Total, start: int) -> Buffer:
        """See ShareFormat."""
        if total.only:
            return _ONE_SHARE + total.only
        numbers = total.rounded()
        if self._spec.kind == "topk":
            return _SUM + encode_chunk_sum(numbers, SUM_KEPT * self._spec.size)
        return self._answers.encode(torch.from_numpy(numbers), start)

    def result(self, raw: Buffer, size: int) -> Numbers:
        """See ShareFormat."""
        if self._spec.kind != "topk":
            return _decoded(raw, size)
        if raw[:1] == _ONE_SHARE:
            return _decoded(memoryview(raw)[1:], size)
        if raw[:1] != _SUM:
            raise BadShare("an answer that is neither a share nor a sum")
        try:
            return decode_chunk_sum(memoryview(raw)[1:], size, SUM_KEPT * self._spec.size)
        except CodecError as error:
            raise BadShare(str(error)) from error

    def settle(self, reduced: Numbers, start: int) -> None:
        """See ShareFormat."""
        if self._spec.kind == "topk":
            self._encoder.take_back(torch.from_numpy(reduced == 0.0), start)


def _decoded(raw: Buffer, size: int) -> Numbers:
    try:
        tensor = decode(raw, _CONTEXT, limits=Limits.exactly((size,))).tensor
    except CodecError as error:
        raise BadShare(str(error)) from error
    return tensor.to(torch.float32).numpy()
