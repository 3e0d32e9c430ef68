"""Fault injection for tests: when a daemon reaches a named point for the n-th time, something breaks.

    SWARMTRAIN_FAULTS="after-forward:3:kill,state-chunk:1:corrupt"  swarmtrain join ... --enable-test-faults

Without the flag the variable has no effect. Each fault happens once.

    SWARMTRAIN_PACE="0.1:0.2"  ...    a slower machine: every forward takes at least 0.1 s, every backward 0.2 s
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swarmtrain.errors import UsageError

VARIABLE = "SWARMTRAIN_FAULTS"
PACE_VARIABLE = "SWARMTRAIN_PACE"
MAX_PACE_S = 60.0


class Point(StrEnum):
    """Where a fault can happen."""

    BEFORE_FORWARD = "before-forward"
    AFTER_FORWARD = "after-forward"  # no other process knows of it yet
    BEFORE_BACKWARD = "before-backward"  # the next stage has answered (the last stage has no such moment)
    BEFORE_ANSWER = "before-answer"  # the microbatch is in the sum, the caller has no answer
    IN_STEAL = "in-steal"  # the victim has handed work over; neither the caller nor the thief knows
    STOLEN_WORK = "stolen-work"  # the thief has received stolen work
    IN_PREPARE = "in-prepare"  # the gradient is ready; nothing was sent
    BEFORE_APPLY = "before-apply"  # prepared, the decision has arrived
    AFTER_APPLY = "after-apply"  # applied, the coordinator has no answer
    STATE_CHUNK = "state-chunk"  # a donor hands out a chunk
    BEFORE_DECISION = "before-decision"  # all stages have reported to the coordinator
    AFTER_DECISION = "after-decision"  # the decision is in the journal; no peer was told
    AFTER_STEP = "after-step"  # the coordinator has applied a step
    CHECKPOINT_WRITE = "checkpoint-write"  # some stages are on disk


class Action(StrEnum):
    """What happens there."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP
    CORRUPT = "corrupt"  # flips a bit in what is about to be sent; before-apply: in the peer's own state
    CUT = "cut"  # all links break


_SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}


def _print_error(action: Action, point: Point) -> None:
    print(f"test fault: {action} at {point}", file=sys.stderr, flush=True)


def _signal_self(action: Action) -> None:
    os.kill(os.getpid(), _SIGNALS[action])


@dataclass
class _Armed:
    point: Point
    countdown: int
    action: Action


@dataclass
class Faults:
    """The faults that are armed in this daemon. Empty for every daemon that is not under test."""

    armed: list[_Armed] = field(default_factory=list)
    is_enabled: bool = False  # whether the flag was given
    cut: Callable[[], None] | None = None  # breaks all links; set by the daemon
    strike: Callable[[Action], None] = _signal_self  # kills or stops this process
    tell: Callable[[Action, Point], None] = _print_error
    pace_s: tuple[float, float] = (0.0, 0.0)  # the least duration of a forward and of a backward

    @classmethod
    def from_environment(cls, *, enabled: bool, environment: Mapping[str, str] = os.environ) -> Faults:
        """The faults in the variable, if the flag was given. UsageError if its text is not a list of faults."""
        if not enabled:
            return cls()
        text = environment.get(VARIABLE, "")
        armed = [_parse(part.strip()) for part in text.split(",")] if text else []
        return cls(armed, is_enabled=True, pace_s=_parse_pace(environment.get(PACE_VARIABLE, "0:0")))

    def arm(self, point: str, nth: int, action: str) -> None:
        """Arm one more fault."""
        self.armed.append(_Armed(Point(point), nth, Action(action)))

    def hit(self, point: Point) -> Action | None:
        """A point is reached. Kills, stops and cuts happen here; any other action is returned for the caller to do."""
        due: Action | None = None
        for fault in [item for item in self.armed if item.point is point]:
            fault.countdown -= 1
            if fault.countdown == 0:
                self.armed.remove(fault)
                due = fault.action
        if due is not None:
            self.tell(due, point)
        if due in _SIGNALS:
            self.strike(due)
        elif due is Action.CUT and self.cut is not None:
            self.cut()
        return due


def damaged(payload: bytes | bytearray | memoryview) -> bytes:
    """The same bytes with one bit flipped in the middle."""
    copy = bytearray(payload)
    if copy:
        copy[len(copy) // 2] ^= 1
    return bytes(copy)


def _parse(text: str) -> _Armed:
    parts = text.split(":")
    try:
        point, nth, action = parts
        fault = _Armed(Point(point), int(nth), Action(action))
    except ValueError:
        raise UsageError(
            f"{VARIABLE}: {text!r:.80} is not POINT:NTH:ACTION",
            fix=f"points: {', '.join(Point)}; actions: {', '.join(Action)}",
        ) from None
    if fault.countdown < 1:
        raise UsageError(f"{VARIABLE}: the count in {text!r:.80} begins at 1")
    return fault


def _parse_pace(text: str) -> tuple[float, float]:
    try:
        forward_s, backward_s = map(float, text.split(":"))
    except ValueError:
        forward_s = backward_s = -1.0
    if not (0.0 <= forward_s <= MAX_PACE_S and 0.0 <= backward_s <= MAX_PACE_S):  # also for NaN
        raise UsageError(f"{PACE_VARIABLE}: {text!r:.80} is not FORWARD:BACKWARD in seconds, up to {MAX_PACE_S:g} each")
    return forward_s, backward_s
