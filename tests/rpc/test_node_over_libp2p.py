"""Nodes over the real thing: libp2p streams through two p2pd processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from swarmtrain.p2p.errors import NetError, PeerUnreachable
from swarmtrain.p2p.host import Host
from swarmtrain.p2p.network import HostOptions
from swarmtrain.rpc.dialing import DialOptions
from swarmtrain.rpc.errors import LinkClosed
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.link import LinkOptions
from swarmtrain.rpc.node import Node, NodeOptions
from swarmtrain.wire.schema import Message

from .helpers import MIB, REGISTRY, Ask, Reply, State, Tensor, echo, next_turn, pattern, run, until

pytestmark = pytest.mark.swarm

OPTIONS = NodeOptions(
    link=LinkOptions(heartbeat_s=1.0, missed_heartbeats=20), dial=DialOptions(first_backoff_s=0.1, last_backoff_s=0.2)
)


@asynccontextmanager
async def two_nodes(directory: Path, handler: object = echo) -> AsyncIterator[tuple[Host, Node, Host, Node]]:
    """Two hosts on loopback that know each other's addresses, with a node each."""
    hosts = [
        await Host.start(HostOptions(state_dir=directory / name, listen=("/ip4/127.0.0.1/tcp/0",))) for name in "ab"
    ]
    hosts[0].learn(hosts[1].addresses())
    hosts[1].learn(hosts[0].addresses())
    nodes = [Node(host, REGISTRY, handler, OPTIONS) for host in hosts]  # type: ignore[arg-type]
    try:
        yield hosts[0], nodes[0], hosts[1], nodes[1]
    finally:
        await asyncio.gather(*(node.close(2.0) for node in nodes))
        await asyncio.gather(*(host.close() for host in hosts))


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_calls_of_all_sizes_go_both_ways_at_once(tmp_path: Path, loop_factory: object) -> None:
    async def main() -> None:
        async with two_nodes(tmp_path) as (_, a, __, b):
            sizes = [0, 100, 20_000, 330_000, MIB, 5 * MIB + 3]
            requests = [cls(i, pattern(size, i)) for i, size in enumerate(sizes) for cls in (Tensor, State)]
            answers = await asyncio.gather(
                *(a.call(b.peer_id, request, 60) for request in requests),
                *(b.call(a.peer_id, request, 60) for request in requests),
                *(a.call(b.peer_id, Ask(i), 60) for i in range(50)),
            )
            assert answers == [*requests, *requests, *(Reply(i) for i in range(50))]
            assert a.traffic().violations == {}
            estimate = a.estimate(b.peer_id)
            assert estimate.num_up_samples > 0
            assert estimate.rtt_s is not None

    run(main(), timeout_s=120, loop_factory=loop_factory)  # type: ignore[arg-type]


def test_the_death_of_p2pd_fails_open_calls_at_once_and_service_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        started = asyncio.Event()
        held = 0

        async def handler(request: Message, exchange: Exchange) -> Message:
            nonlocal held
            if isinstance(request, Ask) and request.number == 1:
                held += 1
                started.set()
                await exchange.caller_gone.wait()
                held -= 1
            return Reply(2)

        async with two_nodes(tmp_path, handler) as (_, a, host_b, b):
            call = asyncio.create_task(a.call(b.peer_id, Ask(1), 60))
            await started.wait()
            process_id = host_b.p2pd_process_id
            assert process_id is not None
            os.kill(process_id, signal.SIGKILL)
            with pytest.raises(LinkClosed):
                await call
            await until(lambda: held == 0, "the handler outlives the link and learns of its end")
            answer = None
            while answer is None:
                try:
                    answer = await a.call(b.peer_id, Ask(2), 30)
                except NetError as error:
                    # Not reachable yet: a failed dial says when to try again.
                    if isinstance(error, PeerUnreachable):
                        await host_b.wait_ready()
                    await next_turn()
            assert answer == Reply(2)

    run(main(), timeout_s=120)
