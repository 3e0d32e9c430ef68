"""What happens in a daemon, as types. Log lines, JSON lines and the status are derived from them, never the reverse."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain import world
from swarmtrain.observe.cost import Cost


def clock_time(at: float) -> str:
    """Seconds since the epoch as a clock on the wall here shows them."""
    return time.strftime("%H:%M:%S", time.localtime(at))


@functools.cache
def _in_snake_case(text: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in text).lstrip("_")


@dataclass(frozen=True)
class Event:
    """Base of all events. `at` is seconds since the epoch."""

    at: float = field(default_factory=world.wall, kw_only=True)

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
    step: int

    def line(self) -> str:
        """For a person."""
        return f"peer {self.peer[-8:]} serves stage {self.stage} from step {self.step}"


@dataclass(frozen=True)
class PeerLost(Event):
    """A peer is gone; `reason` says what the coordinator concludes it from."""

    peer: str
    stage: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"peer {self.peer[-8:]} of stage {self.stage} is lost: {self.reason}"


@dataclass(frozen=True)
class PeerDoubted(Event):
    """The link to a peer broke: it may be gone. Without further heartbeats it will be lost."""

    peer: str
    stage: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"the link to peer {self.peer[-8:]} of stage {self.stage} broke: {self.reason}"


@dataclass(frozen=True)
class MoveGranted(Event):
    """A peer may move from its stage to one that needs it more."""

    peer: str
    source: int
    target: int


@dataclass(frozen=True)
class MoveRefused(Event):
    """A peer asked to move to another stage; the coordinator refused."""

    peer: str
    source: int
    target: int
    reason: str


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
        return f"step {self.step}: loss {self.loss:.4f}, {self.tokens_per_s:,.0f} tokens/s"


@dataclass(frozen=True)
class PeerDiverged(Event):
    """A peer's state differs from that of the majority of its replicas."""

    peer: str
    stage: int
    step: int

    def line(self) -> str:
        """For a person."""
        return f"peer {self.peer[-8:]} of stage {self.stage} differs from its replicas after step {self.step}"


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
        return f"peer {self.peer[-8:]} is no longer a donor of step {self.step}: {self.reason}"


@dataclass(frozen=True)
class PeerEnded(Event):
    """Totals of a peer's life, when it leaves."""

    microbatches: int  # finished
    forwards: int  # computed for the first time
    recomputed: int  # forwards recomputed because of the memory limit
    from_ledger: int  # requests answered again from the ledger
    replayed: int  # sent to the next stage again


@dataclass(frozen=True)
class RunWaits(Event):
    """The run makes no progress; `reason` says why."""

    reason: str

    def line(self) -> str:
        """For a person."""
        return f"the run waits: {self.reason} since {clock_time(self.at)}"


@dataclass(frozen=True)
class RunEnded(Event):
    """All steps are done, or the run was stopped."""

    reason: str
    checkpoint: str = ""
    val_loss: float | None = None


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
        return f"{self.cause.replace('_', ' ')}: {self.reason}" if self.reason else str(self.cause)


@dataclass(frozen=True)
class StepFollowed(Event):
    """A peer has applied a step, after it had finished this number of its microbatches."""

    step: int
    microbatches: int

    def line(self) -> str:
        """For a person."""
        return f"step {self.step} applied; {self.microbatches} of its microbatches were computed here"


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
