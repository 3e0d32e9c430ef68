"""A matrix as the product of two thin factors (PowerSGD's iteration, used between two stages as in Optimus-CC).

The message is viewed as M (rows, columns) with the last axis as columns. From the sender's previous right factor Q:
Q <- orth(Q), P = orth(M Q), Q = Mᵀ P; both factors travel, the receiver multiplies. Q is only the sender's warm start,
so decoding needs nothing but the bytes, and any receiver will do.

Body: P (rows, rank), then Q (columns, rank), each in the factor format.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import numpy
import torch

from swarmtrain.codec.api import MAX_AGE, Aux, Direction, Encoded, Encoder, MessageContext, Scope, Ticket
from swarmtrain.codec.errors import CorruptPayload
from swarmtrain.codec.formats import FORMAT_DTYPES, from_format, to_format
from swarmtrain.codec.payload import Header, header_bytes, seal
from swarmtrain.codec.spec import FACTOR_FORMATS, LowRankSpec
from swarmtrain.codec.tensors import as_bytes, check_finite, largest_magnitude, tensor_from_bytes

CODEC_ID = 5
_PARAMETERS = struct.Struct("<BHbbh")  # factor format, rank, exponents of P and of Q, exponent of the message
_NEGLIGIBLE = 1e-6  # a column of Q this much shorter than the longest one points nowhere


class LowRankEncoder(Encoder):
    """State: the warm start, one (columns, rank) matrix."""

    scope = Scope.SENDER

    def __init__(self, spec: LowRankSpec, *, boundary: int, direction: Direction) -> None:
        super().__init__(spec, boundary=boundary, direction=direction)
        self._spec = spec
        self._start: torch.Tensor | None = None  # never changed in place: tickets remember older ones
        self._open: dict[Ticket, tuple[torch.Tensor | None, torch.Tensor | None]] = {}  # warm start before, after

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder."""
        exponent = _exponent(largest_magnitude(numbers))
        rows, columns, rank = _matrix(tuple(numbers.shape), self._spec.rank)
        matrix = _scale(numbers.view(rows, columns), -exponent)  # (rows, columns), magnitudes below 1
        before = self._start
        left, right = self._factors(matrix, rank)
        if bool(right.any()):  # a message of zeros says nothing about the next one
            self._start = right
        parts, exponents = zip(*(to_format(factor, self._spec.factors) for factor in (left, right)), strict=True)
        body = numpy.concatenate([as_bytes(part) for part in parts])
        parameters = _PARAMETERS.pack(FACTOR_FORMATS.index(self._spec.factors), rank, *exponents, exponent)
        header = Header(CODEC_ID, source_dtype, tuple(numbers.shape), body.size, parameters=parameters)
        ticket = self._new_ticket(context)
        self._open[ticket] = (before, self._start)
        return Encoded(seal(header, body), None, ticket)

    def max_bytes(self, shape: Sequence[int]) -> int:
        """Exact."""
        rows, columns, rank = _matrix(tuple(shape), self._spec.rank)
        return header_bytes(len(shape)) + rank * (rows + columns) * FORMAT_DTYPES[self._spec.factors].itemsize

    def commit(self, ticket: Ticket) -> None:
        """See Encoder."""
        self._open.pop(ticket, None)

    def abort(self, ticket: Ticket) -> None:
        """See Encoder. The warm start goes back only if nothing was encoded since: any start is a good one."""
        before, after = self._open.pop(ticket, (None, None))
        if after is not None and self._start is after:
            self._start = before

    def on_step(self, step: int) -> None:
        """See Encoder. Tickets that were never closed are forgotten."""
        self._open = {ticket: state for ticket, state in self._open.items() if step - ticket.step <= MAX_AGE}

    def reset(self, reason: str) -> None:
        """See Encoder."""
        self._start = None
        self._open.clear()

    def _factors(self, matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """P (rows, rank) with orthonormal columns and Q (columns, rank)."""
        columns = matrix.shape[1]
        fresh = _seeded(columns, rank, self.boundary, self.direction)  # (columns, rank)
        warm = self._start is not None and tuple(self._start.shape) == (columns, rank)
        start = _reseed(self._start, fresh) if warm and self._start is not None else fresh
        left, right = power_step(matrix, start)
        return (left, right) if warm else power_step(matrix, right)


def decode_lowrank(header: Header, body: memoryview) -> torch.Tensor:
    """The tensor of an unsealed lowrank payload."""
    name, claimed_rank, left_exponent, right_exponent, exponent = _PARAMETERS.unpack_from(header.parameters)
    rows, columns, rank = _matrix(header.shape, claimed_rank)
    if name >= len(FACTOR_FORMATS) or rank != claimed_rank:
        raise CorruptPayload(f"a payload claims rank {claimed_rank} of a {rows} x {columns} matrix, format {name}")
    dtype = FORMAT_DTYPES[FACTOR_FORMATS[name]]
    if len(body) != rank * (rows + columns) * dtype.itemsize:
        raise CorruptPayload(f"{len(body)} bytes are not two factors of rank {rank} in {dtype}")
    split = rank * rows * dtype.itemsize
    left = from_format(tensor_from_bytes(body[:split], dtype), left_exponent).view(rows, rank)  # (rows, rank)
    right = from_format(tensor_from_bytes(body[split:], dtype), right_exponent).view(columns, rank)  # (columns, rank)
    matrix = left @ right.T  # (rows, columns)
    check_finite(matrix, CorruptPayload)
    # An approximation may overshoot its message, and next to the largest fp32 number there is no room for that.
    limit = torch.finfo(torch.float32).max
    return _scale(matrix, exponent).clamp_(-limit, limit).view(header.shape)


def power_step(matrix: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One round from `start` (columns, rank): orthonormal P (rows, rank), and Q = Mᵀ P (columns, rank).

    ||M - P Qᵀ||² = ||M||² - ||Q||², so the error never exceeds the message.
    """
    left = orthonormal(matrix @ orthonormal(start))  # (rows, rank)
    return left, matrix.T @ left


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span those of `matrix`, by QR with a non-negative diagonal.

    Householder QR completes a rank-deficient matrix, where Gram-Schmidt would give zero columns for ever after; the
    signs are fixed because libraries choose them differently.
    """
    basis, upper = torch.linalg.qr(matrix)
    signs = torch.where(torch.diagonal(upper) < 0, -1.0, 1.0).to(basis.dtype)  # (rank,)
    oriented: torch.Tensor = basis * signs
    return oriented


def residual_cosine(residual: torch.Tensor, activation: torch.Tensor, following: torch.Tensor) -> float:
    """cos(e, a - a'): lazy error propagation is unbiased as far as this stays near zero.

    `residual` is what the gradient message of `activation` left behind, `following` the activation that receives it.
    Zero if either vanishes.
    """
    error = residual.to(torch.float64).view(-1)
    change = (activation.to(torch.float64) - following.to(torch.float64)).view(-1)
    norms = float(error.norm() * change.norm())
    return float(error @ change) / norms if norms > 0 else 0.0


def _matrix(shape: tuple[int, ...], rank: int) -> tuple[int, int, int]:
    """Rows and columns of the matrix view, and the largest rank that makes sense."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1]) if columns else 0
    return rows, columns, min(rank, rows, columns)


def _exponent(largest: float) -> int:
    """The power of two just above `largest`; with it squares and sums cannot overflow or vanish."""
    return math.frexp(largest)[1] if largest else 0


def _scale(numbers: torch.Tensor, exponent: int) -> torch.Tensor:
    """numbers * 2^exponent, exact, in two steps: 2^±149 is no fp32 number."""
    if exponent == 0:
        return numbers
    half = exponent // 2
    return (numbers * 2.0**half) * 2.0 ** (exponent - half)


def _reseed(start: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """`start` with its vanished columns replaced by fresh ones (columns, rank)."""
    lengths = start.norm(dim=0)  # (rank,)
    return torch.where(lengths > _NEGLIGIBLE * lengths.max(), start, fresh)


def _seeded(columns: int, rank: int, boundary: int, direction: Direction) -> torch.Tensor:
    """The same gaussian start for everyone at this boundary (columns, rank)."""
    seed = hashlib.blake2b(f"lowrank {boundary} {int(direction)}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
    return torch.randn(columns, rank, generator=generator)
