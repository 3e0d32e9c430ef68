"""Checkpoints of a swarm: each stage's state is fetched from a peer that keeps a copy, and handed out on resume."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from swarmtrain import world
from swarmtrain.boundary import codec_pair
from swarmtrain.chain.state_transfer import Download, StateSource, SyncFailed
from swarmtrain.checkpoint import Checkpoint, CheckpointWriter, latest, open_checkpoint, prune, set_aside
from swarmtrain.codec import Direction, make_encoder
from swarmtrain.coordinator.admission import StateOffer
from swarmtrain.coordinator.context import RunContext
from swarmtrain.errors import HardwareError, StorageError
from swarmtrain.model.buffers import StateLayout
from swarmtrain.observe.events import CheckpointFailed, CheckpointWritten
from swarmtrain.observe.faults import Point
from swarmtrain.p2p.errors import NetError
from swarmtrain.reduce.coding import gradient_spec
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import ChunkDigests, Code, FetchDigests, FetchState, StateChunk

log = logging.getLogger(__name__)

STALL_S = 90.0  # a fetch without a byte for this long is given up; a slow one is not
WARM_S = 10.0  # how often keepers of a state that is not fetched yet are told that it is still wanted
MAX_LOADED_BYTES = 1 << 30
NO_SPACE = re.compile(r"no space left|quota exceeded", re.IGNORECASE)


def codecs_remember(manifest: Manifest) -> bool:
    """Whether a codec of the run keeps state between messages. A checkpoint does not hold that state, so there may be
    one only where codecs reset it: where `checkpoint.every` puts it, and at the end."""
    pair = codec_pair(manifest)
    specs = {Direction.FORWARD: pair.forward, Direction.BACKWARD: pair.backward}
    encoders = [make_encoder(spec, boundary=0, direction=way) for way, spec in specs.items()]
    return any(encoder.scope.remembers for encoder in encoders) or gradient_spec(manifest).remembers


class Checkpoints:
    """The run's checkpoint directory. Also the donor of last resort: it serves the newest checkpoint's states."""

    def __init__(self, context: RunContext, directory: Path, *, data_digest: str = "") -> None:
        self._context, self.directory, self._data_digest = context, directory, data_digest
        for path in set_aside(directory, after=context.journal.num_steps()):
            log.warning("%s is of steps that the journal does not have: it does not count", path)
        self.newest: Checkpoint | None = latest(directory)
        self._loaded = LoadedStages()
        self.failure: Exception | None = None  # why the last attempt to write a checkpoint failed, if it did
        self.fetching = CheckpointFetch(context)
        self._one_at_a_time = asyncio.Lock()
        if self.newest is not None:
            self.newest.check_run(context.manifest)
            self.newest.check_data(data_digest)

    @property
    def step(self) -> int:
        """The newest checkpoint's; 0 if there is none: the state at step 0 follows from the seed."""
        return 0 if self.newest is None else self.newest.step

    def offer(self, stage: int) -> StateOffer | None:
        """The state of a stage that this process can hand out, if any."""
        if self.newest is None:
            return None
        return StateOffer(self.newest.step, self.newest.stages[stage].state_digest, (self._context.node.peer_id,))

    async def write(self, step: int, digests: Sequence[str], keepers: Sequence[Sequence[str]]) -> bool:
        """Fetch every stage's state from its keepers and write a checkpoint; False (and an event) if that failed."""
        async with self._one_at_a_time:
            return self.step >= step or await self._write(step, digests, keepers)

    async def _write(self, step: int, digests: Sequence[str], keepers: Sequence[Sequence[str]]) -> bool:
        context = self._context
        writer = CheckpointWriter(self.directory, context.manifest, step, 0, data_digest=self._data_digest)
        try:
            with self.fetching.wanted(step, keepers):
                path = await self._write_stages(writer, digests, keepers)
        except (SyncFailed, StorageError, HardwareError) as error:
            self.failure = error
            context.events.emit(CheckpointFailed(step, str(error)))
            return False
        finally:
            await world.in_thread(writer.discard)
        context.journal.note_checkpoint(step, path.name, list(digests))
        self.newest, self.failure = open_checkpoint(path), None
        self._loaded.clear()
        for stage, book in enumerate(context.stages):
            book.checkpoint = self.offer(stage)
        await self._prune()
        context.events.emit(CheckpointWritten(step, str(path)))
        return True

    async def _write_stages(
        self, writer: CheckpointWriter, digests: Sequence[str], keepers: Sequence[Sequence[str]]
    ) -> Path:
        context = self._context
        await world.in_thread(writer.open)
        for stage, digest in enumerate(digests):
            layout = StateLayout(context.manifest, stage)
            download = Download(context.node, context.run_id, layout, writer.step, digest)
            await self.fetching.fetch(download, keepers[stage])
            writer.basis_epoch = download.basis_epoch
            tensors = dict(layout.named(download.buffers, writer.step))
            await world.in_thread(partial(writer.write_stage, stage, tensors, digest))
            context.faults.hit(Point.CHECKPOINT_WRITE)
        return await world.in_thread(writer.commit)

    async def _prune(self) -> None:
        """Remove old checkpoints, in a thread: they are gigabytes. A failure is logged only."""
        try:
            await world.in_thread(partial(prune, self.directory, self._context.manifest.checkpoint.keep))
        except StorageError as error:
            log.warning("an old checkpoint stays: %s", error)

    async def fetch_digests(self, fetch: FetchDigests) -> ChunkDigests:
        """The chunk digests of a stage of the newest checkpoint."""
        return (await self._state(fetch.run, fetch.stage, fetch.step)).digests()

    async def fetch_state(self, fetch: FetchState) -> StateChunk:
        """A chunk of a stage of the newest checkpoint."""
        chunk = (await self._state(fetch.run, fetch.stage, fetch.step)).chunk(fetch.chunk)
        if chunk is None:
            raise Refusal(Code.UNKNOWN, f"there is no chunk {fetch.chunk}")
        return chunk

    async def _state(self, run: str, stage: int, step: int) -> StateSource:
        if run != self._context.run_id or self.newest is None or step != self.newest.step:
            raise Refusal(Code.UNKNOWN, f"the newest checkpoint here is of step {self.step}")
        if stage >= self._context.manifest.stages.count:
            raise Refusal(Code.WRONG_STAGE, "there is no such stage")
        return await self._loaded.get(self.newest, stage)


class CheckpointFetch:
    """Fetches the states of a checkpoint, one stage after the other, however slowly; gives up when nothing arrives."""

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


class LoadedStages:
    """Stages of a checkpoint in memory, for newcomers that fetch them chunk by chunk: loaded, hashed and checked once.

    It keeps the stages that were asked for last, up to `max_bytes`; one is kept however large it is.
    The digests of a stage's chunks are kept when the stage is not: one that is loaded again is not hashed again, since
    a newcomer compares each chunk with the digest that it was given.
    """

    def __init__(self, max_bytes: int = MAX_LOADED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sources: OrderedDict[tuple[int, int], StateSource] = OrderedDict()  # by step and stage
        self._chunks: dict[tuple[int, int], list[bytes]] = {}
        self._loading = asyncio.Lock()

    def clear(self) -> None:
        """Drop everything: there is a newer checkpoint."""
        self._sources.clear()
        self._chunks.clear()

    async def get(self, checkpoint: Checkpoint, stage: int) -> StateSource:
        """The state of a stage. Concurrent requests wait for one load."""
        key = checkpoint.step, stage
        async with self._loading:
            source = self._sources.get(key)
            if source is None:
                source = await world.in_thread(partial(_load, checkpoint, stage, self._chunks.get(key)))
                self._keep(key, source)
            self._sources.move_to_end(key)
        return source

    def _keep(self, key: tuple[int, int], source: StateSource) -> None:
        assert source.known_digests is not None
        self._sources[key], self._chunks[key] = source, source.known_digests
        while len(self._sources) > 1 and self._num_bytes() > self._max_bytes:
            self._sources.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(source.layout.num_bytes for source in self._sources.values())


def _load(checkpoint: Checkpoint, stage: int, chunks: list[bytes] | None) -> StateSource:
    stored = checkpoint.load(stage, known_digests=chunks)
    return StateSource(stored.layout, checkpoint.step, checkpoint.basis_epoch, stored.buffers, stored.chunks)


def explained(failure: Exception | None) -> str:
    """Why a checkpoint failed, without paths: volunteers do not know the coordinator's directories."""
    cause = failure.__cause__ if isinstance(failure, StorageError) else None
    if cause is None:
        return str(failure)
    reason = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(cause)
    return "no disk space" if NO_SPACE.search(reason) else reason
