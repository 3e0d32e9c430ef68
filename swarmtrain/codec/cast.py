"""Numbers as they are, in another number format: fp32, fp16, bf16, and raw (the tensor's own)."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from swarmtrain.codec.api import Aux, Direction, Encoded, Encoder, MessageContext
from swarmtrain.codec.errors import CorruptPayload
from swarmtrain.codec.formats import FORMAT_DTYPES, from_format, to_format
from swarmtrain.codec.payload import Header, header_bytes, seal
from swarmtrain.codec.spec import CAST_FORMATS, CastSpec
from swarmtrain.codec.tensors import as_bytes, check_finite, plain, tensor_from_bytes

CODEC_ID = 1
_PARAMETERS = struct.Struct("<Bb")  # format, exponent


class CastEncoder(Encoder):
    """Stateless. fp32 copies the numbers once, into the payload."""

    def __init__(self, spec: CastSpec, *, boundary: int, direction: Direction) -> None:
        super().__init__(spec, boundary=boundary, direction=direction)
        self._format = spec.format

    def encode(self, tensor: torch.Tensor, context: MessageContext, aux: Aux | None = None) -> Encoded:
        """See Encoder."""
        if self._format != "raw":
            return super().encode(tensor, context, aux)
        numbers = plain(tensor, keep_dtype=True)
        check_finite(numbers)
        return self._seal(numbers, 0, tensor.dtype, context)

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder."""
        if self._format in ("raw", "fp32"):
            check_finite(numbers)
            return self._seal(numbers, 0, source_dtype, context)
        return self._seal(*to_format(numbers, self._format), source_dtype, context)

    def _seal(
        self, numbers: torch.Tensor, exponent: int, source_dtype: torch.dtype, context: MessageContext
    ) -> Encoded:
        parameters = _PARAMETERS.pack(CAST_FORMATS.index(self._format), exponent)
        header = Header(CODEC_ID, source_dtype, tuple(numbers.shape), numbers.nbytes, parameters=parameters)
        return Encoded(seal(header, as_bytes(numbers)), None, self._new_ticket(context))

    def max_bytes(self, shape: Sequence[int]) -> int:
        """Exact for fp32, fp16 and bf16; raw counts eight bytes per element."""
        width = 8 if self._format == "raw" else FORMAT_DTYPES[self._format].itemsize
        return header_bytes(len(shape)) + math.prod(shape) * width


def decode_cast(header: Header, body: memoryview) -> torch.Tensor:
    """The tensor of an unsealed cast payload."""
    index, exponent = _PARAMETERS.unpack_from(header.parameters)
    if index >= len(CAST_FORMATS):
        raise CorruptPayload(f"a payload has number format {index}")
    keep_dtype = CAST_FORMATS[index] == "raw"
    dtype = header.dtype if keep_dtype else FORMAT_DTYPES[CAST_FORMATS[index]]
    if len(body) != header.num_elements * dtype.itemsize:
        raise CorruptPayload(f"{len(body)} bytes are not {header.num_elements} numbers of {dtype}")
    numbers = tensor_from_bytes(body, dtype)
    if not keep_dtype:
        numbers = from_format(numbers, exponent)
    check_finite(numbers, CorruptPayload)
    return numbers.view(header.shape)
