"""Stages of a checkpoint in memory, for newcomers that fetch them chunk by chunk: loaded, hashed and checked once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial

from swarmtrain import world
from swarmtrain.chain.state_transfer import StateSource
from swarmtrain.checkpoint import Checkpoint

MAX_BYTES = 1 << 30


class LoadedStages:
    """The stages that were asked for last, up to `max_bytes`; one is kept however large it is.

    The digests of a stage's chunks are kept when the stage is not: one that is loaded again is not hashed again, since
    a newcomer compares each chunk with the digest that it was given.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
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
