"""libp2p through hivemind: a process of the pinned hivemind and our host understand each other, both ways.

"Both ways" is: each end dials and is dialed, calls and is called (p2pd's unary calls, which carry the directory), opens
a raw stream and accepts one (which carry the links). hivemind's end runs `hivemind.p2p.P2P`, with nothing of ours.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hivemind.proto.test_pb2 import TestRequest as Request
from hivemind.proto.test_pb2 import TestResponse as Response
from patience import PATIENCE

from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.p2p.host import PROTOCOL, Host

from .host_helpers import DEADLINE_S, ChildHost, Collector, echo_server, hosts, is_running, run, until

CALL = "/swarmtrain/test/double"
NUM_BYTES = 3 << 20  # more than all buffers on the way hold
TIMEOUT_S = DEADLINE_S * PATIENCE


class Pair:
    """Our host, and hivemind's process, which knows our address from its start."""

    def __init__(self, host: Host, child: ChildHost, about: dict[str, Any]) -> None:
        self.host, self.about = host, about
        self.peer_id: str = about["peer_id"]
        self._child = child

    async def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self._child.ask, command=command, **arguments)


@asynccontextmanager
async def pair(directory: Path) -> AsyncIterator[Pair]:
    async with hosts(directory, 1) as (host,):
        child = ChildHost(*host.addresses(), module="tests.p2p.hivemind_process")
        p2pd = None
        try:
            about = await asyncio.to_thread(child.ask, command="describe")
            p2pd = about["p2pd"]
            yield Pair(host, child, about)
        finally:
            await asyncio.to_thread(child.close)
            if p2pd is not None:
                await until(lambda: not is_running(p2pd), "hivemind's p2pd has ended")


def test_hivemind_and_this_host_speak_both_ways(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as both:
            assert both.about["version"] == version("hivemind") == "1.1.12"
            host, peer_id = both.host, both.peer_id
            await both.ask("serve", call=CALL, stream=PROTOCOL)
            assert peer_id in await host.connected_peers(), "hivemind dialed us when it started"
            await check_our_call(both)
            await check_their_call(both)
            await check_our_stream(both)
            await check_their_stream(both)
            about = await both.ask("describe")
            assert about["callers"] == [host.peer_id] * 3, "two calls and a stream, from who they really came from"

    run(main(), deadline_s=300.0)


def test_this_host_dials_a_hivemind_that_knows_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 1) as (host,):
            child = ChildHost(module="tests.p2p.hivemind_process")
            try:
                about = await asyncio.to_thread(child.ask, command="describe")
                await asyncio.to_thread(child.ask, command="serve", call=CALL, stream=PROTOCOL)
                assert about["peer_id"] not in await host.connected_peers()
                host.learn(about["addresses"], of=about["peer_id"])
                answer = await host.call(about["peer_id"], CALL, packed(4), timeout_s=TIMEOUT_S)
                assert Response.FromString(answer).number == 8
                child.kill()  # and our host sees the end of it, and says so of the next call
                with pytest.raises(PeerUnreachable):
                    await host.call(about["peer_id"], CALL, packed(4), timeout_s=TIMEOUT_S)
            finally:
                await asyncio.to_thread(child.close)
            await until(lambda: not is_running(about["p2pd"]), "p2pd follows its killed parent")

    run(main(), deadline_s=300.0)


def packed(number: int) -> bytes:
    raw: bytes = Request(number=number).SerializeToString()
    return raw


async def check_our_call(both: Pair) -> None:
    answer = await both.host.call(both.peer_id, CALL, packed(21), timeout_s=TIMEOUT_S)
    assert Response.FromString(answer).number == 42
    with pytest.raises(PeerUnreachable, match="hivemind says no"):
        await both.host.call(both.peer_id, CALL, packed(-1), timeout_s=TIMEOUT_S)


async def check_their_call(both: Pair) -> None:
    callers = []

    async def triple(caller: str, payload: bytes) -> bytes:
        callers.append(caller)
        number = Request.FromString(payload).number
        if number < 0:
            raise ValueError("this host says no")
        raw: bytes = Response(number=3 * number).SerializeToString()
        return raw

    await both.host.serve_calls("/swarmtrain/test/triple", triple)
    ask = {"peer_id": both.host.peer_id, "name": "/swarmtrain/test/triple"}
    assert await both.ask("call", **ask, number=14) == {"number": 42}
    refused = await both.ask("call", **ask, number=-1)
    assert "this host says no" in refused["refused"]
    assert callers == [both.peer_id] * 2


async def check_our_stream(both: Pair) -> None:
    data = os.urandom(NUM_BYTES)
    stream = await both.host.open(both.peer_id, timeout_s=TIMEOUT_S)
    collector = Collector(stream)
    sending = asyncio.create_task(collector.send(data))
    await collector.receive(NUM_BYTES)
    await sending
    assert collector.digest.digest() == hashlib.sha256(data).digest()
    stream.close()
    await collector.closed


async def check_their_stream(both: Pair) -> None:
    accepted = echo_server(both.host)
    answer = await both.ask("stream", peer_id=both.host.peer_id, name=PROTOCOL, num_bytes=NUM_BYTES)
    assert answer == {"is_same": True}
    assert [collector.stream.peer_id for collector in accepted] == [both.peer_id]
    assert accepted[0].num_bytes == NUM_BYTES
    await accepted[0].closed
