"""Matrices as two thin factors of four bits a number: `reduce.codec = lowrankB`, B thousandths of a byte per number.

PowerSGD's round (codec/powersgd.py), in eight times fewer bytes per rank, which buys eight times the rank:

    P = four bits of orth(sum of four bits of M_i Q_i)            every column of P has length 1, nearly
    R_i = four bits of M_iᵀ P,  R = four bits of sum of R_i
    gradient <- P Rᵀ,  error_i <- M_i - P R_iᵀ;  the owner of a matrix's R also keeps P (sum of R_i - R)ᵀ

Q_i comes from Q = orth(last R) by a step of power iteration at the peer itself, M_iᵀ M_i Q, which costs no bytes: what
was sent of late is what the errors lack, so the last R alone points past much of them. The errors of all peers add up
to what the gradient lacks, whatever was rounded where. P Rᵀ is an exact product of rounded factors
(model/exact_matmul.py), and Q is the last R: replicas have the same bits on every kind of processor.

The bytes of a factor (rows, rank): a bf16 scale per column, then a code of four bits per number, row by row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from swarmtrain.codec.lowrank import orthonormal
from swarmtrain.codec.packing import pack_codes, packed_bytes, unpack_codes
from swarmtrain.codec.powersgd import PowerSGDRound
from swarmtrain.model.exact import largest_magnitude
from swarmtrain.model.exact_matmul import engine_for, grid_step, in_steps, product
from swarmtrain.reduce.shares import ExactShares
from swarmtrain.reduce.totals import BadShare, Buffer, Numbers, Share, Total

BITS = 4
LARGEST_CODE = 7
_ZERO = 8  # the code of 0
_SCALE_BYTES = 2
_BLOCK_ELEMENTS, _LEAST_ROWS = 1 << 21, 256  # of a matrix that is multiplied at once
_LARGEST_SCALE = 2.0**120  # seven of it are an fp32 number


class LowRankShares(ExactShares):
    """Pieces of factors, each the factor of one matrix, and then pieces on the exact grid. The length tells which."""

    unit = 0

    def __init__(self, ranks: Mapping[int, int], *, is_left: bool) -> None:
        """`ranks` by where a factor begins; an owner makes left factors orthonormal."""
        self._ranks, self._is_left = ranks, is_left
        self.left_out: dict[int, Tensor] = {}  # by the same: (rows, rank) that this owner's answer lacks of the sum

    def own(self, numbers: Numbers, start: int) -> Share:
        """See ShareFormat. Rounded like a share that travels."""
        if start not in self._ranks:
            return super().own(numbers, start)
        return self.unpack(self.pack(numbers, start), numbers.size)

    def pack(self, numbers: Numbers, start: int) -> Buffer:
        """See ShareFormat."""
        rank = self._ranks.get(start)
        return super().pack(numbers, start) if rank is None else encoded(_matrix(numbers, rank))

    def unpack(self, raw: Buffer, size: int) -> Share:
        """See ShareFormat."""
        return Share(decoded(raw, size)) if _is_factor(raw, size) else super().unpack(raw, size)

    def answer(self, total: Total, start: int) -> Buffer:
        """See ShareFormat."""
        rank = self._ranks.get(start)
        if rank is None:
            return super().answer(total, start)
        factor = _matrix(total.rounded(), rank)
        if self._is_left:
            return encoded(orthonormal(factor), has_unit_columns=True)
        raw = encoded(factor)
        left_out = factor - _matrix(decoded(raw, total.size), rank)
        if bool(left_out.any()):
            self.left_out[start] = left_out.to(torch.float32)
        return raw

    def result(self, raw: Buffer, size: int) -> Numbers:
        """See ShareFormat."""
        return decoded(raw, size) if _is_factor(raw, size) else super().result(raw, size)


class LowRankRound(PowerSGDRound):
    """One step's all-reduce at one peer: see PowerSGDRound. What `left` and `right` give travels in LowRankShares."""

    def left(self) -> dict[str, Tensor]:
        """This peer's M_i Q_i (rows, rank) by name. Nobody else needs to have the same Q_i."""
        return {
            name: wanted @ own_start(wanted, orthonormal(self._state.right[name]))
            for name, wanted in self._wanted.items()
        }

    def _product(self, name: str, right: Tensor) -> Tensor:
        return multiplied(self._left[name], right)

    def lack(self, name: str, left_out: Tensor) -> Tensor:
        """P left_outᵀ: what the owner of R answers for (rows, columns)."""
        return multiplied(self._left[name], left_out)

    def _error(self, name: str) -> Tensor:
        return multiplied(self._left[name], rounded(self._own_right[name]), self._wanted.pop(name))


def own_start(matrix: Tensor, start: Tensor) -> Tensor:
    """The orthonormal columns nearest to those of MᵀM Q (columns, rank): those of other peers look much alike.

    Signs and order of another orthonormal basis would depend on the peer, and sums of their products would cancel.
    """
    seen = matrix @ start  # (rows, rank)
    for largest in (largest_magnitude(seen), largest_magnitude(matrix)):  # squares must not leave the range
        seen = seen / (largest or 1.0)
    basis, upper = torch.linalg.qr(matrix.t() @ seen)
    outer, _, inner = torch.linalg.svd(upper)
    nearest: Tensor = basis @ (outer @ inner)
    return nearest


def encoded(matrix: Tensor, *, has_unit_columns: bool = False) -> bytes:
    """A factor (rows, rank) in four bits a number: by column whole multiples of a scale, up to 7 of it.

    With `has_unit_columns` the scale is the one that gives a column of these codes length 1.
    """
    matrix = matrix.to(torch.float64)
    scales = _bf16(matrix.abs().amax(dim=0) / LARGEST_CODE)  # (rank,)
    codes = torch.where(scales > 0, matrix / scales, 0.0).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    if has_unit_columns:
        lengths = (codes * codes).sum(dim=0).sqrt()  # of whole numbers: exact before the root
        scales = _bf16(torch.where(lengths > 0, 1.0 / lengths, 0.0))
    packed = pack_codes((codes + _ZERO).to(torch.uint8).reshape(-1).numpy(), BITS)
    return scales.to(torch.bfloat16).view(torch.uint8).numpy().tobytes() + packed.tobytes()


def decoded(raw: Buffer, size: int) -> Numbers:
    """The `size` numbers (fp32) of a factor, row by row. Raises BadShare."""
    num_code_bytes = packed_bytes(size, BITS)
    rank, odd = divmod(len(raw) - num_code_bytes, _SCALE_BYTES)
    if odd or rank < 1 or size % rank:
        raise BadShare(f"{len(raw)} bytes are not a factor of {size} numbers")
    content = np.frombuffer(raw, dtype=np.uint8)
    scales = torch.from_numpy(content[: rank * _SCALE_BYTES].copy()).view(torch.bfloat16).to(torch.float32)
    if not bool((scales.abs() <= _LARGEST_SCALE).all()):  # also true of NaN
        raise BadShare("a factor is not finite, or too large")
    codes = torch.from_numpy(unpack_codes(content[rank * _SCALE_BYTES :], BITS, size).copy())
    numbers: Numbers = (codes.view(-1, rank).to(torch.float32) - _ZERO).mul_(scales).reshape(-1).numpy()
    return numbers


def rounded(matrix: Tensor) -> Tensor:
    """A factor as it arrives elsewhere."""
    return torch.from_numpy(decoded(encoded(matrix), matrix.numel())).view(matrix.shape)


def multiplied(left: Tensor, right: Tensor, from_: Tensor | None = None) -> Tensor:
    """left @ right.T in fp32, with the same bits on every machine; or `from_` less that product, in its place.

    Some rows at a time: an exact product holds several times what comes of it.
    """
    left_step, right_step = grid_step(left), grid_step(right)
    columns = in_steps(right, right_step).t()  # (rank, in)
    found = left.new_empty((left.shape[0], right.shape[0]), dtype=torch.float32) if from_ is None else from_
    engine = engine_for(left.device, left.shape[0])
    num_rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // max(1, right.shape[0]))
    for rows, into in zip(torch.split(left, num_rows), torch.split(found, num_rows), strict=True):
        block = product(in_steps(rows, left_step), columns, engine).mul_(left_step).mul_(right_step)
        into.copy_(block) if from_ is None else into.sub_(block.to(torch.float32))
    return found


def _is_factor(raw: Buffer, size: int) -> bool:
    """A factor takes at most 3 bytes a number, anything exact at least 4."""
    return len(raw) < 4 * size


def _matrix(numbers: Numbers, rank: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float64)).view(-1, rank)


def _bf16(scales: Tensor) -> Tensor:
    """Rounded to bf16, as fp64; at most what `decoded` takes, so that a run that diverges says so itself."""
    return scales.clamp(max=_LARGEST_SCALE).to(torch.bfloat16).to(torch.float64)
