"""An event loop on virtual time: when nothing is ready, the clock jumps to the next timer.

Callbacks of one process run in the order in which they were asked for, as asyncio promises. Between processes there is
no order: the seed decides. What belongs to a process that was killed is dropped, what belongs to a stopped one waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

ITERATION_S = 2e-6  # duration of a turn of the loop, so that time also passes for a task that spins


class Process(Protocol):
    """The owner of callbacks."""

    is_alive: bool
    held: deque[asyncio.Handle] | None  # its callbacks while it is stopped


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Deadlock(Exception):
    """No callback is ready and no timer is set: the simulation is deadlocked."""


class _Task(asyncio.Task[Any]):
    """A task whose order in a set does not depend on its address in memory."""

    _serial: int

    def __hash__(self) -> int:
        return self._serial


class _Future(asyncio.Future[Any]):
    """The same for futures."""

    _serial: int

    def __hash__(self) -> int:
        return self._serial


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module docstring."""

    _ready: deque[Any]  # handles; asyncio's own, as the next two
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(self, seed: str) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._virtual_s = 0.0
        self._serial = 0
        self._clock_resolution = 1e-9
        self.num_callbacks = 0
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        """Seconds since the world began."""
        return self._virtual_s

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        future = _Future(loop=self)
        self._serial += 1
        future._serial = self._serial
        return future

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        self._serial += 1
        task = _Task.__new__(_Task)
        task._serial = self._serial  # before it is put into asyncio's set of all tasks
        task.__init__(coroutine, loop=loop, context=context)  # type: ignore[misc]
        return task

    def run_until(self, condition: Callable[[], bool], *, limit_s: float) -> bool:
        """Run until `condition` holds or `limit_s` seconds have passed; returns whether it holds."""
        ends_at = self._virtual_s + limit_s
        with self.entered():
            while not condition():
                if self._virtual_s >= ends_at:
                    return False
                self._run_once()
            return True

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this is the loop that runs."""
        previous = asyncio.events._get_running_loop()
        asyncio.events._set_running_loop(self)
        try:
            yield
        finally:
            asyncio.events._set_running_loop(previous)

    def let_go(self, process: Process) -> None:
        """Run the callbacks that were held for a stopped process, before any newer one of it."""
        held, process.held = process.held, None
        if held:
            self._ready.extendleft(reversed(held))

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        self._drop_cancelled_timers()
        if not ready:
            if not scheduled:
                raise Deadlock("nothing is ready, and no timer is set")
            self._virtual_s = max(self._virtual_s, scheduled[0]._when)
        else:
            self._virtual_s += ITERATION_S
        now = self._virtual_s
        while scheduled and scheduled[0]._when <= now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for handle in self._in_seeded_order():
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None:
                if not process.is_alive:
                    continue
                if process.held is not None:
                    process.held.append(handle)
                    continue
            self.num_callbacks += 1
            handle._run()

    def _in_seeded_order(self) -> list[Any]:
        """Run all ready callbacks: in order within a process, in a random order between processes."""
        handles = list(self._ready)
        self._ready.clear()
        if len(handles) < 2:
            return handles
        owners = [handle._context.get(PROCESS) for handle in handles]
        first = owners[0]
        if all(owner is first for owner in owners):
            return handles
        turns: dict[int, deque[Any]] = {}
        keys = [id(owner) for owner in owners]
        for key, handle in zip(keys, handles, strict=True):
            turns.setdefault(key, deque()).append(handle)
        self._rng.shuffle(keys)
        return [turns[key].popleft() for key in keys]

    def _drop_cancelled_timers(self) -> None:
        scheduled = self._scheduled
        if self._timer_cancelled_count > 100 and self._timer_cancelled_count > len(scheduled) // 2:
            kept = []
            for handle in scheduled:
                if handle._cancelled:
                    handle._scheduled = False
                else:
                    kept.append(handle)
            heapq.heapify(kept)
            scheduled[:] = kept
            self._timer_cancelled_count = 0
            return
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1

    # Parts for which asyncio's own loops need a selector; here no event comes from outside.

    def _process_events(self, event_list: Any) -> None:
        """No event comes from a selector."""

    def _write_to_self(self) -> None:
        """Does nothing: no other thread wakes this loop."""
