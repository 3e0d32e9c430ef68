"""The directory among many nodes: everybody is found, nobody can lie about others, and outages heal."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from p2p.host_helpers import hosts, run, until

from swarmtrain.directory.dht_messages import Ping, Stored
from swarmtrain.directory.directory import Directory, DirectoryOptions, NotConfirmedError, TopicRule
from swarmtrain.directory.places import place_of_peer, place_of_topic
from swarmtrain.directory.records import RecordError, RecordStore, StoreLimits, make_record
from swarmtrain.p2p.errors import HostDownError, PeerUnreachable
from swarmtrain.p2p.identity import Identity, RunKey
from swarmtrain.wire.schema import pack_fields, unpack_fields

from .memory_hosts import MemoryHost, MemoryNetwork

FIND = "/swarmtrain/directory/2/run/find"
STORE = "/swarmtrain/directory/2/run/store"
QUICK = {"watch_interval_s": 0.05}
NEVER = {"watch_interval_s": 1000.0}


async def join(host: Any, **options: Any) -> Directory:
    return await Directory.start(host, "run", DirectoryOptions(**{**NEVER, **options}))


@asynccontextmanager
async def crowd(count: int, **options: Any) -> AsyncIterator[tuple[MemoryNetwork, list[MemoryHost], list[Directory]]]:
    """`count` nodes in memory that joined through the first."""
    network = MemoryNetwork()
    members: list[MemoryHost] = []
    directories: list[Directory] = []
    for _ in range(count):
        members.append(network.host(*members[:1]))
        directories.append(await join(members[-1], **options))
    try:
        yield network, members, directories
    finally:
        for directory in directories:
            await directory.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "no task is left")


def forget_records(directory: Directory) -> None:
    """As if a node had been replaced by one that knows nothing."""
    directory._node.store = RecordStore(StoreLimits(), time.time)


def store_request(*raws: bytes, topic: str = "topic") -> bytes:
    packed: bytes = msgpack.packb([b"", place_of_topic("run", topic).to_bytes(20, "big"), raws])  # a liar's: no limits
    return packed


async def offer(liar: MemoryHost, victim: MemoryHost, request: bytes) -> list[bool]:
    return list(unpack_fields(Stored, await liar.call(victim.peer_id, STORE, request, timeout_s=1)).accepted)


def test_everybody_finds_everybody_among_40() -> None:
    async def main() -> None:
        async with crowd(40) as (_, members, directories):
            for index, directory in enumerate(directories):
                announced = await directory.announce("peers", b"%d" % index, 30.0)
                assert announced.num_copies == 5
            expected = {host.peer_id: b"%d" % index for index, host in enumerate(members)}
            for directory in directories[::7]:
                found = await directory.lookup("peers")
                assert {peer_id: record.value for peer_id, record in found.items()} == expected
            assert await directories[3].lookup("nothing") == {}

    run(main())


def test_200_that_join_at_once_find_what_one_of_them_announces() -> None:
    async def main() -> None:
        network, far = MemoryNetwork(), 1 << 159
        first = network.host()
        while (place_of_peer(first.peer_id) ^ place_of_topic("run", "coordinator")) < far:
            first = network.host()  # one that is not itself near to what all look for
        hosts = [network.host(first) for _ in range(200)]
        directories = [await join(first)]
        announced = asyncio.create_task(directories[0].announce("coordinator", b"step 1", 30.0))
        directories += await asyncio.gather(*(join(host) for host in hosts))
        await announced
        await directories[0].announce("coordinator", b"step 2", 30.0)
        found = await asyncio.gather(*(directory.lookup("coordinator") for directory in directories))
        steps = Counter(record.value for records in found for record in records.values())
        assert steps == {b"step 2": 201}
        for directory in directories:
            await directory.close()

    run(main())


def test_records_survive_when_a_third_of_the_nodes_vanish() -> None:
    async def main() -> None:
        async with crowd(30) as (network, members, directories):
            for index, directory in enumerate(directories):
                await directory.announce("peers", b"%d" % index, 30.0)
            for host in members[10:20]:
                del network.hosts[host.peer_id]
            found = await directories[25].lookup("peers")
            assert len(found) == 30, "also those of the vanished are known until they expire"
            before = network.num_calls
            await directories[25].lookup("peers")
            assert network.num_calls - before <= 60, "nodes that failed are asked again and again"

    run(main())


def test_a_newer_announcement_replaces_the_older_everywhere() -> None:
    async def main() -> None:
        async with crowd(8) as (_, members, directories):
            await directories[2].announce("peers", b"load 1", 20.0)
            await directories[2].announce("peers", b"load 2", 30.0)
            for directory in directories:
                assert (await directory.lookup("peers"))[members[2].peer_id].value == b"load 2"

    run(main())


def test_records_end_with_their_time() -> None:
    now = time.time()

    async def main() -> None:
        nonlocal now
        async with crowd(4, clock=lambda: now) as (_, members, directories):
            await directories[1].announce("peers", b"short", 10.0)
            await directories[2].announce("peers", b"long", 20.0)
            now += 10.0
            assert list(await directories[3].lookup("peers")) == [members[2].peer_id]
            now += 10.0
            assert await directories[3].lookup("peers") == {}

    run(main())


def test_a_client_uses_the_directory_without_being_part_of_it() -> None:
    async def main() -> None:
        async with crowd(4) as (network, members, directories):
            client_host = network.host(members[0], behind_nat=True)
            client = await join(client_host)
            await client.announce("peers", b"client", 30.0, confirm=True)
            assert client_host.peer_id in await directories[3].lookup("peers")
            assert all(client_host.peer_id not in directory._node.neighbours for directory in directories)
            assert not client_host.handlers
            await client.close()

    run(main())


def test_what_may_not_be_announced() -> None:
    async def main() -> None:
        async with crowd(2) as (_, members, directories):
            for ttl_s in (0.0, -1.0, 61.0, float("nan"), float("inf")):
                with pytest.raises(RecordError):
                    await directories[0].announce("peers", b"", ttl_s)
            with pytest.raises(RecordError):
                await directories[0].announce("peers", b"x" * 3000, 30.0)
            with pytest.raises(RecordError):
                await directories[0].announce("", b"", 30.0)
            for index in range(64):
                await directories[0].announce(f"topic{index}", b"", 30.0)
            with pytest.raises(RecordError, match="64 topics"):
                await directories[0].announce("one more", b"", 30.0)
            members[0].is_ready = False
            for attempt in (directories[0].announce("topic0", b"", 30.0), directories[0].lookup("topic0")):
                with pytest.raises(HostDownError):
                    await attempt

    run(main())


def test_nodes_keep_only_honest_records() -> None:
    async def main() -> None:
        async with crowd(2, limits=StoreLimits(records_per_owner=3)) as (network, members, directories):
            victim, directory, liar = members[1], directories[1], network.host()
            now = time.time()
            honest = make_record(liar.identity, "run", "topic", b"mine", now + 30)
            assert await offer(liar, victim, store_request(honest)) == [True]
            forged = msgpack.unpackb(make_record(victim.identity, "run", "topic", b"", now + 30))
            forged[1][4] = b"forged"
            bad = {
                "forged": store_request(msgpack.packb(forged)),
                "far-future": store_request(make_record(liar.identity, "run", "topic", b"", now + 3600)),
                "expired": store_request(make_record(liar.identity, "run", "topic", b"", now - 1)),
                "oversized": store_request(bytes(5000)),
                "malformed": store_request(b"junk"),
                "misplaced": store_request(honest, topic="other"),
            }
            for flaw, request in bad.items():
                before = dict(directory.status().dropped)
                assert await offer(liar, victim, request) == [False]
                assert dict(directory.status().dropped) == {**before, flaw: before.get(flaw, 0) + 1}
            for index in range(2):
                raw = make_record(liar.identity, "run", f"more{index}", b"", now + 30)
                assert await offer(liar, victim, store_request(raw, topic=f"more{index}")) == [True]
            raw = make_record(liar.identity, "run", "too many", b"", now + 30)
            assert await offer(liar, victim, store_request(raw, topic="too many")) == [False]
            assert directory.status().dropped["over-cap"] == 1
            with pytest.raises(PeerUnreachable):
                await offer(liar, victim, store_request(*[honest] * 65))
            found = await directories[0].lookup("topic")
            assert {peer_id: record.value for peer_id, record in found.items()} == {liar.peer_id: b"mine"}

    run(main())


def test_a_topic_of_the_coordinator_takes_only_what_the_run_signed() -> None:
    run_key = RunKey.generate()
    rules = {"coordinator": TopicRule(countersigned_by=run_key.public_bytes)}

    async def main() -> None:
        async with crowd(4, rules=rules) as (_, members, directories):
            await directories[0].announce("coordinator", b"real", 30.0, signer=run_key.sign, confirm=True)
            announced = await directories[1].announce("coordinator", b"pretender", 30.0, signer=RunKey.generate().sign)
            assert announced.num_copies == 0
            for directory in directories:
                found = await directory.lookup("coordinator")
                assert {peer_id: record.value for peer_id, record in found.items()} == {members[0].peer_id: b"real"}

    run(main())


class Lies:
    """What a lying node may answer to a search."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def __call__(self, caller: str, request: bytes) -> bytes:
        return self._answer


def find_answer(records: Any = (), neighbours: Any = (), responder: Any = b"") -> bytes:
    packed: bytes = msgpack.packb((responder, records, neighbours))
    return packed


FORGED = make_record(Identity.generate(), "run", "peers", b"forged", time.time() + 30)[:-70] + bytes(70)
STRANGER = make_record(Identity.generate(), "other run", "peers", b"stranger", time.time() + 30)


@pytest.mark.parametrize(
    "answer",
    [
        b"junk",
        b"",
        find_answer(),
        find_answer([FORGED, STRANGER, b"", b"x" * 9000]),
        find_answer([FORGED, 7, None, [FORGED]]),
        find_answer({"not": "a list"}),
        find_answer(FORGED),
        find_answer([FORGED] * 1000),
        find_answer([FORGED] * 3000),
        find_answer(neighbours=[b"", bytes(38), b"\x12\x20" + bytes(32)]),
        find_answer(neighbours=[b"x" * 1_000_000]),
        find_answer(neighbours=[b"\x12\x20" + os.urandom(32) for _ in range(20)]),
        find_answer(neighbours=[b"\x12\x20" + os.urandom(32) for _ in range(500)]),
        find_answer(responder=b"x" * 20),
        find_answer(responder=7),
        msgpack.packb((b"", (), (), ())),
    ],
)
def test_lying_nodes_do_not_disturb_a_search(answer: bytes) -> None:
    async def main() -> None:
        async with crowd(12) as (network, members, directories):
            for index, directory in enumerate(directories):
                await directory.announce("peers", b"%d" % index, 30.0)
            for liar in members[2:6]:
                liar.handlers[FIND] = Lies(answer)
            before = network.num_calls
            found = await directories[11].lookup("peers")
            assert {record.value for record in found.values()} == {b"%d" % index for index in range(12)}
            assert network.num_calls - before <= 96

    run(main())


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200), st.sampled_from(["find", "store", "ping"]))
def test_any_bytes_to_a_node_change_nothing(noise: bytes, method: str) -> None:
    async def main() -> None:
        async with crowd(1) as (network, members, directories):
            liar = network.host()
            try:
                await liar.call(members[0].peer_id, f"/swarmtrain/directory/2/run/{method}", noise, timeout_s=1)
            except PeerUnreachable:
                pass  # a refusal
            status = directories[0].status()
            assert (status.num_records, status.num_neighbours) == (0, 0)

    run(main())


def test_a_node_cannot_sit_where_it_likes() -> None:
    async def main() -> None:
        async with crowd(2) as (network, members, directories):
            liar = network.host()
            for wanted in range(50):
                request = pack_fields(Ping(wanted.to_bytes(20, "big"), ()))
                await liar.call(members[0].peer_id, "/swarmtrain/directory/2/run/ping", request, timeout_s=1)
            assert directories[0].status().num_neighbours == 1

    run(main())


def test_a_key_that_many_try_to_fill_stays_readable() -> None:
    """The poisoning of the research: a key that outgrows an answer makes its keepers unable to answer."""
    limits = StoreLimits(bytes_per_key=100_000, records_per_key=1000)

    async def main() -> None:
        async with crowd(3, limits=limits) as (network, members, directories):
            await directories[0].announce("topic", b"honest", 30.0)
            liar = network.host()
            refused = 0
            for _ in range(80):
                raw = make_record(Identity.generate(), "run", "topic", b"x" * 2000, time.time() + 30)
                for victim in members:
                    refused += await offer(liar, victim, store_request(raw)) == [False]
            assert refused > 0, "the cap was never reached"
            found = await directories[2].lookup("topic")
            assert found[members[0].peer_id].value == b"honest"
            await directories[0].announce("topic", b"renewed", 31.0)
            assert (await directories[2].lookup("topic"))[members[0].peer_id].value == b"renewed"

    run(main())


def test_a_node_that_lost_all_its_neighbours_finds_them_again_and_its_records_come_back() -> None:
    async def main() -> None:
        async with crowd(6) as (network, members, directories):
            lonely = network.host(members[0])
            directory = await join(lonely, client_mode=True, **QUICK)  # nobody calls a client and helps it back
            lost = network.host(members[0])
            unwatched = await join(lost, client_mode=True)
            for node in (directory, unwatched):
                await node.announce("peers", b"here", 60.0)
            for node in (lonely, lost):
                network.cut_off.add(node.peer_id)
            for node in (directory, unwatched):  # using the network during the outage empties the table
                await node.lookup("peers")
                assert node.status().num_neighbours == 0
            for other in directories:
                forget_records(other)
            network.cut_off.clear()
            await until(lambda: directory.status().num_recoveries >= 1, "the directory recovers")
            async with asyncio.timeout(60):
                while lonely.peer_id not in await directories[3].lookup("peers"):
                    pass
            assert unwatched.status().num_neighbours == 0, "it healed without the watch: the test shows nothing"
            for node in (directory, unwatched):
                await node.close()

    run(main())


def test_after_a_restart_of_p2pd_the_records_come_back() -> None:
    async def main() -> None:
        async with crowd(5) as (network, members, directories):
            host = network.host(members[0])
            directory = await join(host, client_mode=True)  # so that it does not answer for its own records
            await directory.announce("peers", b"here", 60.0)
            await directory.announce("gone", b"here", 60.0)
            directory.withdraw("gone")
            for other in directories:
                forget_records(other)
            assert host.peer_id not in await directories[2].lookup("peers")
            host.restarted()
            async with asyncio.timeout(60):
                while host.peer_id not in await directories[2].lookup("peers"):
                    pass
            assert host.peer_id not in await directories[2].lookup("gone")
            await directory.close()

    run(main())


def test_confirming_catches_nodes_that_only_say_they_keep_a_record() -> None:
    async def main() -> None:
        async with crowd(4) as (_, members, directories):
            announced = await directories[0].announce("peers", b"x", 30.0, confirm=True)
            assert announced.num_copies == 3

            async def say_yes(caller: str, request: bytes) -> bytes:
                return pack_fields(Stored(b"", (True,)))

            for host in members[1:]:
                host.handlers[STORE] = say_yes
            assert (await directories[0].announce("other", b"x", 30.0)).num_copies == 3, "the lie is not believed"
            with pytest.raises(NotConfirmedError):
                await directories[0].announce("third", b"x", 30.0, confirm=True)
        async with crowd(1) as (_, _, (alone,)):
            assert (await alone.announce("peers", b"x", 30.0)).num_copies == 0
            assert len(await alone.lookup("peers")) == 1
            with pytest.raises(NotConfirmedError):
                await alone.announce("peers", b"x", 30.0, confirm=True)

    run(main())


def test_a_clock_that_is_off_shows_in_the_status(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with crowd(3) as (network, members, _):
            directory = await join(network.host(members[0]), clock=lambda: time.time() - 40, **QUICK)
            await until(lambda: "clock" in caplog.text, "the warning")
            assert directory.status().clock_offset_s == pytest.approx(40, abs=2)
            await directory.close()

    run(main())


# ---- over real p2pd processes ---------------------------------------------------------------------------------------


def test_four_real_hosts_find_each_other_and_survive_a_killed_p2pd(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 4) as members:
            directories = [await join(host, watch_interval_s=0.5) for host in members]
            for index, directory in enumerate(directories):
                announced = await directory.announce("peers", b"%d" % index, 60.0, confirm=True)
                assert announced.num_copies == 3
            expected = {host.peer_id: b"%d" % index for index, host in enumerate(members)}
            for directory in directories:
                found = await directory.lookup("peers")
                assert {peer_id: record.value for peer_id, record in found.items()} == expected
            victim, process = directories[2], members[2].p2pd_process_id
            assert process is not None
            os.kill(process, signal.SIGKILL)
            await until(lambda: victim.status().num_recoveries >= 1, "the directory recovers")
            await victim.announce("peers", b"22", 60.0, confirm=True)
            assert (await directories[3].lookup("peers"))[members[2].peer_id].value == b"22"
            for directory in directories:
                await directory.close()

    run(main())


def test_a_real_host_recovers_from_an_outage_of_the_network(tmp_path: Path) -> None:
    """The other p2pds are stopped, so that nobody answers: the routing table runs empty. Then they go on."""

    async def main() -> None:
        async with hosts(tmp_path, 3, health_interval_s=1000.0) as members:
            directories = [await join(host, watch_interval_s=0.5) for host in members]
            others = [host.p2pd_process_id for host in members[:2]]
            assert None not in others
            for process in others:
                os.kill(process or 0, signal.SIGSTOP)
            try:
                # A word that was on its way may bring one back that the first look had found silent.
                while directories[2].status().num_neighbours:
                    await directories[2].lookup("peers")  # ends when its calls do
            finally:
                for process in others:
                    os.kill(process or 0, signal.SIGCONT)
            await until(lambda: directories[2].status().num_neighbours == 2, "it finds the others again")
            await directories[2].announce("peers", b"back", 60.0, confirm=True)
            assert members[2].peer_id in await directories[1].lookup("peers")
            for directory in directories:
                await directory.close()

    run(main())
