"""What a stage's all-reduce puts on the line of a peer, for every reduce.codec. A test holds it against the messages.

Of n peers in a group each owns an n-th of the numbers. A peer sends its shares of the others' parts to their owners,
and the sum of its own part to all: as many bytes as it receives. Between groups (reduce/groups.py) owners do the same
with the sums of their groups, which take more bytes than a share, since they are exact, but are an n-th of the numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarmtrain.model.layout import EMBEDDING, StagePlan, TensorSpec
from swarmtrain.run.manifest import Manifest

EXACT_SHARE = 6  # bytes: 5 to 7, as the largest number of a piece needs (reduce/packing.py)
_FP32 = 4
_BF16 = 2
_INT8 = 1 + 2 / 128  # with a scale for every 128
_TOPK_CHUNK = 4096
_TOPK_KEPT = 14 / 8  # bytes: 12 bits of position, 2 of value
_TOPK_MEAN = 2 / _TOPK_CHUNK
_TOPK_SUM_KEPT = 4  # times as many values are kept of a sum
_BITS = 1 / 8  # bytes: one for every number, which says whether it is there

_LOWRANK_NUMBER = 4 / 8  # of a factor
_LOWRANK_SCALES = 2 * 2  # of one column of both factors
_LOWRANK_LARGEST = 1 << 24  # bytes of a factor: it travels as one message

# Of a group's sum (reduce/totals.py): as wide as its largest and its finest number need, so these are typical.
_EXACT_SUM = EXACT_SHARE + 1
_FP32_SUM = 9
_BF16_SUM = 5
_INT8_SUM = 7
_LOWRANK_SUM = 7
_TOPK_SUM = 7  # of a number that a member sent; where none did, a bit says so
_TYPICAL_GROUP = 24

MAX_GROUP = 32  # peers that all-reduce in one level; more of them form groups (reduce/groups.py)


def num_groups(num_peers: int) -> int:
    """As few as possible."""
    return max(1, -(-num_peers // MAX_GROUP))


@dataclass(frozen=True, slots=True)
class ReduceBytes:
    """Bytes of all numbers of a stage, there and back."""

    whole: float  # a peer's share to its owners, and the sum
    between: float = 0.0  # a group's sum to the roots, and the sum

    def per_peer(self, num_peers: int) -> float:
        """What a peer sends, and receives, on average. Bounded, however many there are.

        A group's owners have a part of the numbers each, its roots a part of that; nobody sends itself anything.
        """
        count = num_groups(num_peers)
        owned = count / max(1, num_peers)
        return self.whole * (1.0 - owned) + self.between * owned * (1.0 - 1.0 / count)

    def times(self, numbers: float) -> ReduceBytes:
        """Of so many numbers, if this is of one."""
        return ReduceBytes(self.whole * numbers, self.between * numbers)

    def plus(self, other: ReduceBytes) -> ReduceBytes:
        """Of both."""
        return ReduceBytes(self.whole + other.whole, self.between + other.between)

    def of_group(self, num_peers: int) -> float:
        """The same before the n-th is taken off that a peer of n owns itself."""
        return self.per_peer(num_peers) / (1.0 - 1.0 / num_peers) if num_peers > 1 else self.whole


def reduce_bytes(manifest: Manifest, plan: StagePlan) -> ReduceBytes:
    """Of one stage and step. What tied embeddings have in common, and PowerSGD's small tensors, travel exactly."""
    is_exact = manifest.batch.accumulate == "exact"
    exact = ReduceBytes((EXACT_SHARE if is_exact else _FP32) + _FP32, (_EXACT_SUM if is_exact else _FP32_SUM) + _FP32)
    codec = manifest.reduce.codec
    is_tied = manifest.model.tie_embeddings and plan.count > 1
    fused = sum(spec.num_elements for spec in plan.tensors if is_tied and spec.name == EMBEDDING)
    own = plan.num_parameters - fused
    if plan.is_last and manifest.boundary.track_every:
        own += manifest.model.hidden_size**2  # the Gram matrix
    if manifest.powersgd_rank or manifest.lowrank_budget:
        factored = [
            spec for spec in plan.tensors if factor_rank(manifest, spec) and not (is_tied and spec.name == EMBEDDING)
        ]
        others = own - sum(spec.num_elements for spec in factored)
        in_factors = sum(factor_bytes(manifest, spec, factor_rank(manifest, spec)) for spec in factored)
        num_sums = sum(factor_rank(manifest, spec) * sum(spec.shape) for spec in factored)
        sums = num_sums * (_LOWRANK_SUM if manifest.lowrank_budget else _FP32_SUM)
        return exact.times(fused + others).plus(ReduceBytes(2 * in_factors, sums + in_factors))
    each = {
        "bf16": ReduceBytes(2 * _BF16, _BF16_SUM + _BF16),
        "int8": ReduceBytes(2 * _INT8, _INT8_SUM + _INT8),
    }.get(codec, exact)
    if found := re.fullmatch(r"topk(\d+)", codec):
        each = _topk_bytes(int(found[1]) / _TOPK_CHUNK)
    return exact.times(fused).plus(each.times(own))


def _topk_bytes(kept: float) -> ReduceBytes:
    """Per number, if this part of all numbers is kept."""
    in_sum = min(1.0, _TOPK_SUM_KEPT * kept)
    answer = _BF16 * in_sum + min(_BITS, 1.5 * in_sum)  # a position takes 12 bits
    sent_by_some = 1.0 - (1.0 - kept) ** _TYPICAL_GROUP
    return ReduceBytes(kept * _TOPK_KEPT + _TOPK_MEAN + answer, sent_by_some * _TOPK_SUM + _BITS + answer)


def factor_rank(manifest: Manifest, spec: TensorSpec) -> int:
    """The rank of the two factors that this matrix travels as; 0 if it travels exactly.

    PowerSGD's factors must take at most half of its numbers, lowrank's as many bytes as `reduce.codec` says.
    """
    if len(spec.shape) != 2:
        return 0
    rows, columns = spec.shape
    if budget := manifest.lowrank_budget:
        affordable = int(budget / 1000 * rows * columns / factor_bytes(manifest, spec, 1))
        return min(affordable, rows, columns, int(_LOWRANK_LARGEST / (max(rows, columns) * _LOWRANK_NUMBER)))
    rank = manifest.powersgd_rank
    return rank if 2 * rank * (rows + columns) <= rows * columns else 0


def factor_bytes(manifest: Manifest, spec: TensorSpec, rank: int) -> float:
    """Of both factors of a matrix, in one direction."""
    if manifest.lowrank_budget:
        return rank * (sum(spec.shape) * _LOWRANK_NUMBER + _LOWRANK_SCALES)
    return rank * sum(spec.shape) * _FP32
