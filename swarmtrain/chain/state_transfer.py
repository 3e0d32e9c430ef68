"""A stage's state on its way to a newcomer or into a checkpoint: chunks from several donors, each verified.

The receiver knows the state's digest from the coordinator. It fetches the list of chunk digests, checks that the list
hashes to it, and then takes chunks from all donors at once. A donor that sends a wrong byte is dropped and named; one
that dies costs the chunks under way and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarmtrain.model.buffers import StateLayout, as_bytes, chunk_digests, state_digest
from swarmtrain.p2p.errors import NetError
from swarmtrain.rpc.node import Node
from swarmtrain.wire.messages import ChunkDigests, FetchDigests, FetchState, StateChunk

log = logging.getLogger(__name__)

CHUNK_S = 60.0  # without a byte from a donor
IN_FLIGHT = 4  # chunks asked of one donor at once
_DIGEST_BYTES = 32


class SyncFailed(Exception):
    """No donor is left that could deliver the state."""


@dataclass(frozen=True)
class StateSource:
    """A state that this process can hand out."""

    layout: StateLayout
    step: int
    basis_epoch: int
    buffers: list[Tensor]
    known_digests: list[bytes] | None = None  # of its chunks, if they have been computed

    def digests(self) -> ChunkDigests:
        """The digests of all chunks."""
        known = self.known_digests
        return ChunkDigests(
            self.basis_epoch, b"".join(chunk_digests(self.layout, self.buffers) if known is None else known)
        )

    def chunk(self, number: int) -> StateChunk | None:
        """One chunk; None if there is no such chunk."""
        chunks = self.layout.chunks()
        if number >= len(chunks):
            return None
        index, start, stop = chunks[number]
        return StateChunk(as_bytes(self.buffers[index])[start:stop])


class Download:
    """One state being fetched. Verified chunks are kept when `run` is called again with other donors."""

    def __init__(self, node: Node, run_id: str, layout: StateLayout, step: int, digest: str) -> None:
        self._node, self._run_id, self._layout = node, run_id, layout
        self.step, self._digest = step, digest
        self.basis_epoch = 0
        self.buffers = layout.empty()
        self._chunks = layout.chunks()
        self._expected: list[bytes] = []
        self._open: deque[int] = deque(range(len(self._chunks)))
        self.liars: list[str] = []  # donors that sent a wrong chunk
        self._gone: set[str] = set()  # donors that did not answer
        self.num_fetched = 0

    @property
    def stage(self) -> int:
        """Whose state it is."""
        return self._layout.plan.index

    @property
    def progress(self) -> float:
        """Share of the chunks that are here and verified."""
        return self.num_fetched / len(self._chunks)

    def is_of(self, step: int, digest: str) -> bool:
        """Whether this is the download of that state."""
        return (self.step, self._digest) == (step, digest)

    async def run(
        self,
        donors: Iterable[str],
        *,
        on_progress: Callable[[float], None] | None = None,
        on_dropped: Callable[[str, str], None] | None = None,
    ) -> None:
        """Fetch everything that is still missing. SyncFailed when no donor is left.

        `on_dropped` is told of donors that are not asked any more, and why.
        """
        self._on_progress, self._on_dropped = on_progress, on_dropped
        living = [donor for donor in donors if donor not in self.liars]
        num_donors = len(living)
        if not self._expected:
            await self._fetch_expected(living)
        # A donor that fails late leaves chunks to donors that had nothing left to do: hence the rounds.
        while self.num_fetched < len(self._chunks):
            living = [donor for donor in living if donor not in self.liars and donor not in self._gone]
            if not living:
                left = len(self._chunks) - self.num_fetched
                self._gone.clear()  # they may be back when this is tried again
                raise SyncFailed(f"{left} of {len(self._chunks)} chunks could not be had from {num_donors} donors")
            async with asyncio.TaskGroup() as tasks:
                for _ in range(IN_FLIGHT):  # in turn, so that even a small state comes from all donors
                    for donor in living:
                        tasks.create_task(self._pull(donor))

    async def _fetch_expected(self, donors: list[str]) -> None:
        stage = self._layout.plan.index
        for donor in donors:
            try:
                request = FetchDigests(self._run_id, stage, self.step)
                answer = await self._node.call_while_moving(donor, request, CHUNK_S, expect=ChunkDigests)
            except NetError as error:
                log.info("donor %s does not give its digests: %s", donor[-8:], error)
                continue
            raw = bytes(answer.digests)
            parts = [raw[i : i + _DIGEST_BYTES] for i in range(0, len(raw), _DIGEST_BYTES)]
            sound = len(parts) == len(self._chunks)
            if sound and state_digest(stage, self.step, answer.basis_epoch, parts) == self._digest:
                self._expected, self.basis_epoch = parts, answer.basis_epoch
                return
            self._drop(donor, "it has another state than the run's")
        raise SyncFailed(f"none of {len(donors)} donors has the state of step {self.step}")

    async def _pull(self, donor: str) -> None:
        """Take chunks from one donor, one after the other, until none is open or the donor fails."""
        while self._open and donor not in self.liars and donor not in self._gone:
            number = self._open.popleft()
            try:
                request = FetchState(self._run_id, self._layout.plan.index, self.step, number)
                answer = await self._node.call_while_moving(donor, request, CHUNK_S, expect=StateChunk)
            except NetError as error:
                self._open.append(number)
                if donor not in self._gone:
                    self._gone.add(donor)
                    self._tell_dropped(donor, f"lost: {error}")
                return
            except BaseException:
                self._open.append(number)
                raise
            if not self._accept(number, answer):
                self._open.append(number)
                self._drop(donor, "it sent a wrong chunk")

    def _accept(self, number: int, chunk: StateChunk) -> bool:
        index, start, stop = self._chunks[number]
        if len(chunk.values) != stop - start or hashlib.sha256(chunk.values).digest() != self._expected[number]:
            return False
        raw = self.buffers[index].view(torch.uint8)
        raw[start:stop] = torch.from_numpy(np.frombuffer(chunk.values, dtype=np.uint8).copy())
        self.num_fetched += 1
        if self._on_progress is not None:
            self._on_progress(self.progress)
        return True

    def _drop(self, donor: str, reason: str) -> None:
        if donor not in self.liars:
            self.liars.append(donor)
            self._tell_dropped(donor, reason)

    def _tell_dropped(self, donor: str, reason: str) -> None:
        log.warning("donor %s is dropped: %s", donor[-8:], reason)
        if self._on_dropped is not None:
            self._on_dropped(donor, reason)

    _on_progress: Callable[[float], None] | None = None
    _on_dropped: Callable[[str, str], None] | None = None
