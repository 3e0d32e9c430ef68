"""A state is fetched from several donors at once; wrong and dead donors cost their own chunks and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from runs import small

from swarmtrain.chain import state_transfer
from swarmtrain.chain.state_transfer import Download, StateSource, SyncFailed
from swarmtrain.model.buffers import state_digest
from swarmtrain.model.state import StageState
from swarmtrain.observe.faults import damaged
from swarmtrain.rpc.errors import LinkClosed
from swarmtrain.rpc.node import Node
from swarmtrain.wire.messages import ChunkDigests, FetchDigests, FetchState, StateChunk
from swarmtrain.wire.schema import Message

STEP = 3


@pytest.fixture(scope="module")
def source() -> StateSource:
    state = StageState(small(), 1)
    return StateSource(state.layout, STEP, 0, [buffer.detach() for buffer in state.buffers])


def digest_of(source: StateSource) -> str:
    raw = bytes(source.digests().digests)
    return state_digest(1, STEP, 0, [raw[i : i + 32] for i in range(0, len(raw), 32)])


class Donors:
    """Stands for a node: answers for all donors, and counts the chunks that each has given."""

    def __init__(self, source: StateSource) -> None:
        self.source = source
        self.given: Counter[str] = Counter()
        self.spoil: dict[str, Callable[[StateChunk], StateChunk]] = {}
        self.dies_after: dict[str, int] = {}

    async def call_while_moving(self, donor: str, request: Message, stall_s: float, *, expect: type[Any]) -> Message:
        await asyncio.sleep(0)
        if self.dies_after.get(donor, 1 << 30) <= self.given[donor]:
            raise LinkClosed("gone")
        if isinstance(request, FetchDigests):
            return self.source.digests()
        assert isinstance(request, FetchState)
        self.given[donor] += 1
        chunk = self.source.chunk(request.chunk)
        assert chunk is not None
        return self.spoil.get(donor, lambda item: item)(chunk)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk on the way at a time, so that donors take turns."""
    monkeypatch.setattr(state_transfer, "IN_FLIGHT", 1)


def download(donors: Donors) -> Download:
    node = cast(Node, donors)
    return Download(node, "run", donors.source.layout, STEP, digest_of(donors.source))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_state_arrives_whole_and_verified(source: StateSource) -> None:
    fetched = download(Donors(source))
    asyncio.run(fetched.run(["a", "b"]))
    assert same(fetched.buffers, source.buffers)
    assert fetched.progress == 1.0


def test_a_donor_that_damages_a_chunk_is_dropped_and_named(source: StateSource) -> None:
    donors, dropped = Donors(source), []
    donors.spoil["liar"] = lambda chunk: StateChunk(damaged(chunk.values))
    fetched = download(donors)
    asyncio.run(fetched.run(["liar", "b"], on_dropped=lambda donor, why: dropped.append((donor, why))))
    assert same(fetched.buffers, source.buffers)
    assert dropped == [("liar", "it sent a wrong chunk")]
    assert donors.given["liar"] == 1


def test_a_donor_that_dies_with_the_last_chunks_leaves_them_to_the_others(source: StateSource) -> None:
    donors, dropped = Donors(source), []
    donors.dies_after["dying"] = 0
    fetched = download(donors)
    asyncio.run(fetched.run(["b", "dying"], on_dropped=lambda donor, why: dropped.append(donor)))
    assert same(fetched.buffers, source.buffers)
    assert dropped == ["dying"]


def test_verified_chunks_are_kept_for_another_try(source: StateSource) -> None:
    donors = Donors(source)
    num_chunks = len(source.layout.chunks())
    donors.dies_after = {"a": num_chunks - 1}
    fetched = download(donors)
    with pytest.raises(SyncFailed, match="could not be had"):
        asyncio.run(fetched.run(["a"]))
    asyncio.run(fetched.run(["b"]))
    assert same(fetched.buffers, source.buffers)
    assert donors.given == {"a": num_chunks - 1, "b": 1}


def test_a_donor_with_another_state_is_dropped_before_a_chunk_is_asked_for(source: StateSource) -> None:
    donors = Donors(source)
    other = ChunkDigests(0, bytes(source.digests().digests)[::-1])

    async def call(donor: str, request: Message, stall_s: float, *, expect: type[Any]) -> Message:
        if donor == "liar" and isinstance(request, FetchDigests):
            return other
        return await Donors.call_while_moving(donors, donor, request, stall_s, expect=expect)

    donors.call_while_moving = call  # type: ignore[method-assign]
    fetched = download(donors)
    asyncio.run(fetched.run(["liar", "b"]))
    assert fetched.liars == ["liar"]
    assert donors.given["liar"] == 0


def test_nobody_left_is_an_error_that_counts_what_is_missing(source: StateSource) -> None:
    donors = Donors(source)
    donors.spoil["liar"] = lambda chunk: StateChunk(b"")
    with pytest.raises(SyncFailed, match="from 1 donors"):
        asyncio.run(download(donors).run(["liar"]))
