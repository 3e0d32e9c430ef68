"""When compression pays: pure functions from estimates to decisions.

Compression of one message costs accuracy, and saves time only if a stage waits for that message. Optimus-CC found this
for a 1F1B pipeline: gradients sent while the receiving stage still has forward work are hidden behind it, those of the
epilogue are not. Here the same question is asked for every message: would its receiver wait?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SendEstimate:
    """What a sender expects of one message, in seconds."""

    other_work_s: float  # work that the receiver can do before it needs this message: its queue
    exact_s: float  # encoding, time on the wire and decoding, if sent exactly
    compressed_s: float  # the same, if compressed


def expected_wait_s(other_work_s: float, transfer_s: float) -> float:
    """How long a receiver with `other_work_s` to do stands idle for a message that takes `transfer_s`."""
    return max(0.0, transfer_s - other_work_s)


def is_critical(estimate: SendEstimate) -> bool:
    """True if the receiver would wait for the exact message, and less for the compressed one."""
    exact_wait_s = expected_wait_s(estimate.other_work_s, estimate.exact_s)
    return exact_wait_s > expected_wait_s(estimate.other_work_s, estimate.compressed_s)


@dataclass(frozen=True, slots=True)
class StageAllReduce:
    """What is expected of one stage at the end of a step, in seconds since the step began."""

    drained_s: float  # its last microbatch is done
    exact_s: float  # duration of its all-reduce if exact
    compressed_s: float  # and if compressed


def stages_to_compress(stages: Sequence[StageAllReduce]) -> frozenset[int]:
    """The fewest stages whose compression lets the step end as early as possible.

    No plan ends before T = max over stages of the earlier of its two ends; compressing exactly the stages whose exact
    all-reduce would end after T reaches it. In a pipeline that drains from the last stage to the first these are the
    early stages, as in Optimus-CC's selective stage compression.
    """
    exact_ends = [stage.drained_s + stage.exact_s for stage in stages]
    best_ends = [stage.drained_s + min(stage.exact_s, stage.compressed_s) for stage in stages]
    earliest = max(best_ends, default=0.0)
    return frozenset(index for index, end in enumerate(exact_ends) if end > earliest)
