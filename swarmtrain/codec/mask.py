"""Masks: which elements of a tensor were sent."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy
import numpy.typing
import torch

from swarmtrain.codec.api import Aux
from swarmtrain.codec.errors import CodecError, NeedAux

DIGEST_BYTES = 8
BoolArray = numpy.typing.NDArray[numpy.bool_]


def select_largest(rows: torch.Tensor, kept: int) -> BoolArray:
    """True at exactly `kept` largest magnitudes of each row of `rows` (rows, width); of equals, the first ones."""
    width = rows.shape[1]
    if kept >= width:
        return numpy.ones(tuple(rows.shape), dtype=numpy.bool_)
    magnitudes = rows.abs()  # (rows, width)
    threshold = torch.topk(magnitudes, kept, dim=1, sorted=False).values.amin(dim=1, keepdim=True)  # (rows, 1)
    mask = magnitudes >= threshold  # (rows, width)
    crowded = torch.nonzero(mask.sum(dim=1) > kept).view(-1)  # rows with more equals of the threshold than places
    if crowded.numel():
        above = magnitudes[crowded] > threshold[crowded]  # (crowded, width)
        equal = magnitudes[crowded] == threshold[crowded]  # (crowded, width)
        places = kept - above.sum(dim=1, keepdim=True)  # (crowded, 1)
        mask[crowded] = above | (equal & (equal.cumsum(dim=1) <= places))
    result: BoolArray = mask.numpy()
    return result


def make_aux(mask: BoolArray, shape: tuple[int, ...]) -> Aux:
    """The mask as it is kept with the microbatch."""
    bits = numpy.packbits(mask.reshape(-1)).tobytes()
    return Aux(shape, bits, _digest(shape, bits))


def aux_from_bytes(shape: tuple[int, ...], bits: bytes) -> Aux:
    """An Aux that was stored or sent as its bytes. Raises CodecError if they do not fit `shape`."""
    if len(bits) != -(-math.prod(shape) // 8):
        raise CodecError(f"a mask of {len(bits)} bytes does not fit a tensor of shape {shape}")
    return Aux(shape, bits, _digest(shape, bits))


def mask_array(aux: Aux, shape: tuple[int, ...]) -> BoolArray:
    """The mask as a flat array. Raises NeedAux if it is one of another shape."""
    if aux.shape != shape:
        raise NeedAux(b"", f"the forward mask has shape {aux.shape}, the message {shape}")
    flat = numpy.unpackbits(numpy.frombuffer(aux.mask, dtype=numpy.uint8), count=math.prod(shape))
    return flat.view(numpy.bool_)


def apply_mask(tensor: torch.Tensor, aux: Aux) -> torch.Tensor:
    """`tensor` with zeros outside the mask, in place.

    What was not sent forward was not used downstream, so its true gradient is zero, whatever a dense codec delivers.
    """
    mask = mask_array(aux, tuple(tensor.shape))
    tensor.view(-1).mul_(torch.from_numpy(mask))
    return tensor


def _digest(shape: tuple[int, ...], bits: bytes) -> bytes:
    described = struct.pack(f"<{len(shape)}Q", *shape)
    return hashlib.blake2b(described + bits, digest_size=DIGEST_BYTES).digest()
