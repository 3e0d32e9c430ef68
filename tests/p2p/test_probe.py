"""Asking whether somebody listens, and that p2pd is reached at once after its peer came back."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from patience import PATIENCE

from swarmtrain.p2p.addresses import Address
from swarmtrain.p2p.dialing import answering, connect_once
from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.p2p.host import Host, HostOptions

from .host_helpers import Collector, echo_server

pytestmark = pytest.mark.swarm

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def address(port: int) -> Address:
    return Address.parse(f"/ip4/127.0.0.1/tcp/{port}")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_only_those_that_listen_are_kept_and_the_others_have_a_reason() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        closed = closed_port()
        good, reason = await answering([address(closed), address(port)], connect_once, timeout_s=60)
        assert good == (address(port),)
        assert reason == "connection refused"
        assert await answering([address(port)], connect_once, timeout_s=60) == ((address(port),), "")
        server.close()

    asyncio.run(main())


def test_an_address_that_swallows_everything_costs_no_more_than_the_time_given() -> None:
    async def silent(host: str, port: int) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.timeout(60):
            good, reason = await answering([address(1), address(2)], silent, timeout_s=0.05)
        assert good == ()
        assert reason == "i/o timeout"

    asyncio.run(main())


def test_one_that_is_silent_does_not_hold_up_one_that_answers() -> None:
    async def one_is_silent(host: str, port: int) -> None:
        await asyncio.sleep(0 if port == 1 else 3600)

    async def main() -> None:
        async with asyncio.timeout(60):
            good, _ = await answering([address(2), address(1)], one_is_silent, timeout_s=3600)
        assert good == (address(1),)

    asyncio.run(main())


def test_a_name_that_does_not_exist_is_no_crash() -> None:
    async def main() -> None:
        good, reason = await answering([Address.parse("/dns4/nowhere.invalid/tcp/1")], connect_once, timeout_s=60)
        assert good == ()
        assert reason

    asyncio.run(main())


def test_a_peer_that_came_back_is_reached_although_it_was_called_all_the_time(tmp_path: Path) -> None:
    """libp2p would refuse to dial again for 5 s after the first failure, and longer after each further one."""

    async def main() -> None:
        first = await Host.start(HostOptions(tmp_path / "first", listen=LOOPBACK))
        second = await Host.start(HostOptions(tmp_path / "second", listen=LOOPBACK, health_interval_s=60.0))
        try:
            second.learn(first.addresses())
            await exchange(second, first)
            await first.close()
            async with asyncio.timeout(30 * PATIENCE):
                while first.peer_id in await second.connected_peers():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                for _ in range(5):
                    with pytest.raises(PeerUnreachable, match="refused"):
                        await second.open(first.peer_id, timeout_s=60)
                first = await Host.start(HostOptions(tmp_path / "first", listen=LOOPBACK))  # same identity, same port
                await exchange(second, first)  # the first try works
        finally:
            await second.close()
            await first.close()

    asyncio.run(main())


async def exchange(dialer: Host, listener: Host) -> None:
    echo_server(listener)
    collector = Collector(await dialer.open(listener.peer_id, timeout_s=60))
    await collector.send(b"hello")
    await asyncio.wait_for(collector.receive(5), 60)
    collector.stream.close()
