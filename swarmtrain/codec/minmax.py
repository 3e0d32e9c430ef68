"""Uniform quantization between the smallest and the largest value of the whole tensor (Rudakov et al.), for the study.

Not a contraction: zero is no level, so one outlier adds an offset to everything small. Do not put it under feedback.
Body: minimum and maximum in fp32, then codes, packed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy
import torch

from swarmtrain.codec.api import Aux, Direction, Encoded, Encoder, MessageContext
from swarmtrain.codec.errors import CorruptPayload
from swarmtrain.codec.packing import pack_codes, packed_bytes, unpack_codes
from swarmtrain.codec.payload import Header, header_bytes, seal
from swarmtrain.codec.spec import QUANT_BITS, MinMaxSpec
from swarmtrain.codec.tensors import Bytes, check_finite

CODEC_ID = 3
_PARAMETERS = struct.Struct("<B")  # bits
_RANGE = struct.Struct("<ff")  # minimum, maximum


class MinMaxEncoder(Encoder):
    """Stateless; fixed rate."""

    def __init__(self, spec: MinMaxSpec, *, boundary: int, direction: Direction) -> None:
        super().__init__(spec, boundary=boundary, direction=direction)
        self._bits = spec.bits

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder."""
        check_finite(numbers)
        low, high = (0.0, 0.0) if numbers.numel() == 0 else (bound.item() for bound in torch.aminmax(numbers))
        codes = _nearest_levels(numbers.view(-1), low, high, self._bits)
        body = numpy.empty(_RANGE.size + packed_bytes(codes.size, self._bits), dtype=numpy.uint8)
        _RANGE.pack_into(body.data, 0, low, high)
        body[_RANGE.size :] = pack_codes(codes, self._bits)
        parameters = _PARAMETERS.pack(self._bits)
        header = Header(CODEC_ID, source_dtype, tuple(numbers.shape), body.size, parameters=parameters)
        return Encoded(seal(header, body), None, self._new_ticket(context))

    def max_bytes(self, shape: Sequence[int]) -> int:
        """Exact."""
        return header_bytes(len(shape)) + _RANGE.size + packed_bytes(math.prod(shape), self._bits)


def decode_minmax(header: Header, body: memoryview) -> torch.Tensor:
    """The tensor of an unsealed minmax payload."""
    (bits,) = _PARAMETERS.unpack_from(header.parameters)
    if bits not in QUANT_BITS or len(body) != _RANGE.size + packed_bytes(header.num_elements, bits):
        raise CorruptPayload(f"{len(body)} bytes are not {header.num_elements} codes of {bits} bits with their range")
    low, high = _RANGE.unpack_from(body)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise CorruptPayload(f"a payload claims the range {low} to {high}")
    codes = unpack_codes(numpy.frombuffer(body, dtype=numpy.uint8)[_RANGE.size :], bits, header.num_elements)
    return torch.from_numpy(_levels(low, high, bits)[codes]).view(header.shape)


def _nearest_levels(numbers: torch.Tensor, low: float, high: float, bits: int) -> Bytes:
    """Index of the level nearest to each number. In fp64, where the range cannot overflow."""
    if low == high:
        return numpy.zeros(numbers.numel(), dtype=numpy.uint8)
    places = (numbers.to(torch.float64) - low) * (((1 << bits) - 1) / (high - low))  # (n,)
    codes: Bytes = places.round_().to(torch.uint8).numpy()
    return codes


def _levels(low: float, high: float, bits: int) -> numpy.typing.NDArray[numpy.float32]:
    """All values a code can mean; the ends are exact."""
    levels = numpy.linspace(low, high, 1 << bits, dtype=numpy.float64).astype(numpy.float32)
    levels[-1] = high
    return levels
