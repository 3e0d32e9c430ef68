"""Patience of a peer that cannot find its run: it says what it waits for, tries again, and gives up only if told when.

A coordinator may be away for minutes, and nobody may be there to start this daemon again when it has ended. What no
waiting can mend, as an invite that is not one or a run that does not want this peer, ends the daemon at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarmtrain import world
from swarmtrain.errors import SwarmtrainError
from swarmtrain.p2p.errors import BootstrapError
from swarmtrain.peer.coordinator_link import RunUnreachable

T = TypeVar("T")

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 15.0
ATTEMPT_S = 10.0  # one attempt at finding the coordinator: after that the peer says that it waits
REMIND_S = 60.0  # how often it says so while nothing changes


class Patience:
    """For one way into the run."""

    def __init__(self, limit_s: float, say: Callable[[str], None]) -> None:
        """Gives up after `limit_s`; 0: never."""
        self._loop = asyncio.get_running_loop()
        self._say = say
        self._ends_at = self._loop.time() + limit_s if limit_s else float("inf")
        self._pause_s, self._said, self._said_at = FIRST_PAUSE_S, "", 0.0
        self._rng = world.random()

    async def insist(self, attempt: Callable[[float], Awaitable[T]], *, is_over: Callable[[], bool]) -> T:
        """What `attempt(timeout_s)` comes to, made until it finds the run; its error when time or the run is over."""
        while True:
            left_s = self._ends_at - self._loop.time()
            try:
                return await attempt(min(ATTEMPT_S, left_s))
            except (BootstrapError, RunUnreachable) as error:
                if is_over() or self._loop.time() + self._pause_s > self._ends_at:
                    raise
                await self._wait(error)

    async def _wait(self, error: SwarmtrainError) -> None:
        """A while that grows; not the same one for all who started together."""
        text, now = str(error), self._loop.time()
        if text != self._said or now - self._said_at > REMIND_S:
            self._said, self._said_at = text, now
            self._say(f"{text}. This peer waits, and tries again. {error.fix}".rstrip())
        await asyncio.sleep(self._pause_s * self._rng.uniform(0.75, 1.0))
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
