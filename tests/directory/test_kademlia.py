"""Routing table and search: the nearest are remembered and found; nobody can make a search endless."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.directory.dht_messages import Contact, Find, FoundHere, Ping, Pong, Store, Stored
from swarmtrain.directory.kademlia import RoutingTable, search
from swarmtrain.wire.errors import WireError
from swarmtrain.wire.schema import Message, pack_fields, unpack_fields

places = st.integers(0, 2**160 - 1)


@settings(deadline=None, max_examples=100)
@given(places, st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=200), places, st.integers(1, 8))
def test_the_table_knows_the_living_within_its_size(
    own_place: int, events: list[tuple[bool, int]], key: int, bucket_size: int
) -> None:
    others = [random.Random(index).getrandbits(160) for index in range(40)] + [own_place]
    table = RoutingTable(own_place, bucket_size)
    heard: set[int] = set()
    for is_heard, index in events:
        place = others[index]
        if is_heard:
            table.add(place, str(place))
            heard.add(place)
        else:
            table.remove(place)
            heard.discard(place)
        known = {int(peer_id) for peer_id in table.peers()}
        assert own_place not in known
        assert known <= heard, "somebody who did not answer is still there"
        assert len(table) == len(known)
        by_distance = {(place ^ own_place).bit_length() for place in heard - {own_place}}
        assert len(known) >= len(by_distance), "a distance at which somebody is known has nobody"
        nearest = list(table.nearest(key, 5, without=others[0]))
        assert nearest == sorted(known - {others[0]}, key=lambda place: place ^ key)[:5]


def test_a_full_bucket_keeps_the_old_and_holds_the_new_in_reserve() -> None:
    table = RoutingTable(0, 2)
    assert table.add(0b1000, "a") is None
    assert table.add(0b1001, "b") is None
    assert table.add(0b1010, "c") == "a", "the one not heard of for longest is to be pinged"
    assert table.peers() == {"a", "b"}
    table.add(0b1000, "a")  # it answered
    assert table.add(0b1011, "d") == "b"
    table.remove(0b1001)  # it did not
    assert table.peers() == {"a", "d"}
    table.remove(0b1000)
    assert table.peers() == {"c", "d"}


class World:
    """Nodes that know some others, alive ones among them in every part of the DHT, and those that are dead."""

    def __init__(self, count: int, seed: int, num_dead: int = 0) -> None:
        generator = random.Random(seed)
        self.places = [generator.getrandbits(160) for _ in range(count)]
        self.dead = set(self.places[1 : 1 + num_dead])
        alive = [place for place in self.places if place not in self.dead]
        self.tables: dict[int, RoutingTable] = {}
        for place in self.places:
            self.tables[place] = RoutingTable(place, 20)
            parts: dict[int, list[int]] = {}
            for other in generator.sample(alive, len(alive)):
                parts.setdefault((other ^ place).bit_length(), []).append(other)
            others = [other for part in parts.values() for other in part[:3]]
            others += generator.sample(self.places, min(12, count))
            others += sorted(self.places, key=lambda p: p ^ place)[:8]
            for other in others:
                self.tables[place].add(other, str(other))
        self.asked: list[int] = []
        self.key = 0

    async def ask(self, peer_id: str) -> dict[int, str] | None:
        place = int(peer_id)
        self.asked.append(place)
        await asyncio.sleep(0)
        return None if place in self.dead else self.tables[place].nearest(self.key, 20)

    def search(self, start: int, key: int) -> list[int]:
        self.key = key
        known = self.tables[start].nearest(key, 20)
        found = search(key, known, self.ask, own_place=start, beam=20, num_workers=4, max_asked=96)
        return [int(peer_id) for peer_id in asyncio.run(found)]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1000), places, st.integers(0, 30))
def test_a_search_finds_the_nearest_that_are_alive(seed: int, key: int, num_dead: int) -> None:
    world = World(120, seed, num_dead)
    start = world.places[0]
    alive = sorted(set(world.places) - world.dead - {start}, key=lambda place: place ^ key)
    found = world.search(start, key)
    assert found[:5] == alive[:5]
    assert len(world.asked) == len(set(world.asked)), "somebody was asked twice"
    assert start not in world.asked


def test_liars_who_know_ever_nearer_nodes_do_not_keep_a_search_busy() -> None:
    asked = 0

    async def lie(peer_id: str) -> dict[int, str]:
        nonlocal asked
        asked += 1
        return {int(peer_id) // 2 + offset: str(int(peer_id) // 2 + offset) for offset in range(20)}

    start = 2**159
    found = search(0, {start: str(start)}, lie, own_place=1, beam=20, num_workers=4, max_asked=96)
    assert len(asyncio.run(found)) <= 20
    assert asked == 96


def test_a_search_from_nowhere_ends_and_a_cancelled_one_leaves_no_task() -> None:
    async def hang(peer_id: str) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        options = {"own_place": 1, "beam": 20, "num_workers": 4, "max_asked": 96}
        assert await search(0, {}, hang, **options) == []
        task = asyncio.create_task(search(0, {2: "a", 3: "b"}, hang, **options))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


MESSAGES = [
    Ping(b"", ()),
    Ping(bytes(20), (b"address",)),
    Pong(bytes(20), 1.5),
    Store(bytes(20), bytes(20), (b"record", b"")),
    Stored(b"", (True, False)),
    Find(bytes(20), bytes(20), (b"address",)),
    FoundHere(b"", (b"record",), (Contact(bytes(38), (b"address",)),)),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_survive_packing_and_no_cut_is_taken_for_one(message: Message) -> None:
    packed = pack_fields(message)
    assert unpack_fields(type(message), packed) == message
    for cut in range(len(packed)):
        with pytest.raises(WireError):
            unpack_fields(type(message), packed[:cut])
    with pytest.raises(WireError):
        unpack_fields(type(message), packed + b"x")


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=100), st.sampled_from(MESSAGES), st.integers(0, 99), st.integers(1, 255))
def test_any_bytes_are_a_message_or_malformed(noise: bytes, message: Message, position: int, flip: int) -> None:
    damaged = bytearray(pack_fields(message))
    damaged[position % len(damaged)] ^= flip
    for raw in (noise, bytes(damaged)):
        for kind in map(type, MESSAGES):
            try:
                read = unpack_fields(kind, raw)
            except WireError:
                continue
            assert unpack_fields(kind, pack_fields(read)) == read
