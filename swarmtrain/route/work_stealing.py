"""Work stealing: a peer that runs out of work, the thief, takes a waiting forward from a peer of its stage, the victim.

What a sender knows of a queue is old by the time it matters: a processor stands idle while others of its stage have
work waiting. So the idle one asks (Blumofe and Leiserson 1999). The victim redirects the caller of the forward to the
thief, and the caller sends the same bytes there: by the rules of the chain a refusal like any other. A request that is
lost, late or a lie costs a detour, never a result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Generic, TypeVar

NUM_ASKED = 6  # victims of a stage, asked one after the other until one gives work
MIN_PAUSE_S = 0.25  # between two rounds of asking: work that is shorter is not worth the messages
MAX_PAUSE_S = 1.0  # the back-off when no victim gave work
MIN_WAIT_S = 0.25  # a forward that waits for less stays with the victim: the detour takes as long
MAX_EXCESS = 1.15  # of the thief's load over the victim's: within this, loads differ by chance

Peer = TypeVar("Peer")


class StealPolicy(Generic[Peer]):
    """When a thief asks, and which victims."""

    def __init__(self, rng: random.Random, num_asked: int = NUM_ASKED) -> None:
        self._rng = rng
        self._num_asked = num_asked
        self._victim: Peer | None = None
        self._pause_s = MIN_PAUSE_S
        self._next_at = -math.inf

    def victims(self, others: Sequence[Peer], now: float) -> list[Peer]:
        """The last victim, though it may have left, then others of its stage at random; none during the back-off."""
        if now < self._next_at or not others:
            return []
        self._next_at = now + self._pause_s
        victim, num_others = self._victim, len(others)
        if num_others <= self._num_asked:
            chosen = self._rng.sample(others, num_others)
        else:  # one draw is much faster than many: some that are listed one after the other, from anywhere on
            num_chosen, start = self._num_asked - (victim is not None), int(self._rng.random() * num_others)
            chosen = list(others[start : start + num_chosen])
            if len(chosen) < num_chosen:
                chosen += others[: num_chosen - len(chosen)]
        if victim is None:
            return chosen
        return [victim, *(other for other in chosen if other != victim)]

    def stole(self, victim: Peer) -> None:
        """This victim gave work: it is likely to have more."""
        self._victim, self._pause_s = victim, MIN_PAUSE_S

    def failed(self) -> None:
        """No victim of a round gave work: the whole stage seems to lack it, and is asked less and less often."""
        self._victim, self._pause_s = None, min(2.0 * self._pause_s, MAX_PAUSE_S)


def is_worth_stealing(*, waiting_s: float, victim_load_s: float, thief_load_s: float, thief_service_s: float) -> bool:
    """Whether a victim gives away the forward that it would do last, which waits for about `waiting_s`.

    The load of a peer is what it has committed itself to: both passes of all that it holds. A thief that stands idle
    while it holds much only waits for its gradients to come back: with more work it would fall behind when they do. So
    work goes to thieves that hold no more than the victim, within what loads differ by chance.
    """
    return waiting_s > MIN_WAIT_S and thief_load_s + thief_service_s <= MAX_EXCESS * victim_load_s


def is_line_bound(wire_s: float, service_s: float) -> bool:
    """Whether sending what a microbatch makes takes a peer longer than computing it: then it does not lack work."""
    return wire_s > service_s


def is_held_up(backlog_bytes: float, message_bytes: float) -> bool:
    """Whether a peer's results pile up at its own uplink: then more work would not help it."""
    return backlog_bytes > 2.0 * message_bytes
