"""How many microbatches are under way at once: it follows the delay, and never falls below two per peer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from chain.test_dispatch import FakeNeighbours

from swarmtrain.chain.dispatch import Dispatcher
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.lease import Leases, ResizableSemaphore
from swarmtrain.route.router import Router
from swarmtrain.route.views import PeerView
from swarmtrain.rpc.errors import CallRefused, Refusal
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Code, Done, Hop, Progress, Work
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.schema import Message

from .contexts import bare_context, heartbeat

NUM_MICROBATCHES = 120
NUM_STAGES = 2
NUM_LOST = 3
ROUTE = tuple(Hop(stage, f"p{stage}", "1") for stage in range(NUM_STAGES))


class Pipeline:
    """Answers every lease after `delay_s`, of which it says to have waited the share `waited` in queues."""

    def __init__(self, delay_s: float, waited: float) -> None:
        self._delay_s, self._waited = delay_s, waited
        self.num_inside = self.most_inside = 0
        self.seen: list[int] = []

    async def call(self, work: Work, **_: object) -> Done:
        self.seen.append(work.microbatch)
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(self._delay_s)
        took_s = asyncio.get_running_loop().time() - began  # longer than asked for, on a busy machine
        self.num_inside -= 1
        return Done(1.0, ROUTE, 0.0, 0.0, 0.0, b"", waited_s=self._waited * took_s)


class Sharing(Pipeline):
    """As much of a node as calling needs: what waits at the first peer of the stage is given to the second, at last."""

    async def call(  # type: ignore[override]
        self, peer_id: str, work: Work, deadline_s: float, on_progress: Callable[[Message], None], *, expect: type[Done]
    ) -> Done:
        if not work.is_stolen:
            await super().call(work)
            raise CallRefused(Code.REDIRECTED, redirect_to="second")
        on_progress(Progress(()))
        return Done(1.0, (Hop(0, peer_id, "1"), *ROUTE[1:]), 0.0, 0.0, 0.0, b"")


class Full(Pipeline):
    """As much of a node as calling needs: the only peer of the stage, which is busy while it has two microbatches."""

    async def call(  # type: ignore[override]
        self, peer_id: str, work: Work, deadline_s: float, on_progress: Callable[[Message], None], *, expect: type[Done]
    ) -> Done:
        if self.num_inside == 2:
            raise CallRefused(Code.BUSY, retry_after_s=self._delay_s)
        return replace(await super().call(work), route=(Hop(0, peer_id, "1"), *ROUTE[1:]))


def leases_over(pipeline: Pipeline | Dispatcher, num_peers: int, *changes: str) -> Leases:
    size = (f"batch.microbatches_per_step={NUM_MICROBATCHES}", f"stages.count={NUM_STAGES}", "schedule.steps=1")
    manifest = preset("nano", [*size, "schedule.warmup_steps=0", *changes])
    sampler = SimpleNamespace(microbatch=lambda step, index: np.zeros((1, 2)))
    context = bare_context(manifest, dispatcher=pipeline, sampler=sampler)
    for number in range(num_peers):
        beat = heartbeat(number % NUM_STAGES, "serving", "1", 0, "")
        context.members.heartbeat(f"p{number}", beat, 0.0)
    return Leases(context)


async def all_leased(leases: Leases) -> None:
    """All steps, where none has to wait for a state."""
    await leases.allow(leases._context.manifest.schedule.steps)
    await leases.fill()


@pytest.mark.parametrize(("waited", "grows"), [(0.0, True), (0.9, False)])
def test_more_is_in_flight_where_time_goes_into_distance_and_not_where_it_goes_into_queues(
    waited: float, grows: bool
) -> None:
    async def main() -> tuple[Pipeline, Leases]:
        pipeline = Pipeline(0.005, waited)
        leases = leases_over(pipeline, num_peers=3)
        await all_leased(leases)
        return pipeline, leases

    pipeline, leases = asyncio.run(main())
    assert pipeline.seen == list(range(NUM_MICROBATCHES))  # each once, in order
    assert (pipeline.most_inside > 20) is grows
    assert pipeline.most_inside >= 6  # two for each of three peers
    assert leases.window() <= NUM_MICROBATCHES


def test_time_in_the_queue_of_a_peer_that_gives_its_work_away_is_no_distance() -> None:
    async def main() -> Sharing:
        node = Sharing(0.05, 0.0)
        neighbours = FakeNeighbours(["first", "second"])
        leases = leases_over(Dispatcher(cast(Any, node), cast(Any, neighbours)), num_peers=3)
        await all_leased(leases)
        return node

    node = asyncio.run(main())
    assert sorted(node.seen) == list(range(NUM_MICROBATCHES))
    assert 6 <= node.most_inside <= 20


def test_time_in_which_every_peer_is_busy_is_no_distance() -> None:
    async def main() -> tuple[Full, int]:
        loop = asyncio.get_running_loop()
        node, router = Full(0.005, 0.0), Router(clock=loop.time, rng=random.Random(0))
        router.update_peers([PeerView("only", PeerReport(0))])
        neighbours = SimpleNamespace(router=router, wait_for_news=asyncio.sleep, observe_link=lambda peer_id: None)
        leases = leases_over(Dispatcher(cast(Any, node), cast(Any, neighbours)), num_peers=3)
        await all_leased(leases)
        return node, leases.window()

    node, window = asyncio.run(main())
    assert sorted(node.seen) == list(range(NUM_MICROBATCHES))
    assert 6 <= window <= 30


def test_a_failed_lease_ends_the_step_although_others_wait_for_room() -> None:
    class Broken(Pipeline):
        async def call(self, work: Work, **_: object) -> Done:
            if work.microbatch == 3:
                raise ZeroDivisionError
            return await super().call(work)

    async def main() -> None:
        leases = leases_over(Broken(10.0, 0.0), num_peers=2)
        await all_leased(leases)

    with pytest.raises(ExceptionGroup):
        asyncio.run(asyncio.wait_for(main(), 5.0))


def test_room_that_grows_lets_more_in() -> None:
    async def main() -> list[int]:
        size, entered = 1, []
        room = ResizableSemaphore(lambda: size)

        async def enter(number: int) -> None:
            await room.enter()
            entered.append(number)

        waiting = asyncio.create_task(enter(0))
        await waiting
        more = asyncio.create_task(enter(1))
        await asyncio.sleep(0)
        assert entered == [0]
        size = 2
        room.leave()
        await more
        await enter(2)
        return entered

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_lease_that_ran_out_makes_the_window_smaller_and_is_given_again() -> None:
    class Stuck(Pipeline):
        async def call(self, work: Work, **_: object) -> Done:
            if len(self.seen) < NUM_LOST:
                self.seen.append(work.microbatch)
                raise Refusal(Code.NOBODY, "no peer did it in time")
            return await super().call(work)

    async def news(timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def main() -> tuple[int, int, list[int]]:
        pipeline = Stuck(0.0, 0.9)
        pipeline.neighbours = SimpleNamespace(wait_for_news=news)  # type: ignore[attr-defined]
        leases = leases_over(pipeline, num_peers=0)
        before = leases.window()
        await leases._lease(0, 5, StepBooks(NUM_STAGES, NUM_MICROBATCHES), ())
        return before, leases.window(), pipeline.seen

    before, after, seen = asyncio.run(main())
    assert after < before
    assert seen == [5] * (NUM_LOST + 1)


class Steps(Pipeline):
    """Which steps' microbatches came, in order."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)
        self.steps: list[int] = []

    async def call(self, work: Work, **_: object) -> Done:
        if work.step not in self.steps:
            self.steps.append(work.step)
        return await super().call(work)


@pytest.mark.parametrize(
    ("changes", "leased"),
    [
        ((), [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        (("schedule.delay=1",), [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
        (
            ("schedule.delay=1", "checkpoint.every=2"),  # a barrier: step 2 sees the weights of step 2
            [[0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]],
        ),
        (
            ("schedule.delay=1", "schedule.delay_from=3"),
            [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
        ),
    ],
)
def test_a_step_is_leased_as_soon_as_peers_have_the_state_that_it_computes_with(
    changes: tuple[str, ...], leased: list[list[int]]
) -> None:
    """`leased`: the steps of which microbatches have come while peers have applied 0, 1, ... steps."""

    async def main() -> None:
        pipeline = Steps()
        leases = leases_over(pipeline, 3, "schedule.steps=5", "batch.microbatches_per_step=4", *changes)
        filling = asyncio.create_task(leases.fill())
        for newest, steps in enumerate(leased):
            await leases.allow(newest)
            books = leases._context.books
            await leases._context.wait_for(
                lambda steps=steps, books=books: all(step in books and books[step].is_answered for step in steps)
            )
            for _ in range(20):  # nothing comes of what must wait
                await asyncio.sleep(0)
            assert pipeline.steps == steps
            assert leases.idle_s >= 0.0
        await filling

    asyncio.run(main())
