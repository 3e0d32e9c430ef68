"""What the owner wants, what is seen of the machine, and whether the peer pauses because of it. Pure: times are given.

A cause begins when it has held for a moment, and ends when it has not held for longer: a peer that pauses and resumes
with every gust of somebody else's work would be of no use to either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import tzinfo

from swarmtrain.courtesy.hours import Hours, local_time, parse_zone
from swarmtrain.courtesy.traffic import TrafficCap
from swarmtrain.observe.activity import Cause
from swarmtrain.units import show_duration, show_size

BUSY_SHARE = 0.25  # of all processors, used by others: the machine is in use
BUSY_S = 10.0  # so long; a keystroke counts at once
TOUCHED_S = 10.0  # a keystroke that is no older than this
RELEASE_S = 30.0  # a program or a use of the GPU that ended may begin again: games are started by launchers
COOLER_BY = 5.0  # degrees below the limit before work goes on
POWER_S = 10.0  # how long the draw must be too high
POWER_REST_S = 60.0
POWER_SHARE = 0.8  # of the limit, below which work goes on


ALL_DAY = Hours()


@dataclass(frozen=True)
class Rules:
    """The owner's wishes. The defaults ask for nothing."""

    hours: Hours = ALL_DAY
    time_zone: str = ""  # of the hours and of the traffic's month; empty: the machine's
    idle_s: float = 0.0  # how long the machine must have been idle; 0: it need not be
    programs: tuple[str, ...] = ()  # names; while one of them runs, the peer pauses
    yields_gpu: bool = False  # to every other process that uses it
    max_gpu_celsius: float = 0.0  # 0: no limit
    max_gpu_watts: float = 0.0
    traffic: TrafficCap | None = None

    @property
    def zone(self) -> tzinfo | None:
        """None: the machine's own."""
        return parse_zone(self.time_zone)

    @property
    def needs_gpu(self) -> bool:
        """Whether the GPU's own sensors are asked."""
        return self.yields_gpu or self.max_gpu_celsius > 0 or self.max_gpu_watts > 0

    @property
    def needs_sensors(self) -> bool:
        """Whether anything but the clock and the peer's own counters is asked."""
        return self.idle_s > 0 or bool(self.programs) or self.needs_gpu


@dataclass(frozen=True)
class Seen:
    """What the sensors say. None: this machine does not say."""

    others_cpu: float | None = None  # share of all processors that others have used since the last look, 0 to 1
    input_idle_s: float | None = None  # since the last keystroke on this machine
    programs: tuple[str, ...] = ()  # those of the owner's list that run
    gpu_users: tuple[str, ...] = ()  # other processes that use the GPU
    gpu_celsius: float | None = None
    gpu_watts: float | None = None


@dataclass(frozen=True)
class Pause:
    """Why a peer pauses."""

    cause: Cause
    reason: str
    next: str
    ends_at: float | None = None  # seconds since the epoch, where that is known


@dataclass
class _Latch:
    """On when a condition has held for `rise_s`, off when it has not for `fall_s`."""

    rise_s: float
    fall_s: float
    is_on: bool = False
    _since: float | None = None  # when the condition began to contradict what is on

    def look(self, holds: bool, now: float) -> bool:
        if holds is self.is_on:
            self._since = None
            return self.is_on
        self._since = now if self._since is None else self._since
        if now - self._since >= (self.fall_s if self.is_on else self.rise_s):
            self.is_on, self._since = holds, None
        return self.is_on

    def ends_at(self, now: float) -> float:
        """When it goes off at the earliest."""
        return (now if self._since is None else self._since) + self.fall_s


@dataclass
class Manners:
    """Whether a peer pauses, from one look to the next. `now` is a clock that never goes back, `wall` the wall's."""

    rules: Rules
    _busy: _Latch = field(init=False)
    _touched: _Latch = field(init=False)
    _program: _Latch = field(init=False)
    _gpu: _Latch = field(init=False)
    _hot: _Latch = field(init=False)
    _power: _Latch = field(init=False)
    _program_names: tuple[str, ...] = ()
    _gpu_names: tuple[str, ...] = ()
    _last: Pause | None = None

    def __post_init__(self) -> None:
        idle_s = self.rules.idle_s
        self._busy = _Latch(BUSY_S, idle_s, is_on=idle_s > 0)  # that it is idle must be seen first
        self._touched = _Latch(0.0, idle_s)
        self._program, self._gpu = _Latch(0.0, RELEASE_S), _Latch(0.0, RELEASE_S)
        self._hot, self._power = _Latch(0.0, 0.0), _Latch(POWER_S, POWER_REST_S)

    def look(
        self, seen: Seen, *, now: float, wall: float, month_bytes: float = 0.0, step_bytes: float = 0.0
    ) -> Pause | None:
        """The nearest cause to pause; None: work is welcome. A cause keeps its words, whatever its figures do."""
        causes: tuple[Callable[[], Pause | None], ...] = (
            lambda: self._hours(wall),
            lambda: self._traffic(month_bytes, step_bytes, wall),
            lambda: self._programs(seen, now),
            lambda: self._gpu_use(seen, now),
            lambda: self._in_use(seen, now, wall),
            lambda: self._heat(seen, now),
            lambda: self._watts(seen, now),
        )
        found = [pause for cause in causes if (pause := cause()) is not None]  # all of them: each latch sees each look
        pause, last = (found[0] if found else None), self._last
        if pause is not None and last is not None and pause.cause is last.cause is not Cause.OFF_HOURS:
            pause = replace(last, ends_at=pause.ends_at)
        self._last = pause
        return pause

    def _hours(self, wall: float) -> Pause | None:
        rules = self.rules
        if rules.hours.are_open(wall, rules.zone):
            return None
        opens = rules.hours.next_change(wall, rules.zone)
        following = f"work again at {local_time(opens, rules.zone):%H:%M}" if opens else "these hours never come"
        return Pause(Cause.OFF_HOURS, f"outside its hours ({rules.hours})", following, opens)

    def _traffic(self, month_bytes: float, step_bytes: float, wall: float) -> Pause | None:
        cap = self.rules.traffic
        if cap is None or not cap.is_spent(month_bytes, step_bytes):
            return None
        ends = cap.month_ends(wall, self.rules.zone)
        reason = f"this month's traffic is spent ({show_size(cap.num_bytes)})"
        return Pause(Cause.TRAFFIC, reason, f"work again on {local_time(ends, self.rules.zone):%d %B}", ends)

    def _programs(self, seen: Seen, now: float) -> Pause | None:
        if not self._program.look(bool(self.rules.programs and seen.programs), now):
            return None
        self._program_names = seen.programs or self._program_names
        return Pause(Cause.PROGRAM, f"{self._program_names[0]} runs", "work again when it has ended")

    def _gpu_use(self, seen: Seen, now: float) -> Pause | None:
        if not self._gpu.look(self.rules.yields_gpu and bool(seen.gpu_users), now):
            return None
        self._gpu_names = seen.gpu_users or self._gpu_names
        return Pause(Cause.GPU_USED, f"{self._gpu_names[0]} uses the GPU", "work again when it does not any more")

    def _in_use(self, seen: Seen, now: float, wall: float) -> Pause | None:
        idle_s = self.rules.idle_s
        if not idle_s:
            return None
        is_touched = seen.input_idle_s is not None and seen.input_idle_s < TOUCHED_S
        latches = [
            self._busy.look((seen.others_cpu or 0.0) > BUSY_SHARE, now) and self._busy,
            self._touched.look(is_touched, now) and self._touched,
        ]
        ends = [latch.ends_at(now) for latch in latches if latch]
        if not ends:
            return None
        following = f"work again when the machine has been idle for {show_duration(idle_s)}"
        return Pause(Cause.IN_USE, "the machine is in use", following, wall + max(ends) - now)

    def _heat(self, seen: Seen, now: float) -> Pause | None:
        limit = self.rules.max_gpu_celsius
        if not limit or seen.gpu_celsius is None:
            return None
        is_hot = seen.gpu_celsius > (limit - COOLER_BY if self._hot.is_on else limit)
        if not self._hot.look(is_hot, now):
            return None
        reason = f"the GPU is at {seen.gpu_celsius:.0f} °C, its owner's limit is {limit:g} °C"
        return Pause(Cause.GPU_HOT, reason, f"work again at {limit - COOLER_BY:g} °C")

    def _watts(self, seen: Seen, now: float) -> Pause | None:
        limit = self.rules.max_gpu_watts
        if not limit or seen.gpu_watts is None:
            return None
        is_high = seen.gpu_watts > (POWER_SHARE * limit if self._power.is_on else limit)
        if not self._power.look(is_high, now):
            return None
        reason = f"the GPU draws {seen.gpu_watts:.0f} W, its owner's limit is {limit:g} W"
        return Pause(Cause.GPU_POWER, reason, f"work again below {POWER_SHARE * limit:.0f} W")
