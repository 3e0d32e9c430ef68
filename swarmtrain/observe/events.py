"""What happens in a daemon, as types. Log lines, JSON lines and status are derived from these, never the reverse."""

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
    """A peer is gone, and why that is believed."""

    peer: str
    stage: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"peer {self.peer[-8:]} of stage {self.stage} is lost: {self.reason}"


@dataclass(frozen=True)
class PeerDoubted(Event):
    """The link to a peer broke: it may be gone. It is lost when it stays silent."""

    peer: str
    stage: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"the link to peer {self.peer[-8:]} of stage {self.stage} broke: {self.reason}"


@dataclass(frozen=True)
class MoveGranted(Event):
    """A peer may leave its stage for one that needs it more."""

    peer: str
    source: int
    target: int


@dataclass(frozen=True)
class MoveRefused(Event):
    """A peer asked to move, and stays."""

    peer: str
    source: int
    target: int
    reason: str


@dataclass(frozen=True)
class WorkReplayed(Event):
    """Microbatches of a step that a stage had lost, and that are being done again there."""

    step: int
    stage: int
    microbatches: int

    def line(self) -> str:
        """For a person."""
        return f"{self.microbatches} microbatches of step {self.step} are done again on stage {self.stage}"


@dataclass(frozen=True)
class StagePrepared(Event):
    """All peers of a stage hold the same reduced gradient."""

    step: int
    stage: int
    attempt: int
    seconds: float
    compressed: bool = False  # whether it was reduced with the run's lossy codec


@dataclass(frozen=True)
class PrepareFailed(Event):
    """An attempt to reduce a stage's gradient was given up."""

    step: int
    stage: int
    attempt: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"stage {self.stage} could not reduce step {self.step} (attempt {self.attempt}): {self.reason}"


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
    """A peer's state differs from its stage's majority."""

    peer: str
    stage: int
    step: int

    def line(self) -> str:
        """For a person."""
        return f"peer {self.peer[-8:]} of stage {self.stage} has another state than the others after step {self.step}"


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
    """A stage's state was lost: the whole run goes on from its last checkpoint."""

    stage: int
    from_step: int
    to_step: int

    def line(self) -> str:
        """For a person."""
        return f"stage {self.stage} lost its state: back from step {self.from_step} to step {self.to_step}"


@dataclass(frozen=True)
class SyncProgress(Event):
    """A newcomer is fetching its stage's state."""

    step: int
    percent: int

    def line(self) -> str:
        """For a person."""
        return f"{self.percent} % of the state of step {self.step}"


@dataclass(frozen=True)
class DonorDropped(Event):
    """A newcomer does not fetch from this peer any more: it sent something wrong, or is gone."""

    peer: str
    step: int
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"peer {self.peer[-8:]} does not give the state of step {self.step} any more: {self.reason}"


@dataclass(frozen=True)
class PeerEnded(Event):
    """What a peer has done in its life, when it leaves."""

    microbatches: int  # finished
    forwards: int  # computed for the first time
    recomputed: int  # forwards computed again for want of memory
    from_ledger: int  # answers given again from memory
    replayed: int  # given to the next stage once more


@dataclass(frozen=True)
class RunWaits(Event):
    """Why nothing goes on."""

    reason: str

    def line(self) -> str:
        """For a person."""
        return f"the run waits: {self.reason} since {clock_time(self.at)}"


@dataclass(frozen=True)
class RunEnded(Event):
    """The run's steps are done, or it stopped."""

    reason: str
    checkpoint: str = ""
    val_loss: float | None = None


@dataclass(frozen=True)
class RunResumes(Event):
    """What the run waited for is there."""

    def line(self) -> str:
        """For a person."""
        return "the run goes on"


@dataclass(frozen=True)
class StepTimed(Event):
    """Where the time of a step went, as the coordinator saw it."""

    step: int
    lease_s: float  # every microbatch through all stages
    reduce_s: float  # every stage's gradient
    apply_s: float  # decision and optimizer


@dataclass(frozen=True)
class CallsRerouted(Event):
    """Calls to the next stage that had to go to another peer, and why; told at most once a second per cause."""

    stage: int
    cause: str
    calls: int

    def line(self) -> str:
        """For a person."""
        return f"{self.calls} calls to stage {self.stage} went to another peer: {self.cause}"


@dataclass(frozen=True)
class ActivityChanged(Event):
    """What a peer is doing now, and if it is idle, why. `since` is when that began, `at` when it was certain."""

    cause: str
    reason: str
    next: str
    since: float

    def line(self) -> str:
        """For a person."""
        return f"{self.cause.replace('_', ' ')}: {self.reason}" if self.reason else str(self.cause)


@dataclass(frozen=True)
class StepFollowed(Event):
    """A peer has applied a step, and how many of its microbatches it had finished."""

    step: int
    microbatches: int

    def line(self) -> str:
        """For a person."""
        return f"step {self.step} applied, {self.microbatches} microbatches were done here"


Sink = Callable[[Event], None]


class Events:
    """Hands every event to every sink, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)
        self.cost = Cost()

    def add(self, sink: Sink) -> None:
        """One more listener."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """It happened."""
        with self.cost:
            for sink in self._sinks:
                sink(event)
