"""What a daemon gets from the world around it: clocks, randomness, a disk, and work away from the event loop.

Daemon code never asks the operating system for these by itself (tests/test_world.py reads the source). `RealWorld`, the
default, hands them through; the simulated swarm (swarmtrain/simulated) gives every daemon a world whose clock jumps,
whose random numbers follow from a seed and whose threads are events, so that a run can be replayed from one number.
The world is a context variable: tasks and callbacks inherit it from whoever started them.
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
        """What kind of work it is: a simulated engine knows how long that takes."""

    @property
    def least_s(self) -> float:
        """It takes at least so long, as on a slower machine."""

    def run(self) -> None:
        """Do it. Must not raise."""

    def finished(self, run_s: float) -> None:
        """It was done, and took so long. Called where `run` was called."""


class Engine(Protocol):
    """Runs jobs one after the other, away from the event loop."""

    def wake(self) -> None:
        """There may be a job to take."""

    async def stop(self) -> None:
        """Take no further job; returns when the one under way has ended."""


class World(Protocol):
    """See the module."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back, finer than the event loop's own."""

    def wall(self) -> float:
        """Seconds since the epoch, as this machine believes."""

    def processor(self) -> float:
        """Seconds of processor time that this thread has used."""

    def random(self) -> randomness.Random:
        """A new source of random numbers."""

    def token_bytes(self, num_bytes: int) -> bytes:
        """Bytes that nobody can guess."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do `work`, which may block, away from the event loop."""

    def start_engine(self, name: str, take: Callable[[], Job | None]) -> Engine:
        """An engine that calls `take` for its next job whenever it is free and was woken; None: there is none."""

    def check_disk(self, path: Path) -> None:
        """Called before something is written below `path`: a simulated disk raises OSError when it is full."""

    def sync(self, path: Path) -> None:
        """When this returns, what `path` holds survives a loss of power: a file's content, a directory's names.

        A new or renamed file survives only if both were synced, the file and the directory that names it.
        """

    def open_database(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        """An SQLite database, without transactions of its own accord. Its pragmas say what a commit is worth."""


class RealWorld:
    """The operating system's."""

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
        """See `World`: the write itself will say."""

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
    """This context, and whatever is started from it, is in `world` from now on."""
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
    """Make `path` and what lies above it, as far as they are missing, so that they survive a loss of power."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        sync(place.parent)


def open_database(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """See `World`."""
    return _current.get().open_database(path, read_only=read_only)
