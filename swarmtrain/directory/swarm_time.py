"""What time it is in the swarm: records expire by it, so daemons must agree on it, whatever their machines' clocks say.

A daemon's clock starts with its machine's time, and from then on goes with the monotonic clock: that somebody sets the
machine's time in the middle of a run changes nothing. Every answer to a ping carries the other end's time. A daemon
that finds itself alone with its time among others who agree goes by theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmtrain import world

TOLERANCE_S = 3.0  # differences that do not matter: a way there and back, and clocks that are set by NTP


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
        """Others know better."""
        self._ahead_s += seconds


def agreed_shift(offsets: Iterable[float], *, yields: bool) -> float:
    """By how much a clock should be set, given how far those of others are ahead of it; 0 if it is right.

    The largest group that agrees counts, this clock included. Between two groups of one size it stays as it is, unless
    it `yields`: of two daemons that are alone with each other, the one that came later does.
    """
    others = sorted(offsets)
    own = sum(abs(offset) <= TOLERANCE_S for offset in others) + 1
    groups = [[other for other in others if abs(other - offset) <= TOLERANCE_S] for offset in others]
    best = max(groups, key=len, default=[])
    if not best or len(best) < own or (len(best) == own and not yields):
        return 0.0
    middle = best[len(best) // 2]
    return middle if abs(middle) > TOLERANCE_S else 0.0
