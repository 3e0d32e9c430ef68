"""Codes of a few bits each, packed without gaps.

Eight codes of b bits become b bytes, the first code in the lowest bits. The squeezing works on eight codes at once as
one 64-bit word: neighbours are joined to pairs, pairs to fours, fours to eights.
"""

from __future__ import annotations

import math

import numpy
import numpy.typing

from swarmtrain.codec.tensors import Bytes

MAX_INDEX_BITS = 32
_Words = numpy.typing.NDArray[numpy.uint64]


def packed_bytes(num_codes: int, bits: int) -> int:
    """Length of `num_codes` packed codes."""
    return (num_codes * bits + 7) // 8


def pack_codes(codes: Bytes, bits: int) -> Bytes:
    """`codes` (each below 2^bits, bits <= 8) as ceil(n * bits / 8) bytes."""
    if bits == 8:
        return codes
    padded = numpy.zeros((codes.size + 7) // 8 * 8, dtype=numpy.uint8)
    padded[: codes.size] = codes
    words = padded.view("<u8")  # (eights,)
    moved = numpy.empty_like(words)
    for low, high, distance in _LANES[bits]:
        numpy.bitwise_and(words, high, out=moved)
        numpy.right_shift(moved, distance, out=moved)
        numpy.bitwise_and(words, low, out=words)
        numpy.bitwise_or(words, moved, out=words)
    whole = _WHOLE.get(bits)
    if whole is not None:  # numbers of a common size move faster than rows of bytes
        packed: Bytes = words.astype(whole).view(numpy.uint8)
    else:
        packed = words.view(numpy.uint8).reshape(-1, 8)[:, :bits].reshape(-1)  # (eights * bits,)
    return packed[: packed_bytes(codes.size, bits)]


def unpack_codes(packed: Bytes, bits: int, num_codes: int) -> Bytes:
    """The codes that `pack_codes` packed; `packed` has exactly their length."""
    if bits == 8:
        return packed
    num_words = (num_codes + 7) // 8
    padded = packed
    if packed.size < num_words * bits:
        padded = numpy.zeros(num_words * bits, dtype=numpy.uint8)
        padded[: packed.size] = packed
    whole = _WHOLE.get(bits)
    if whole is not None:
        words: _Words = padded.view(whole).astype("<u8")  # (eights,)
    else:
        words = numpy.zeros(num_words, dtype="<u8")
        words.view(numpy.uint8).reshape(num_words, 8)[:, :bits] = padded.reshape(num_words, bits)
    moved = numpy.empty_like(words)
    for low, high, distance in reversed(_LANES[bits]):
        numpy.left_shift(words, distance, out=moved)
        numpy.bitwise_and(moved, high, out=moved)
        numpy.bitwise_and(words, low, out=words)
        numpy.bitwise_or(words, moved, out=words)
    codes: Bytes = words.view(numpy.uint8)[:num_codes]
    return codes


def _lanes(bits: int) -> tuple[tuple[numpy.uint64, numpy.uint64, numpy.uint64], ...]:
    """For each step of joining codes, pairs and fours: masks of what stays and of what moves, and how far."""
    steps = []
    for lane, used in ((8, bits), (16, 2 * bits), (32, 4 * bits)):
        low = sum(((1 << used) - 1) << start for start in range(0, 64, 2 * lane))
        steps.append((numpy.uint64(low), numpy.uint64(low << lane), numpy.uint64(lane - used)))
    return tuple(steps)


_LANES = {bits: _lanes(bits) for bits in range(1, 8)}
_WHOLE = {1: "<u1", 2: "<u2", 4: "<u4"}  # eight codes are one number of this type


def index_bits(count: int) -> int:
    """Bits that tell `count` things apart: 0 for a single one."""
    return (count - 1).bit_length() if count > 1 else 0


def pack_indices(indices: numpy.typing.NDArray[numpy.uint32], bits: int) -> Bytes:
    """Whole numbers below 2^bits, bits <= 32, most significant bit first, without gaps."""
    if bits == 0 or indices.size == 0:
        return numpy.empty(0, dtype=numpy.uint8)
    unpacked = numpy.unpackbits(indices.astype(">u4").view(numpy.uint8)).reshape(-1, MAX_INDEX_BITS)
    packed: Bytes = numpy.packbits(unpacked[:, MAX_INDEX_BITS - bits :])
    return packed


def unpack_indices(packed: Bytes, bits: int, count: int) -> numpy.typing.NDArray[numpy.uint32]:
    """The inverse of `pack_indices`; `packed` has exactly `packed_bytes(count, bits)` bytes."""
    unpacked = numpy.zeros((count, MAX_INDEX_BITS), dtype=numpy.uint8)
    if bits:
        unpacked[:, MAX_INDEX_BITS - bits :] = numpy.unpackbits(packed, count=count * bits).reshape(count, bits)
    return numpy.packbits(unpacked.reshape(-1)).view(">u4").astype(numpy.uint32)


def entropy_bytes(kept: int, total: int) -> float:
    """The least that any coding of `kept` of `total` positions needs on average: a yardstick for studies."""
    if not 0 < kept < total:
        return 0.0
    share = kept / total
    return -total * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
