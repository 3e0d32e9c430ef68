"""The time of training over a link: a pipeline in steady state, limited by its slowest part.

Every stage computes while its links carry other microbatches, and a link carries both directions at once. So the time
per token is the largest of: a stage's computing, its encoding and decoding included, and the bytes that a boundary
sends forward or backward. Filling the pipeline, latency and the all-reduce of gradients are left out: they are the same
for every method that is compared here, or depend on the swarm.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmtrain.units import parse_rate

LINKS = {name: parse_rate(name) for name in ("20mbit", "80mbit", "500mbit", "100gbit")}  # bytes per second


@dataclass(frozen=True)
class TokenCosts:
    """The cost of one token with a method."""

    stage_s: float  # computing, of one stage, forward and backward
    codec_s: float  # encoding and decoding, of one stage
    forward_bytes: float  # over one boundary
    backward_bytes: float


def seconds_per_token(costs: TokenCosts, bytes_per_s: float) -> float:
    """The pipeline's time per token over links of this rate."""
    wire_s = max(costs.forward_bytes, costs.backward_bytes) / bytes_per_s
    return max(costs.stage_s + costs.codec_s, wire_s)
