"""What a peer does on its coordinator's word, while something else is still under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.observe.events import Events
from swarmtrain.peer.compute import ComputeThread
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.enrolling import Enrolling
from swarmtrain.peer.options import PeerOptions
from swarmtrain.peer.seat import Seat
from swarmtrain.peer.steps import Ready, Steps
from swarmtrain.peer.syncing import Syncing
from swarmtrain.reduce.coding import Reduced
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import Apply, ChunkDigests, Enrolled, FetchDigests, Verdict

from .test_stage_jobs import jobs_of, manifest

__all__ = ["manifest"]  # a fixture
SERVE = Enrolled(2, 0, Verdict.SERVE, "", 0, "", ())


class Newcomer:
    """A peer of stage 0 at step 0, with a coordinator and a donor that answer when they are let."""

    peer_id = "p"

    def __init__(self, manifest: Manifest, compute: ComputeThread) -> None:
        nothing = cast(Any, None)
        node = cast(Any, self)
        jobs = jobs_of(manifest, 0)
        context = PeerContext("run", manifest, 0, "life", node, compute, jobs, nothing, None, 100, 1 << 40)
        self.context, self.seat, self.steps = context, Seat(1, context), Steps(context)
        self.syncing = Syncing(context, self.steps, Events())
        options = PeerOptions(nothing, 0, nothing)
        observer = cast(Any, SimpleNamespace(spent=lambda: ()))
        self.enrolling = Enrolling(
            self.seat,
            options,
            nothing,
            self.steps,
            self.syncing,
            observer,
            leave=lambda reason: None,
            say_phase=lambda phase, detail: None,
        )
        self.answer: Enrolled | None = None
        self.donor_asked, self.donor_answers = asyncio.Event(), asyncio.Event()

    async def call(self, peer_id: str, request: Any, deadline_s: float, *, expect: type[Any]) -> Any:
        if expect is Enrolled:
            assert self.answer is not None
            return self.answer
        assert isinstance(request, FetchDigests)
        self.donor_asked.set()
        await self.donor_answers.wait()
        return ChunkDigests(0, b"")

    async def hears(self, answer: Enrolled) -> None:
        """It shows a sign of life, and this is the answer."""
        self.answer = answer
        await self.enrolling._show_life("coordinator")


def with_newcomer(manifest: Manifest, main: Callable[[Newcomer], Awaitable[None]]) -> None:
    async def bounded() -> None:
        compute = ComputeThread()
        try:
            async with asyncio.timeout(60):
                newcomer = Newcomer(manifest, compute)
                await main(newcomer)
                await newcomer.syncing.close()
        finally:
            await compute.stop()

    asyncio.run(bounded())


def test_who_serves_after_a_roll_back_fetches_no_state_of_the_steps_that_were_taken_back(manifest: Manifest) -> None:
    """Loaded later, it would replace the run's state, and drop the work of a step under way."""

    async def main(newcomer: Newcomer) -> None:
        await newcomer.hears(Enrolled(1, 5, Verdict.SYNC, "", 5, "digest", ("donor",)))
        await newcomer.donor_asked.wait()
        assert newcomer.context.state is PeerState.SYNCING
        fetching = newcomer.syncing._task
        assert fetching is not None
        await newcomer.hears(SERVE)  # the run is at step 0 again, as this peer is
        assert newcomer.context.state is PeerState.SERVING
        assert fetching.done()

    with_newcomer(manifest, main)


def test_a_state_that_is_being_loaded_is_waited_for(manifest: Manifest) -> None:
    async def main(newcomer: Newcomer) -> None:
        loading, load = asyncio.Event(), asyncio.Event()

        async def slow_load(source: object) -> None:
            loading.set()
            await load.wait()

        newcomer.steps.load = slow_load  # type: ignore[method-assign]
        await newcomer.hears(Enrolled(1, 0, Verdict.SYNC, "", 0, "", ()))
        await loading.wait()
        await newcomer.hears(SERVE)
        assert newcomer.context.state is PeerState.SYNCING
        task = newcomer.syncing._task
        assert task is not None
        load.set()
        await task
        await newcomer.hears(SERVE)
        assert newcomer.context.state is PeerState.SERVING

    with_newcomer(manifest, main)


@pytest.mark.parametrize(("term", "run_step", "reached"), [(2, 0, 0), (2, 1, 1), (1, 0, 1)])
def test_a_newcomer_does_not_follow_decisions_that_were_taken_back(
    manifest: Manifest, term: int, run_step: int, reached: int
) -> None:
    """The run went back to step 0 under term 2; or its coordinator was only restarted; or nothing has happened."""

    async def main(newcomer: Newcomer) -> None:
        await newcomer.hears(Enrolled(1, 1, Verdict.WAIT, "", 0, "", ()))
        steps, jobs = newcomer.steps, newcomer.context.jobs
        steps._ready[0] = Ready(Reduced(jobs.worker.reduced_sum(), lambda: None), "sum", frozenset())
        steps._decisions[0] = Apply("run", 1, 0, "sum", 1.0, 0.0, False)
        await newcomer.hears(Enrolled(term, run_step, Verdict.SYNC, "", 0, "", ()))
        assert newcomer.syncing._task is not None
        assert await newcomer.syncing._task
        assert newcomer.context.step == jobs.worker.state.step == reached

    with_newcomer(manifest, main)
