"""A daemon's status: a frozen `Status` and a pure `apply(event, status)` that gives the next one. No I/O, no clock.

The status verb, the page, the API and the metrics all show it, together with counters that are read on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from swarmtrain.observe.activity import Cause
from swarmtrain.observe.events import (
    ActivityChanged,
    CheckpointWritten,
    Event,
    PeerDiverged,
    PhaseReached,
    RunEnded,
    RunResumes,
    RunRolledBack,
    RunWaits,
    StagePrepared,
    StepApplied,
    StepFollowed,
    StepTimed,
    SyncProgress,
)

MAX_RECENT = 60  # events that are shown
MAX_MARKS = 20  # steps over which the pace of the run is measured
MAX_POINTS = 400  # of the loss curve; when it is full, every second point is dropped
_QUIET = (StepTimed, StepApplied, StagePrepared, StepFollowed)  # every step has them: not shown as news
_PRIVATE = ("path", "checkpoint")  # paths on the operator's machine are not shown on the page
_STARTING = ("identity", "stage", "network", "invite", "manifest", "fit", "resume", "page", "public page", "metrics")


@dataclass(frozen=True, slots=True)
class Point:
    """One step of the curve."""

    step: int
    at: float
    loss: float
    tokens_per_s: float | None  # unknown for steps of a journal of an older version
    val_loss: float | None


@dataclass(frozen=True)
class Status:
    """A daemon's state, its reason, since when, what is next; and the last facts of its events."""

    kind: str  # "peer" or "coordinator"
    started_at: float
    num_steps: int = 0  # of the run; 0 while unknown
    state: str = "starting"
    cause: str = Cause.JOINING
    reason: str = ""
    since: float = 0.0
    next: str = ""
    step: int = 0
    last: StepApplied | None = None
    val_loss: float | None = None
    split: StepTimed | None = None
    points: tuple[Point, ...] = ()
    stride: int = 1  # steps between two points of the curve
    validated: tuple[Point, ...] = ()  # those with a validation loss, however far apart the others are kept
    sync_percent: int | None = None
    checkpoint_step: int = 0
    last_applied_at: float = 0.0
    diverged: int = 0
    num_events: int = 0
    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    recent: tuple[tuple[int, Event], ...] = ()  # with their numbers, oldest first
    marks: tuple[tuple[int, float], ...] = ()  # the last steps and when they were applied, since training last stopped

    def seconds_left(self) -> float | None:
        """Until the last step, at the pace of the last ones; None while it does not train, or has just begun."""
        if self.state != "training" or len(self.marks) < 2:
            return None
        (first, began), (last, ended) = self.marks[0], self.marks[-1]
        return max(0.0, (self.num_steps - last) * (ended - began) / (last - first))

    def headline(self) -> dict[str, Any]:
        """State and cause, reason, since when, what is next."""
        return {
            "state": self.state,
            "cause": self.cause,
            "reason": self.reason,
            "since": self.since,
            "next": self.next,
            "started_at": self.started_at,
        }

    def news(self) -> list[dict[str, Any]]:
        """Recent events to show, oldest first."""
        shown = [{"number": number, "line": event.line(), **event.as_dict()} for number, event in self.recent]
        return [{key: value for key, value in item.items() if key not in _PRIVATE} for item in shown]

    def curve(self) -> list[dict[str, Any]]:
        """The points of the loss curve, and those with a validation loss."""
        merged = {point.step: point for point in (*self.points, *self.validated)}
        return [asdict(merged[step]) for step in sorted(merged)]


def apply(event: Event, status: Status) -> Status:
    """The status after `event`."""
    number = status.num_events + 1
    counts = MappingProxyType({**status.counts, event.name: status.counts.get(event.name, 0) + 1})
    recent = status.recent
    if not isinstance(event, _QUIET):
        recent = (*recent, (number, event))[-MAX_RECENT:]
    return _facts(event, _headline(event, replace(status, num_events=number, counts=counts, recent=recent)))


def _headline(event: Event, status: Status) -> Status:
    """State, reason, since, next."""
    match event:
        case PhaseReached(phase=phase, detail=detail):
            state = "starting" if phase in _STARTING else phase
            reason = detail if state == phase else f"{phase}: {detail}"
            return _enter(status, event.at, state, reason, "")  # what is next, its activity says
        case ActivityChanged(cause=cause, reason=reason, next=following, since=since):
            return replace(status, cause=cause, reason=reason, next=following, since=since)
        case SyncProgress(step=step, percent=percent):
            return replace(status, reason=f"fetching the state of step {step}: {percent} %")
        case RunWaits(reason=reason):
            is_last = 0 < status.num_steps <= status.step
            following = "the last checkpoint, then the end" if is_last else f"step {status.step + 1}"
            return _enter(status, event.at, "waiting", reason, f"{following}, as soon as that has changed")
        case RunResumes():
            return _enter(status, event.at, "training", "", _next_step(status, status.step))
        case StepApplied(step=step):
            if status.state == "waiting":  # the apply was under way when a stage became empty
                return replace(status, next=f"step {step + 1}, as soon as that has changed")
            return _enter(status, event.at, "training", "", _next_step(status, step))
        case RunRolledBack(stage=stage, from_step=before, to_step=step):
            reason = f"stage {stage} lost its state of step {before}; the run is back at step {step}"
            return _enter(status, event.at, "training", reason, _next_step(status, step))
        case RunEnded(reason=reason):
            return _enter(status, event.at, "complete", reason, "nothing: the peers leave")
    return status


def _facts(event: Event, status: Status) -> Status:
    """Numbers that events carry."""
    match event:
        case StepApplied(step=step):
            status = with_point(status, point_of(event))
            val_loss = status.val_loss if event.val_loss is None else event.val_loss
            marks = (*status.marks, (step, event.at))[-MAX_MARKS:]
            return replace(status, step=step, last=event, val_loss=val_loss, last_applied_at=event.at, marks=marks)
        case RunWaits():
            return replace(status, marks=())
        case StepFollowed(step=step):
            return replace(status, step=step, last_applied_at=event.at)
        case StepTimed():
            return replace(status, split=event)
        case SyncProgress(percent=percent):
            return replace(status, sync_percent=percent)
        case PhaseReached(phase="serving"):
            return replace(status, sync_percent=None)
        case CheckpointWritten(step=step):
            return replace(status, checkpoint_step=step)
        case RunRolledBack(to_step=step):
            points, validated = (
                tuple(point for point in known if point.step <= step) for known in (status.points, status.validated)
            )
            return replace(status, step=step, points=points, validated=validated, last=None, marks=())
        case PeerDiverged():
            return replace(status, diverged=status.diverged + 1)
    return status


def _enter(status: Status, at: float, state: str, reason: str, following: str | None = None) -> Status:
    """Enter a state. `since` does not change if state and reason are the same as before."""
    is_same = (status.state, status.reason) == (state, reason) or state == status.state == "training"
    since = status.since if is_same else at
    known = status.next if following is None else following
    return replace(status, state=state, cause=state, reason=reason, since=since, next=known)


def _next_step(status: Status, step: int) -> str:
    if status.num_steps and step >= status.num_steps:
        return "the last checkpoint, then the end"
    return f"step {step + 1}" + (f" of {status.num_steps}" if status.num_steps else "")


def point_of(event: StepApplied) -> Point:
    """What the curve keeps of a step; a speed of 0 is not known."""
    return Point(event.step, event.at, event.loss, event.tokens_per_s or None, event.val_loss)


def with_point(status: Status, point: Point) -> Status:
    """The curve keeps its first point and one of every `stride` steps, and always the newest."""
    validated = tuple(known for known in status.validated if known.step < point.step)
    if point.val_loss is not None:
        validated = (*validated, point)
    if len(validated) > MAX_POINTS:
        validated = (*validated[:-1:2], validated[-1])
    status, points = replace(status, validated=validated), status.points
    if points and points[-1].step >= point.step:  # after a roll-back steps come again
        points = tuple(known for known in points if known.step < point.step)
    if points and not _is_kept(points[-1], status.stride) and len(points) > 1:
        points = points[:-1]
    points = (*points, point)
    stride = status.stride
    while len(points) > MAX_POINTS:
        stride *= 2
        points = (*(known for known in points[:-1] if known.step % stride == 0), points[-1])
    return replace(status, points=points, stride=stride)


def _is_kept(point: Point, stride: int) -> bool:
    return point.step % stride == 0
