"""A peer leaves its machine to its owner: it looks again and again whether it should pause, and does.

A paused peer takes no new work, finishes and answers for what it has, takes part in that step's all-reduce, and keeps
its stage's state; if no other peer has that, the coordinator writes a checkpoint first (`coordinator/keeping.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from swarmtrain import world
from swarmtrain.courtesy.rules import Manners, Pause, Rules, Seen
from swarmtrain.courtesy.sensors import Sensors
from swarmtrain.courtesy.traffic import WRITE_SHARE, TrafficCount
from swarmtrain.observe.activity import Cause
from swarmtrain.observe.events import Events, PhaseReached
from swarmtrain.peer.assignment import Assignment
from swarmtrain.peer.identity import PeerState
from swarmtrain.waiting import wait_event

LOOK_S = 5.0  # between two looks at the machine
MIN_COUNT_S = 0.1  # between two looks at the traffic, if that has a cap
FORGETS_RATE_S = 60.0  # half of it: the rate of a line at work counts through its short rests
STEPS = 5  # that say how many bytes a step takes: a state that was fetched is none
CLOCK_S = 30.0  # between two looks at the clock alone, which may be set
BUSY_S = 1.0  # how soon a peer that cannot pause yet tries again
BY_OWNER = Pause(Cause.PAUSED, "paused by its owner", "work again after `swarmtrain resume`")


class Courtesy:
    """Of one daemon, over all its stages."""

    def __init__(self, rules: Rules, sensors: Sensors, events: Events, traffic_file: Path) -> None:
        self._sensors, self._events, self._traffic_file = sensors, events, traffic_file
        self._rules, self._manners = rules, Manners(rules)
        self._found: Pause | None = None
        self._is_asked = False  # the owner has asked to pause
        self._changed, self._rules_changed = asyncio.Event(), asyncio.Event()
        self._link_bytes: Callable[[], int] = lambda: 0
        self._step: Callable[[], int] = lambda: 0
        self._step_before, self._bytes_before = 0, 0.0
        self._step_bytes: deque[float] = deque(maxlen=STEPS)
        self._seen, self._looked_at = Seen(), float("-inf")
        self._count_s = MIN_COUNT_S
        self._noted_at, self._highest_rate = float("-inf"), 0.0
        self._counted: TrafficCount | None = None  # from the first cap on, also while there is none
        self._open_count()

    @property
    def rules(self) -> Rules:
        """As the owner has set them last."""
        return self._rules

    @property
    def count(self) -> TrafficCount | None:
        """Of the month's traffic, if that has a cap."""
        return self._counted if self._rules.traffic is not None else None

    @property
    def pause(self) -> Pause | None:
        """Why this peer should not work now. What the owner asks for comes first."""
        return BY_OWNER if self._is_asked else self._found

    def ask(self, *, pause: bool) -> None:
        """The owner pauses the peer, or takes that back; other causes to pause stay."""
        self._is_asked = pause
        self._changed.set()

    def change(self, rules: Rules) -> None:
        """The owner has changed their mind; what is not allowed has been refused before."""
        self._rules, self._manners = rules, Manners(rules)
        self._looked_at = float("-inf")
        self._open_count()
        self._rules_changed.set()

    async def check(self) -> None:
        """HardwareError if the rules ask for what this machine cannot say."""
        if self._rules.needs_gpu:
            await world.in_thread(lambda: self._sensors.check(self._rules))

    def meter(self, link_bytes: Callable[[], int], step: Callable[[], int]) -> None:
        """What this process's links have sent and received so far, and the steps that the peer has applied."""
        self._link_bytes, self._step = link_bytes, step

    async def watch(self) -> None:
        """Look again and again, until cancelled. What was counted last is written then."""
        try:
            while True:
                self._rules_changed.clear()
                await self.look()
                await wait_event(self._rules_changed, self._pause_s())
        finally:
            if self._counted is not None:
                self._counted.note(self._link_bytes(), world.wall())
                self._counted.write()

    async def look(self) -> None:
        """Look once, and note whether the peer should pause."""
        rules, count = self._rules, self._counted
        if rules.needs_sensors and world.monotonic() - self._looked_at >= LOOK_S - MIN_COUNT_S:
            self._looked_at = world.monotonic()
            self._seen = await world.in_thread(lambda: self._sensors.look(rules))
        if count is not None:
            await self._note_traffic(count)
        wall = world.wall()
        if rules is not self._rules:
            return  # they were changed meanwhile: looked at again at once
        used = count.month_bytes if count is not None else 0.0  # without a cap nobody asks
        usual = median(self._step_bytes) if len(self._step_bytes) == STEPS else 0.0
        found = self._manners.look(self._seen, now=world.monotonic(), wall=wall, month_bytes=used, step_bytes=usual)
        if found != self._found:
            self._found = found
            self._changed.set()

    async def _note_traffic(self, count: TrafficCount) -> None:
        """Count, and look again before another thousandth of the cap can have passed."""
        before = count.own_bytes
        count.note(self._link_bytes(), world.wall())
        step = self._step()
        if step != self._step_before:
            self._step_bytes.append(count.own_bytes - self._bytes_before)
            self._step_before, self._bytes_before = step, count.own_bytes
        now = world.monotonic()
        passed_s = min(FORGETS_RATE_S, max(MIN_COUNT_S, now - self._noted_at))
        self._noted_at = now
        rate = max(1.0, count.own_bytes - before) / passed_s
        self._highest_rate = max(rate, self._highest_rate * 0.5 ** (passed_s / FORGETS_RATE_S))
        self._count_s = min(LOOK_S, max(MIN_COUNT_S, WRITE_SHARE * count.cap.num_bytes / self._highest_rate))
        if count.needs_writing:
            await world.in_thread(count.write)
            await world.in_thread(count.read_others)

    async def obey(self, assignment: Assignment) -> None:
        """Pause and resume the peer as it should, until cancelled."""
        while True:
            self._changed.clear()
            self.apply(assignment)
            must_wait = self.pause is not None and assignment.peer.state is not PeerState.PAUSED
            await wait_event(self._changed, BUSY_S if must_wait else None)

    def apply(self, assignment: Assignment) -> None:
        """Pause or resume the peer now, if its state permits: one that fetches a state gets it first."""
        peer, pause = assignment.peer, self.pause
        if pause is not None and peer.state in (PeerState.SERVING, PeerState.JOINING):
            self._enter(assignment, PeerState.PAUSED, pause.reason)
        elif pause is None and peer.state is PeerState.PAUSED:
            self._enter(assignment, PeerState.JOINING, "nothing asks it to pause any more")

    def snapshot(self) -> dict[str, Any]:
        """For status, page and metrics."""
        pause, count, rules = self.pause, self.count, self._rules
        traffic = None
        if count is not None:
            ends_at = count.cap.month_ends(world.wall(), count.zone)
            traffic = {"bytes": count.month_bytes, "limit": count.cap.num_bytes, "ends_at": ends_at}
        return {
            "pause": pause and {"cause": pause.cause, "reason": pause.reason, "ends_at": pause.ends_at},
            "month": traffic,
            "hours": str(rules.hours),
        }

    def _enter(self, assignment: Assignment, state: PeerState, reason: str) -> None:
        assignment.peer.become(state)
        self._events.emit(PhaseReached(state.value, reason))
        assignment.changed()

    def _pause_s(self) -> float:
        if self.count is not None:
            return self._count_s
        return LOOK_S if self._rules.needs_sensors else CLOCK_S

    def _open_count(self) -> None:
        """Begin to count, or go on with another cap. A cap that is lifted and set again finds what was used since."""
        cap, zone, before = self._rules.traffic, self._rules.zone, self._counted
        if cap is None:
            return
        if before is None:
            self._counted = TrafficCount(self._traffic_file, cap, zone)
        else:
            before.cap, before.zone = cap, zone
