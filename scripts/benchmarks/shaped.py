"""Daemons as processes, and links made slower on purpose: what the benchmarks of routing share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections import deque
from typing import Any

LOOPBACK = "/ip4/127.0.0.1/tcp"
_CHUNK_BYTES = 1 << 14
_QUEUE_S = 0.1


class Relay:
    """Hands on everything that comes in on its port, in order and `delay_s` later, and back.

    With `bytes_per_s`, which may be changed at any time, all its connections share a link of that rate each way.
    """

    def __init__(self, target_port: int, delay_s: float, bytes_per_s: float = 0.0) -> None:
        self._target_port, self._delay_s, self.bytes_per_s = target_port, delay_s, bytes_per_s
        self._free_at = [0.0, 0.0]
        self.num_bytes = 0  # carried so far, both ways
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """End all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        for way, (source, sink) in enumerate(((reader, there_writer), (there_reader, writer))):
            task = asyncio.create_task(self._carry(source, sink, way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: int) -> None:
        loop = asyncio.get_running_loop()
        due: deque[tuple[float, bytes]] = deque()
        arrived = asyncio.Event()

        async def read() -> None:
            while data := await source.read(_CHUNK_BYTES):
                now = loop.time()
                self.num_bytes += len(data)
                if self.bytes_per_s:
                    self._free_at[way] = max(now, self._free_at[way]) + len(data) / self.bytes_per_s
                    due.append((self._free_at[way] + self._delay_s, data))
                else:
                    due.append((now + self._delay_s, data))
                arrived.set()
                # The sender feels a full link, as it would feel a router's full queue.
                await asyncio.sleep(max(0.0, self._free_at[way] - now - _QUEUE_S))
            due.append((loop.time(), b""))
            arrived.set()

        reading = asyncio.create_task(read())
        try:
            while True:
                while not due:
                    arrived.clear()
                    await arrived.wait()
                moment, data = due.popleft()
                await asyncio.sleep(max(0.0, moment - loop.time()))
                if not data:
                    break
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            reading.cancel()
            with contextlib.suppress(OSError):
                sink.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Daemon:
    """One verb as a process, its events as they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *arguments: str, **variables: str) -> Daemon:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SWARMTRAIN_DIE_WITH_PARENT": str(os.getpid()),
            **variables,
        }
        command = [sys.executable, "-m", "swarmtrain", *arguments, "--json"]
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        return cls(await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=none, env=environment))

    async def until(self, event: str, **wanted: Any) -> dict[str, Any]:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found["event"] == event and all(found.get(key) == value for key, value in wanted.items()):
                return found
        raise RuntimeError(f"a daemon ended before it said {event}")

    def drop_events(self) -> None:
        """Read on, so that the daemon never waits for a reader."""
        self._reading = asyncio.create_task(self._drop())

    async def _drop(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(1 << 16):
            pass

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
