"""What a peer makes of the next stage's answers: checked as messages, and a late one is nobody's fault but its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch

from swarmtrain.chain.dispatch import Dispatcher
from swarmtrain.peer.compute import ComputeThread, Kind
from swarmtrain.peer.ledger import Entry
from swarmtrain.peer.microbatch import Microbatches
from swarmtrain.peer.work_stealing import Thief
from swarmtrain.route.router import Router
from swarmtrain.route.views import PeerView
from swarmtrain.rpc.errors import CallRefused, Refusal
from swarmtrain.run.manifest import Manifest, parse_manifest
from swarmtrain.wire.messages import Code, Done, Hop, Replay, Work
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.schema import encode

from .parts import parts_of
from .test_room import Caller, unmeasured
from .test_stage_jobs import jobs_of, manifest, tokens

__all__ = ["manifest"]  # a fixture

P = TypeVar("P")


class Last:
    """A peer of the last stage, and two lives of one upstream: the second one remembers nothing of the first."""

    def __init__(self, manifest: Manifest, compute: ComputeThread) -> None:
        node = cast(Any, SimpleNamespace(peer_id="p", backlog_bytes=lambda: 1 << 40, estimate=unmeasured))
        self.parts = parts_of(manifest, 1, node, compute)
        self.parts.peer.contact_at = math.inf
        thief = Thief(*self.parts.all)
        self._manifest, self._microbatches = manifest, Microbatches(*self.parts.all, None, thief, max_queue=100)
        self.upstream = [jobs_of(manifest, 0), jobs_of(manifest, 0)]
        self.upstream[0].forward(Entry(0, 0, tokens(manifest, 0), b""), 0)

    def request(self, life: int) -> Work:
        entry = Entry(0, 1, tokens(self._manifest, 1), b"")
        boundary = memoryview(self.upstream[life].forward(entry, 0).payload)  # as it comes from the wire
        return Work("run", 0, 1, 0, 1, 0, False, (), entry.tokens, boundary)

    async def work(self, work: Work) -> Done:
        return await self._microbatches.work(work, cast(Any, Caller()))


class Downstream:
    """The next stage: one peer, which answers at once, unless `before` has something to do first."""

    def __init__(self, manifest: Manifest) -> None:
        self._jobs = jobs_of(manifest, 1)
        self.before: Callable[[], Awaitable[None]] | None = None
        self.waited_s = 0.0  # as it says
        self.num_refusals = 0  # so often it is busy

    async def call(self, peer_id: str, work: Work, deadline_s: float, progress: object, *, expect: object) -> Done:
        if self.num_refusals:
            self.num_refusals -= 1
            raise CallRefused(Code.BUSY, retry_after_s=0.02)
        entry = Entry(work.step, work.microbatch, work.tokens, work.boundary, generation=self._jobs.generation)
        outcome = self._jobs.forward(entry, work.step)
        if self.before is not None:
            await self.before()
        return Done(outcome.loss, (Hop(1, peer_id, "life"),), 0.0, 0.0, 0.0, outcome.payload, waited_s=self.waited_s)


class First:
    """A peer of stage 0 with one peer downstream, without a network."""

    def __init__(self, manifest: Manifest, compute: ComputeThread) -> None:
        self.downstream = Downstream(manifest)
        loop = asyncio.get_running_loop()
        self.router = Router(clock=loop.time, rng=cast(Any, SimpleNamespace(random=lambda: 1.0)))
        self.router.update_peers([PeerView("downstream", PeerReport(1))])
        self.paused_s = 0.0  # because all peers downstream were busy
        neighbours = SimpleNamespace(
            router=self.router, observe_link=lambda peer_id: None, wait_for_news=self._wait_for_news
        )
        node = cast(
            Any,
            SimpleNamespace(peer_id="p", call=self.downstream.call, backlog_bytes=lambda: 1 << 40, estimate=unmeasured),
        )
        authority = cast(Any, SimpleNamespace(is_coordinator=self._is_coordinator))
        dispatcher = Dispatcher(node, cast(Any, neighbours))
        self.parts = parts_of(manifest, 0, node, compute, authority=authority)
        thief = Thief(*self.parts.all)
        self._manifest, self._microbatches = manifest, Microbatches(*self.parts.all, dispatcher, thief, max_queue=100)

    async def _wait_for_news(self, timeout_s: float) -> None:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(timeout_s)
        self.paused_s += asyncio.get_running_loop().time() - began

    async def _is_coordinator(self, peer_id: str) -> bool:
        return True

    async def work(self) -> Done:
        request = Work("run", 0, 0, 0, 0, 0, False, (), tokens(self._manifest, 0), b"")
        return await self._microbatches.work(request, cast(Any, Caller()))

    async def replay(self) -> Done:
        return await self._microbatches.replay(Replay("run", 0, 0, 0, ()), cast(Any, Caller()))

    async def drop_step(self) -> None:
        """As when the step was done without this peer."""
        await self.parts.stage.drop_work()


def run_with(
    kind: Callable[[Manifest, ComputeThread], P], manifest: Manifest, main: Callable[[P], Awaitable[None]]
) -> None:
    async def bounded() -> None:
        compute = ComputeThread()
        try:
            async with asyncio.timeout(60):
                await main(kind(manifest, compute))
        finally:
            await compute.stop()

    asyncio.run(bounded())


def masked(manifest: Manifest) -> Manifest:
    """Its gradients cannot be decoded without what was kept of the forward."""
    return parse_manifest(manifest.canonical(), ["wire.forward=topk10", "wire.backward=topk10"])


def test_checking_an_answer_says_nothing_about_how_long_step_work_takes(manifest: Manifest) -> None:
    async def main(first: First) -> None:
        await first.work()
        await first.replay()
        times = first.parts.stage.times
        assert times.count[Kind.STEP] == 0
        assert times.count[Kind.MESSAGE] == 2

    run_with(First, manifest, main)


def test_one_that_says_to_have_waited_for_ever_does_not_keep_its_caller_from_answering(manifest: Manifest) -> None:
    """What is told of waiting is added up from stage to stage, and a message holds no more than the most of one."""

    async def main(first: First) -> None:
        first.downstream.waited_s = 1e9
        began = asyncio.get_running_loop().time()
        answer = await first.work()
        took_s = asyncio.get_running_loop().time() - began
        for told in (answer, await first.work()):  # once more: from the ledger
            encode(told)
            assert told.waited_s <= took_s

    run_with(First, manifest, main)


def test_waiting_for_a_next_stage_that_is_busy_is_told_to_who_called(manifest: Manifest) -> None:
    async def main(first: First) -> None:
        first.downstream.num_refusals = 3
        began = asyncio.get_running_loop().time()
        answer = await first.work()
        took_s = asyncio.get_running_loop().time() - began
        assert first.downstream.num_refusals == 0
        assert 0.0 < first.paused_s <= answer.waited_s <= took_s

    run_with(First, manifest, main)


@pytest.mark.parametrize("again", [False, True])
def test_an_answer_that_comes_when_the_step_is_over_is_not_held_against_its_sender(
    manifest: Manifest, again: bool
) -> None:
    async def main(first: First) -> None:
        if again:
            await first.work()
        first.downstream.before = first.drop_step
        with pytest.raises(Refusal) as caught:
            await (first.replay() if again else first.work())
        assert caught.value.code == Code.AHEAD
        assert not first.router.is_banned("downstream")
        assert not first.parts.stage.jobs.worker.sum.total.any()

    run_with(First, masked(manifest), main)


@pytest.mark.parametrize("backward", ["topk25", "ef21-topk50"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_caller_that_sends_other_bytes_gets_the_mask_that_the_gradient_belongs_to(
    manifest: Manifest, backward: str, joined: bool
) -> None:
    """While the first answer is still being computed, and when it is in the ledger; a difference is not for it."""
    run = parse_manifest(manifest.canonical(), ["wire.forward=ef-topk25", f"wire.backward={backward}"])

    async def main(last: Last) -> None:
        one, other = last.request(0), last.request(1)
        assert one.boundary != other.boundary
        if joined:
            answers = await asyncio.gather(last.work(one), last.work(other))
        else:
            answers = [await last.work(one), await last.work(other)]
        mine, theirs = last.parts.ledger.get(1), last.upstream[1]
        assert mine is not None
        assert mine.answer is not None
        assert last.parts.stage.jobs.num_forwards == 1
        right = last.upstream[0].codecs.decode_gradient(
            mine.answer.gradient, 0, 1, last.upstream[0]._masks_out[0, 1, 0]
        )
        gotten = theirs.codecs.decode_gradient(answers[1].gradient, 0, 1, theirs._masks_out[0, 1, 0])
        assert torch.equal(gotten, right)
        assert (await last.work(other)).gradient is answers[1].gradient  # made once
        assert mine.num_bytes >= len(answers[1].gradient) + len(mine.answer.gradient)

    run_with(Last, run, main)
