"""Fetches the states of a checkpoint, one stage after the other, however slowly; gives up when nothing arrives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence

from swarmtrain.chain.state_transfer import Download, SyncFailed
from swarmtrain.coordinator.context import RunContext
from swarmtrain.model.buffers import StateLayout
from swarmtrain.p2p.errors import NetError
from swarmtrain.wire.messages import FetchState, StateChunk

log = logging.getLogger(__name__)

STALL_S = 90.0  # a fetch without a byte for this long is given up; a slow one is not
WARM_S = 10.0  # how often keepers of a state that is not fetched yet are told that it is still wanted


class CheckpointFetch:
    """One download at a time."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._under_way: asyncio.Task[None] | None = None
        self._stage = -1  # whose state is being fetched, or was fetched last

    def give_up(self) -> None:
        """Stop the download under way; its checkpoint fails. A download that is complete is not affected."""
        if self._under_way is not None:
            self._under_way.cancel()

    @contextlib.contextmanager
    def wanted(self, step: int, keepers: Sequence[Sequence[str]]) -> Iterator[None]:
        """Meanwhile keepers of later stages are asked for one chunk: a peer drops a copy that is not asked for."""
        self._stage = -1
        warming = self._context.in_background(self._keep_warm(step, keepers))
        try:
            yield
        finally:
            warming.cancel()

    async def fetch(self, download: Download, keepers: Sequence[str]) -> None:
        """Download a whole state; SyncFailed if nothing arrives for STALL_S, or when it is given up."""
        loop = asyncio.get_running_loop()
        self._stage = download.stage
        fetching = self._under_way = asyncio.create_task(download.run(keepers))
        num_fetched, progress_at = 0, loop.time()
        try:
            while not (await asyncio.wait([fetching], timeout=WARM_S))[0]:
                if download.num_fetched > num_fetched:
                    num_fetched, progress_at = download.num_fetched, loop.time()
                elif loop.time() - progress_at >= STALL_S:
                    raise SyncFailed(f"nothing of stage {download.stage} has come for {STALL_S:g} s")
            if fetching.cancelled():
                raise SyncFailed("it was given up")
            fetching.result()
        finally:
            self._under_way = None
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _keep_warm(self, step: int, keepers: Sequence[Sequence[str]]) -> None:
        while True:
            await asyncio.sleep(WARM_S)
            later = [(stage, peer) for stage in range(self._stage + 1, len(keepers)) for peer in keepers[stage]]
            await asyncio.gather(*(self._ask(peer, stage, step) for stage, peer in later))

    async def _ask(self, keeper: str, stage: int, step: int) -> None:
        last_chunk = len(StateLayout(self._context.manifest, stage).chunks()) - 1
        request = FetchState(self._context.run_id, stage, step, last_chunk)
        try:
            await self._context.node.call(keeper, request, deadline_s=WARM_S, expect=StateChunk)
        except NetError as error:
            log.info("%s keeps a state that is still to be fetched, and does not answer: %s", keeper[-8:], error)
