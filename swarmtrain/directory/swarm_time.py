"""The swarm's time. Records expire by it, so daemons must agree on it, whatever their machines' clocks say.

A daemon's clock starts with its machine's time and then advances with the monotonic clock, so that setting the
machine's clock in the middle of a run changes nothing. Every answer to a ping carries the other end's time. A daemon
whose time differs adopts the time of the largest group of neighbours that agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmtrain import world

TOLERANCE_S = 3.0  # clocks agree within this: it covers a round trip and the error of NTP


class SwarmClock:
    """Seconds since the epoch, as the swarm counts them."""

    def __init__(self) -> None:
        self._ahead_s = world.wall() - world.monotonic()

    def __call__(self) -> float:
        return world.monotonic() + self._ahead_s

    @property
    def wall_offset_s(self) -> float:
        """By how much it is ahead of the machine's own time."""
        return self() - world.wall()

    def shift(self, seconds: float) -> None:
        """Set the clock forward by `seconds`, to the others' time."""
        self._ahead_s += seconds


def agreed_shift(offsets: Iterable[float], *, yields: bool) -> float:
    """By how many seconds to shift a clock, given by how much others are ahead of it; 0 if it is right.

    The largest group that agrees decides, this clock included. In a tie the clock keeps its time, unless it `yields`:
    of two daemons that are alone with each other, the later one yields.
    """
    others = sorted(offsets)
    own = sum(abs(offset) <= TOLERANCE_S for offset in others) + 1
    groups = [[other for other in others if abs(other - offset) <= TOLERANCE_S] for offset in others]
    best = max(groups, key=len, default=[])
    if not best or len(best) < own or (len(best) == own and not yields):
        return 0.0
    middle = best[len(best) // 2]
    return middle if abs(middle) > TOLERANCE_S else 0.0
