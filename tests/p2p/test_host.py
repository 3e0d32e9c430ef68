"""Streams over real p2pd processes: intact, bounded, and back again after whatever dies."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE

from swarmtrain.p2p.addresses import Address
from swarmtrain.p2p.errors import AddressError, HostDownError, NetError, PeerUnreachable
from swarmtrain.p2p.host import Host, HostEvent, HostEventKind, HostOptions
from swarmtrain.p2p.identity import Identity
from swarmtrain.p2p.network import ByteStream
from swarmtrain.p2p.p2pd import P2pdOptions, bundled_p2pd

from .host_helpers import LOOPBACK, ChildHost, Collector, echo_server, hosts, is_running, run, until

pytestmark = pytest.mark.swarm

LOOPS = pytest.mark.parametrize("loop", ["uvloop", pytest.param("asyncio", marks=pytest.mark.long)])


@LOOPS
def test_bytes_travel_both_ways_between_authenticated_peers(tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            accepted = echo_server(first)
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            assert collector.stream.peer_id == first.peer_id
            await collector.send(b"hello")
            await collector.receive(5)
            assert accepted[0].stream.peer_id == second.peer_id
            assert collector.digest.digest() == hashlib.sha256(b"hello").digest()
            # and the other way round, over the same connection
            echo_server(second)
            back = Collector(await first.open(second.peer_id, timeout_s=60))
            await back.send(b"welcome")
            await back.receive(7)
        assert await asyncio.wait_for(collector.closed, 5) is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main(), loop=loop)


@LOOPS
def test_64_mib_arrive_intact(tmp_path: Path, loop: str) -> None:
    data = random.Random(1).randbytes(2**20) * 64

    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            accepted: list[Collector] = []
            first.listen(lambda stream: accepted.append(Collector(stream)))
            sender = Collector(await second.open(first.peer_id, timeout_s=60))
            await sender.send(data)
            await until(lambda: bool(accepted), "the stream is accepted")
            await accepted[0].receive(len(data))
            assert accepted[0].digest.digest() == hashlib.sha256(data).digest()
            assert sender.num_pauses > 0, "64 MiB went out without back-pressure"

    run(main(), loop=loop)


def test_20_streams_at_once_do_not_mix(tmp_path: Path) -> None:
    async def one(host: Host, peer_id: str, seed: int) -> None:
        data = random.Random(seed).randbytes(300_000 + seed)
        collector = Collector(await host.open(peer_id, timeout_s=60))
        sending = asyncio.create_task(collector.send(data, chunk_bytes=10_000))
        await collector.receive(len(data))
        await sending
        assert collector.digest.digest() == hashlib.sha256(data).digest()
        collector.stream.close()

    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            accepted = echo_server(first)
            await asyncio.gather(*(one(second, first.peer_id, seed) for seed in range(20)))
            assert len(accepted) == 20
            await asyncio.wait_for(asyncio.gather(*(collector.closed for collector in accepted)), 10)

    run(main())


@LOOPS
def test_bytes_before_start_are_kept_and_delivered_in_order(tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            parked: list[ByteStream] = []
            first.listen(parked.append)
            sender = Collector(await second.open(first.peer_id, timeout_s=60))
            data = random.Random(2).randbytes(400_000)
            await sender.send(data)
            await until(lambda: bool(parked), "the stream is accepted")
            receiver = Collector(parked[0], buffer_bytes=1000)  # smaller than what waits
            await receiver.receive(len(data))
            assert receiver.digest.digest() == hashlib.sha256(data).digest()
            with pytest.raises(RuntimeError):
                parked[0].start(receiver)

    run(main(), loop=loop)


@LOOPS
def test_a_reader_that_pauses_stops_the_writer_and_loses_nothing(tmp_path: Path, loop: str) -> None:
    data = bytes(2**20) * 48  # more than all buffers on the way (yamux 16 MiB) hold

    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            accepted: list[Collector] = []
            first.listen(lambda stream: accepted.append(Collector(stream)))
            sender = Collector(await second.open(first.peer_id, timeout_s=60))
            await sender.send(b"x")
            await until(lambda: bool(accepted) and accepted[0].num_bytes == 1, "the first byte")
            receiver = accepted[0]
            receiver.stream.pause_reading()
            sending = asyncio.create_task(sender.send(data))
            await until(lambda: not sender.writable.is_set(), "the writer is told to pause")
            at_pause = receiver.num_bytes
            assert at_pause <= 2**18 + 1, "bytes were delivered to a paused reader"
            receiver.stream.resume_reading()
            await receiver.receive(len(data) + 1)
            await sending

    run(main(), loop=loop)


def test_a_stream_to_nobody_fails_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            stranger = Identity.generate().peer_id
            with pytest.raises(PeerUnreachable, match="no address of the peer is known"):
                await second.open(stranger, timeout_s=60)
            second.learn([f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}"])
            with pytest.raises(PeerUnreachable, match="refused"):
                await second.open(stranger, timeout_s=60)
            second.learn([first.addresses()[0].replace(first.peer_id, stranger)])
            with pytest.raises(PeerUnreachable, match="another peer answers"):
                await second.open(stranger, timeout_s=60)
            with pytest.raises(NetError):
                await second.open(second.peer_id, timeout_s=60)
            for garbage in ("", "peer", "12D3KooW", "x" * 10_000, stranger[:-1]):
                with pytest.raises(AddressError):
                    await second.open(garbage, timeout_s=60)

    run(main())


def test_addresses_from_strangers_are_learned_with_care(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 3) as (_, second, third):
            echo_server(second)
            real, wrong = second.addresses()[0], f"/ip4/127.0.0.1/tcp/1/p2p/{second.peer_id}"
            third.learn(["junk", "", "/ip4/1.2.3.4/tcp/1", real, "x" * 10_000])
            third.learn([wrong], of=third.peer_id)  # a peer may not speak for another
            third.learn([wrong] * 3, of="somebody")
            assert third._book.get(second.peer_id) == (Address.parse(real),)
            collector = Collector(await third.open(second.peer_id, timeout_s=60))
            await collector.send(b"x")
            await collector.receive(1)

    run(main())


def test_a_host_that_does_not_listen_closes_incoming_streams(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            await asyncio.wait_for(collector.closed, 10)
            first.listen(lambda stream: 1 / 0)  # type: ignore[arg-type, return-value]
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            await asyncio.wait_for(collector.closed, 10)
            echo_server(first)  # and it still works
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            await collector.send(b"x")
            await collector.receive(1)

    run(main())


def test_incoming_streams_of_one_peer_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2, max_incoming_streams_per_peer=3) as (first, second):
            accepted = echo_server(first)
            streams = [Collector(await second.open(first.peer_id, timeout_s=60)) for _ in range(3)]
            await until(lambda: len(accepted) == 3, "three streams are accepted")
            refused = Collector(await second.open(first.peer_id, timeout_s=60))
            await asyncio.wait_for(refused.closed, 10)
            assert len(accepted) == 3
            streams[0].stream.close()
            await until(lambda: any(collector.closed.done() for collector in accepted), "a place is free again")
            again = Collector(await second.open(first.peer_id, timeout_s=60))
            await again.send(b"x")
            await again.receive(1)

    run(main())


@LOOPS
def test_after_its_p2pd_is_killed_a_host_serves_again_with_the_same_id_and_port(tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            events: list[HostEvent] = []
            second.subscribe(events.append)
            echo_server(first)
            echo_server(second)
            before, old_process = second.addresses(), second.p2pd_process_id
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            assert old_process is not None
            os.kill(old_process, signal.SIGKILL)
            await asyncio.wait_for(collector.closed, 5)
            await until(lambda: bool(events), "the owner is told of the death")
            # waits for the new p2pd by itself
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            await collector.send(b"x")
            await collector.receive(1)
            assert second.p2pd_process_id != old_process
            assert second.addresses() == before
            await until(lambda: events[-1].kind is HostEventKind.P2PD_RESTARTED, "the owner is told")
            assert [event.kind for event in events] == [HostEventKind.P2PD_DIED, HostEventKind.P2PD_RESTARTED]
            back = Collector(await first.open(second.peer_id, timeout_s=60))
            await back.send(b"x")
            await back.receive(1)

    run(main(), loop=loop)


def test_what_p2pds_death_interrupts_fails_at_once(tmp_path: Path) -> None:
    async def never(caller: str, request: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def main(silent_port: int) -> None:
        async with hosts(tmp_path, 2, health_interval_s=100.0) as (first, second):
            await first.serve_calls("/never", never)
            nobody = Identity.generate().peer_id
            second.learn([f"/ip4/127.0.0.1/tcp/{silent_port}/p2p/{nobody}"])
            waiting = {
                asyncio.create_task(second.open(nobody, timeout_s=1000)),
                asyncio.create_task(second.call(first.peer_id, "/never", b"", timeout_s=1000)),
            }
            done, _ = await asyncio.wait(waiting, timeout=0.5)
            assert not done, "nobody waits, so that the test shows nothing"
            assert second.p2pd_process_id is not None
            os.kill(second.p2pd_process_id, signal.SIGKILL)
            for task in waiting:
                with pytest.raises(HostDownError):
                    await asyncio.wait_for(task, 60)
            await until(lambda: second.is_ready, "it is back")
            async with asyncio.timeout(60):
                while not await second.is_up():  # noqa: ASYNC110  # a new p2pd may take a moment to say who it is
                    await asyncio.sleep(0.05)

    with socket.socket() as silent:  # takes connections and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        run(main(silent.getsockname()[1]))


def test_a_p2pd_that_hangs_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        options = {"health_interval_s": 0.2, "health_timeout_s": 0.5}
        async with hosts(tmp_path, 2, **options) as (first, second):
            echo_server(first)
            old_process = second.p2pd_process_id
            assert old_process is not None
            assert await second.is_up()
            os.kill(old_process, signal.SIGSTOP)
            async with asyncio.timeout(60):
                while await second.is_up():  # a moment passes until it has stopped
                    pass
            await until(lambda: second.p2pd_process_id != old_process, "p2pd was replaced")
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            await collector.send(b"x")
            await collector.receive(1)
            assert not is_running(old_process)

    run(main())


def test_open_fails_within_its_time_when_p2pd_cannot_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        binary = tmp_path / "p2pd"
        binary.symlink_to(bundled_p2pd())
        events: list[HostEvent] = []
        async with hosts(tmp_path, 1, p2pd_binary=binary) as (host,):
            host.subscribe(events.append)
            binary.unlink()
            assert host.p2pd_process_id is not None
            os.kill(host.p2pd_process_id, signal.SIGKILL)
            await until(lambda: any(e.kind is HostEventKind.RESTART_FAILED for e in events), "the owner is told")
            with pytest.raises(HostDownError):
                await host.open(Identity.generate().peer_id, timeout_s=0.2)
            binary.symlink_to(bundled_p2pd())
            await until(lambda: host.is_ready, "it comes back as soon as it can")

    run(main())


def test_a_killed_daemon_leaves_no_p2pd_and_its_peers_notice_at_once(tmp_path: Path) -> None:
    child = ChildHost()

    async def main() -> None:
        async with hosts(tmp_path, 1) as (host,):
            echo_server(host)
            settings = {"listen": LOOPBACK, "bootstrap": host.addresses()}
            about = await asyncio.to_thread(
                lambda: child.ask(command="start", state_dir=str(tmp_path / "child"), **settings)
            )
            collector = Collector(await host.open(about["peer_id"], timeout_s=60))
            await collector.send(b"x")
            await collector.receive(1)
            assert is_running(about["p2pd"])
            sockets = list((tmp_path / "child" / "sockets").iterdir())
            assert len(sockets) == 2
            child.kill()
            await asyncio.wait_for(collector.closed, 5)
            await until(lambda: not is_running(about["p2pd"]), "p2pd follows its parent", deadline_s=2.0)
            # the next daemon on that directory is the same peer at the same address, whatever was left there
            assert any(path.exists() for path in sockets), "nothing stale was left, so that the test shows less"
            options = HostOptions(tmp_path / "child", listen=LOOPBACK, bootstrap=host.addresses())
            heir = await Host.start(options)
            try:
                assert (heir.peer_id, heir.addresses()) == (about["peer_id"], tuple(about["addresses"]))
                collector = Collector(await heir.open(host.peer_id, timeout_s=60))
                await collector.send(b"x")
                await collector.receive(1)
            finally:
                await heir.close()
            assert not any(path.exists() for path in sockets)

    try:
        run(main(), deadline_s=150.0)  # the child imports torch, which takes long on a busy machine
    finally:
        child.close()


def test_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 1) as (host,):
            process = host.p2pd_process_id
            assert process is not None
            assert os.getsid(process) != os.getsid(0), "Ctrl-C would end p2pd before the daemon has drained"
            await host.close()  # twice is fine
        assert not is_running(process)
        assert sorted(path.name for path in (tmp_path / "host0").iterdir()) == [
            "host.lock",
            "identity.key",
            "listen.ports",
        ]
        with pytest.raises(HostDownError):
            await host.open(Identity.generate().peer_id, timeout_s=5)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())  # loads what is loaded once
    before = psutil.Process().num_fds()
    for _ in range(2):
        run(main())
    assert psutil.Process().num_fds() <= before
    assert not [child for child in psutil.Process().children() if child.name() == "p2pd"]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_ipv6_works_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2, loopback=["/ip6/::1/tcp/0"]) as (first, second):
            echo_server(first)
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            await collector.send(b"x")
            await collector.receive(1)
            assert first.addresses()[0].startswith("/ip6/::1/tcp/")

    run(main())


def test_a_long_state_directory_gets_its_sockets_elsewhere(tmp_path: Path) -> None:
    long_path = tmp_path / ("x" * 100) / ("with a space, a comma and ü")

    async def main() -> Path:
        async with hosts(long_path, 2) as (first, second):
            elsewhere = Path((long_path / "host0" / "sockets.path").read_text())
            echo_server(first)
            collector = Collector(await second.open(first.peer_id, timeout_s=60))
            await collector.send(b"x")
            await collector.receive(1)
            assert sorted(os.listdir(elsewhere)) == ["p2pd.sock", "streams.sock"]
            assert os.stat(elsewhere).st_mode & 0o777 == 0o700
        return elsewhere

    assert not run(main()).exists()
    assert not (long_path / "host0" / "sockets.path").exists()


def test_a_peer_with_default_security_can_be_talked_to(tmp_path: Path) -> None:
    """We offer TLS only; libp2p's default offers Noise first, then TLS."""
    control = tmp_path / "p2pd.sock"
    command = [str(bundled_p2pd()), f"-listen=/unix{control}", f"-hostAddrs={LOOPBACK[0]}", "-idleTimeout=60s"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        lines = [other.stdout.readline().strip() for _ in range(4)]
        address = f"{lines[3]}/p2p/{lines[1].removeprefix('Peer ID: ')}"

        async def main() -> None:
            async with hosts(tmp_path, 1) as (host,):
                (result,) = await host.connect([address])
                assert result.error is None
                assert result.peer_id in await host.connected_peers()

        run(main())
    finally:
        other.kill()
        other.wait(60)
        other.stdout.close()


def test_calls_answer_fail_and_end_in_time(tmp_path: Path) -> None:
    async def answer(caller: str, request: bytes) -> bytes:
        if request == b"fail":
            raise ValueError("as asked")
        if request == b"large":
            return bytes(4 * 2**20)
        if request == b"hang":
            await asyncio.Event().wait()
        return caller.encode() + request

    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            await first.serve_calls("/test", answer)
            assert await second.call(first.peer_id, "/test", b"x", timeout_s=60) == second.peer_id.encode() + b"x"
            for request, reason in ((b"fail", "ValueError: as asked"), (b"large", "too large")):
                with pytest.raises(PeerUnreachable, match=reason):
                    await second.call(first.peer_id, "/test", request, timeout_s=10 * PATIENCE)
            with pytest.raises(PeerUnreachable, match="no answer"):
                await second.call(first.peer_id, "/test", b"hang", timeout_s=1)
            with pytest.raises(PeerUnreachable, match="too large"):
                await second.call(first.peer_id, "/test", bytes(4 * 2**20), timeout_s=60)
            with pytest.raises(PeerUnreachable):
                await second.call(first.peer_id, "/unknown", b"x", timeout_s=60)
            assert first.p2pd_process_id is not None
            os.kill(first.p2pd_process_id, signal.SIGKILL)
            await until(lambda: not first.is_ready, "the death is noticed")
            await first.wait_ready()  # handlers are registered again

            async def answers() -> bool:
                try:
                    return bool(await second.call(first.peer_id, "/test", b"y", timeout_s=2))
                except NetError:
                    return False

            async with asyncio.timeout(30 * PATIENCE):
                while not await answers():
                    pass

    run(main())


def test_p2pd_gets_the_flags_that_were_found_necessary(tmp_path: Path) -> None:
    line = P2pdOptions(Path("p2pd"), tmp_path / "s", tmp_path / "k", LOOPBACK).command_line()
    for flag in ("-noise=0", "-tls=1", "-relay=1", "-relayService=0", "-idleTimeout=20s"):
        assert flag in line
    assert "-autoRelay=0" in line  # p2pd would take public relays of strangers
    assert not any(flag.startswith(("-b", "-trustedRelays", "-announceAddrs", "-force")) for flag in line)
    relay = P2pdOptions(Path("p2pd"), tmp_path / "s", tmp_path / "k", LOOPBACK, serve_relay=True).command_line()
    assert {"-relayService=1", "-forceReachabilityPublic=1", "-relayBufferSize=262144"} <= set(relay)
