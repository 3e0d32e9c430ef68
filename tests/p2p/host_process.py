"""A small daemon for tests: a host with an echo service and a directory, driven by lines of JSON on stdin.

Run as `python -m tests.p2p.host_process`. It ends when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from swarmtrain.directory.directory import Directory, DirectoryOptions
from swarmtrain.errors import SwarmtrainError
from swarmtrain.p2p.host import Host, HostOptions

from .host_helpers import Collector, echo_server


class Daemon:
    """Holds what the commands made."""

    def __init__(self) -> None:
        self.host: Host | None = None
        self.directory: Directory | None = None

    async def start(self, *, state_dir: str, directory: bool = False, **options: Any) -> dict[str, Any]:
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        self.host = await Host.start(HostOptions(Path(state_dir), health_interval_s=1.0, **settings))
        echo_server(self.host)
        if directory:
            self.directory = await Directory.start(self.host, "run", DirectoryOptions(watch_interval_s=1.0))
        return self.describe()

    def describe(self) -> dict[str, Any]:
        assert self.host is not None
        return {
            "peer_id": self.host.peer_id,
            "addresses": self.host.addresses(),
            "p2pd": self.host.p2pd_process_id,
            "process": os.getpid(),
        }

    async def echo(self, *, peer_id: str, num_bytes: int, timeout_s: float = 10.0) -> dict[str, Any]:
        assert self.host is not None
        began = time.monotonic()
        stream = await self.host.open(peer_id, timeout_s=timeout_s)
        collector = Collector(stream)
        data = os.urandom(min(num_bytes, 2**20)) * max(1, num_bytes >> 20)
        sending = asyncio.create_task(collector.send(data))
        await collector.receive(len(data))
        await sending
        stream.close()
        return {"num_bytes": collector.num_bytes, "seconds": time.monotonic() - began}

    async def learn(self, *, addresses: list[str]) -> dict[str, Any]:
        assert self.host is not None
        self.host.learn(addresses)
        return {}

    async def announce(self, *, topic: str, value: str, **options: Any) -> dict[str, Any]:
        assert self.directory is not None
        return {"num_copies": (await self.directory.announce(topic, value.encode(), 30.0, **options)).num_copies}

    async def lookup(self, *, topic: str) -> dict[str, Any]:
        assert self.directory is not None
        return {"records": {peer_id: r.value.decode() for peer_id, r in (await self.directory.lookup(topic)).items()}}

    async def status(self) -> dict[str, Any]:
        assert self.directory is not None
        status = self.directory.status()
        return {"num_neighbours": status.num_neighbours, "num_recoveries": status.num_recoveries}

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        name = command.pop("command")
        if name == "describe":
            return self.describe()
        answer: dict[str, Any] = await getattr(self, name)(**command)
        return answer

    async def close(self) -> None:
        if self.directory is not None:
            await self.directory.close()
        if self.host is not None:
            await self.host.close()


async def main() -> None:
    daemon = Daemon()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = await daemon.obey(json.loads(line))
        except SwarmtrainError as error:
            answer = {"error": error.error_id, "message": str(error)}
        except AssertionError as error:
            answer = {"error": "assertion", "message": str(error)}
        print(json.dumps(answer), flush=True)
    await daemon.close()


if __name__ == "__main__":
    uvloop.run(main())
