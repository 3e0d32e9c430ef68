"""Copies of a peer's state that newcomers and checkpoints fetch from, while the state itself goes on."""

from __future__ import annotations

import asyncio

from swarmtrain.chain.state_transfer import StateSource
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.context import PeerContext

MAX_SNAPSHOTS = 2  # one for newcomers, one for a checkpoint
SNAPSHOT_LIFE_S = 30.0  # a copy of the state that nobody has fetched from for so long is dropped
_STEP_JOB = -1


class Snapshots:
    """The copies, by step."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._copies: dict[int, StateSource] = {}
        self._fetched_at: dict[int, float] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._copies

    def fetch(self, step: int) -> StateSource:
        """A copy that is there, for somebody who fetches from it now."""
        self._fetched_at[step] = asyncio.get_running_loop().time()
        return self._copies[step]

    async def keep(self) -> None:
        """Copy the state as it is now."""
        copied = await self._context.compute.run(Kind.STEP, _STEP_JOB, self._context.jobs.copy_state)
        self._copies.pop(copied.value.step, None)  # of a history that was taken back
        self._copies[copied.value.step] = copied.value
        self._fetched_at[copied.value.step] = asyncio.get_running_loop().time()
        for old in list(self._copies)[:-MAX_SNAPSHOTS]:  # the first that were made: after a roll-back steps begin again
            self._drop(old)

    def drop_unused(self) -> None:
        """Copies that nobody has fetched from for a while."""
        now = asyncio.get_running_loop().time()
        for step in [step for step, at in self._fetched_at.items() if now - at > SNAPSHOT_LIFE_S]:
            self._drop(step)

    def _drop(self, step: int) -> None:
        del self._copies[step], self._fetched_at[step]
