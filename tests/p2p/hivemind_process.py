"""A process of the pinned hivemind: its own `P2P` with a unary handler and a stream handler, driven by lines of JSON.

Run as `python -m tests.p2p.hivemind_process`. It ends when stdin does. Nothing of swarmtrain is in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import version
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto.test_pb2 import TestRequest, TestResponse

CHUNK_BYTES = 1 << 16


class Peer:
    """Holds the P2P instance and what it has heard."""

    def __init__(self, p2p: P2P) -> None:
        self.p2p = p2p
        self.callers: list[str] = []

    async def describe(self) -> dict[str, Any]:
        return {
            "peer_id": self.p2p.peer_id.to_base58(),
            "addresses": [str(address) for address in await self.p2p.get_visible_maddrs()],
            "p2pd": self.p2p._child.pid,
            "version": version("hivemind"),
            "callers": self.callers,
        }

    async def serve(self, *, call: str, stream: str) -> dict[str, Any]:
        await self.p2p.add_protobuf_handler(call, self._double, TestRequest)
        await self.p2p.add_binary_stream_handler(stream, self._echo)
        return {}

    async def _double(self, request: TestRequest, context: P2PContext) -> TestResponse:
        self.callers.append(context.remote_id.to_base58())
        if request.number < 0:
            raise ValueError("hivemind says no")
        return TestResponse(number=2 * request.number)

    async def _echo(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.callers.append(info.peer_id.to_base58())
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def call(self, *, peer_id: str, name: str, number: int) -> dict[str, Any]:
        """One unary call; an error answer is an answer here."""
        try:
            request = TestRequest(number=number)
            answer = await self.p2p.call_protobuf_handler(PeerID.from_base58(peer_id), name, request, TestResponse)
        except Exception as error:  # whatever the other end did, the test wants to see it
            return {"refused": f"{type(error).__name__}: {error}"}
        return {"number": answer.number}

    async def stream(self, *, peer_id: str, name: str, num_bytes: int) -> dict[str, Any]:
        """Send bytes over a raw stream and read them back."""
        _, reader, writer = await self.p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), name)
        sent = os.urandom(num_bytes)
        back = asyncio.create_task(reader.readexactly(num_bytes))
        for start in range(0, num_bytes, CHUNK_BYTES):
            writer.write(sent[start : start + CHUNK_BYTES])
            await writer.drain()
        is_same = await back == sent
        writer.close()
        return {"is_same": is_same}


async def main() -> None:
    p2p = await P2P.create(initial_peers=sys.argv[1:], nat_port_map=False, startup_timeout=120, idle_timeout=120)
    await p2p.wait_for_at_least_n_peers(len(sys.argv[1:]), attempts=1200, delay=0.1)
    peer = Peer(p2p)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            command = json.loads(line)
            answer = await getattr(peer, command.pop("command"))(**command)
            print(json.dumps(answer), flush=True)
    finally:
        await p2p.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
