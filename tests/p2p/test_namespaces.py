"""Hosts in network namespaces of their own: no shared loopback, firewalls, relays, cables pulled.

Each p2pd, through which all traffic goes, runs in its namespace; the Python ends share this process to save time.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from patience import PATIENCE

from swarmtrain.directory.directory import Directory, DirectoryOptions
from swarmtrain.p2p.confinement import P2pdLimits
from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.p2p.host import Host, HostOptions
from swarmtrain.p2p.p2pd import bundled_p2pd

from . import netns
from .host_helpers import Collector, echo_server, until

pytestmark = pytest.mark.swarm

ANYWHERE = ("/ip4/0.0.0.0/tcp/0",)
MAY_ENTER = P2pdLimits(capabilities=frozenset({netns.CAP_SYS_ADMIN}))


class Swarm:
    """A relay, a reachable peer, and two that only dial out."""

    def __init__(self, lab: netns.Lab, directory: Path) -> None:
        self.lab = lab
        self.hosts: dict[str, Host] = {}
        self.directories: dict[str, Directory] = {}
        self.relay_address = ""
        self._directory = directory

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await self._start("relay", stack, relay=True)
            self.relay_address = self.outside("relay")[0]
            await self._start("open", stack)
            for name in ("nat1", "nat2"):
                await self._start(name, stack, use_relays=(self.relay_address,), behind_nat=True)
            yield

    async def _start(self, name: str, stack: AsyncExitStack, **options: Any) -> None:
        binary = self._directory / f"p2pd-{name}"
        binary.write_text(f'#!/bin/sh\nexec {" ".join(self.lab.enter(name))} {bundled_p2pd()} "$@"\n')
        binary.chmod(0o755)
        bootstrap = (self.relay_address,) if self.relay_address else ()
        settings: dict[str, Any] = {"listen": ANYWHERE, "bootstrap": bootstrap, "health_interval_s": 1.0}
        settings |= {"p2pd_binary": binary, "p2pd_limits": MAY_ENTER, "probe": partial(self.lab.probe, name)}
        host = await Host.start(HostOptions(self._directory / name, **settings, **options))
        stack.push_async_callback(host.close)
        echo_server(host)
        directory = await Directory.start(host, "run", DirectoryOptions(watch_interval_s=1.0))
        stack.push_async_callback(directory.close)
        self.hosts[name], self.directories[name] = host, directory

    def outside(self, name: str) -> tuple[str, ...]:
        """A host's addresses without those of its own loopback."""
        return tuple(address for address in self.hosts[name].addresses() if "/127.0.0.1/" not in address)

    async def echo(self, name: str, to: str, *, num_bytes: int = 2**20, timeout_s: float = 10.0) -> None:
        """Send bytes there and back."""
        collector = Collector(await self.hosts[name].open(self.hosts[to].peer_id, timeout_s=timeout_s))
        sending = asyncio.create_task(collector.send(bytes(num_bytes)))
        await asyncio.wait_for(collector.receive(num_bytes), 30)
        await sending
        collector.stream.close()


class Runner:
    """Keeps the swarm's event loop between tests."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._running = swarm.running()

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(90 * PATIENCE):
                await work

        self._runner.run(bounded())

    def __enter__(self) -> Runner:
        self.run(self._running.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._running.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    reason = netns.why_not()
    if reason is not None:
        pytest.skip(reason)
    with netns.lab("relay", "open", "nat1", "nat2") as lab:
        for name in ("nat1", "nat2"):
            lab.outgoing_only(name)
        with Runner(Swarm(lab, tmp_path_factory.mktemp("namespaces"))) as runner:
            yield runner


def test_hosts_without_a_shared_loopback_talk_to_each_other(runner: Runner) -> None:
    async def main(swarm: Swarm) -> None:
        assert swarm.outside("open") != ()
        assert all(f"/{swarm.lab.address('open')}/" in address for address in swarm.outside("open"))
        await swarm.echo("open", "relay")
        await swarm.echo("relay", "open")

    runner.run(main(runner.swarm))


def test_peers_that_only_dial_out_reach_each_other_through_the_relay(runner: Runner) -> None:
    async def main(swarm: Swarm) -> None:
        relayed = [address for address in swarm.outside("nat2") if "/p2p-circuit/" in address]
        assert relayed == [f"{swarm.relay_address}/p2p-circuit/p2p/{swarm.hosts['nat2'].peer_id}"]
        swarm.hosts["nat1"].learn(swarm.outside("nat2"))
        before = swarm.lab.received_bytes("relay")
        size = 8 * 2**20  # libp2p's default relay would cut after 128 KiB
        await swarm.echo("nat1", "nat2", num_bytes=size)
        assert swarm.lab.received_bytes("relay") - before >= 2 * size, "it did not go through the relay"

    runner.run(main(runner.swarm))


def test_a_reachable_peer_dials_one_behind_a_nat(runner: Runner) -> None:
    async def main(swarm: Swarm) -> None:
        swarm.hosts["open"].learn(swarm.outside("nat1"))
        await swarm.echo("open", "nat1")

    runner.run(main(runner.swarm))


def test_the_directory_spans_all_of_them(runner: Runner) -> None:
    async def main(swarm: Swarm) -> None:
        for name in ("open", "nat1", "nat2"):
            await swarm.directories[name].announce("peers", name.encode(), 30.0, confirm=True)
        for directory in swarm.directories.values():
            values = [record.value for record in (await directory.lookup("peers")).values()]
            assert sorted(values) == [b"nat1", b"nat2", b"open"]

    runner.run(main(runner.swarm))


def test_a_relay_that_was_restarted_is_used_again(runner: Runner) -> None:
    async def main(swarm: Swarm) -> None:
        relay = swarm.hosts["relay"]
        killed = relay.p2pd_process_id
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda: relay.p2pd_process_id != killed, "there is a new p2pd")
        received = swarm.lab.received_bytes("relay")
        size = 2**20
        async with asyncio.timeout(
            30 * PATIENCE
        ):  # the new one knows of no reservation until it is asked for one again
            while True:
                try:
                    await swarm.echo("nat1", "nat2", num_bytes=size)
                    break
                except PeerUnreachable:
                    await asyncio.sleep(0.2)
        assert swarm.lab.received_bytes("relay") - received >= 2 * size, "it did not go through the relay"

    runner.run(main(runner.swarm))


def test_a_peer_that_is_no_relay_is_not_used_as_one(runner: Runner, tmp_path: Path) -> None:
    """Every p2pd gives reservations, but cuts what goes through it after 128 KiB."""

    async def main(swarm: Swarm) -> None:
        nat1 = swarm.hosts["nat1"].options
        settings: dict[str, Any] = {"use_relays": swarm.outside("open"), "behind_nat": True}
        settings |= {"p2pd_binary": nat1.p2pd_binary, "p2pd_limits": MAY_ENTER, "probe": nat1.probe}
        options = HostOptions(tmp_path / "host", listen=ANYWHERE, **settings)
        host = await Host.start(options)
        try:
            assert swarm.hosts["open"].peer_id in await host.connected_peers()
            assert not any("/p2p-circuit" in address for address in host.addresses())
        finally:
            await host.close()

    runner.run(main(runner.swarm))


def test_a_host_whose_cable_was_pulled_finds_back(runner: Runner) -> None:
    async def main(swarm: Swarm) -> None:
        directory = swarm.directories["open"]
        assert directory.status().num_neighbours > 0
        recoveries = directory.status().num_recoveries
        swarm.lab.plug("open", in_=False)
        try:
            async with asyncio.timeout(30 * PATIENCE):
                while directory.status().num_neighbours > 0:  # using it during the outage empties the table
                    await directory.lookup("peers")
        finally:
            swarm.lab.plug("open", in_=True)
        await until(lambda: directory.status().num_recoveries > recoveries, "it recovers")
        await directory.announce("back", b"here", 30.0, confirm=True)
        assert swarm.hosts["open"].peer_id in await swarm.directories["relay"].lookup("back")

    runner.run(main(runner.swarm))
