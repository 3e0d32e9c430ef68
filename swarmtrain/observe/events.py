"""What happens in a daemon, as types. Log lines, JSON lines and status are derived from these, never the reverse."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO


@dataclass(frozen=True)
class Event:
    """Base of all events. `at` is seconds since the epoch."""

    at: float = field(default_factory=time.time, kw_only=True)

    @property
    def name(self) -> str:
        """As in JSON: the class name in snake case."""
        text = type(self).__name__
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in text).lstrip("_")

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


@dataclass(frozen=True)
class PeerLost(Event):
    """A peer is gone, and why that is believed."""

    peer: str
    stage: int
    reason: str


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


@dataclass(frozen=True)
class StagePrepared(Event):
    """All peers of a stage hold the same reduced gradient."""

    step: int
    stage: int
    attempt: int
    seconds: float


@dataclass(frozen=True)
class PrepareFailed(Event):
    """An attempt to reduce a stage's gradient was given up."""

    step: int
    stage: int
    attempt: int
    reason: str


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


@dataclass(frozen=True)
class PeerDiverged(Event):
    """A peer's state differs from its stage's majority."""

    peer: str
    stage: int
    step: int


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A checkpoint is on disk."""

    step: int
    path: str


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; the next step tries again."""

    step: int
    reason: str


@dataclass(frozen=True)
class RunRolledBack(Event):
    """A stage's state was lost: the whole run goes on from its last checkpoint."""

    stage: int
    from_step: int
    to_step: int


@dataclass(frozen=True)
class SyncProgress(Event):
    """A newcomer is fetching its stage's state."""

    step: int
    percent: int


@dataclass(frozen=True)
class DonorDropped(Event):
    """A newcomer does not fetch from this peer any more: it sent something wrong, or is gone."""

    peer: str
    step: int
    reason: str


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


@dataclass(frozen=True)
class RunEnded(Event):
    """The run's steps are done, or it stopped."""

    reason: str
    checkpoint: str = ""
    val_loss: float | None = None


Sink = Callable[[Event], None]


class Events:
    """Hands every event to every sink, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)

    def add(self, sink: Sink) -> None:
        """One more listener."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """It happened."""
        for sink in self._sinks:
            sink(event)


def json_lines(stream: TextIO) -> Sink:
    """A sink that writes one JSON object per line."""

    def write(event: Event) -> None:
        print(json.dumps(event.as_dict()), file=stream, flush=True)

    return write


def log_lines(stream: TextIO = sys.stderr) -> Sink:
    """A sink that writes a line for a person, with the time of day."""

    def write(event: Event) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(event.at))
        print(f"{clock} {event.line()}", file=stream, flush=True)

    return write
