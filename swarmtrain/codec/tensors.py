"""Small moves between tensors and bytes that all codecs share."""

from __future__ import annotations

import math
from typing import Any

import numpy
import numpy.typing
import torch

from swarmtrain.codec.errors import CodecError, CorruptPayload, NonFiniteTensor

Bytes = numpy.typing.NDArray[numpy.uint8]

# What may be encoded, in the order of its number in the header.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# numpy has no bf16; its bytes pass as 16-bit integers.
_NUMPY_TYPES: dict[torch.dtype, numpy.dtype[Any]] = {
    torch.float64: numpy.dtype("<f8"),
    torch.float32: numpy.dtype("<f4"),
    torch.float16: numpy.dtype("<f2"),
    torch.bfloat16: numpy.dtype("<i2"),
    torch.uint8: numpy.dtype("u1"),
    torch.int8: numpy.dtype("i1"),
}


def plain(tensor: torch.Tensor, *, keep_dtype: bool = False) -> torch.Tensor:
    """The tensor's numbers on the CPU, contiguous, without graph, as fp32; no copy if they already are.

    Raises CodecError for a dtype that is not a floating-point one, NonFiniteTensor for fp64 numbers beyond fp32.
    """
    if tensor.dtype not in DTYPES:
        raise CodecError(f"a boundary tensor of dtype {tensor.dtype} cannot be encoded; use a floating-point dtype")
    source = tensor.detach().to("cpu")
    if not keep_dtype:
        source = source.to(torch.float32)
    return source.contiguous()


def check_finite(numbers: torch.Tensor, error: type[NonFiniteTensor] | type[CorruptPayload] = NonFiniteTensor) -> None:
    """Raises `error` if a number is NaN or infinite.

    Any such number makes the sum non-finite, and a sum is the cheapest pass there is. A finite sum is the proof; only
    sums that overflow cost a second look.
    """
    wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    if math.isfinite(torch.sum(numbers, dtype=wide).item()) or bool(torch.isfinite(numbers).all()):
        return
    raise error("a boundary tensor holds NaN or infinity")


def largest_magnitude(numbers: torch.Tensor) -> float:
    """max |x|, 0 for an empty tensor. Raises NonFiniteTensor for NaN and infinity."""
    if numbers.numel() == 0:
        return 0.0
    low, high = torch.aminmax(numbers)
    largest = max(-low.item(), high.item())
    if not largest < float("inf"):  # also true for NaN
        raise NonFiniteTensor("a boundary tensor holds NaN or infinity")
    return largest


def as_bytes(numbers: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor as bytes; no copy."""
    if numbers.dtype == torch.bfloat16:
        numbers = numbers.view(torch.int16)
    array: Bytes = numbers.reshape(-1).numpy().view(numpy.uint8)
    return array


def tensor_from_bytes(body: memoryview | Bytes, dtype: torch.dtype) -> torch.Tensor:
    """A new, writable one-dimensional tensor with these bytes. One copy."""
    array: numpy.typing.NDArray[Any] = numpy.frombuffer(body, dtype=_NUMPY_TYPES[dtype]).copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor
