"""Receivers, hosts and child daemons for the tests of the host and the directory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop
from patience import PATIENCE

from swarmtrain.p2p.host import Host, HostOptions
from swarmtrain.p2p.network import ByteStream

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
DEADLINE_S = 30.0
REPOSITORY = Path(__file__).resolve().parents[2]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, loop: str = "uvloop", deadline_s: float = 60.0) -> T:
    """Run a test's coroutine on the named event loop; whatever hangs fails."""

    async def bounded() -> T:
        async with asyncio.timeout(deadline_s * PATIENCE):
            return await main

    return uvloop.run(bounded()) if loop == "uvloop" else asyncio.run(bounded())


async def until(condition: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a state that nobody announces."""
    end = time.monotonic() + deadline_s * PATIENCE
    while not condition():
        if time.monotonic() >= end:
            raise TimeoutError(f"this never became true: {what}")
        await asyncio.sleep(0.01)


def is_running(process_id: int) -> bool:
    """True while the process is there and not a zombie."""
    try:
        return bool(psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Collector:
    """A receiver that keeps count and hash of what came, and back-pressure in mind."""

    def __init__(self, stream: ByteStream, *, echo: bool = False, buffer_bytes: int = 2**18) -> None:
        self.stream = stream
        self.num_bytes = 0
        self.digest = hashlib.sha256()
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.writable = asyncio.Event()
        self.writable.set()
        self.num_pauses = 0
        self._echo = echo
        self._buffer = bytearray(buffer_bytes)
        self._progress = asyncio.Event()
        stream.start(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, num_bytes: int) -> None:
        assert not self.closed.done(), "bytes after stream_closed"
        data = bytes(self._buffer[:num_bytes])
        self.num_bytes += num_bytes
        self.digest.update(data)
        self._progress.set()
        if self._echo:
            self.stream.write(data)

    def stream_closed(self, error: Exception | None) -> None:
        self.closed.set_result(error)  # raises if it is called twice
        self.writable.set()
        self._progress.set()

    def pause_writing(self) -> None:
        self.num_pauses += 1
        self.writable.clear()
        if self._echo:
            self.stream.pause_reading()

    def resume_writing(self) -> None:
        self.writable.set()
        if self._echo:
            self.stream.resume_reading()

    async def receive(self, num_bytes: int) -> None:
        """Wait until that many bytes have come in all."""
        while self.num_bytes < num_bytes:
            assert not self.closed.done(), f"closed after {self.num_bytes} of {num_bytes} bytes"
            self._progress.clear()
            await self._progress.wait()

    async def send(self, data: bytes, chunk_bytes: int = 2**18) -> None:
        """Write in chunks, waiting when told to."""
        view = memoryview(data)
        for start in range(0, len(data), chunk_bytes):
            await self.writable.wait()
            self.stream.write(view[start : start + chunk_bytes])


@asynccontextmanager
async def hosts(
    directory: Path, count: int, *, loopback: Sequence[str] = LOOPBACK, **options: Any
) -> AsyncIterator[list[Host]]:
    """`count` hosts on loopback; the first is the bootstrap peer of the others."""
    started: list[Host] = []
    try:
        for index in range(count):
            bootstrap = started[0].addresses() if started else ()
            settings = {"listen": tuple(loopback), "bootstrap": bootstrap, "health_interval_s": 1.0, **options}
            started.append(await Host.start(HostOptions(directory / f"host{index}", **settings)))
        yield started
    finally:
        for host in started:
            await host.close()


def echo_server(host: Host) -> list[Collector]:
    """Have `host` send everything back; the list grows with every stream."""
    accepted: list[Collector] = []
    host.listen(lambda stream: accepted.append(Collector(stream, echo=True)))
    return accepted


class ChildHost:
    """A process of its own that is driven by lines of JSON: a daemon (tests/p2p/host_process.py), or another module."""

    def __init__(self, *arguments: str, module: str = "tests.p2p.host_process", prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "tests")},
        )

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, deadline_s: float = 120.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        assert ready, "the child did not answer in time"
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(60)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; a failure in the child fails the test."""
        self.send(**command)
        answer = self.receive()
        assert "error" not in answer, answer
        return answer

    def kill(self) -> None:
        """SIGKILL: no chance to clean up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def close(self) -> None:
        """End of input is the child's sign to leave."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
