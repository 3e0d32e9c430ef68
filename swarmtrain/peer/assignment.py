"""One stay of a peer on one stage: since when it serves there, and who must hear at once of a change."""

from __future__ import annotations

import asyncio

from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.route.moves import Mover

DESERTED_S = 5.0  # a draining peer that does not hear the coordinator for so long need not wait for it


class Assignment:
    """The facts of one stay; touched on the event loop only."""

    def __init__(self, number: int, context: PeerContext) -> None:
        """`number` rises with every move."""
        self.number, self.context = number, context
        self.mover: Mover | None = None  # of a peer that may move
        self.announce_now = asyncio.Event()
        self.heartbeat_now = asyncio.Event()
        self.deserted = asyncio.Event()  # the coordinator has not been heard for long
        self._unneeded = asyncio.Event()  # nothing that this draining peer has computed can count any more
        self._serving_since: float | None = None
        self._syncing_since = 0.0
        self.download_s = 0.0  # what fetching this stage's state took

    @property
    def version(self) -> int:
        """A move that was given up raises it, which makes a late permission void."""
        return max(self.number, self.mover.version) if self.mover is not None else self.number

    @property
    def served_s(self) -> float:
        """For how long this peer has been serving here."""
        return _now() - self._serving_since if self._serving_since is not None else 0.0

    def serves(self) -> None:
        """joining or syncing -> serving."""
        self.context.become(PeerState.SERVING)
        now = _now()
        self.download_s = now - self._syncing_since if self._syncing_since else 0.0
        self._serving_since, self._syncing_since = now, 0.0
        self.changed()

    def syncs(self) -> None:
        """Its state is being fetched from now on."""
        self._serving_since, self._syncing_since = None, _now()
        self.announce_now.set()

    def changed(self) -> None:
        """Everybody should hear of it now."""
        self.announce_now.set()
        self.heartbeat_now.set()

    def unheard(self) -> None:
        """The coordinator did not answer."""
        if _now() - self.context.contact_at > DESERTED_S:
            self.deserted.set()

    def heard_step(self, run_step: int, *, holds_sum: bool) -> None:
        """The coordinator counts `run_step` applied steps, and has heard that this peer drains.

        Whose microbatches others have done is in no roster, and is not told to apply the step: this is how it learns
        that its step is over, or was taken back. Who holds the reduced sum is told: a coordinator that was restarted
        counts a step as soon as it is decided, and this peer may be the only one that can apply it.
        """
        context = self.context
        may_count = len(context.ledger) > 0 and context.step <= run_step <= context.step + holds_sum
        if context.state is PeerState.DRAINING and not may_count:
            self._unneeded.set()

    async def drained(self, timeout_s: float) -> None:
        """Wait until what is in the ledger has been applied, or the step was done without it; within the stated time.

        Not without a coordinator: nobody would apply it, and whoever coordinates later has it computed again.
        """
        context = self.context
        if len(context.ledger) == 0:
            return
        if _now() - context.contact_at <= DESERTED_S:
            self.deserted.clear()  # it was heard since
        events = (_passed(context, context.step), self.deserted.wait(), self._unneeded.wait())
        waits = [asyncio.ensure_future(event) for event in events]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


async def _passed(context: PeerContext, step: int) -> None:
    async with context.step_changed:
        await context.step_changed.wait_for(lambda: context.step > step)


def _now() -> float:
    return asyncio.get_running_loop().time()
