"""The compute thread: it alone computes with the stage's weights, in the order of a priority queue.

Step work (prepare, apply) before backward before forward before validation; within one kind the older step first, and
in it the older microbatch. So a stage drains before it fills, and queues stay short. With `schedule.delay` a second
thread of this kind does what a step needs after its microbatches, so that those of the next one need not wait. When a
pass begins or ends and nothing else waits, the thread sets `ran_out`, unless its last pass has failed: a machine on
which passes fail is soon done with any amount of work.

`DeviceWatch` notices a device that hangs while the event loop lives. The peer then says so itself, once, and takes no
work until the device answers: no other peer can tell a hang from slow work in less than a deadline, and each would pay
that deadline in every step and for every microbatch. What the hanging job was at stays in the ledger and counts if it
ends after all.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Lock
from typing import Any, Generic, TypeVar

from swarmtrain import world
from swarmtrain.observe.split import Part, TimeSplit
from swarmtrain.rpc.errors import Refusal
from swarmtrain.wire.messages import Code

T = TypeVar("T")
Key = tuple[int, int]  # step, microbatch

log = logging.getLogger(__name__)


class Kind(IntEnum):
    """What a job is. Times are kept apart by kind, so short jobs are not of a kind with long ones."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2
    EVALUATE = 3
    MESSAGE = 4  # looks at what came, settles what went
    CHECK = 5  # both passes of what another peer has computed

    @property
    def rank(self) -> int:
        """Lower runs first; messages are looked at in turn with step work, and another peer's work with forwards."""
        return {Kind.MESSAGE: Kind.STEP, Kind.CHECK: Kind.FORWARD}.get(self, self)


PASSES = frozenset({Kind.FORWARD, Kind.BACKWARD})


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A job's result, how long it waited and how long it ran."""

    value: T
    queue_s: float
    run_s: float


@dataclass(order=True)
class _Job:
    """One piece of work in the queue; a `world.Job`."""

    rank: int
    of: Key
    serial: int
    kind: Kind = field(compare=False)
    work: Callable[[], object] = field(compare=False)
    future: asyncio.Future[Timed[object]] = field(compare=False)
    submitted: float = field(compare=False)
    compute: ComputeThread = field(compare=False)
    began: float = field(default=0.0, compare=False)
    value: object = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """See `world.Job`."""
        return self.kind.name.lower()

    @property
    def least_s(self) -> float:
        """See `world.Job`."""
        return self.compute.at_least_s.get(self.kind, 0.0)

    def run(self) -> None:
        """On the thread."""
        try:
            self.value = self.work()
        except BaseException as caught:
            self.error = caught

    def finished(self, run_s: float) -> None:
        """On the thread."""
        self.compute.job_finished(self, run_s)

    def deliver(self, run_s: float) -> None:
        """On the event loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(Timed(self.value, self.began - self.submitted, run_s))


HANG_S = 20.0  # a job that takes longer than this, and much longer than those of its kind, hangs
FIRST_HANG_S = 120.0  # the same where nothing is known: a first pass may compile
HANG_FACTOR = 8.0


def hang_limit_s(recent_s: Collection[float]) -> float:
    """How long a job may run before its device is taken to hang, by the times of the last ones of its kind."""
    return max(HANG_S, HANG_FACTOR * max(recent_s)) if recent_s else FIRST_HANG_S


RECENT = 64  # jobs of a kind that stand for its usual time


@dataclass
class ComputeTimes:
    """Running averages of run times in seconds, and totals, for records and metrics."""

    average_s: dict[Kind, float] = field(default_factory=dict)
    total_s: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))
    count: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    idle_s: float = 0.0
    recent_s: dict[Kind, deque[float]] = field(default_factory=lambda: {kind: deque(maxlen=RECENT) for kind in Kind})

    def typical_s(self, kind: Kind) -> float:
        """The median of late, 0 if there was none: what a peer announces must not follow every hiccup."""
        recent = self.recent_s[kind]
        return statistics.median(recent) if recent else 0.0

    def add(self, kind: Kind, run_s: float) -> None:
        """One more job."""
        known = self.average_s.get(kind)
        self.average_s[kind] = run_s if known is None else 0.8 * known + 0.2 * run_s
        self.recent_s[kind].append(run_s)
        self.total_s[kind] += run_s
        self.count[kind] += 1


class Stopped(Exception):
    """The thread takes no more jobs: this peer leaves its stage."""


class Withdrawn(Exception):
    """A job that was taken out of the queue before it began."""


class ComputeThread:
    """Runs jobs one after the other; results arrive on the event loop that submitted them."""

    def __init__(
        self,
        split: TimeSplit | None = None,
        *,
        name: str = "compute",
        at_least_s: Mapping[Kind, float] | None = None,
    ) -> None:
        """`at_least_s`: a job that is done sooner makes the thread wait; for tests that need a slower machine."""
        self._loop = asyncio.get_running_loop()
        self.at_least_s = dict(at_least_s or {})
        self.split = split or TimeSplit()
        self._jobs: list[_Job] = []
        self._serial = itertools.count()
        self._lock = Lock()
        self._stopping = False
        self._has_failed = False  # the last pass
        self._idle_since = world.monotonic()
        self.times = ComputeTimes()
        self._running: tuple[Kind, float] | None = None  # since when; written by the thread
        self.ran_out = asyncio.Event()  # a pass began or ended, and nothing waits; cleared by the task that acts on it
        self._engine = world.start_engine(name, self._take)

    async def run(self, kind: Kind, of: Key, work: Callable[[], T]) -> Timed[T]:
        """Run `work` of a microbatch on the thread when its turn comes.

        Cancelling the caller does not stop a job that has begun.
        """
        future: asyncio.Future[Timed[object]] = self._loop.create_future()
        job = _Job(kind.rank, of, next(self._serial), kind, work, future, world.monotonic(), self)
        with self._lock:
            if self._stopping:
                raise Stopped("the compute thread has stopped")
            heapq.heappush(self._jobs, job)
            self.split.begin(Part.QUEUE)
        self._engine.wake()
        return await future  # type: ignore[return-value]

    @property
    def hangs(self) -> bool:
        """Whether the job that runs should have ended long ago."""
        running = self._running
        if running is None:
            return False
        kind, began = running
        return world.monotonic() - began > hang_limit_s(self.times.recent_s[kind])

    def backlog(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    def backlog_s(self) -> float:
        """How long a new forward would wait, by the average times."""
        with self._lock:
            kinds = [job.kind for job in self._jobs]
        return sum(self.times.average_s.get(kind, 0.0) for kind in kinds)

    def withdraw(self, kind: Kind, may_go: Callable[[Key], bool]) -> Key | None:
        """Take the waiting job of this kind that would run last out of the queue, of those whose microbatch may go.

        Returns its step and microbatch; the caller that waits for the job gets `Withdrawn`.
        """
        with self._lock:
            waiting = [job for job in self._jobs if job.kind is kind and not job.future.done()]
            last = max((job for job in waiting if may_go(job.of)), default=None)
            if last is None:
                return None
            self._jobs.remove(last)
            heapq.heapify(self._jobs)
        self.split.end(Part.QUEUE)
        last.future.set_exception(Withdrawn())
        return last.of

    async def stop(self) -> None:
        """Finish the running job, drop the rest, end the thread."""
        with self._lock:
            self._stopping = True
            dropped, self._jobs = self._jobs, []
        for job in dropped:
            self.split.end(Part.QUEUE)
            job.future.cancel()
        await self._engine.stop()

    def _take(self) -> _Job | None:
        """The engine is free: its next job."""
        while True:
            with self._lock:
                if not self._jobs:
                    return None
                job = heapq.heappop(self._jobs)
                is_last = not self._jobs and job.kind in PASSES and not self._has_failed
            job.began = world.monotonic()
            if job.future.cancelled():
                self.split.end(Part.QUEUE)
                continue
            self.times.idle_s += job.began - self._idle_since
            self._running = (job.kind, job.began)
            self.split.take()
            if is_last:
                self._loop.call_soon_threadsafe(self.ran_out.set)
            return job

    def job_finished(self, job: _Job, run_s: float) -> None:
        """Called by the job, on the thread."""
        self.split.end(Part.COMPUTE)
        self._running, self._idle_since = None, world.monotonic()
        self.times.add(job.kind, run_s)
        self._loop.call_soon_threadsafe(job.deliver, run_s)
        if job.kind in PASSES:
            self._has_failed = job.error is not None
            if not self._jobs and not self._has_failed:
                self._loop.call_soon_threadsafe(self.ran_out.set)


DEVICE_LOOK_S = 1.0  # how often the thread is looked at
RETRY_S = 5.0  # what callers are told


class DeviceWatch:
    """Whether the device hangs: a job on one of the threads that use it."""

    def __init__(self, *threads: ComputeThread) -> None:
        self._threads = threads
        self._hanging = asyncio.Event()

    @property
    def hangs(self) -> bool:
        """Whether it does not answer."""
        return self._hanging.is_set()

    async def next_change(self) -> bool:
        """Look now and then until the device begins to hang, or answers again; whether it hangs now."""
        while True:
            await asyncio.sleep(DEVICE_LOOK_S)
            hangs = any(thread.hangs for thread in self._threads)
            if hangs and not self.hangs:
                log.warning("the device does not answer: this peer takes no work until it does")
                self._hanging.set()
                return True
            if self.hangs and not hangs:
                log.warning("the device answers again")
                self._hanging.clear()
                return False

    def check(self) -> None:
        """Refuse what needs the device while it hangs."""
        if self.hangs:
            raise Refusal(Code.NOT_SERVING, "the device of this peer does not answer", RETRY_S)

    async def unless_it_hangs(self, work: Awaitable[T]) -> T:
        """What `work` comes to. If the device begins to hang before, the caller is refused; the work goes on."""
        task = asyncio.ensure_future(work)
        try:
            is_done = await self.ends(task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not is_done:
            task.add_done_callback(see_exception)
            self.check()
        return await task

    async def ends(self, task: asyncio.Future[T]) -> bool:
        """Wait for a task, but not while the device hangs; whether it has ended."""
        hanging = asyncio.ensure_future(self._hanging.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {task, hanging}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hanging.cancel()
        return task.done()


def see_exception(task: asyncio.Future[T]) -> None:
    """Its waiter was refused; its error is not lost without a word."""
    if not task.cancelled():
        task.exception()
