"""The compute thread: one job at a time, in the order of kind and age; errors and cancellations stay with their job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.peer.compute import ComputeThread, Key, Kind, Stopped, Withdrawn


def with_thread(main: Callable[[ComputeThread], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            compute = ComputeThread()
            try:
                await main(compute)
            finally:
                await compute.stop()

    asyncio.run(bounded())


async def held(
    compute: ComputeThread,
    submit: Callable[[], list[Coroutine[Any, Any, Any]]],
    before: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Submit jobs while the thread is busy with one, so that they are sorted before any of them runs."""
    busy, go = threading.Event(), threading.Event()

    def occupy() -> None:
        busy.set()
        assert go.wait(20)

    first = asyncio.create_task(compute.run(Kind.STEP, (-1, -1), occupy))
    await asyncio.to_thread(busy.wait, 20)
    tasks = [asyncio.create_task(item) for item in submit()]
    await asyncio.sleep(0)  # every task runs up to its await: its job is queued
    assert compute.backlog() == len(tasks)
    before()
    go.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(0, 5)), min_size=1, max_size=20), st.integers(0, 5))
def test_the_job_that_would_run_last_is_withdrawn_and_the_others_run(
    wanted: list[tuple[Kind, int]], may_not_go: int
) -> None:
    ran: list[int] = []
    withdrawn: list[Key | None] = []

    async def main(compute: ComputeThread) -> None:
        def withdraw() -> None:  # on the loop, while all the others wait
            withdrawn.append(compute.withdraw(Kind.FORWARD, lambda of: of != (0, may_not_go)))

        jobs = [compute.run(kind, (0, age), lambda i=i: ran.append(i)) for i, (kind, age) in enumerate(wanted)]
        found = await held(compute, lambda: jobs, before=withdraw)
        assert [i for i, one in enumerate(found) if isinstance(one, Withdrawn)] == expected
        assert compute.backlog() == 0

    order = sorted(range(len(wanted)), key=lambda i: (wanted[i][0].rank, wanted[i][1], i))
    forwards = [i for i in order if wanted[i][0] is Kind.FORWARD and wanted[i][1] != may_not_go]
    expected = forwards[-1:]
    with_thread(main)
    assert withdrawn == [(0, wanted[forwards[-1]][1]) if forwards else None]
    assert ran == [i for i in order if i not in expected]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(0, 5)), min_size=1, max_size=20))
def test_jobs_run_by_kind_then_age_then_arrival(wanted: list[tuple[Kind, int]]) -> None:
    ran: list[int] = []

    async def main(compute: ComputeThread) -> None:
        await held(
            compute,
            lambda: [compute.run(kind, (0, age), lambda i=i: ran.append(i)) for i, (kind, age) in enumerate(wanted)],
        )

    with_thread(main)
    assert ran == sorted(range(len(wanted)), key=lambda i: (wanted[i][0].rank, wanted[i][1], i))


def test_a_failing_job_fails_its_caller_and_nobody_else() -> None:
    async def main(compute: ComputeThread) -> None:
        def fail() -> None:
            raise ValueError("no")

        results = await held(
            compute, lambda: [compute.run(Kind.FORWARD, (0, 0), fail), compute.run(Kind.FORWARD, (0, 1), lambda: 7)]
        )
        assert isinstance(results[0], ValueError)
        assert results[1].value == 7

    with_thread(main)


def test_a_cancelled_job_that_waits_does_not_run() -> None:
    ran: list[str] = []

    async def main(compute: ComputeThread) -> None:
        busy, go = threading.Event(), threading.Event()
        first = asyncio.create_task(compute.run(Kind.STEP, (-1, -1), lambda: (busy.set(), go.wait(20))))
        await asyncio.to_thread(busy.wait, 20)
        doomed = asyncio.create_task(compute.run(Kind.FORWARD, (0, 0), lambda: ran.append("doomed")))
        kept = asyncio.create_task(compute.run(Kind.FORWARD, (0, 1), lambda: ran.append("kept")))
        await asyncio.sleep(0)
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)
        go.set()
        await asyncio.gather(first, kept)

    with_thread(main)
    assert ran == ["kept"]


def test_times_are_told_and_kept_apart() -> None:
    async def main(compute: ComputeThread) -> None:
        timed = await compute.run(Kind.FORWARD, (0, 0), lambda: 3)
        assert timed.value == 3
        assert timed.queue_s >= 0
        assert timed.run_s >= 0
        assert compute.times.count[Kind.FORWARD] == 1
        assert compute.times.count[Kind.BACKWARD] == 0
        assert compute.backlog_s() == 0

    with_thread(main)


def test_stopping_drops_what_waits_and_takes_nothing_more() -> None:
    ran: list[int] = []

    async def main(compute: ComputeThread) -> None:
        busy, go = threading.Event(), threading.Event()
        first = asyncio.create_task(compute.run(Kind.STEP, (-1, -1), lambda: (busy.set(), go.wait(20))))
        await asyncio.to_thread(busy.wait, 20)
        waiting = asyncio.create_task(compute.run(Kind.FORWARD, (0, 0), lambda: ran.append(0)))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(compute.stop())
        await asyncio.sleep(0)
        go.set()
        await stopping
        results = await asyncio.gather(first, waiting, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        with pytest.raises(Stopped):
            await compute.run(Kind.FORWARD, (0, 1), lambda: ran.append(1))

    with_thread(main)
    assert ran == []


def test_a_slower_machine_takes_its_time_for_the_named_kinds_only() -> None:
    async def main() -> None:
        compute = ComputeThread(at_least_s={Kind.FORWARD: 0.05})
        try:
            assert (await compute.run(Kind.FORWARD, (0, 0), lambda: 7)).run_s >= 0.05
            assert (await compute.run(Kind.BACKWARD, (0, 0), lambda: 7)).run_s < 0.05
        finally:
            await compute.stop()

    asyncio.run(main())
