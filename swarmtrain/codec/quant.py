"""Symmetric uniform quantization, one scale for each group of consecutive values.

With b bits there are 2^b - 1 levels, -L … L, L = 2^(b-1) - 1; zero is one of them, so nothing changes its sign and the
error is never larger than the value. The scale of a group is its largest magnitude, in bf16 and rounded up: it has the
exponent range of fp32, so that gradients at 1e-8 survive, and no number lies beyond the last level. No epsilon.

Body: scales (2 bytes each), then codes, packed. Work goes through chunks that stay in the processor's cache.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import numpy
import numpy.typing
import torch

from swarmtrain.codec.api import Aux, Direction, Encoded, Encoder, MessageContext
from swarmtrain.codec.errors import CorruptPayload, NonFiniteTensor
from swarmtrain.codec.packing import pack_codes, packed_bytes, unpack_codes
from swarmtrain.codec.payload import Header, header_bytes, seal
from swarmtrain.codec.spec import MAX_GROUP, QUANT_BITS, QuantSpec
from swarmtrain.codec.tensors import Bytes, check_finite
from swarmtrain.native import native

CODEC_ID = 2
_PARAMETERS = struct.Struct("<BH")  # bits, group
_CHUNK_ELEMENTS = 1 << 15  # one operation at a time; torch splits larger ones over its threads
_LARGE_MESSAGE = 1 << 20  # from here on its threads pay; below, each of their meetings costs more than it saves
_LARGE_CHUNK_ELEMENTS = 1 << 17
_CHUNKS_PER_BLOCK = 8  # scales are computed for a whole block, whose numbers wait in a larger cache
_INFINITY_BITS = 0x7F800000
_LARGEST_SCALE = 0x7F7F  # of bf16; the fp32 numbers above it differ by less than half a step of 8 bits
_SMALL_SCALE = 2.0**-100  # L / scale is still a normal number
_LIFT = 2.0**64
_NATIVE_FROM = 1 << 12  # numbers; below, a call costs as much as it saves

Scales = numpy.typing.NDArray[numpy.uint16]


class QuantEncoder(Encoder):
    """Stateless, but for memory that it uses again; fixed rate."""

    def __init__(self, spec: QuantSpec, *, boundary: int, direction: Direction) -> None:
        super().__init__(spec, boundary=boundary, direction=direction)
        self._bits, self._group = spec.bits, spec.group
        self._memory = Memory()

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder."""
        body = quantize(numbers.view(-1), self._bits, self._group, self._memory)
        parameters = _PARAMETERS.pack(self._bits, self._group)
        header = Header(CODEC_ID, source_dtype, tuple(numbers.shape), body.size, parameters=parameters)
        return Encoded(seal(header, body), None, self._new_ticket(context))

    def max_bytes(self, shape: Sequence[int]) -> int:
        """Exact."""
        return header_bytes(len(shape)) + quantized_bytes(math.prod(shape), self._bits, self._group)


def decode_quant(header: Header, body: memoryview) -> torch.Tensor:
    """The tensor of an unsealed quant payload."""
    bits, group = _PARAMETERS.unpack_from(header.parameters)
    if bits not in QUANT_BITS or not 8 <= group <= MAX_GROUP or group % 8:
        raise CorruptPayload(f"a payload claims {bits} bits in groups of {group}")
    if len(body) != quantized_bytes(header.num_elements, bits, group):
        raise CorruptPayload(f"{len(body)} bytes are not {header.num_elements} codes of {bits} bits with their scales")
    return dequantize(numpy.frombuffer(body, dtype=numpy.uint8), header.num_elements, bits, group).view(header.shape)


def quantized_bytes(num_elements: int, bits: int, group: int) -> int:
    """Length of scales and codes together."""
    return 2 * -(-num_elements // group) + packed_bytes(num_elements, bits)


class Memory:
    """Working memory that one encoder keeps: fresh pages cost more than the quantization of what goes into them."""

    def __init__(self) -> None:
        self._body: Bytes = numpy.empty(0, dtype=numpy.uint8)
        self._scratch = torch.empty(0, 0)

    def body(self, length: int) -> Bytes:
        """The same bytes each time; grows to the largest message so far."""
        if self._body.size < length:
            self._body = numpy.empty(length, dtype=numpy.uint8)
        return self._body[:length]

    def scratch(self, rows: int, group: int) -> torch.Tensor:
        """(rows, group), the same numbers each time."""
        if self._scratch.shape != (rows, group):
            self._scratch = torch.empty(rows, group)
        return self._scratch


def quantize(numbers: torch.Tensor, bits: int, group: int, memory: Memory | None = None) -> Bytes:
    """Scales and codes of one-dimensional fp32 `numbers`, valid until `memory` is used again.

    Raises NonFiniteTensor.
    """
    memory = memory or Memory()
    num_elements = numbers.numel()
    num_groups = -(-num_elements // group)
    body = memory.body(quantized_bytes(num_elements, bits, group))
    scales = body[: 2 * num_groups].view("<u2")
    packed = body[2 * num_groups :]
    whole = num_elements // group
    if bits == 8 and _quantize_native(numbers[: whole * group], group, scales[:whole], packed[: whole * group]):
        tail = num_elements - whole * group
        if tail:
            _quantize_tail(numbers[whole * group :], bits, group, scales[whole:], packed[whole * group :])
        return body
    matrix = numbers[: whole * group].view(whole, group)  # (groups, group)
    chunk = _rows_per_chunk(num_elements, group)
    scratch = memory.scratch(min(whole, chunk), group)
    for start, rows in _pieces(matrix, chunk * _CHUNKS_PER_BLOCK):
        codes = _slice(packed, bits, start * group, rows.numel())
        _quantize_rows(rows, bits, scales[start : start + rows.shape[0]], codes, scratch)
    tail = num_elements - whole * group
    if tail:
        _quantize_tail(numbers[whole * group :], bits, group, scales[whole:], _slice(packed, bits, whole * group, tail))
    return body


def _quantize_native(numbers: torch.Tensor, group: int, scales: Scales, codes: Bytes) -> bool:
    """Fill `scales` and `codes` of whole groups by machine code; False if there is none. Raises NonFiniteTensor."""
    loops = native() if numbers.numel() >= _NATIVE_FROM else None
    if loops is None:
        return False
    if not loops.quantize(numbers.numpy(), group, scales, codes):
        raise NonFiniteTensor("a boundary tensor holds NaN or infinity")
    return True


def _quantize_tail(numbers: torch.Tensor, bits: int, group: int, scales: Scales, packed: Bytes) -> None:
    """The last, shorter group."""
    padded = torch.zeros(1, group)
    padded[0, : numbers.numel()] = numbers
    codes = numpy.empty(packed_bytes(group, bits), dtype=numpy.uint8)
    _quantize_rows(padded, bits, scales, codes, padded.clone())
    packed[:] = codes[: packed_bytes(numbers.numel(), bits)]


def dequantize(body: Bytes, num_elements: int, bits: int, group: int) -> torch.Tensor:
    """The fp32 numbers of what `quantize` gave; `body` has exactly their length. Raises CorruptPayload."""
    num_groups = -(-num_elements // group)
    scales = body[: 2 * num_groups].view("<u2")
    packed = body[2 * num_groups :]
    largest = int(scales.max(initial=0))
    if largest > _LARGEST_SCALE:
        raise CorruptPayload("a scale is negative, infinite or NaN")
    numbers = torch.from_numpy(numpy.empty(num_elements, numpy.float32))  # numpy asks for huge pages, torch does not
    loops = native() if bits == 8 and num_elements >= _NATIVE_FROM else None
    done = 0
    if loops is not None:
        done = num_elements // group * group
        loops.dequantize(packed[:done], group, scales, numbers[:done].numpy())
    steps = (scales.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)[done // group :]  # (groups,)
    steps /= numpy.float32(_levels(bits))
    chunk = _rows_per_chunk(num_elements, group) * group
    for first, target in _pieces(numbers[done:], chunk):
        codes = unpack_codes(_slice(packed, bits, done + first, target.shape[0]), bits, target.shape[0])
        if bits < 8:
            codes -= numpy.uint8(_levels(bits))
        numpy.copyto(target.numpy(), codes.view(numpy.int8))
        _scale_groups(target, steps[first // group : (first + chunk) // group], group)
    if largest == _LARGEST_SCALE:  # only there a code that no encoder writes could overflow
        check_finite(numbers, CorruptPayload)
    return numbers


def _quantize_rows(rows: torch.Tensor, bits: int, scales: Scales, packed: Bytes, scratch: torch.Tensor) -> None:
    """Fill `scales` (rows,) and `packed` for a block of rows (rows, group) that fits the cache."""
    chunk, group = scratch.shape
    largest = numpy.empty(rows.shape[0], dtype=numpy.int32)  # (rows,)
    for start, part in _pieces(rows, chunk):
        magnitudes = torch.abs(part, out=_first(scratch, part.shape[0]))  # (chunk, group)
        # The magnitudes of floats order like their bits as integers, and torch finds the largest integer faster.
        torch.amax(magnitudes.view(torch.int32), dim=1, out=torch.from_numpy(largest[start : start + chunk]))
    lifted, factors = _factors(rows, largest, bits, scales)  # (rows, group), (rows, 1)
    for start, part in _pieces(lifted, chunk):
        factor = torch.from_numpy(factors[start : start + chunk])  # (chunk, 1)
        numbers = torch.mul(part, factor, out=_first(scratch, part.shape[0]))  # (chunk, group)
        numbers.round_()  # halves to even: the same for x and -x
        _store_codes(numbers, bits, _slice(packed, bits, start * group, numbers.numel()))


def _factors(
    rows: torch.Tensor, largest: numpy.typing.NDArray[numpy.int32], bits: int, scales: Scales
) -> tuple[torch.Tensor, numpy.typing.NDArray[numpy.float32]]:
    """Fill `scales`; rows and the factors (rows, 1) that turn them into codes. `largest` are bits of magnitudes."""
    if int(largest.max(initial=0)) >= _INFINITY_BITS:
        raise NonFiniteTensor("a boundary tensor holds NaN or infinity")
    rounded = (largest + 0xFFFF) & ~0xFFFF  # up to the next bf16 number
    numpy.minimum(rounded, _LARGEST_SCALE << 16, out=rounded)
    numpy.right_shift(rounded, 16, out=scales, casting="unsafe")
    scale = rounded.view(numpy.float32).reshape(-1, 1)  # (rows, 1)
    levels = numpy.float32(_levels(bits))
    if float(scale.min()) >= _SMALL_SCALE:
        return rows, levels / scale
    lift = numpy.where(scale < _SMALL_SCALE, numpy.float32(_LIFT), numpy.float32(1))  # (rows, 1)
    factors = numpy.divide(levels, scale * lift, out=numpy.zeros_like(scale), where=scale > 0)
    return rows * torch.from_numpy(lift), factors


def _pieces(tensor: torch.Tensor, length: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Start and content of consecutive pieces along the first axis."""
    if tensor.shape[0] <= length:
        if tensor.shape[0]:
            yield 0, tensor
        return
    for start in range(0, tensor.shape[0], length):
        yield start, tensor[start : start + length]


def _first(scratch: torch.Tensor, rows: int) -> torch.Tensor:
    return scratch if scratch.shape[0] == rows else scratch[:rows]


def _store_codes(numbers: torch.Tensor, bits: int, packed: Bytes) -> None:
    """Write whole numbers -L … L as packed codes."""
    if bits == 8:
        torch.from_numpy(packed.view(numpy.int8)).copy_(numbers.view(-1))
        return
    codes = numbers.view(-1).to(torch.int8).numpy().view(numpy.uint8)
    codes += numpy.uint8(_levels(bits))
    packed[:] = pack_codes(codes, bits)


def _slice(packed: Bytes, bits: int, first: int, count: int) -> Bytes:
    """Where `count` codes from number `first` on (a multiple of 8) lie."""
    start = first * bits // 8
    return packed[start : start + packed_bytes(count, bits)]


def _scale_groups(target: torch.Tensor, steps: numpy.typing.NDArray[numpy.float32], group: int) -> None:
    """Multiply each group of `target` by its step; the last group may be shorter."""
    whole = target.shape[0] // group
    factors = torch.from_numpy(steps[:whole]).view(whole, 1)  # (whole, 1)
    target[: whole * group].view(whole, group).mul_(factors)
    if whole * group < target.shape[0]:
        target[whole * group :].mul_(float(steps[whole]))


def _rows_per_chunk(num_elements: int, group: int) -> int:
    large = num_elements >= _LARGE_MESSAGE or torch.get_num_threads() == 1
    return max(1, (_LARGE_CHUNK_ELEMENTS if large else _CHUNK_ELEMENTS) // group)


def _levels(bits: int) -> int:
    return (1 << (bits - 1)) - 1
