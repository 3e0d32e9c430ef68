"""The largest magnitudes of each row, with their positions.

Forward messages carry the positions, as a bitmask or as packed indices, whichever is shorter. A backward message that
reuses the forward mask carries none: for a fixed mask m the network downstream computes f(m * x), so m * g is its exact
gradient, not an approximation. Its payload names the mask by digest, and a receiver without it answers NeedAux.

Body: positions (or the digest), then values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing
import torch

from swarmtrain.codec.api import DEFAULT_LIMITS, Aux, Buffer, Direction, Encoded, Encoder, MessageContext, Scope
from swarmtrain.codec.errors import CodecError, CorruptPayload, NeedAux
from swarmtrain.codec.formats import FORMAT_DTYPES, from_format, to_format
from swarmtrain.codec.mask import DIGEST_BYTES, BoolArray, make_aux, mask_array, select_largest
from swarmtrain.codec.packing import index_bits, pack_indices, packed_bytes, unpack_indices
from swarmtrain.codec.payload import Header, header_bytes, seal, unseal
from swarmtrain.codec.quant import dequantize, quantize, quantized_bytes
from swarmtrain.codec.spec import DEFAULT_GROUP, VALUE_FORMATS, TopKSpec
from swarmtrain.codec.tensors import Bytes, as_bytes, check_finite, tensor_from_bytes

CODEC_ID = 4
_PARAMETERS = struct.Struct("<BBbI")  # value format, coding of the positions, exponent, kept per row
_BITMASK, _INDICES, _REFERENCE = range(3)
_OFFERS_MASK = 1  # flag: the mask is meant for the backward message
INLINE_MASK = 2  # flag: of a backward message, the mask within it is that of the activation it belongs to


class TopKEncoder(Encoder):
    """No state of its own; the mask lives with the microbatch."""

    def __init__(self, spec: TopKSpec, *, boundary: int, direction: Direction) -> None:
        super().__init__(spec, boundary=boundary, direction=direction)
        self._spec = spec
        self._reuse = direction is Direction.BACKWARD and not spec.separate
        self.scope = Scope.NONE if spec.separate else Scope.MICROBATCH

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder. A backward message of the reusing kind raises NeedAux without `aux`."""
        check_finite(numbers)
        shape = tuple(numbers.shape)
        plan = _Plan.of(shape, self._spec)
        if self._reuse:
            if aux is None:
                raise NeedAux(b"", f"{self.spec} backward needs the mask of the forward message")
            mask = mask_array(aux, shape)
            kept = _kept_per_row(mask, plan)
            plan = _Plan(plan.rows, plan.width, kept, plan.values)
            coding, positions = _REFERENCE, numpy.frombuffer(aux.digest, dtype=numpy.uint8)
            offered = None
        else:
            mask = select_largest(numbers.view(plan.rows, plan.width), plan.kept).reshape(-1)
            coding, positions = plan.code_positions(mask)
            offered = None if self._spec.separate else make_aux(mask, shape)
        kept_values = numbers.view(-1)[torch.from_numpy(mask)]  # (rows * kept,)
        values, exponent = _encode_values(kept_values, plan.values)
        body = numpy.concatenate((positions, values))
        parameters = _PARAMETERS.pack(VALUE_FORMATS.index(plan.values), coding, exponent, plan.kept)
        flags = _OFFERS_MASK if offered is not None and self.direction is Direction.FORWARD else 0
        header = Header(CODEC_ID, source_dtype, shape, body.size, flags, parameters)
        return Encoded(seal(header, body), offered, self._new_ticket(context))

    def max_bytes(self, shape: Sequence[int]) -> int:
        """Exact, for the direction of this encoder."""
        plan = _Plan.of(tuple(shape), self._spec)
        positions = DIGEST_BYTES if self._reuse else plan.position_bytes
        return header_bytes(len(shape)) + positions + plan.value_bytes


def decode_topk(header: Header, body: memoryview, aux: Aux | None) -> tuple[torch.Tensor, Aux | None]:
    """Tensor and offered mask of an unsealed topk payload. Raises CorruptPayload, NeedAux."""
    plan, coding, exponent = _plan_of_header(header)
    content = numpy.frombuffer(body, dtype=numpy.uint8)
    mask, values = _read_mask(header.shape, plan, coding, content, aux)
    if values.size != plan.value_bytes:
        raise CorruptPayload(f"{values.size} bytes are not {plan.total} values in {plan.values}")
    kept_values = _decode_values(values, plan, exponent)
    tensor = torch.zeros(header.num_elements)
    tensor[torch.from_numpy(mask)] = kept_values
    offered = make_aux(mask, header.shape) if header.flags & _OFFERS_MASK else None
    return tensor.view(header.shape), offered


def inline_aux(payload: Buffer, aux: Aux) -> bytes:
    """The same backward message with its mask inside: for a receiver whose mask is another one, or that has none.

    Values are not encoded again.
    """
    header, body = unseal(payload, DEFAULT_LIMITS)
    if header.codec != CODEC_ID:
        raise CodecError("only topk messages refer to a mask")
    plan, coding, exponent = _plan_of_header(header)
    if coding != _REFERENCE or bytes(body[:DIGEST_BYTES]) != aux.digest:
        raise CodecError("this message does not refer to that mask")
    coding, positions = plan.code_positions(mask_array(aux, header.shape))
    content = numpy.concatenate((positions, numpy.frombuffer(body[DIGEST_BYTES:], dtype=numpy.uint8)))
    parameters = _PARAMETERS.pack(VALUE_FORMATS.index(plan.values), coding, exponent, plan.kept)
    return seal(
        Header(CODEC_ID, header.dtype, header.shape, content.size, header.flags | INLINE_MASK, parameters), content
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a tensor is cut into rows, and what is kept of each."""

    rows: int
    width: int
    kept: int
    values: str

    @staticmethod
    def of(shape: tuple[int, ...], spec: TopKSpec) -> _Plan:
        width = shape[-1] if shape else 1
        rows = math.prod(shape[:-1]) if width else 0
        return _Plan(rows, width, spec.kept_per_row(width), spec.values)

    @property
    def total(self) -> int:
        return self.rows * self.kept

    @property
    def value_bytes(self) -> int:
        if self.values == "int8":
            return quantized_bytes(self.total, 8, DEFAULT_GROUP)
        return self.total * FORMAT_DTYPES[self.values].itemsize

    @property
    def bitmask_bytes(self) -> int:
        return packed_bytes(self.rows * self.width, 1)

    @property
    def index_bytes(self) -> int:
        return packed_bytes(self.total, index_bits(self.width))

    @property
    def position_bytes(self) -> int:
        return min(self.bitmask_bytes, self.index_bytes)

    def code_positions(self, mask: BoolArray) -> tuple[int, Bytes]:
        """The shorter coding of a flat mask, and its bytes."""
        if self.bitmask_bytes <= self.index_bytes:
            return _BITMASK, numpy.packbits(mask)
        columns = numpy.nonzero(mask.reshape(self.rows, self.width))[1].astype(numpy.uint32)
        return _INDICES, pack_indices(columns, index_bits(self.width))


def _plan_of_header(header: Header) -> tuple[_Plan, int, int]:
    """Plan, coding of the positions and exponent. Raises CorruptPayload for what no encoder writes."""
    values, coding, exponent, kept = _PARAMETERS.unpack_from(header.parameters)
    width = header.shape[-1] if header.shape else 1
    if values >= len(VALUE_FORMATS) or coding > _REFERENCE or not min(1, width) <= kept <= width:
        raise CorruptPayload(f"a payload claims {kept} of {width} values, format {values}, positions {coding}")
    rows = math.prod(header.shape[:-1]) if width else 0
    return _Plan(rows, width, kept, VALUE_FORMATS[values]), coding, exponent


def _read_mask(
    shape: tuple[int, ...], plan: _Plan, coding: int, content: Bytes, aux: Aux | None
) -> tuple[BoolArray, Bytes]:
    """The flat mask, and what follows the positions."""
    if coding == _REFERENCE:
        digest = content[:DIGEST_BYTES].tobytes()
        if aux is None or aux.digest != digest:
            raise NeedAux(digest)
        mask = mask_array(aux, shape)
        length = DIGEST_BYTES
    elif coding == _BITMASK:
        length = plan.bitmask_bytes
        _need_bytes(content, length)
        mask = numpy.unpackbits(content[:length], count=plan.rows * plan.width).view(numpy.bool_)
    else:
        length = plan.index_bytes
        _need_bytes(content, length)
        mask = _mask_of_indices(unpack_indices(content[:length], index_bits(plan.width), plan.total), plan)
    if _kept_per_row(mask, plan) != plan.kept:
        raise CorruptPayload("a mask does not keep what its header says")
    return mask, content[length:]


def _need_bytes(content: Bytes, length: int) -> None:
    if content.size < length:
        raise CorruptPayload(f"{content.size} bytes are too few for {length} bytes of positions")


def _mask_of_indices(indices: numpy.typing.NDArray[numpy.uint32], plan: _Plan) -> BoolArray:
    if indices.size and int(indices.max()) >= plan.width:
        raise CorruptPayload("an index lies outside its row")
    mask = numpy.zeros((plan.rows, plan.width), dtype=numpy.bool_)
    mask[numpy.repeat(numpy.arange(plan.rows), plan.kept), indices] = True
    return mask.reshape(-1)


def _kept_per_row(mask: BoolArray, plan: _Plan) -> int:
    """How many each row keeps; raises CorruptPayload if rows differ."""
    if plan.rows == 0 or plan.width == 0:
        return plan.kept
    counts = mask.reshape(plan.rows, plan.width).sum(axis=1)
    if int(counts.min()) != int(counts.max()):
        raise CorruptPayload("the rows of a mask keep different numbers of values")
    return int(counts[0])


def _encode_values(values: torch.Tensor, name: str) -> tuple[Bytes, int]:
    if name == "int8":
        return quantize(values, 8, DEFAULT_GROUP), 0
    numbers, exponent = to_format(values, name)
    return as_bytes(numbers), exponent


def _decode_values(content: Bytes, plan: _Plan, exponent: int) -> torch.Tensor:
    if plan.values == "int8":
        return dequantize(content, plan.total, 8, DEFAULT_GROUP)
    values = from_format(tensor_from_bytes(content, FORMAT_DTYPES[plan.values]), exponent)
    check_finite(values, CorruptPayload)
    return values
