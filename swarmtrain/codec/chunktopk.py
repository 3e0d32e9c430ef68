"""In-stage gradients as the few largest values of each chunk of 4096, in two bits each (after SparseLoCo).

A kept value costs 12 bits of position and 2 bits: its sign, and whether it lies above or below the chunk's mean kept
magnitude. These four classes have one representative for the whole message, in units of the chunk's mean; it is the one
with the least squared error, so a message never takes away more than it gives. 64 of 4096 cost 0.22 bits per number.

Body: four representatives (fp32), the chunks' means (bf16), positions, classes. A last, shorter chunk keeps its share.
"""

from __future__ import annotations

import struct

import numpy
import numpy.typing
import torch

from swarmtrain.codec.errors import CorruptPayload
from swarmtrain.codec.mask import select_largest
from swarmtrain.codec.packing import index_bits, pack_codes, pack_indices, packed_bytes, unpack_codes, unpack_indices
from swarmtrain.codec.payload import Header, seal
from swarmtrain.codec.tensors import Bytes, check_finite

CODEC_ID = 8
CHUNK = 4096
_PARAMETERS = struct.Struct("<H")  # kept per whole chunk
_CLASSES = 4
_INDEX_BITS = index_bits(CHUNK)
_CODE_BITS = 2
_LARGEST_MEAN = 0x7F7F  # of bf16

Floats = numpy.typing.NDArray[numpy.float64]


def kept_in(length: int, kept: int) -> int:
    """How many values are kept of a chunk of `length`, if a whole one keeps `kept`."""
    return max(1, round(length * kept / CHUNK)) if length else 0


def chunk_topk_bytes(num_elements: int, kept: int) -> int:
    """Length of the body."""
    total = num_elements // CHUNK * kept + kept_in(num_elements % CHUNK, kept)
    num_chunks = -(-num_elements // CHUNK)
    return 4 * _CLASSES + 2 * num_chunks + packed_bytes(total, _INDEX_BITS) + packed_bytes(total, _CODE_BITS)


def encode_chunk_topk(numbers: torch.Tensor, source_dtype: torch.dtype, kept: int) -> bytes:
    """The payload of one-dimensional fp32 `numbers`. Raises NonFiniteTensor."""
    check_finite(numbers)
    positions, chunk_of = _select(numbers, kept)  # (total,) both
    values = numbers.numpy()[chunk_of * CHUNK + positions].astype(numpy.float64)  # (total,)
    num_chunks = -(-numbers.numel() // CHUNK)
    means = _to_bf16(_mean_magnitudes(values, chunk_of, num_chunks))  # (chunks,)
    unit = _from_bf16(means)[chunk_of]  # (total,)
    codes = (values > 0) * numpy.uint8(2) + (numpy.abs(values) > unit)  # (total,)
    parts = (
        _representatives(values, unit, codes).view(numpy.uint8),
        means.view(numpy.uint8),
        pack_indices(positions.astype(numpy.uint32), _INDEX_BITS),
        pack_codes(codes.astype(numpy.uint8), _CODE_BITS),
    )
    body = numpy.concatenate(parts)
    parameters = _PARAMETERS.pack(kept)
    return seal(Header(CODEC_ID, source_dtype, tuple(numbers.shape), body.size, parameters=parameters), body)


def decode_chunk_topk(header: Header, body: memoryview) -> torch.Tensor:
    """The tensor of an unsealed payload: zero where nothing was kept."""
    (kept,) = _PARAMETERS.unpack_from(header.parameters)
    count = header.num_elements
    if len(header.shape) != 1 or not 1 <= kept <= CHUNK or len(body) != chunk_topk_bytes(count, kept):
        raise CorruptPayload(f"{len(body)} bytes are not {kept} of {CHUNK} values of a tensor of shape {header.shape}")
    content = numpy.frombuffer(body, dtype=numpy.uint8)
    lengths = _chunk_lengths(count)
    num_chunks = lengths.size
    chunk_of = numpy.repeat(numpy.arange(num_chunks), [kept_in(int(length), kept) for length in lengths])
    book, means, positions, codes = _read(content, num_chunks, chunk_of.size)
    if not numpy.isfinite(book).all() or int(means.max(initial=0)) > _LARGEST_MEAN:
        raise CorruptPayload("a representative or a mean is not a finite number")
    if (positions >= lengths[chunk_of]).any():
        raise CorruptPayload("a position lies outside its chunk")
    tensor = torch.zeros(count)
    values = book.astype(numpy.float64)[codes] * _from_bf16(means)[chunk_of]  # (total,)
    with numpy.errstate(over="ignore"):
        tensor.numpy()[chunk_of * CHUNK + positions] = values.astype(numpy.float32)
    check_finite(tensor, CorruptPayload)
    return tensor


def encode_chunk_sum(numbers: numpy.typing.NDArray[numpy.float32], kept: int) -> bytes:
    """The sum of several messages: the `kept` largest values of each chunk, as positions (or a bit for every number,
    if that is shorter) and bf16 numbers."""
    positions, chunk_of = _select(torch.from_numpy(numbers), min(kept, CHUNK))  # (total,) both
    where = chunk_of * CHUNK + positions  # (total,)
    values = torch.from_numpy(numbers[where]).to(torch.bfloat16).view(torch.int16).numpy().astype("<i2")  # (total,)
    if _has_bits(kept):
        bits = numpy.zeros(numbers.size, dtype=numpy.uint8)
        bits[where] = 1
        return numpy.packbits(bits).tobytes() + values.tobytes()
    return pack_indices(positions.astype(numpy.uint32), _INDEX_BITS).tobytes() + values.tobytes()


def decode_chunk_sum(raw: memoryview, num_elements: int, kept: int) -> numpy.typing.NDArray[numpy.float32]:
    """Zero where no value was kept. Raises CorruptPayload."""
    lengths = _chunk_lengths(num_elements)
    chunk_of = numpy.repeat(numpy.arange(lengths.size), [kept_in(int(length), min(kept, CHUNK)) for length in lengths])
    num_bytes = packed_bytes(num_elements, 1) if _has_bits(kept) else packed_bytes(chunk_of.size, _INDEX_BITS)
    if len(raw) != num_bytes + 2 * chunk_of.size:
        raise CorruptPayload(f"{len(raw)} bytes are not {kept} of {CHUNK} values of {num_elements}")
    content = numpy.frombuffer(raw, dtype=numpy.uint8)
    if _has_bits(kept):
        where = numpy.flatnonzero(numpy.unpackbits(content[:num_bytes], count=num_elements))  # (total,)
        if where.size != chunk_of.size:
            raise CorruptPayload(f"{where.size} of {num_elements} values where {chunk_of.size} are kept")
    else:
        positions = unpack_indices(content[:num_bytes], _INDEX_BITS, chunk_of.size)
        if (positions >= lengths[chunk_of]).any():
            raise CorruptPayload("a position lies outside its chunk")
        where = chunk_of * CHUNK + positions
    sums = numpy.zeros(num_elements, dtype=numpy.float32)
    sums[where] = _from_bf16(content[num_bytes:].copy().view("<u2"))
    return sums


def _has_bits(kept: int) -> bool:
    return kept * _INDEX_BITS > CHUNK


def _chunk_lengths(num_elements: int) -> numpy.typing.NDArray[numpy.int64]:
    lengths = numpy.full(-(-num_elements // CHUNK), CHUNK)
    if num_elements % CHUNK:
        lengths[-1] = num_elements % CHUNK
    return lengths


def _select(
    numbers: torch.Tensor, kept: int
) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64]]:
    """Position within its chunk, and the chunk, of every kept value, in order."""
    whole = numbers.numel() // CHUNK
    chunks, positions = numpy.nonzero(select_largest(numbers[: whole * CHUNK].view(whole, CHUNK), kept))
    tail = numbers[whole * CHUNK :]
    if tail.numel():
        _, tail_positions = numpy.nonzero(select_largest(tail.view(1, -1), kept_in(tail.numel(), kept)))
        chunks = numpy.concatenate((chunks, numpy.full(tail_positions.size, whole)))
        positions = numpy.concatenate((positions, tail_positions))
    return positions, chunks


def _mean_magnitudes(values: Floats, chunk_of: numpy.typing.NDArray[numpy.int64], num_chunks: int) -> Floats:
    sums = numpy.bincount(chunk_of, weights=numpy.abs(values), minlength=num_chunks)
    counts = numpy.bincount(chunk_of, minlength=num_chunks)
    return sums / numpy.maximum(counts, 1)


def _representatives(values: Floats, unit: Floats, codes: Bytes) -> numpy.typing.NDArray[numpy.float32]:
    """For each class the factor r that makes the sum of (v - r * unit)² least; zero for an empty class."""
    # In units of the largest one, so that squares neither overflow nor vanish.
    largest = unit.max(initial=0.0) or 1.0
    unit, values = unit / largest, values / largest
    products = numpy.bincount(codes, weights=values * unit, minlength=_CLASSES)
    squares = numpy.bincount(codes, weights=unit * unit, minlength=_CLASSES)
    book = numpy.divide(products, squares, out=numpy.zeros(_CLASSES), where=squares > 0)
    return book.astype("<f4")


def _read(
    content: Bytes, num_chunks: int, total: int
) -> tuple[
    numpy.typing.NDArray[numpy.float32],
    numpy.typing.NDArray[numpy.uint16],
    numpy.typing.NDArray[numpy.uint32],
    Bytes,
]:
    ends = numpy.cumsum((4 * _CLASSES, 2 * num_chunks, packed_bytes(total, _INDEX_BITS)))
    book, means, positions, codes = numpy.split(content, ends)
    return (
        book.view("<f4"),
        means.view("<u2"),
        unpack_indices(positions, _INDEX_BITS, total),
        unpack_codes(codes, _CODE_BITS, total),
    )


def _to_bf16(numbers: Floats) -> numpy.typing.NDArray[numpy.uint16]:
    bits = torch.from_numpy(numbers).to(torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(numpy.uint16)
    return numpy.minimum(bits, numpy.uint16(_LARGEST_MEAN)).astype("<u2")


def _from_bf16(bits: numpy.typing.NDArray[numpy.uint16]) -> Floats:
    return (bits.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32).astype(numpy.float64)
