"""What a peer does on its coordinator's word, while something else is still under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.courtesy.rules import Rules
from swarmtrain.observe.events import Events
from swarmtrain.peer import heartbeats
from swarmtrain.peer.assignment import Assignment, Departure
from swarmtrain.peer.compute import ComputeThread
from swarmtrain.peer.courtesy import Courtesy
from swarmtrain.peer.heartbeats import Announcing, HeartbeatLoop
from swarmtrain.peer.identity import PeerState
from swarmtrain.peer.join import Syncing
from swarmtrain.peer.options import PeerOptions
from swarmtrain.peer.step import Ready, StepProtocol
from swarmtrain.reduce.coding import Reduced
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import Apply, ChunkDigests, Directive, FetchDigests, Verdict
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.records import parse_record

from .parts import parts_of
from .test_stage_jobs import manifest

__all__ = ["manifest"]  # a fixture
SERVE = Verdict(2, 0, Directive.SERVE, "", 0, "", ())


class Newcomer:
    """A peer of stage 0 at step 0, with a coordinator and a donor that answer when they are let."""

    peer_id = "p"

    def __init__(self, manifest: Manifest, compute: ComputeThread) -> None:
        nothing = cast(Any, None)
        parts = self.parts = parts_of(manifest, 0, self, compute, state=PeerState.JOINING)
        self.peer, self.clock = parts.peer, parts.clock
        self.assignment = Assignment(1, *parts.all, None, asyncio.Event())
        self.steps = StepProtocol(*parts.all)
        self.syncing = Syncing(*parts.all, self.steps, Events())
        options = PeerOptions(nothing, 0, nothing)
        observer = cast(Any, SimpleNamespace(spent=lambda: ()))
        self.heartbeats = HeartbeatLoop(
            self.assignment,
            options,
            nothing,
            self.steps,
            self.syncing,
            observer,
            Events(),
            Departure(Events()),
            metrics_at="",
        )
        self.answer: Verdict | None = None
        self.signs: list[tuple[str, int]] = []  # state and step
        self.on_sign: Callable[[], Awaitable[None]] | None = None  # before a sign is answered
        self.donor_asked, self.donor_answers = asyncio.Event(), asyncio.Event()

    async def call(self, peer_id: str, request: Any, deadline_s: float, *, expect: type[Any]) -> Any:
        if expect is Verdict:
            assert self.answer is not None
            self.signs.append((request.report.state, request.report.step))
            if self.on_sign is not None:
                await self.on_sign()
            return self.answer
        raise AssertionError(request)

    async def call_while_moving(self, peer_id: str, request: Any, stall_s: float, *, expect: type[Any]) -> Any:
        assert isinstance(request, FetchDigests)
        self.donor_asked.set()
        await self.donor_answers.wait()
        return ChunkDigests(0, b"")

    async def hears(self, answer: Verdict) -> None:
        """It shows a heartbeat, and this is the answer."""
        self.answer = answer
        await self.heartbeats._show_life("coordinator")

    async def serves(self, step: int) -> None:
        """It serves at `step`, with a microbatch in its ledger."""
        await self.hears(SERVE)
        await self.clock.enter(step)
        self.clock.ledger.open(0, b"", b"")

    @contextlib.asynccontextmanager
    async def drains(self) -> AsyncIterator[asyncio.Task[None]]:
        """It waits until what it has in its ledger is applied."""
        self.peer.become(PeerState.DRAINING)
        task = asyncio.create_task(self.assignment.drained(3600.0, asyncio.Event()))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def showing_life(self) -> AsyncIterator[None]:
        """It shows heartbeats as it does in a run."""
        link = SimpleNamespace(peer_id="coordinator", wants_look=False)
        self.heartbeats._link = cast(Any, link)
        task = asyncio.create_task(self.heartbeats.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


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


def test_a_peer_tells_both_of_its_rate_caps_to_the_coordinator_and_to_its_callers(manifest: Manifest) -> None:
    async def main(newcomer: Newcomer) -> None:
        nothing = cast(Any, None)
        options = PeerOptions(nothing, 0, nothing, max_up_bytes_per_s=5e5, max_down_bytes_per_s=2e6)
        newcomer.heartbeats._options = options
        told = newcomer.heartbeats._heartbeat().report
        assert (told.up_bytes_per_s, told.down_bytes_per_s) == (5e5, 2e6)
        host = cast(Any, SimpleNamespace(addresses=list))
        record = Announcing(newcomer.assignment, options, nothing, host, nothing)._record()
        report = parse_record(PeerReport, record)
        assert report is not None
        assert (report.up_bytes_per_s, report.down_bytes_per_s) == (5e5, 2e6)

    with_newcomer(manifest, main)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[bool]:
    """Whenever a peer is about to pause between two signs: whether it has a reason not to, and does not."""
    found = asyncio.Queue[bool]()

    async def wait_event(event: asyncio.Event, timeout_s: float) -> bool:
        found.put_nowait(event.is_set())
        return await event.wait()

    monkeypatch.setattr(heartbeats, "wait_event", wait_event)
    return found


def test_a_newcomer_that_is_told_to_serve_says_at_once_that_it_does(
    manifest: Manifest, pauses: asyncio.Queue[bool]
) -> None:
    async def main(newcomer: Newcomer) -> None:
        newcomer.answer = SERVE
        async with newcomer.showing_life():
            assert await pauses.get()
            assert not await pauses.get()
            assert newcomer.signs == [("joining", 0), ("serving", 0)]

    with_newcomer(manifest, main)


def test_what_changes_while_a_sign_of_life_is_answered_is_told_at_once(
    manifest: Manifest, pauses: asyncio.Queue[bool]
) -> None:
    async def main(newcomer: Newcomer) -> None:
        async def is_paused() -> None:
            newcomer.on_sign = None
            newcomer.peer.become(PeerState.PAUSED)
            newcomer.assignment.changed()

        await newcomer.hears(SERVE)
        newcomer.assignment.heartbeat_now.clear()
        newcomer.on_sign = is_paused
        async with newcomer.showing_life():
            assert await pauses.get()
            assert not await pauses.get()
            assert newcomer.signs[1:] == [("serving", 0), ("paused", 0)]

    with_newcomer(manifest, main)


def test_who_is_told_to_fetch_a_state_is_not_paused_on_the_way_there(manifest: Manifest) -> None:
    """Its owner's rules apply in the very moment between the word and the task that follows it."""

    async def main(newcomer: Newcomer) -> None:
        await newcomer.hears(SERVE)
        told = asyncio.create_task(newcomer.heartbeats._stop_serving("its state is wanting"))
        courtesy = Courtesy(Rules(), cast(Any, None), Events(), Path())
        while newcomer.peer.state is PeerState.SERVING:
            courtesy.apply(newcomer.assignment)
            await asyncio.sleep(0)
            courtesy.ask(pause=newcomer.heartbeats._assignment._syncing_since > 0.0)
        await told
        assert newcomer.peer.state is PeerState.SYNCING

    with_newcomer(manifest, main)


def test_a_step_that_is_applied_while_a_sign_of_life_is_answered_is_told_after_the_pause(
    manifest: Manifest, pauses: asyncio.Queue[bool]
) -> None:
    """Steps may be shorter than the way to the coordinator: every heartbeat would be followed by another at once."""

    async def main(newcomer: Newcomer) -> None:
        async def is_applied() -> None:
            await newcomer.clock.enter(newcomer.clock.step + 1)

        await newcomer.hears(SERVE)
        newcomer.assignment.heartbeat_now.clear()
        newcomer.on_sign = is_applied
        async with newcomer.showing_life():
            assert not await pauses.get()
            assert newcomer.signs[1:] == [("serving", 0)]

    with_newcomer(manifest, main)


def test_who_serves_after_a_roll_back_fetches_no_state_of_the_steps_that_were_taken_back(manifest: Manifest) -> None:
    """Loaded later, it would replace the run's state, and drop the work of a step under way."""

    async def main(newcomer: Newcomer) -> None:
        await newcomer.hears(Verdict(1, 5, Directive.SYNC, "", 5, "digest", ("donor",)))
        await newcomer.donor_asked.wait()
        assert newcomer.peer.state is PeerState.SYNCING
        fetching = newcomer.syncing._task
        assert fetching is not None
        await newcomer.hears(SERVE)  # the run is at step 0 again, as this peer is
        assert newcomer.peer.state is PeerState.SERVING
        assert fetching.done()

    with_newcomer(manifest, main)


def test_a_state_that_is_being_loaded_is_waited_for(manifest: Manifest) -> None:
    async def main(newcomer: Newcomer) -> None:
        loading, load = asyncio.Event(), asyncio.Event()

        async def slow_load(source: object, *, term: int) -> None:
            loading.set()
            await load.wait()

        newcomer.steps.load = slow_load  # type: ignore[method-assign]
        await newcomer.hears(Verdict(1, 0, Directive.SYNC, "", 0, "", ()))
        await loading.wait()
        await newcomer.hears(SERVE)
        assert newcomer.peer.state is PeerState.SYNCING
        task = newcomer.syncing._task
        assert task is not None
        load.set()
        await task
        await newcomer.hears(SERVE)
        assert newcomer.peer.state is PeerState.SERVING

    with_newcomer(manifest, main)


@pytest.mark.parametrize(("term", "run_step", "reached"), [(2, 0, 0), (2, 1, 1), (1, 0, 1)])
def test_a_newcomer_does_not_follow_decisions_that_were_taken_back(
    manifest: Manifest, term: int, run_step: int, reached: int
) -> None:
    """The run went back to step 0 under term 2; or its coordinator was only restarted; or nothing has happened."""

    async def main(newcomer: Newcomer) -> None:
        await newcomer.hears(Verdict(1, 1, Directive.WAIT, "", 0, "", ()))
        steps, jobs = newcomer.steps, newcomer.parts.stage.jobs
        steps._ready[0] = Ready(Reduced(jobs.worker.reduced_sum(), lambda: None), "sum", frozenset())
        steps._decisions[0] = Apply("run", 1, 0, "sum", 1.0, 0.0, False)
        await newcomer.hears(Verdict(term, run_step, Directive.SYNC, "", 0, "", ()))
        assert newcomer.syncing._task is not None
        assert await newcomer.syncing._task
        assert newcomer.clock.step == jobs.worker.state.step == reached

    with_newcomer(manifest, main)


def at_step(step: int, term: int = 2) -> Verdict:
    """What a peer that drains hears of a run at this step."""
    return Verdict(term, step, Directive.WAIT, "", 0, "", ())


async def is_over_soon(task: asyncio.Task[None]) -> bool:
    """Whether it ends by what has happened already: every task gets its turn some times."""
    for _ in range(20):
        await asyncio.sleep(0)
    return task.done()


@pytest.mark.parametrize(
    ("run_step", "holds_sum", "goes"),
    [
        (3, False, False),  # somebody may still die, and then its work counts
        (3, True, False),
        (4, False, True),  # done without it
        (4, True, False),  # decided perhaps, and applied by nobody yet
        (5, True, True),
        (2, False, True),  # the run went back
        (2, True, True),
    ],
)
def test_who_drains_goes_when_its_step_is_over_without_it_and_not_while_its_work_may_count(
    manifest: Manifest, run_step: int, holds_sum: bool, goes: bool
) -> None:
    async def main(peer: Newcomer) -> None:
        await peer.serves(3)
        if holds_sum:
            total = peer.parts.stage.jobs.worker.reduced_sum()
            peer.steps._ready[3] = Ready(Reduced(total, lambda: None), "sum", frozenset({0}))
        async with peer.drains() as draining:
            await peer.hears(at_step(run_step))
            assert await is_over_soon(draining) == goes
            await peer.clock.enter(4)  # its step is applied here as well
            if not goes:
                assert not await is_over_soon(draining), "the new state may be nowhere else"
                await peer.hears(replace(at_step(4), is_only=True))
                assert not await is_over_soon(draining)
                await peer.hears(at_step(4))
            await draining

    with_newcomer(manifest, main)


def test_who_drains_goes_when_all_that_it_had_came_to_nothing(manifest: Manifest) -> None:
    async def main(peer: Newcomer) -> None:
        await peer.serves(3)
        async with peer.drains() as draining:
            assert not await is_over_soon(draining)
            entry = peer.clock.ledger.get(0)
            assert entry is not None
            peer.clock.ledger.drop(entry)
            await peer.hears(at_step(3))
            await draining

    with_newcomer(manifest, main)


def test_who_drains_does_not_go_by_an_answer_to_what_it_said_before(manifest: Manifest) -> None:
    """It may have applied a step before the coordinator counted it; or the answer comes from a former term."""

    async def main(peer: Newcomer) -> None:
        await peer.serves(3)
        async with contextlib.AsyncExitStack() as stack:
            tasks = list[asyncio.Task[None]]()

            async def begins_to_drain() -> None:
                tasks.append(await stack.enter_async_context(peer.drains()))

            peer.on_sign = begins_to_drain
            await peer.hears(at_step(2))
            assert not await is_over_soon(tasks[0])
            peer.on_sign = None
            await peer.hears(at_step(4, term=1))
            assert not await is_over_soon(tasks[0])
            await peer.hears(at_step(4))
            await tasks[0]

    with_newcomer(manifest, main)
