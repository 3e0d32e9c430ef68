"""What a stage's all-reduce puts on the line of a peer, for every reduce.codec. A test holds it against the messages.

Of n peers each owns an n-th of the numbers. A peer sends its shares of the others' parts to their owners, and the sum
of its own part to all: as many bytes as it receives.
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


@dataclass(frozen=True, slots=True)
class ReduceBytes:
    """`whole` + `per_peer` n bytes, less the n-th of them that a peer owns itself."""

    whole: float
    per_peer: float = 0.0  # topk: an answer repeats every peer's share

    def of_group(self, num_peers: int) -> float:
        """What a peer would send, and receive, if all parts were others'."""
        return self.whole + self.per_peer * num_peers


def reduce_bytes(manifest: Manifest, plan: StagePlan) -> ReduceBytes:
    """Of one stage and step. What tied embeddings have in common, and PowerSGD's small tensors, travel exactly."""
    exact = (EXACT_SHARE if manifest.batch.accumulate == "exact" else _FP32) + _FP32
    codec = manifest.reduce.codec
    is_tied = manifest.model.tie_embeddings and plan.count > 1
    fused = sum(spec.num_elements for spec in plan.tensors if is_tied and spec.name == EMBEDDING)
    own = plan.num_parameters - fused
    if plan.is_last and manifest.boundary.track_every:
        own += manifest.model.hidden_size**2  # the Gram matrix
    if rank := manifest.powersgd_rank:
        factored = [
            spec for spec in plan.tensors if is_factored(spec, rank) and not (is_tied and spec.name == EMBEDDING)
        ]
        in_factors = rank * sum(sum(spec.shape) for spec in factored)
        others = own - sum(spec.num_elements for spec in factored)
        return ReduceBytes(exact * (fused + others) + 2 * _FP32 * in_factors)
    if found := re.fullmatch(r"topk(\d+)", codec):
        share = own * (int(found[1]) * _TOPK_KEPT / _TOPK_CHUNK + _TOPK_MEAN)
        return ReduceBytes(exact * fused + share, share)
    both_ways = {"none": exact, "bf16": 2 * _BF16, "int8": 2 * _INT8}.get(codec, exact)
    return ReduceBytes(exact * fused + both_ways * own)


def is_factored(spec: TensorSpec, rank: int) -> bool:
    """Whether PowerSGD sends this matrix as two factors: they must take at most half of its numbers."""
    if len(spec.shape) != 2:
        return False
    rows, columns = spec.shape
    return 2 * rank * (rows + columns) <= rows * columns
