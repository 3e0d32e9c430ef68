"""Where a peer's time goes: at every moment exactly one of compute, reduce, queue, wire, idle (with its cause).

Activities of a peer overlap; a moment counts for the first of the list that is going on. So the parts add up to the
wall-clock time, and `idle` is capacity that was not used. The times of single microbatches, in which queueing counts
although the processor is busy with another one, are counted separately (`MicrobatchTimes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

from swarmtrain import world
from swarmtrain.observe.activity import Cause

_HOLDS_BACK = (Cause.NEXT_STAGE_EMPTY, Cause.CAPPED)  # a call that waits for these sends nothing


class Part(StrEnum):
    """What time is spent on, in order of precedence; of an all-reduce in the background the last, before idle."""

    COMPUTE = "compute"  # the compute thread runs a job
    REDUCE = "reduce"  # an all-reduce with the other peers of the stage
    QUEUE = "queue"  # a job is waiting and has not begun
    WIRE = "wire"  # work is in transit to the next stage, there, or in transit back
    IDLE = "idle"


class TimeSplit:
    """Counts seconds by part. Called from the event loop and from the compute thread."""

    def __init__(self, clock: Callable[[], float] = world.monotonic, *, reduces_behind: bool = False) -> None:
        """`reduces_behind`: an all-reduce is only waited for when nothing else goes on."""
        self._clock, self._reduces_behind = clock, reduces_behind
        self._lock = Lock()
        self._going_on = dict.fromkeys(Part, 0)
        self._cause = Cause.JOINING
        self._seconds: dict[tuple[Part, Cause | None], float] = {}
        self._began = self._since = clock()
        self._current: tuple[Part, Cause | None] = (Part.IDLE, self._cause)

    def begin(self, part: Part) -> None:
        """An activity of this part begins."""
        with self._lock:
            self._going_on[part] += 1
            self._switch()

    def end(self, part: Part) -> None:
        """An activity of this part has ended."""
        with self._lock:
            self._going_on[part] -= 1
            self._switch()

    def take(self) -> None:
        """A job leaves the queue for the compute thread."""
        with self._lock:
            self._going_on[Part.QUEUE] -= 1
            self._going_on[Part.COMPUTE] += 1
            self._switch()

    @contextlib.contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """An activity that lasts as long as the block."""
        self.begin(part)
        try:
            yield
        finally:
            self.end(part)

    def explain_idle(self, cause: Cause) -> None:
        """From now on, idle time has this cause."""
        with self._lock:
            self._cause = cause
            self._switch()

    def is_going_on(self, part: Part) -> bool:
        """Whether an activity of this part is under way."""
        return self._going_on[part] > 0

    def read(self) -> SplitSeconds:
        """The totals since the start."""
        with self._lock:
            self._switch()
            parts: dict[Part, float] = {part: 0.0 for part in Part if part is not Part.IDLE}
            idle: dict[str, float] = {}
            for (part, cause), seconds in self._seconds.items():
                if cause is None:
                    parts[part] += seconds
                else:
                    idle[cause.value] = idle.get(cause.value, 0.0) + seconds
            return SplitSeconds({part.value: spent for part, spent in parts.items()}, idle, self._since - self._began)

    def _switch(self) -> None:
        now = self._clock()
        self._seconds[self._current] = self._seconds.get(self._current, 0.0) + now - self._since
        self._since = now
        self._current = self._now()

    def _now(self) -> tuple[Part, Cause | None]:
        is_reducing = self._going_on[Part.REDUCE] > 0
        if self._going_on[Part.COMPUTE]:
            return Part.COMPUTE, None
        if is_reducing and not self._reduces_behind:
            return Part.REDUCE, None
        if self._going_on[Part.QUEUE]:
            return Part.QUEUE, None
        if self._going_on[Part.WIRE] and self._cause not in _HOLDS_BACK:
            return Part.WIRE, None
        if is_reducing:
            return Part.REDUCE, None
        cause = Cause.NO_LEASE if self._cause is Cause.WORKING else self._cause
        return Part.IDLE, cause


@dataclass(frozen=True)
class SplitSeconds:
    """Seconds by part, idle seconds by cause, and the total."""

    parts: dict[str, float]
    idle: dict[str, float]
    total_s: float


@dataclass
class MicrobatchTimes:
    """Sums over finished microbatches: waiting for the compute thread, computing, and time at downstream stages."""

    queue_s: float = 0.0
    compute_s: float = 0.0
    downstream_s: float = 0.0
    count: int = 0

    def add(self, queue_s: float, compute_s: float, total_s: float) -> None:
        """Add a microbatch that was answered after `total_s`."""
        self.queue_s += queue_s
        self.compute_s += compute_s
        self.downstream_s += max(0.0, total_s - queue_s - compute_s)
        self.count += 1
