"""How a peer gets its stage's state: from the seed, from other peers, or from a checkpoint; and how it hands it out.

A newcomer listens to the all-reduces of its stage while it downloads, so that it can follow on its own afterwards.
Whatever goes wrong on the way, it ends up by starting over as a new incarnation: the coordinator then offers a newer
state.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from swarmtrain import world
from swarmtrain.chain.state_transfer import Download, StateSource, SyncFailed
from swarmtrain.observe.events import DonorDropped, Events, SyncProgress
from swarmtrain.observe.faults import Action, Point, damaged
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step import StepProtocol
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.rpc.errors import Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import ChunkDigests, Code, FetchDigests, FetchState, StateChunk, Verdict

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # of one download, before another state is asked for
STUCK_S = 45.0  # a newcomer that has a state and does not get further for so long starts over


class Syncing:
    """Fetches the state of one stage, and gives it to others."""

    def __init__(self, peer: PeerIdentity, clock: StepClock, stage: Stage, steps: StepProtocol, events: Events) -> None:
        self._peer, self._clock, self._stage, self._steps, self._events = peer, clock, stage, steps, events
        self._task: asyncio.Task[bool] | None = None
        self._download: Download | None = None
        self._num_failures = 0
        self._advanced_at = 0.0
        self._last_step = -1
        self.num_started_over = 0

    async def begin(self) -> None:
        """The peer has become syncing: nothing of the current step counts any more."""
        self._num_failures = 0
        self._advanced_at = asyncio.get_running_loop().time()
        await self._steps.forget()

    async def close(self) -> None:
        """Stop fetching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def stop(self) -> bool:
        """Fetch no more, since the state that this peer has counts: what comes later would replace it.

        False while a fetched state is being loaded: then that is the one that counts.
        """
        if self._task is None or self._task.done():
            return True
        if self._download is None:
            return False
        await self.close()
        self._download = None
        return True

    async def order(self, order: Verdict) -> asyncio.Task[bool] | None:
        """Fetch the state that the coordinator named; one at a time, another one replaces it.

        Returns the new download, or None if it is under way already. Its result says whether the state was loaded.
        """
        if self._task is not None and not self._task.done():
            if self._download is None or self._download.is_of(order.sync_step, order.sync_digest):
                return None
            await self.close()
        if order.sync_step == 0 and not order.donors:
            self._task = asyncio.create_task(self._load_first(order.term), name="first state")
        else:
            self._task = asyncio.create_task(self._fetch(order), name=f"fetch the state of step {order.sync_step}")
        return self._task

    def check_stuck(self, run_step: int) -> None:
        """Start over if the run goes on and this newcomer does not follow."""
        step, now = self._clock.step, asyncio.get_running_loop().time()
        is_fetching = (self._task is not None and not self._task.done()) or self._steps.listener.is_going_on
        if step != self._last_step or is_fetching or run_step <= step:
            self._last_step, self._advanced_at = step, now
        elif self._peer.state is PeerState.SYNCING and now - self._advanced_at > STUCK_S:
            log.warning("no progress at step %d while the run is at %d: starting over", step, run_step)
            self._start_over()

    def _start_over(self) -> None:
        self._peer.incarnation = world.token_hex(8)
        self._steps.listener.drop()  # they were asked of the former incarnation
        self._download, self._num_failures = None, 0
        self._advanced_at = asyncio.get_running_loop().time()
        self.num_started_over += 1

    async def _load_first(self, term: int) -> bool:
        self._download = None
        await self._steps.load(await self._stage.first_state(), term=term)
        return True

    async def _fetch(self, order: Verdict) -> bool:
        peer, layout, step = self._peer, self._stage.layout, order.sync_step
        if self._download is None or not self._download.is_of(step, order.sync_digest):
            self._steps.listener.drop(before=step)
            self._download = Download(peer.node, peer.run_id, layout, step, order.sync_digest)
            self._num_failures = 0
        download, shown = self._download, -1

        def progress(share: float) -> None:
            nonlocal shown
            if int(10 * share) > shown:
                shown = int(10 * share)
                self._events.emit(SyncProgress(step, int(100 * share)))

        def drop(donor: str, reason: str) -> None:
            self._events.emit(DonorDropped(donor, step, reason))

        try:
            await download.run(order.donors, on_progress=progress, on_dropped=drop)
        except SyncFailed as error:
            log.warning("fetching the state of step %d failed: %s", step, error)
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._start_over()
            return False
        self._download = None
        await self._steps.load(StateSource(layout, step, download.basis_epoch, download.buffers), term=order.term)
        return True

    async def fetch_state(self, fetch: FetchState, exchange: Exchange) -> StateChunk:
        """Answer `FetchState`."""
        chunk = (await self._source(fetch.run, fetch.stage, fetch.step)).chunk(fetch.chunk)
        if chunk is None:
            raise Refusal(Code.UNKNOWN, f"there is no chunk {fetch.chunk}")
        if self._peer.faults.hit(Point.STATE_CHUNK) is Action.CORRUPT:
            return replace(chunk, values=damaged(chunk.values))
        return chunk

    async def fetch_digests(self, fetch: FetchDigests, exchange: Exchange) -> ChunkDigests:
        """Answer `FetchDigests`."""
        source = await self._source(fetch.run, fetch.stage, fetch.step)
        return await world.in_thread(source.digests)

    async def _source(self, run: str, stage: int, step: int) -> StateSource:
        """The state of `step`: a copy that was kept, or one made now if that is the current step."""
        peer = self._peer
        if run != peer.run_id or stage != peer.stage:
            raise peer.refuse(Code.WRONG_STAGE, f"this peer serves stage {peer.stage}")
        snapshot = await self._steps.snapshot_of(step)
        if snapshot is None:
            raise peer.refuse(Code.UNKNOWN, f"no copy of the state of step {step} here")
        return snapshot
