"""The services that a daemon takes from its environment: clocks, randomness, a disk, work off the event loop.

Daemon code never asks the operating system for them directly (tests/test_world.py reads the source). `RealWorld`, the
default, passes requests on; the simulated swarm (swarmtrain/simulated) gives every daemon a world whose clock jumps,
whose random numbers come from a seed and whose threads are events, so that a run can be replayed from one number.
The world is a context variable: tasks and callbacks inherit it from their creator.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import random as randomness
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")


class Job(Protocol):
    """A piece of work for an engine."""

    @property
    def label(self) -> str:
        """The kind of work. A simulated engine has a duration for each."""

    @property
    def least_s(self) -> float:
        """Minimum duration in seconds, to emulate a slower machine."""

    def run(self) -> None:
        """Do it. Must not raise."""

    def finished(self, run_s: float) -> None:
        """Called after `run`, in the same thread, with its duration."""


class Engine(Protocol):
    """Runs jobs one after the other, off the event loop."""

    def wake(self) -> None:
        """There may be a job to take."""

    async def stop(self) -> None:
        """Take no further job; returns when the one under way has ended."""


class World(Protocol):
    """See the module."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back, finer than the event loop's own."""

    def wall(self) -> float:
        """Seconds since the epoch by this machine's clock."""

    def processor(self) -> float:
        """Seconds of processor time that this thread has used."""

    def random(self) -> randomness.Random:
        """A new source of random numbers."""

    def token_bytes(self, num_bytes: int) -> bytes:
        """Unpredictable bytes."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which may block, off the event loop."""

    def start_engine(self, name: str, take: Callable[[], Job | None]) -> Engine:
        """An engine that, when it is free and woken, calls `take` for its next job; None means no job."""

    def check_disk(self, path: Path) -> None:
        """To be called before a write below `path`: a simulated disk raises OSError when it is full."""

    def sync(self, path: Path) -> None:
        """When this returns, what `path` holds survives a loss of power: a file's content, a directory's names.

        A new or renamed file survives only if both were synced, the file and the directory that names it.
        """

    def open_database(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        """An SQLite database without implicit transactions. Its pragmas decide the durability of a commit."""


class RealWorld:
    """The operating system's services."""

    def monotonic(self) -> float:
        """See `World`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `World`."""
        return time.time()

    def processor(self) -> float:
        """See `World`."""
        return time.thread_time()

    def random(self) -> randomness.Random:
        """See `World`."""
        return randomness.Random()

    def token_bytes(self, num_bytes: int) -> bytes:
        """See `World`."""
        return secrets.token_bytes(num_bytes)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """See `World`."""
        return await asyncio.to_thread(work)

    def start_engine(self, name: str, take: Callable[[], Job | None]) -> Engine:
        """See `World`."""
        return _ThreadEngine(name, take)

    def check_disk(self, path: Path) -> None:
        """See `World`. Does nothing: the write itself fails on a full disk."""

    def sync(self, path: Path) -> None:
        """See `World`."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open_database(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        """See `World`."""
        if read_only:
            return sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        return sqlite3.connect(path, isolation_level=None)


class _ThreadEngine:
    """An engine on a thread of its own."""

    def __init__(self, name: str, take: Callable[[], Job | None]) -> None:
        self._take = take
        self._changed = threading.Condition()
        self._is_woken = self._is_stopping = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """See `Engine`."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    async def stop(self) -> None:
        """See `Engine`."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while not self._is_stopping:
            job = self._take()
            if job is None:
                with self._changed:
                    while not self._is_woken and not self._is_stopping:
                        self._changed.wait()
                    self._is_woken = False
                continue
            began = time.perf_counter()
            job.run()
            left_s = job.least_s - (time.perf_counter() - began)
            if left_s > 0:
                time.sleep(left_s)
            job.finished(time.perf_counter() - began)


_current: contextvars.ContextVar[World] = contextvars.ContextVar("world", default=RealWorld())  # noqa: B039  # stateless


def enter(world: World) -> None:
    """Set the world of this context, and of everything that is started from it."""
    _current.set(world)


def monotonic() -> float:
    """See `World`."""
    return _current.get().monotonic()


def wall() -> float:
    """See `World`."""
    return _current.get().wall()


def processor() -> float:
    """See `World`."""
    return _current.get().processor()


def random() -> randomness.Random:
    """See `World`."""
    return _current.get().random()


def token_bytes(num_bytes: int) -> bytes:
    """See `World`."""
    return _current.get().token_bytes(num_bytes)


def token_hex(num_bytes: int) -> str:
    """`token_bytes` as text."""
    return token_bytes(num_bytes).hex()


async def in_thread(work: Callable[[], T]) -> T:
    """See `World`."""
    return await _current.get().in_thread(work)


def start_engine(name: str, take: Callable[[], Job | None]) -> Engine:
    """See `World`."""
    return _current.get().start_engine(name, take)


def check_disk(path: Path) -> None:
    """See `World`."""
    _current.get().check_disk(path)


def sync(path: Path) -> None:
    """See `World`."""
    _current.get().sync(path)


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, so that they survive a loss of power."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        sync(place.parent)


def open_database(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """See `World`."""
    return _current.get().open_database(path, read_only=read_only)
