"""The virtual loop: time that jumps, an order that the seed decides, processes that are stopped and killed."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable

import pytest

from swarmtrain.simulated.loop import PROCESS, Deadlock, VirtualLoop


class OneProcess:
    def __init__(self, loop: VirtualLoop) -> None:
        self.is_alive = True
        self.held: deque[asyncio.Handle] | None = None
        self._loop = loop
        self._context = contextvars.Context()
        self._context.run(PROCESS.set, self)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback, context=self._context)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, callback, context=self._context)


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop("test")


def test_an_hour_passes_at_once(loop: VirtualLoop) -> None:
    done = []
    loop.call_later(3600.0, lambda: done.append(loop.time()))
    started = time.monotonic()
    assert loop.run_until(lambda: bool(done), limit_s=7200.0)
    assert done == [3600.0]
    assert time.monotonic() - started < 600.0  # not an hour


def test_what_never_happens_is_not_waited_for_beyond_the_limit(loop: VirtualLoop) -> None:
    loop.call_later(100.0, lambda: None)
    assert not loop.run_until(lambda: False, limit_s=50.0)


def test_nothing_left_to_happen_is_an_error(loop: VirtualLoop) -> None:
    with pytest.raises(Deadlock):
        loop.run_until(lambda: False, limit_s=1.0)


def test_spinning_without_a_timer_gets_older_as_well(loop: VirtualLoop) -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110  # that it spins is the point
            await asyncio.sleep(0)

    task = loop.create_task(spin())
    assert not loop.run_until(lambda: False, limit_s=0.001)
    task.cancel()
    loop.run_until(task.done, limit_s=1.0)


def order_of(seed: str) -> list[str]:
    loop, said = VirtualLoop(seed), list[str]()
    one, other = OneProcess(loop), OneProcess(loop)
    for number in range(8):
        one.call_soon(lambda number=number: said.append(f"one {number}"))  # type: ignore[misc]
        other.call_soon(lambda number=number: said.append(f"other {number}"))  # type: ignore[misc]
    loop.run_until(lambda: len(said) == 16, limit_s=1.0)
    return said


def test_within_a_process_callbacks_run_in_turn_and_between_processes_as_the_seed_says() -> None:
    orders = [order_of(str(seed)) for seed in range(20)]
    for said in orders:
        assert [line for line in said if line.startswith("one")] == [f"one {number}" for number in range(8)]
        assert [line for line in said if line.startswith("other")] == [f"other {number}" for number in range(8)]
    assert len({tuple(said) for said in orders}) > 10
    assert order_of("3") == order_of("3")


def test_a_killed_process_never_runs_again(loop: VirtualLoop) -> None:
    process, said = OneProcess(loop), list[str]()
    process.call_soon(lambda: said.append("now"))
    process.call_later(1.0, lambda: said.append("later"))
    loop.run_until(lambda: bool(said), limit_s=0.5)
    process.is_alive = False
    loop.call_later(2.0, lambda: said.append("somebody else"))
    loop.run_until(lambda: len(said) == 2, limit_s=5.0)
    assert said == ["now", "somebody else"]


def test_a_stopped_process_does_everything_later_and_in_turn(loop: VirtualLoop) -> None:
    process, said = OneProcess(loop), list[str]()
    process.held = deque()
    process.call_soon(lambda: said.append("first"))
    process.call_later(1.0, lambda: said.append("second"))
    loop.call_later(5.0, lambda: None)
    loop.run_until(lambda: loop.time() >= 5.0, limit_s=6.0)
    assert said == []
    process.call_soon(lambda: said.append("third"))
    loop.let_go(process)
    loop.run_until(lambda: len(said) == 3, limit_s=1.0)
    assert said == ["first", "second", "third"]


def test_where_a_task_lies_in_a_set_does_not_depend_on_memory(loop: VirtualLoop) -> None:
    async def nothing() -> None:
        pass

    tasks = [loop.create_task(nothing()) for _ in range(5)]
    serials = [hash(task) for task in tasks]
    assert serials == list(range(serials[0], serials[0] + 5))
    loop.run_until(lambda: all(task.done() for task in tasks), limit_s=1.0)


def test_many_cancelled_timers_are_dropped_and_the_others_run_once(loop: VirtualLoop) -> None:
    ran: list[int] = []
    for number in range(400):
        timer = loop.call_later(1.0 + number / 1000, ran.append, number)
        if number % 4:
            timer.cancel()
    loop.run_until(lambda: len(ran) == 100, limit_s=5.0)
    loop.call_later(1.0, lambda: None)
    loop.run_until(lambda: False, limit_s=0.5)
    assert ran == list(range(0, 400, 4))
