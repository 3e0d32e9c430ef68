"""A node of the run's DHT, inside this process: Kademlia over the host's small calls. It trusts no other node.

It differs from hivemind's node because of faults that were observed there. A peer's place in the DHT follows from its
peer id, so that a peer has only one. Bad records are dropped one by one (there, one bad record hides all others of its
key). Messages are bounded before they are decoded, and so is a search. Nothing is cached: whatever a search finds was
on the network just now. Other nodes are not blamed for this host's outages.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from swarmtrain import world
from swarmtrain.directory.dht_messages import (
    MAX_RECORDS_PER_ANSWER,
    Contact,
    Find,
    FoundHere,
    Ping,
    Pong,
    Store,
    Stored,
    pack_addresses,
    unpack_addresses,
)
from swarmtrain.directory.guard import CallGate, OpenCalls
from swarmtrain.directory.kademlia import PLACE_BYTES, RoutingTable, search
from swarmtrain.directory.places import place_bytes, place_of_peer, place_of_topic
from swarmtrain.directory.records import Flaw, FlawedRecord, Record, RecordChecker, RecordStore, topic_of
from swarmtrain.p2p.addresses import peer_id_from_bytes, peer_id_to_bytes
from swarmtrain.p2p.errors import AddressError, HostDownError, NetError
from swarmtrain.p2p.network import CallNetwork
from swarmtrain.wire.errors import WireError
from swarmtrain.wire.schema import pack_fields, unpack_fields

logger = logging.getLogger(__name__)

BUCKET_SIZE = 20  # Kademlia's k; also how many of the nearest nodes a search asks
MAX_PARTS = 8 * PLACE_BYTES
NUM_PER_PART = 5  # nodes that a refresh asks in each other part of the DHT
NUM_WORKERS = 4  # concurrent calls of one search
CALL_TIMEOUT_S = 3.0
MAX_ASKED = 96  # by one search: nodes that claim to know ever nearer ones cannot keep it busy
MAX_ANSWER_BYTES = 2 * 2**20  # below the size at which p2pd drops an answer
SUSPECT_FIRST_S, SUSPECT_LONGEST_S = 5.0, 60.0
MAX_REMEMBERED_PEERS = 256
NUM_CLOCKS = 5  # how many neighbours' clocks this node compares its own with


Answer = TypeVar("Answer", Pong, Stored, FoundHere)
_Question = Ping | Store | Find


@dataclass(slots=True)
class _Suspect:
    until: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: the newest live record of each owner, its holders, and the nearest nodes in order."""

    records: dict[str, tuple[Record, bytes]]
    holders: dict[str, set[str]]
    nearest: list[str]


class DhtNode:
    """See the module docstring. In client mode it asks others, stores nothing for them, and is in no routing table."""

    def __init__(
        self,
        network: CallNetwork,
        run_id: str,
        checker: RecordChecker,
        store: RecordStore,
        *,
        client_mode: bool = False,
        gate: CallGate | None = None,
        clock: Callable[[], float] = world.wall,
    ) -> None:
        self.place = place_of_peer(network.peer_id)
        self._table = RoutingTable(self.place, BUCKET_SIZE)
        self.store = store
        self.checker = checker
        self.seen: OrderedDict[str, None] = OrderedDict()  # peers that have answered: ways back after an outage
        self._network = network
        self._run_id = run_id
        self._clock = clock
        self._client_mode = client_mode
        gate = gate or OpenCalls(run_id)
        self._namespace, self._is_excluded = gate.namespace, gate.is_excluded
        self._own_name = b"" if client_mode else place_bytes(self.place)
        self._suspects: dict[str, _Suspect] = {}
        self._clock_offsets: OrderedDict[str, float] = OrderedDict()
        self._background: set[asyncio.Task[bool]] = set()
        self._being_pinged: set[str] = set()
        self._is_closed = False
        self._next_part = 0  # the part that the next refresh begins with
        self.was_alone = False  # whether the routing table was empty at some time since the watch cleared this

    async def serve(self) -> None:
        """Begin to answer other nodes (not in client mode)."""
        if self._client_mode:
            return
        await self._network.serve_calls(self._protocol("ping"), self._answer_ping)
        await self._network.serve_calls(self._protocol("store"), self._answer_store)
        await self._network.serve_calls(self._protocol("find"), self._answer_find)

    def close(self) -> None:
        """Answer no more questions, and end the background tasks."""
        self._is_closed = True
        for task in self._background:
            task.cancel()

    @property
    def neighbours(self) -> set[str]:
        """The other nodes in the routing table."""
        return self._table.peers()

    @property
    def clock_offset_s(self) -> float:
        """By how much the neighbours' clocks are ahead of ours (median)."""
        return statistics.median(self._clock_offsets.values()) if self._clock_offsets else 0.0

    def clock_offsets(self) -> list[float]:
        """By how much each measured neighbour's clock is ahead of ours."""
        return list(self._clock_offsets.values())

    async def measure_clocks(self) -> None:
        """Ask neighbours for their time: at first several, later one per call, in turn."""
        known, neighbours = self._clock_offsets, sorted(self.neighbours)
        for gone in [peer_id for peer_id in known if peer_id not in neighbours]:
            del known[gone]
        unknown = [peer_id for peer_id in neighbours if peer_id not in known]
        oldest = [peer_id for peer_id in known if peer_id in neighbours][:1]
        wanted = unknown[: max(0, NUM_CLOCKS - len(known))] or oldest
        for peer_id in wanted:
            known.pop(peer_id, None)
        await asyncio.gather(*(self.ping(peer_id) for peer_id in wanted))

    def time_has_changed(self) -> None:
        """Our clock was set: drop everything that was measured or stored by the old time."""
        self._clock_offsets.clear()
        self._suspects.clear()
        self.store.clear()

    def trust_again(self) -> None:
        """Clear the back-off of all peers: after an outage of this host their failures mean nothing."""
        self._suspects.clear()

    def _protocol(self, method: str) -> str:
        return f"/swarmtrain/directory/2/{self._namespace}/{method}"

    # ---- calls to others --------------------------------------------------------------------------------------------

    async def ping(self, peer_id: str) -> bool:
        """Whether the peer answers as a node of this DHT. If so, each has the other in its routing table."""
        asked_at = self._clock()
        answer = await self._call(peer_id, "ping", Ping(self._own_name, self._own_addresses()), Pong)
        if answer is None:
            return False
        answered_at = self._clock()
        if 0 <= answered_at - asked_at < 1.0:  # a slow answer says little about the clock
            self._clock_offsets[peer_id] = answer.time - (asked_at + answered_at) / 2
            while len(self._clock_offsets) > 64:
                self._clock_offsets.popitem(last=False)
        return True

    async def put_at(self, peer_id: str, key: int, raw: bytes) -> bool:
        """Ask a node to store a record; whether it says that it does."""
        answer = await self._call(peer_id, "store", Store(self._own_name, place_bytes(key), (raw,)), Stored)
        return answer is not None and answer.accepted == (True,)

    async def search(self, topic: str) -> Found:
        """Ask the nodes nearest to a topic, this one's own store included, for its records."""
        found = Found({}, {}, [])
        key = place_of_topic(self._run_id, topic)
        for raw in self.store.get(key):
            self._add(found, raw, topic, holder=self._network.peer_id)
        nearest = await self._search(key, lambda peer_id, raw: self._add(found, raw, topic, holder=peer_id))
        found.nearest.extend(nearest)
        return found

    async def find_nearest(self, key: int) -> list[str]:
        """The nodes nearest to `key` that answered, nearest first, without this one."""
        return await self._search(key, lambda peer_id, raw: None)

    async def refresh(self, ways: Iterable[str], *, num_parts: int) -> None:
        """Discover nodes in `num_parts` other parts of the DHT, in turn, asking the peers `ways` as well.

        Without it, peers that join at once through one node know only that node and those nearest to themselves: a
        search among them ends there and misses records elsewhere.
        """
        if len(self._table) < BUCKET_SIZE:
            return  # the lookup of our own place has asked all known nodes
        places = self._table.far_places()
        for _ in range(min(num_parts, len(places))):
            key = places[self._next_part % len(places)]
            self._next_part += 1
            await self._search(key, lambda peer_id, raw: None, also=ways, beam=NUM_PER_PART)

    async def _search(
        self,
        key: int,
        on_record: Callable[[str, bytes], None],
        *,
        also: Iterable[str] = (),
        beam: int = BUCKET_SIZE,
    ) -> list[str]:
        async def ask(peer_id: str) -> dict[int, str] | None:
            suspect = self._suspects.get(peer_id)
            if suspect is not None and suspect.until > self._clock():
                return None
            question = Find(self._own_name, place_bytes(key), self._own_addresses())
            answer = await self._call(peer_id, "find", question, FoundHere)
            if answer is None:
                return None
            for raw in answer.records:
                on_record(peer_id, raw)
            return self._hear_of(answer.neighbours)

        start = self._table.nearest(key, beam)
        for others in await asyncio.gather(*(ask(peer_id) for peer_id in also)):
            start.update(others or {})
        return await search(
            key,
            start,
            ask,
            own_place=self.place,
            beam=beam,
            num_workers=NUM_WORKERS,
            max_asked=MAX_ASKED,
        )

    async def _call(self, peer_id: str, method: str, question: _Question, answer_type: type[Answer]) -> Answer | None:
        """The peer's answer, or None; the routing table is updated either way."""
        packed = pack_fields(question)
        try:
            raw = await self._network.call(peer_id, self._protocol(method), packed, timeout_s=CALL_TIMEOUT_S)
            answer = unpack_fields(answer_type, raw)
        except HostDownError:
            return None  # this host's outage, not the peer's fault
        except (NetError, WireError) as error:
            logger.debug("%s of %s failed: %s", method, peer_id, error)
            self._note_failure(peer_id)
            return None
        self._note_success(peer_id, answer.responder)
        return answer

    def _add(self, found: Found, raw: bytes, topic: str, holder: str) -> None:
        try:
            record = self.checker.check(raw, topic)
        except FlawedRecord as error:
            logger.debug("a record of %s from %s was dropped: %s", topic, holder, error)
            return
        if self._is_excluded(record.peer_id):
            self.checker.dropped[Flaw.EXCLUDED] += 1
            return
        held = found.records.get(record.peer_id)
        if held is None or held[0].expires_at < record.expires_at:
            found.records[record.peer_id] = (record, raw)
            found.holders[record.peer_id] = {holder}
        elif held[1] == raw:
            found.holders[record.peer_id].add(holder)

    # ---- answers to others ------------------------------------------------------------------------------------------

    async def _answer_ping(self, caller: str, payload: bytes) -> bytes:
        question = unpack_fields(Ping, payload)
        self._note_caller(caller, question.sender, question.addresses)
        return pack_fields(Pong(self._own_name, self._clock()))

    async def _answer_store(self, caller: str, payload: bytes) -> bytes:
        question = unpack_fields(Store, payload)
        self._note_caller(caller, question.sender)
        accepted = []
        for raw in question.records:
            accepted.append(self.keep(int.from_bytes(question.key, "big"), raw))
            await asyncio.sleep(0)  # a check costs 100 us: let other tasks run in between
        return pack_fields(Stored(self._own_name, tuple(accepted)))

    async def _answer_find(self, caller: str, payload: bytes) -> bytes:
        question = unpack_fields(Find, payload)
        is_excluded = self._is_excluded(caller)
        self._note_caller(caller, question.sender, question.addresses)
        key = int.from_bytes(question.key, "big")
        records = self.store.get(key)[:MAX_RECORDS_PER_ANSWER]
        while sum(map(len, records)) > MAX_ANSWER_BYTES:  # happens only with store limits far above the default
            records = records[: len(records) // 2]
        near = {} if is_excluded else self._table.nearest(key, BUCKET_SIZE, without=place_of_peer(caller))
        neighbours = tuple(
            Contact(peer_id_to_bytes(peer_id), pack_addresses(self._network.known_addresses(peer_id)))
            for peer_id in near.values()
        )
        return pack_fields(FoundHere(self._own_name, tuple(records), neighbours))

    def keep(self, key: int, raw: bytes) -> bool:
        """Check a record and store it. False if it is flawed or a cap refuses it; the refusal is counted."""
        try:
            topic = topic_of(raw)
            if place_of_topic(self._run_id, topic) != key:
                raise FlawedRecord(Flaw.MISPLACED)
        except FlawedRecord as error:
            self.checker.dropped[error.flaw] += 1
            return False
        try:
            record = self.checker.check(raw, topic)
        except FlawedRecord:
            return False
        if self._is_excluded(record.peer_id):
            self.checker.dropped[Flaw.EXCLUDED] += 1
            return False
        if not self.store.put(key, record.peer_id, raw, record.expires_at):
            self.checker.dropped[Flaw.OVER_CAP] += 1
            return False
        return True

    # ---- known peers ------------------------------------------------------------------------------------------------

    def _note_caller(self, peer_id: str, name: bytes, addresses: tuple[bytes, ...] = ()) -> None:
        if self._is_closed:
            raise HostDownError("this node has left the directory")
        if self._is_excluded(peer_id):
            return  # it may read: so it finds the coordinator, which tells it
        if name == place_bytes(place_of_peer(peer_id)):  # a client sends no name and stays out of the table
            self._network.learn(unpack_addresses(addresses, peer_id), of=peer_id)
            self._enter(peer_id)

    def _own_addresses(self) -> tuple[bytes, ...]:
        return () if self._client_mode else pack_addresses(self._network.addresses())

    def _hear_of(self, neighbours: tuple[Contact, ...]) -> dict[int, str]:
        """The peers that another node named, at the places that follow from their peer ids."""
        places = {}
        for contact in neighbours:
            try:
                peer_id = peer_id_from_bytes(contact.peer_id)
            except AddressError:
                continue
            if peer_id != self._network.peer_id:
                self._network.hear(unpack_addresses(contact.addresses, peer_id), of=peer_id)
            places[place_of_peer(peer_id)] = peer_id
        return places

    def _note_success(self, peer_id: str, name: bytes) -> None:
        self._suspects.pop(peer_id, None)
        if name == place_bytes(place_of_peer(peer_id)):
            self._enter(peer_id)
            self.seen[peer_id] = None
            self.seen.move_to_end(peer_id)
            while len(self.seen) > MAX_REMEMBERED_PEERS:
                self.seen.popitem(last=False)

    def _enter(self, peer_id: str) -> None:
        oldest = self._table.add(place_of_peer(peer_id), peer_id)
        if oldest is not None and oldest not in self._being_pinged:
            self._being_pinged.add(oldest)
            task = asyncio.create_task(self.ping(oldest))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            task.add_done_callback(lambda _: self._being_pinged.discard(oldest))

    def _note_failure(self, peer_id: str) -> None:
        known = self._suspects.get(peer_id)
        pause_s = min(2 * known.pause_s, SUSPECT_LONGEST_S) if known is not None else SUSPECT_FIRST_S
        self._suspects[peer_id] = _Suspect(self._clock() + pause_s, pause_s)
        if len(self._suspects) > 4 * MAX_REMEMBERED_PEERS:
            now = self._clock()
            self._suspects = {peer: suspect for peer, suspect in self._suspects.items() if suspect.until > now}
        self._table.remove(place_of_peer(peer_id))
        self.was_alone = self.was_alone or not len(self._table)
