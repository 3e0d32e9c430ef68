"""Bounds of a peer: what it has no room for is refused as busy, counted and taken later; what it has is answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rpc.helpers import until

from swarmtrain.peer import microbatch as microbatch_module
from swarmtrain.peer.compute import ComputeThread, Kind
from swarmtrain.peer.identity import PeerState
from swarmtrain.peer.ledger import Entry
from swarmtrain.peer.microbatch import Microbatches
from swarmtrain.peer.work_stealing import Thief
from swarmtrain.rpc.errors import Refusal
from swarmtrain.rpc.meter import LinkEstimate
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import Code, Done, Work

from .parts import CALLER, HUGE, parts_of
from .test_stage_jobs import jobs_of, manifest, tokens

__all__ = ["manifest"]  # a fixture


def unmeasured(peer_id: str) -> LinkEstimate:
    """What is known of a line that nothing large has crossed."""
    return LinkEstimate(peer_id, None, None, None, None, 0, 0)


class Caller:
    """As much of an exchange as a microbatch needs."""

    peer_id = CALLER

    def __init__(self) -> None:
        self.deadline = asyncio.get_running_loop().time() + 60.0

    def progress(self, item: object) -> None:
        return None


class Peer:
    """A peer of the last stage, without a network."""

    def __init__(self, manifest: Manifest, compute: ComputeThread, *, max_queue: int, max_ledger_bytes: int) -> None:
        node = cast(Any, SimpleNamespace(peer_id="p", backlog_bytes=lambda: 1 << 40, estimate=unmeasured))
        self.parts = parts_of(manifest, 1, node, compute, max_ledger_bytes=max_ledger_bytes)
        self.parts.peer.contact_at = asyncio.get_running_loop().time()
        self._manifest, self._upstream = manifest, jobs_of(manifest, 0)
        thief = Thief(*self.parts.all)
        self._microbatches = Microbatches(*self.parts.all, None, thief, max_queue=max_queue)

    async def work(self, microbatch: int, *, steps_ahead: int = 0) -> Done:
        ids = tokens(self._manifest, microbatch)
        boundary = self._upstream.forward(Entry(0, microbatch, ids, b""), 0).payload
        request = Work("run", 0, 1, self.parts.clock.step + steps_ahead, microbatch, 0, False, (), ids, boundary)
        return await self._microbatches.work(request, cast(Any, Caller()))

    async def refuses(self, microbatch: int) -> None:
        """It says that it is busy and until when, and counts that."""
        with pytest.raises(Refusal) as caught:
            await self.work(microbatch)
        assert caught.value.code == Code.BUSY
        assert caught.value.retry_after_s > 0.0
        assert self.parts.peer.counters.refused == {Code.BUSY: 1}


@asynccontextmanager
async def peer_of(manifest: Manifest, *, max_queue: int = 100, max_ledger_bytes: int = HUGE) -> AsyncIterator[Peer]:
    compute = ComputeThread()
    try:
        async with asyncio.timeout(60):
            yield Peer(manifest, compute, max_queue=max_queue, max_ledger_bytes=max_ledger_bytes)
    finally:
        await compute.stop()


def test_a_full_queue_refuses_new_work_and_takes_it_when_it_is_shorter(manifest: Manifest) -> None:
    async def main() -> None:
        async with peer_of(manifest, max_queue=2) as peer:
            go = threading.Event()
            asyncio.get_running_loop().call_later(20.0, go.set)  # if the test fails, it ends all the same
            occupied = asyncio.create_task(peer.parts.compute.run(Kind.STEP, (-1, -1), go.wait))
            waiting = [asyncio.create_task(peer.work(microbatch)) for microbatch in (0, 1)]
            await until(lambda: peer.parts.compute.backlog() == 2, "both wait")
            await peer.refuses(2)
            assert len(peer.parts.ledger) == 2  # nothing of the refused one is kept
            joined = asyncio.create_task(peer.work(1))  # it has that one
            go.set()
            await occupied
            answers = await asyncio.gather(*waiting)
            assert await joined == answers[1]
            await peer.work(2)

    asyncio.run(main())


def test_a_full_ledger_refuses_new_work_until_the_next_step_and_answers_for_what_it_has(manifest: Manifest) -> None:
    async def main() -> None:
        async with peer_of(manifest, max_ledger_bytes=1) as peer:
            first = await peer.work(0)
            assert peer.parts.ledger.num_bytes() > 1
            await peer.refuses(1)
            assert await peer.work(0) is first
            assert peer.parts.peer.counters.from_ledger == 1
            await peer.parts.clock.enter(peer.parts.clock.step)  # as after an apply: the ledger is empty
            await peer.work(1)

    asyncio.run(main())


@pytest.mark.parametrize("state", [PeerState.PAUSED, PeerState.DRAINING])
def test_who_rests_answers_for_what_it_has_and_takes_nothing_new(manifest: Manifest, state: PeerState) -> None:
    async def main() -> None:
        async with peer_of(manifest) as peer:
            first = await peer.work(0)
            peer.parts.peer.become(state)
            assert await peer.work(0) is first
            with pytest.raises(Refusal) as caught:
                await peer.work(1)
            assert caught.value.code == Code.NOT_SERVING

    asyncio.run(main())


@pytest.mark.parametrize("state", [PeerState.PAUSED, PeerState.DRAINING])
def test_who_takes_no_more_work_lets_none_of_the_next_step_wait(
    manifest: Manifest, state: PeerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without work in this step it is not asked to end it: the caller would wait for nothing."""
    monkeypatch.setattr(microbatch_module, "STEP_WAIT_S", 3600.0)

    async def main() -> None:
        async with peer_of(manifest) as peer:
            first = await peer.work(0)
            peer.parts.peer.become(state)
            with pytest.raises(Refusal) as caught:
                await peer.work(1, steps_ahead=1)
            assert caught.value.code == Code.NOT_SERVING
            assert await peer.work(0) is first  # it answers for what it has

    asyncio.run(main())
