"""A peer that runs out of work says so, and the next piece goes to it.

What a sender knows of a queue is old by the time it matters: a processor stands idle while others of its stage have
work waiting. So the peer itself tells some of those who gave it work lately, when it begins with the last piece it has,
and again when that is done (join-idle-queue, Lu et al. 2011, with several tokens per idle server). What a sender does
with it: `FinishTimePolicy.feed`. A hint that is lost, late or wrong costs a wait in a queue, never a result.
"""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Generic, TypeVar

NUM_TOLD = 3  # at most
CALLERS_PER_TOLD = 6  # of fewer nobody is told: few senders know a small stage well, and all would send at once
REMEMBERED = 32  # calls; who calls often is in it often, and will soon have something to send
MIN_PAUSE_S = 0.25  # work shorter than this is not worth a message

Caller = TypeVar("Caller")


class Appetite(Generic[Caller]):
    """Whom a peer tells that it runs out of work."""

    def __init__(self, rng: random.Random, num_told: int = NUM_TOLD) -> None:
        self._rng = rng
        self._num_told = num_told
        self._callers: deque[Caller] = deque(maxlen=REMEMBERED)
        self._told_at = -math.inf

    def called_by(self, caller: Caller) -> None:
        """This one has sent a piece of work."""
        self._callers.append(caller)

    def whom_to_tell(self, now: float) -> list[Caller]:
        """Some of the last callers, each by how often it calls; nobody of few, or if others were told just now."""
        callers, random_ = self._callers, self._rng.random
        num_told = min(self._num_told, len(set(callers)) // CALLERS_PER_TOLD)
        if not num_told or now - self._told_at < MIN_PAUSE_S:
            return []
        self._told_at = now
        return list(dict.fromkeys(callers[int(random_() * len(callers))] for _ in range(num_told)))


def is_held_up(backlog_bytes: float, message_bytes: float) -> bool:
    """Whether what a peer has done piles up at its own uplink: then more work would not help it."""
    return backlog_bytes > 2.0 * message_bytes
