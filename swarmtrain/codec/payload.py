"""The self-describing envelope of every encoded tensor.

    offset  size  field
         0     4  magic "STc1"
         4     4  checksum of everything behind it
         8     1  format version
         9     1  codec id
        10     1  dtype of the tensor that was encoded
        11     1  number of dimensions, at most 8
        12     2  flags
        14     8  length of the body
        22    10  parameters of the codec
        32    4n  the shape, then zeros up to a multiple of 8
         …        body

A header is 32 to 64 bytes long. The checksum is verified before any other field is believed, so whatever was flipped
or cut, the answer is CorruptPayload, and UnknownCodec means an intact message from a newer build.

The checksum is a crc32. Over a long body it is taken of the body's row and column sums (as a matrix of 64-bit words)
instead of its bytes: at 2 GB/s a plain crc32 would cost several times the encoding itself. A flipped bit, or any change
within one word, changes one row sum and one column sum; moved words change sums too, unless they are equal.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
import torch

from swarmtrain.codec.api import Buffer, Limits
from swarmtrain.codec.errors import CodecError, CorruptPayload, UnknownCodec
from swarmtrain.codec.tensors import DTYPES
from swarmtrain.native import native

MAGIC = b"STc1"
VERSION = 1
MAX_DIMENSIONS = 8
PARAMETER_BYTES = 10
_FIXED = struct.Struct("<4sIBBBBHQ10s")
_CHECKED_FROM = 8  # magic and checksum itself are not covered
_ROW_BYTES = 4096  # one row of the checksum's matrix
_ROW_WORDS = _ROW_BYTES // 8
_BAND_ROWS = 128  # rows summed at a time: 512 KiB, so that the second pass finds them in the cache
_PLAIN_BYTES = 1 << 16  # up to here a plain crc32 of the body is faster


@dataclass(frozen=True, slots=True)
class Header:
    """Everything a payload says about itself."""

    codec: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    body_bytes: int
    flags: int = 0
    parameters: bytes = b""

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)


def header_bytes(num_dimensions: int) -> int:
    """Length of the header of a tensor with so many dimensions."""
    return (_FIXED.size + 4 * num_dimensions + 7) // 8 * 8


def seal(header: Header, body: Buffer | numpy.typing.NDArray[Any]) -> bytes:
    """The finished payload: header and body, copied once. `body` is C-contiguous.

    Raises CodecError for a shape that no header can describe.
    """
    if len(header.shape) > MAX_DIMENSIONS or any(size >= 1 << 32 for size in header.shape):
        raise CodecError(f"a tensor of shape {header.shape} cannot be described: at most 8 dimensions below 2^32")
    head = bytearray(header_bytes(len(header.shape)))
    fixed = (VERSION, header.codec, DTYPES.index(header.dtype), len(header.shape), header.flags, header.body_bytes)
    _FIXED.pack_into(head, 0, MAGIC, 0, *fixed, header.parameters)
    struct.pack_into(f"<{len(header.shape)}I", head, _FIXED.size, *header.shape)
    content = _flat(body)
    if len(content) != header.body_bytes:
        raise AssertionError(f"the body has {len(content)} bytes, its header says {header.body_bytes}")
    struct.pack_into("<I", head, 4, _checksum(memoryview(head), content))
    return b"".join((head, content))


def unseal(payload: Buffer, limits: Limits) -> tuple[Header, memoryview]:
    """Header and body of an intact payload. Allocates nothing that grows with what the header claims.

    Raises CorruptPayload if it is cut, changed, or over `limits`; UnknownCodec for another format version.
    """
    whole = _flat(payload)
    if len(whole) < _FIXED.size:
        raise CorruptPayload(f"a payload of {len(whole)} bytes is shorter than its header")
    magic, checksum, version, codec, dtype, ndim, flags, body_bytes, parameters = _FIXED.unpack_from(whole)
    if magic != MAGIC:
        raise CorruptPayload("a payload does not begin with the codec's mark")
    # Another format version may have a longer header, but it keeps magic, checksum and length where they are.
    head_length = header_bytes(ndim)
    if len(whole) != head_length + body_bytes:
        raise CorruptPayload(f"a payload has {len(whole)} bytes, its header says {head_length + body_bytes}")
    body = whole[head_length:]
    if checksum != _checksum(whole[:head_length], body):
        raise CorruptPayload("a payload's checksum does not match its bytes")
    if version != VERSION:
        raise UnknownCodec(f"a payload has format version {version}, this build knows {VERSION}")
    if ndim > MAX_DIMENSIONS or dtype >= len(DTYPES):
        raise CorruptPayload(f"a payload claims {ndim} dimensions and dtype {dtype}")
    shape = struct.unpack_from(f"<{ndim}I", whole, _FIXED.size)
    header = Header(codec, DTYPES[dtype], shape, body_bytes, flags, parameters)
    _check_limits(header, limits)
    return header, body


def peek(payload: Buffer) -> Header:
    """The header of an intact payload, without limits: for logs and metrics."""
    return unseal(payload, Limits(max_elements=1 << 255))[0]


def _check_limits(header: Header, limits: Limits) -> None:
    # Empty axes count as one, or a tensor without elements could claim absurd sizes for the other axes.
    claimed = math.prod(max(1, size) for size in header.shape)
    if claimed > limits.max_elements:
        raise CorruptPayload(f"a payload claims {claimed} elements, the limit is {limits.max_elements}")
    if limits.expected_shape is not None and header.shape != limits.expected_shape:
        raise CorruptPayload(f"a payload has shape {header.shape}, expected {limits.expected_shape}")


def _flat(data: Buffer | numpy.typing.NDArray[Any]) -> memoryview:
    view = data.data if isinstance(data, numpy.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # empty views cannot be cast


def _checksum(head: memoryview, body: memoryview) -> int:
    checksum = zlib.crc32(head[_CHECKED_FROM:])
    if len(body) <= _PLAIN_BYTES:
        return zlib.crc32(body, checksum)
    num_rows = len(body) // _ROW_BYTES
    words = numpy.frombuffer(body, dtype="<u8", count=num_rows * _ROW_WORDS).reshape(num_rows, _ROW_WORDS)
    row_sums = numpy.empty(num_rows, dtype="<u8")
    column_sums = numpy.zeros(_ROW_WORDS, dtype="<u8")
    loops = native()
    if loops is not None:
        loops.sums(words, row_sums, column_sums)
    for start in range(0, num_rows, _BAND_ROWS) if loops is None else ():
        band = words[start : start + _BAND_ROWS]  # (rows, words), stays in the cache for the second sum
        numpy.sum(band, axis=1, out=row_sums[start : start + _BAND_ROWS])
        column_sums += numpy.sum(band, axis=0)
    for part in (row_sums.data, column_sums.data, body[num_rows * _ROW_BYTES :]):
        checksum = zlib.crc32(part, checksum)
    return checksum
