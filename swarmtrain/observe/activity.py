"""Why is this peer idle? A pure function from what a peer knows about itself to a cause, a sentence and what is next.

The nearest cause that holds is named: that the owner has paused this peer explains more than that the run waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """What a peer does, or why it is idle. Also the `cause` label of the metrics, so the set is fixed."""

    WORKING = "working"
    JOINING = "joining"
    SYNCING = "syncing"
    PAUSED = "paused"
    OFF_HOURS = "off_hours"
    TRAFFIC = "traffic"
    PROGRAM = "program"
    GPU_USED = "gpu_used"
    IN_USE = "in_use"
    GPU_HOT = "gpu_hot"
    GPU_POWER = "gpu_power"
    DRAINING = "draining"
    COORDINATOR_AWAY = "coordinator_away"
    BANNED = "banned"
    CAPPED = "capped"
    NEXT_STAGE_EMPTY = "next_stage_empty"
    STEP_END = "step_end"
    NO_LEASE = "no_lease"


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What a peer knows about itself at one moment."""

    state: str
    stage: int
    step: int
    coordinator_silent_s: float = 0.0
    contact_limit_s: float = 10.0  # without contact for so long, its work may not be counted
    coordinator_says: str = ""  # the reason in its last verdict
    is_banned: bool = False  # the coordinator sends it no work for a while
    empty_stages: tuple[int, ...] = ()  # stages without peers, as the coordinator knows
    sync_text: str = ""
    is_computing: bool = False
    num_open: int = 0  # microbatches that it has accepted and not answered
    num_waiting_jobs: int = 0
    is_reducing: bool = False
    is_prepared: bool = False  # this step's all-reduce is done; it waits for the decision
    has_next: bool = False  # there is a stage after its own
    next_stage_peers: int = 0
    paused_by: Cause = Cause.PAUSED  # while it is paused: why, and what has to happen
    pause_reason: str = "paused by its owner"
    pause_next: str = "work again after `swarmtrain resume`"
    is_only: bool = False  # no other peer that stays has its state, nor a checkpoint
    capped_by: str = ""  # the limit of the owner that is reached; empty if none


@dataclass(frozen=True, slots=True)
class Activity:
    """What the peer does or why it is idle, and what comes next."""

    cause: Cause
    reason: str
    next: str


def explain(facts: PeerFacts) -> Activity:
    """What the peer is doing, or why it is idle."""
    return _life(facts) or _obstacle(facts) or _work(facts)


def _life(facts: PeerFacts) -> Activity | None:
    match facts.state:
        case "paused":
            return Activity(facts.paused_by, facts.pause_reason + _alone(facts), facts.pause_next)
        case "draining" | "gone":
            return Activity(Cause.DRAINING, "finishing the step that it has work in", f"leaves the run{_alone(facts)}")
    if facts.coordinator_silent_s > facts.contact_limit_s:
        following = "tries again every few seconds"
        return Activity(Cause.COORDINATOR_AWAY, "the coordinator does not answer", following)
    match facts.state:
        case "syncing":
            reason = facts.sync_text or facts.coordinator_says or "waiting for a state to fetch"
            return Activity(Cause.SYNCING, reason, "serves as soon as its state is the run's")
        case "joining":
            return Activity(Cause.JOINING, "waiting for the coordinator's verdict", "fetches the state, or serves")
    return None


def _alone(facts: PeerFacts) -> str:
    """What else the owner of a peer that goes or rests should know."""
    if not facts.is_only:
        return ""
    return f"; it alone has stage {facts.stage}'s state, which the run saves first"


def _obstacle(facts: PeerFacts) -> Activity | None:
    """What keeps a serving peer from getting work. A peer that computes has work."""
    if facts.is_computing:
        return None
    if facts.is_banned:
        return Activity(Cause.BANNED, facts.coordinator_says, "gets work again after a back-off")
    if facts.capped_by:
        return Activity(Cause.CAPPED, facts.capped_by, "continues as the limit allows")
    if facts.has_next and (not facts.next_stage_peers or facts.stage + 1 in facts.empty_stages):
        return Activity(
            Cause.NEXT_STAGE_EMPTY,
            f"stage {facts.stage + 1} has no peers",
            f"continues as soon as a peer serves stage {facts.stage + 1}",
        )
    return None


def _work(facts: PeerFacts) -> Activity:
    if facts.is_computing or facts.num_open or facts.num_waiting_jobs or facts.is_reducing:
        return Activity(Cause.WORKING, "", "the next microbatch")
    if facts.is_prepared:
        reason = f"its part of step {facts.step + 1} is done; the other stages are not ready"
        return Activity(Cause.STEP_END, reason, "applies the step when it is decided")
    reason = f"no work has come: {facts.coordinator_says}" if facts.coordinator_says else "no work has come"
    return Activity(Cause.NO_LEASE, reason, "the next microbatch")
