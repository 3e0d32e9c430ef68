"""Checkpoints of a swarm: each stage's state is fetched from a peer that keeps a copy, and handed out on resume."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from swarmtrain import world
from swarmtrain.boundary import codec_pair
from swarmtrain.chain.state_transfer import Download, StateSource, SyncFailed
from swarmtrain.checkpoint import Checkpoint, CheckpointWriter, latest, open_checkpoint, prune, set_aside
from swarmtrain.codec import Direction, make_encoder
from swarmtrain.coordinator.admission import StateOffer
from swarmtrain.coordinator.checkpoint_fetch import CheckpointFetch
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.loaded_stages import LoadedStages
from swarmtrain.errors import HardwareError, StorageError
from swarmtrain.model.buffers import StateLayout
from swarmtrain.observe.events import CheckpointFailed, CheckpointWritten
from swarmtrain.observe.faults import Point
from swarmtrain.reduce.coding import gradient_spec
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import ChunkDigests, Code, FetchDigests, FetchState, StateChunk

log = logging.getLogger(__name__)

NO_SPACE = re.compile(r"no space left|quota exceeded", re.IGNORECASE)


def codecs_remember(manifest: Manifest) -> bool:
    """Whether a codec of the run keeps state between messages. A checkpoint does not hold that state, so there may be
    one only where codecs reset it: where `checkpoint.every` puts it, and at the end."""
    pair = codec_pair(manifest)
    specs = {Direction.FORWARD: pair.forward, Direction.BACKWARD: pair.backward}
    encoders = [make_encoder(spec, boundary=0, direction=way) for way, spec in specs.items()]
    return any(encoder.scope.remembers for encoder in encoders) or gradient_spec(manifest).kind in ("topk", "powersgd")


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
            tensors = dict(layout.named(download.buffers))
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


def explained(failure: Exception | None) -> str:
    """Why a checkpoint failed, without paths: volunteers do not know the coordinator's directories."""
    cause = failure.__cause__ if isinstance(failure, StorageError) else None
    if cause is None:
        return str(failure)
    reason = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(cause)
    return "no disk space" if NO_SPACE.search(reason) else reason
