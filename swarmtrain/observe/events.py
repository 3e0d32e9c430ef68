"""What happens in a daemon, as types. Log lines, JSON lines and the status are derived from them, never the reverse.

Steps are numbered from 1, as in "step 3 of 200". A state's step is the last one that it has applied.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain import world
from swarmtrain.observe.cost import Cost
from swarmtrain.units import show_duration, show_size


def clock_time(at: float) -> str:
    """Seconds since the epoch as a clock on the wall here shows them."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def called(peer: str, name: str = "") -> str:
    """How people read of a peer: by the name that its owner gave it, and the end of its id, which nobody can choose."""
    return f"{name} ({peer[-8:]})" if name else f"peer {peer[-8:]}"


@functools.cache
def _in_snake_case(text: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in text).lstrip("_")


@dataclass(frozen=True)
class Event:
    """Base of all events. `at` is seconds since the epoch."""

    at: float = field(default_factory=world.wall, kw_only=True)

    @property
    def is_detail(self) -> bool:
        """Whether a terminal shows it with --events only."""
        return type(self) in DETAILS

    @property
    def name(self) -> str:
        """As in JSON: the class name in snake case."""
        return _in_snake_case(type(self).__name__)

    def line(self) -> str:
        """For a person."""
        parts = [f"{key} {value}" for key, value in asdict(self).items() if key != "at" and value not in ("", None)]
        return f"{self.name.replace('_', ' ')}: {', '.join(parts)}"

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        return {"event": self.name, **asdict(self)}


@dataclass(frozen=True)
class PhaseReached(Event):
    """Start-up or life cycle: identity, network, manifest, fit, sync, serving, draining, gone."""

    phase: str
    detail: str = ""

    def line(self) -> str:
        """`serving: stage 2`"""
        return f"{self.phase}: {self.detail}" if self.detail else self.phase


@dataclass(frozen=True)
class PeerJoined(Event):
    """A peer serves a stage."""

    peer: str
    stage: int
    step: int  # of its state
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{called(self.peer, self.peer_name)} serves stage {self.stage} from step {self.step + 1} on"


@dataclass(frozen=True)
class PeerLeft(Event):
    """A peer has said goodbye. `microbatches` of the run count as its own, over all stages that it served."""

    peer: str
    stage: int
    microbatches: int = 0
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{called(self.peer, self.peer_name)} has left stage {self.stage} after {self.microbatches} microbatches"


@dataclass(frozen=True)
class PeerLost(Event):
    """A peer is gone without a word; `reason` says what the coordinator concludes it from."""

    peer: str
    stage: int
    reason: str
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{called(self.peer, self.peer_name)} of stage {self.stage} is lost: {self.reason}"


@dataclass(frozen=True)
class PeerAdmitted(Event):
    """A peer was admitted to the run, and gets certificates from now on; by an invite of this name, if it has one."""

    peer: str
    peer_name: str = ""
    invite: str = ""

    def line(self) -> str:
        """For a person."""
        by = f", by the invite for {self.invite}" if self.invite else ""
        return f"{called(self.peer, self.peer_name)} is admitted to the run{by}"


@dataclass(frozen=True)
class PeerAsks(Event):
    """A peer asks to be admitted, and waits for the operator."""

    peer: str
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{called(self.peer, self.peer_name)} asks to be admitted: swarmtrain members admit {self.peer}"


@dataclass(frozen=True)
class PeerForgotten(Event):
    """The admission of a peer was taken back."""

    peer: str
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{called(self.peer, self.peer_name)} is no member of the run any more"


@dataclass(frozen=True)
class PeerExcluded(Event):
    """A peer was excluded from the run, by its identity; `step` is the one under way."""

    peer: str
    step: int
    reason: str
    peer_name: str = ""

    def line(self) -> str:
        """`attic (KaFzQhQS) was excluded at step 41: ...`"""
        return f"{called(self.peer, self.peer_name)} was excluded at step {self.step}: {self.reason}"


@dataclass(frozen=True)
class PeerReadmitted(Event):
    """A peer is not excluded any more."""

    peer: str
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{called(self.peer, self.peer_name)} may take part again"


@dataclass(frozen=True)
class PeerSuspended(Event):
    """A peer has cost the run too much: for a while it is in no all-reduce, and its work does not count."""

    peer: str
    stage: int
    reason: str  # of its last strike
    seconds: float
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        who = called(self.peer, self.peer_name)
        return f"{who} of stage {self.stage} is left out for {show_duration(self.seconds)}: {self.reason}"


@dataclass(frozen=True)
class PeerDoubted(Event):
    """The link to a peer broke: it may be gone. Without further heartbeats it will be lost."""

    peer: str
    stage: int
    reason: str
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return f"the link to {called(self.peer, self.peer_name)} of stage {self.stage} broke: {self.reason}"


@dataclass(frozen=True)
class MoveGranted(Event):
    """A peer may move from its stage to one that needs it more."""

    peer: str
    source: int
    target: int
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{called(self.peer, self.peer_name)} moves from stage {self.source} to stage {self.target}"


@dataclass(frozen=True)
class MoveRefused(Event):
    """A peer asked to move to another stage; the coordinator refused."""

    peer: str
    source: int
    target: int
    reason: str
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        who = called(self.peer, self.peer_name)
        return f"{who} may not move from stage {self.source} to stage {self.target}: {self.reason}"


@dataclass(frozen=True)
class WorkReplayed(Event):
    """A stage had lost microbatches of a step; they are computed again there."""

    step: int
    stage: int
    microbatches: int

    def line(self) -> str:
        """For a person."""
        return f"{self.microbatches} microbatches of step {self.step} are computed again on stage {self.stage}"


@dataclass(frozen=True)
class StagePrepared(Event):
    """The all-reduce of a stage is complete: all its peers hold the same gradient."""

    step: int
    stage: int
    attempt: int
    seconds: float
    compressed: bool = False  # whether the all-reduce used the run's lossy codec

    def line(self) -> str:
        """For a person."""
        how = ", compressed" if self.compressed else ""
        tries = f" (attempt {self.attempt})"
        return f"step {self.step}: stage {self.stage} holds its sum after {self.seconds:.3f} s{how}{tries}"


@dataclass(frozen=True)
class PrepareFailed(Event):
    """One attempt at the all-reduce of a stage was given up."""

    step: int
    stage: int
    attempt: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"all-reduce of stage {self.stage} failed in step {self.step} (attempt {self.attempt}): {self.reason}"


@dataclass(frozen=True)
class StepApplied(Event):
    """A step is part of the run."""

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    grad_norm: float
    lr: float
    val_loss: float | None = None
    checkpoint: str | None = None

    def line(self) -> str:
        """For a person."""
        validation = f", validation {self.val_loss:.4f}" if self.val_loss is not None else ""
        return f"step {self.step}: loss {self.loss:.4f}, {self.tokens_per_s:,.0f} tokens/s{validation}"


@dataclass(frozen=True)
class PeerDiverged(Event):
    """A peer's state differs from that of the majority of its replicas."""

    peer: str
    stage: int
    step: int
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        who = called(self.peer, self.peer_name)
        return f"{who} of stage {self.stage} differs from its replicas after step {self.step}"


@dataclass(frozen=True)
class OwnerDisowned(Event):
    """A peer's sum of what it owned differs from what two others have added up: it owns nothing from now on."""

    step: int
    stage: int
    peer: str
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return (
            f"step {self.step}: the sum of {called(self.peer, self.peer_name)} of stage {self.stage} differs from what "
            "two others have added up; it adds up nothing from now on"
        )


@dataclass(frozen=True)
class WorkBegunAnew(Event):
    """What was computed of some microbatches does not count, on any stage: they are begun anew."""

    step: int
    microbatches: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"step {self.step}: {self.microbatches} microbatches are begun anew: {self.reason}"


@dataclass(frozen=True)
class CheckUndecided(Event):
    """Two peers came to different results, and no third one could say which is right."""

    step: int
    stage: int
    peer: str
    checker: str
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        return (
            f"step {self.step}: {called(self.peer, self.peer_name)} and {called(self.checker)} of stage {self.stage} "
            "came to different results, and no third peer could say which is right"
        )


@dataclass(frozen=True)
class LastHolder(Event):
    """A peer that leaves or rests alone has the state of its stage: a checkpoint is written first."""

    peer: str
    stage: int
    step: int  # of its state
    state: str  # draining or paused
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        doing = "is leaving" if self.state == "draining" else f"is {self.state}"
        who = called(self.peer, self.peer_name)
        return f"{who} {doing} and alone has stage {self.stage}'s state: a checkpoint of step {self.step} comes first"


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A checkpoint is on disk."""

    step: int
    path: str

    def line(self) -> str:
        """For a person."""
        return f"checkpoint of step {self.step}"


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; the next step tries again."""

    step: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"the checkpoint of step {self.step} could not be written: {self.reason}"


@dataclass(frozen=True)
class RunRolledBack(Event):
    """A stage's state was lost: the whole run goes back to its last checkpoint."""

    stage: int
    from_step: int
    to_step: int

    def line(self) -> str:
        """For a person."""
        return f"stage {self.stage} lost its state: the run goes back from step {self.from_step} to step {self.to_step}"


@dataclass(frozen=True)
class SyncProgress(Event):
    """A joining peer is fetching its stage's state."""

    step: int
    percent: int

    def line(self) -> str:
        """For a person."""
        return f"{self.percent} % of the state of step {self.step}"


@dataclass(frozen=True)
class DonorDropped(Event):
    """A joining peer stops fetching from this donor, which sent wrong data or is gone."""

    peer: str
    step: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"{called(self.peer)} is no longer a donor of step {self.step}: {self.reason}"


@dataclass(frozen=True)
class PeerEnded(Event):
    """Totals of a peer's stay on a stage, when it leaves; and what it has given since it was started."""

    microbatches: int  # finished
    forwards: int  # computed for the first time
    recomputed: int  # forwards recomputed because of the memory limit
    from_ledger: int  # requests answered again from the ledger
    replayed: int  # sent to the next stage again
    credit: int = 0  # microbatches of the run that count as its own, as its coordinator has said, former lives included
    credit_tokens: int = 0
    credit_share: float = 0.0  # of the work of all applied steps, on all stages
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    peer_name: str = ""

    def line(self) -> str:
        """For a person."""
        if not self.credit:
            return f"No work came in {show_duration(self.seconds)}. Thank you for being there!"
        return (
            f"Thank you{', ' if self.peer_name else ''}{self.peer_name}! You computed {self.credit:,} microbatches "
            f"({self.credit_tokens:,} tokens), {100 * self.credit_share:.3g} % of the run's work, "
            f"in {show_duration(self.seconds)}, with {show_size(self.sent_bytes)} sent "
            f"and {show_size(self.received_bytes)} received."
        )


@dataclass(frozen=True)
class RunWaits(Event):
    """The run makes no progress; `reason` says why."""

    reason: str

    def line(self) -> str:
        """For a person."""
        return f"the run waits: {self.reason}"


@dataclass(frozen=True)
class RunEnded(Event):
    """All steps are done, or the run was stopped."""

    reason: str
    checkpoint: str = ""
    val_loss: float | None = None

    def line(self) -> str:
        """For a person."""
        validation = f"; validation loss {self.val_loss:.4f}" if self.val_loss is not None else ""
        return f"{self.reason}{validation}" + (f"; checkpoint {self.checkpoint}" if self.checkpoint else "")


@dataclass(frozen=True)
class RunResumes(Event):
    """The run no longer waits."""

    def line(self) -> str:
        """For a person."""
        return "the run continues"


@dataclass(frozen=True)
class StepTimed(Event):
    """Where the time of a step went, as measured by the coordinator."""

    step: int
    lease_s: float  # until every microbatch was through all stages
    reduce_s: float  # the all-reduce of every stage
    apply_s: float  # decision and optimizer
    waited_s: float = 0.0  # of the latter two, without a microbatch under way
    slowest_stage: int = -1  # whose all-reduce ended last

    def line(self) -> str:
        """For a person."""
        parts = f"lease {self.lease_s:.2f} s, reduce {self.reduce_s:.2f} s, apply {self.apply_s:.2f} s"
        return f"step {self.step}: {parts}"


@dataclass(frozen=True)
class CallsRerouted(Event):
    """Calls to the next stage had to go to another peer; at most one event per second and cause."""

    stage: int
    cause: str
    calls: int

    def line(self) -> str:
        """For a person."""
        return f"{self.calls} calls to stage {self.stage} went to another peer: {self.cause}"


@dataclass(frozen=True)
class ActivityChanged(Event):
    """What a peer does now, or why it is idle. It began at `since`; `at` is when it was certain."""

    cause: str
    reason: str
    next: str
    since: float

    def line(self) -> str:
        """For a person."""
        return f"idle: {self.reason}" if self.reason else str(self.cause)


@dataclass(frozen=True)
class StepFollowed(Event):
    """A peer has applied a step, after it had finished this number of its microbatches."""

    step: int
    microbatches: int

    def line(self) -> str:
        """For a person."""
        return f"step {self.step} applied; {self.microbatches} of its microbatches were computed here"


# What every step brings, and what concerns those who look for a fault.
DETAILS = frozenset({StepTimed, StagePrepared, StepFollowed, PeerDoubted, MoveRefused, CallsRerouted})

Sink = Callable[[Event], None]


class Events:
    """Hands every event to every sink, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)
        self.cost = Cost()

    def add(self, sink: Sink) -> None:
        """Hand further events to this sink, too."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Hand the event to every sink."""
        with self.cost:
            for sink in self._sinks:
                sink(event)


def event_from(item: object) -> Event:
    """The event that `as_dict` was made of; ValueError for anything else."""
    if not isinstance(item, dict):
        raise ValueError("not an event")
    content = dict(item)
    kind = content.pop("event", "")
    known = {_in_snake_case(cls.__name__): cls for cls in Event.__subclasses__()}
    if kind not in known:
        raise ValueError(f"no event {kind!r:.40}")
    try:
        return known[kind](**content)
    except TypeError as error:
        raise ValueError(f"another {kind}") from error
