"""The run's directory: signed records of peers by topic, each valid for up to a minute.

`announce` puts a record of this peer under a topic, `lookup` returns the records of all peers. Below is a DHT among the
run's daemons. The directory repairs itself: a node that has lost all its neighbours (a short outage is enough) finds
them again, records are spread again after p2pd restarts, and important ones can be confirmed by reading them back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from swarmtrain.directory.dht import MAX_PARTS, DhtNode
from swarmtrain.directory.guard import CallGate, GuardedCalls, OpenCalls
from swarmtrain.directory.places import place_of_topic
from swarmtrain.directory.records import (
    MAX_LIFE_S,
    Record,
    RecordChecker,
    RecordError,
    RecordStore,
    Signer,
    StoreLimits,
    TopicRule,
    make_record,
)
from swarmtrain.directory.swarm_time import SwarmClock, agreed_shift
from swarmtrain.p2p.addresses import group_by_peer
from swarmtrain.p2p.errors import (
    HostDownError,
    HostError,
    NetError,
)
from swarmtrain.p2p.network import HostEvent, HostEventKind, NetworkHost

__all__ = ["Announcement", "Directory", "DirectoryOptions", "DirectoryStatus", "Record", "TopicRule"]
logger = logging.getLogger(__name__)
MAX_CLOCK_OFFSET_S = 5.0
NUM_REPLICAS = 5  # how many nodes are asked to store a record
CONFIRM_ATTEMPTS = 3
LOOKS_PER_REFRESH = 12  # once a minute
MAX_OWN_TOPICS = 64  # as many as other nodes store for one owner


class NotConfirmedError(HostError):
    """An announced record could not be read back from any other peer."""

    error_id = "ST-NOT-CONFIRMED"


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    """`rules`: the conditions on a topic's records. `client_mode`: use the DHT, store nothing for others (None: only if
    the host is behind a NAT). `watch_interval_s`: how often the neighbours are checked. `gate`: who may
    use the directory, and which records count; without it anybody may, and all do."""

    rules: Mapping[str, TopicRule] = field(default_factory=lambda: MappingProxyType({}))
    client_mode: bool | None = None
    watch_interval_s: float = 5.0
    limits: StoreLimits = field(default_factory=StoreLimits)
    gate: CallGate | None = None
    clock: Callable[[], float] | None = None  # None: the swarm's, see swarm_time.py


@dataclass(frozen=True, slots=True)
class Announcement:
    """The outcome of an announcement: `num_copies` other nodes say they store it (or have shown it, if confirmed)."""

    expires_at: float
    num_copies: int


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    """A snapshot for status pages and metrics."""

    num_neighbours: int
    num_records: int
    num_record_bytes: int
    num_recoveries: int
    clock_offset_s: float
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Own:
    raw: bytes
    expires_at: float


class Directory:
    """See the module docstring. Made by `Directory.start`."""

    def __init__(
        self, host: NetworkHost, run_id: str, options: DirectoryOptions, node: DhtNode, clock: Callable[[], float]
    ) -> None:
        self._host = host
        self._run_id = run_id
        self._options, self._clock = options, clock
        self._node = node
        self._own: dict[str, _Own] = {}
        self._bootstrap = [peer for peer in group_by_peer(host.options.bootstrap) if peer != host.peer_id]
        self._wake = asyncio.Event()
        self._closed = False
        self._num_recoveries = 0
        self._num_looks = 0
        self._refreshed_at = -math.inf  # last refresh after an empty lookup
        self._was_alone = True
        self._is_new_p2pd = False
        self._warned_of_clock = False
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, host: NetworkHost, run_id: str, options: DirectoryOptions | None = None) -> Directory:
        """Join the DHT of a run through the host's bootstrap peers.

        It is not an error if none of them answers: the watch keeps trying, and a run's first daemon is alone (see
        `status`).
        """
        options = options or DirectoryOptions()
        clock = options.clock or SwarmClock()
        gate = options.gate or OpenCalls(run_id)
        checker = RecordChecker(run_id, options.rules, clock, vouches=gate.vouches)
        store = RecordStore(options.limits, clock)
        client_mode = options.client_mode if options.client_mode is not None else bool(host.options.behind_nat)
        network = GuardedCalls(host, gate) if options.gate is not None else host
        node = DhtNode(network, run_id, checker, store, client_mode=client_mode, gate=gate, clock=clock)
        self = cls(host, run_id, options, node, clock)
        try:
            await node.serve()
            await self._find_neighbours()
            self._agree_on_time()
        except BaseException:
            node.close()
            raise
        self._was_alone = not node.neighbours
        host.subscribe(self._on_host_event)
        self._watcher = asyncio.create_task(self._watch(), name="watch the directory")
        return self

    async def announce(
        self, topic: str, value: bytes, ttl_s: float, *, signer: Signer | None = None, confirm: bool = False
    ) -> Announcement:
        """Put `value` (at most 2 KiB; `wire/records.py` packs a message) under `topic` for `ttl_s` <= 60 s.

        Announce again well before it expires. `signer` countersigns, for topics whose rule requires it. With `confirm`
        the record is read back from other nodes, in a few attempts; NotConfirmedError if none shows it. Without it,
        num_copies may be 0: a run's first daemon stores its record itself until others ask for it.
        Raises RecordError for a value that is not allowed, HostDownError while p2pd is down.
        """
        if not 0 < ttl_s <= MAX_LIFE_S:
            raise RecordError(f"a record lives at most {MAX_LIFE_S:g} s, not {ttl_s:g} s")
        if len(self._own) >= MAX_OWN_TOPICS and topic not in self._own:
            raise RecordError(f"a peer announces at most {MAX_OWN_TOPICS} topics")
        self._check_up()
        expires_at = self._clock() + ttl_s
        credential = self._options.gate.credential() if self._options.gate is not None else b""
        raw = make_record(self._host.identity, self._run_id, topic, value, expires_at, signer, credential=credential)
        self._own[topic] = _Own(raw, expires_at)
        num_copies = await self._spread(topic, raw)
        if confirm:
            num_copies = await self._confirm(topic, raw)
        return Announcement(expires_at, num_copies)

    async def lookup(self, topic: str) -> dict[str, Record]:
        """All live records of a topic by the peer that announced them, this peer's own included.

        Every record is checked now. Raises HostDownError while p2pd is down.
        """
        self._check_up()
        found = await self._node.search(topic)
        now = asyncio.get_running_loop().time()
        if not found.records and now - self._refreshed_at >= self._options.watch_interval_s:
            self._refreshed_at = now  # other nodes may know some that are nearer to the topic
            await self._node.refresh(self._bootstrap, num_parts=MAX_PARTS)
            found = await self._node.search(topic)
        return {peer_id: record for peer_id, (record, _) in found.records.items()}

    def now(self) -> float:
        """The time by which records expire."""
        return self._clock()

    def withdraw(self, topic: str) -> None:
        """Do not spread this peer's record of a topic again after an outage. Copies at other nodes expire."""
        self._own.pop(topic, None)

    def status(self) -> DirectoryStatus:
        """A snapshot; cheap."""
        node = self._node
        return DirectoryStatus(
            num_neighbours=len(node.neighbours),
            num_records=node.store.num_records,
            num_record_bytes=node.store.num_bytes,
            num_recoveries=self._num_recoveries,
            clock_offset_s=self._wall_offset_s(),
            dropped=MappingProxyType({flaw.value: count for flaw, count in node.checker.dropped.items()}),
        )

    async def close(self) -> None:
        """Leave the DHT. Announced records expire."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self._node.close()

    # ---- keeping records --------------------------------------------------------------------------------------------

    def _check_up(self) -> None:
        if self._closed or not self._host.is_ready:
            raise HostDownError("the directory cannot be used: p2pd is down")

    async def _spread(self, topic: str, raw: bytes) -> int:
        """Store a record here and at the nearest nodes. Returns how many other nodes say they store it."""
        key = place_of_topic(self._run_id, topic)
        self._node.keep(key, raw)
        nearest = await self._node.find_nearest(key)
        answers = await asyncio.gather(*(self._node.put_at(peer_id, key, raw) for peer_id in nearest[:NUM_REPLICAS]))
        return sum(answers)

    async def _confirm(self, topic: str, raw: bytes) -> int:
        """How many other nodes show the record; raises NotConfirmedError. Rejoins and spreads between attempts."""
        for attempt in range(CONFIRM_ATTEMPTS):
            found = await self._node.search(topic)
            held = found.records.get(self._host.peer_id)
            if held is not None and held[1] == raw:
                holders = found.holders[self._host.peer_id] - {self._host.peer_id}
                if holders:
                    return len(holders)
            if attempt + 1 < CONFIRM_ATTEMPTS:
                await self._recover()
                await self._spread(topic, raw)
        raise NotConfirmedError(
            f"no other peer shows the record for {topic}",
            fix="check that other daemons of this run are reachable from here",
        )

    # ---- keeping neighbours -----------------------------------------------------------------------------------------

    def _on_host_event(self, event: HostEvent) -> None:
        if event.kind is HostEventKind.P2PD_RESTARTED:
            self._is_new_p2pd = True
            self._wake.set()

    async def _watch(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._options.watch_interval_s):
                    await self._wake.wait()
            except TimeoutError:
                pass  # the usual case: the interval is over
            self._wake.clear()
            try:
                await self._look_after()
            except (NetError, OSError) as error:
                logger.info("a check of the directory failed: %s", error)

    async def _look_after(self) -> None:
        await self._host.wait_ready()
        neighbours = self._node.neighbours
        if not neighbours or self._is_new_p2pd or self._node.was_alone:
            self._is_new_p2pd = self._node.was_alone = False
            self._was_alone = True
            await self._recover()
        else:
            missing = [peer_id for peer_id in self._bootstrap if peer_id not in neighbours]
            await asyncio.gather(*(self._node.ping(peer_id) for peer_id in missing))
            if self._num_looks % LOOKS_PER_REFRESH == 0:
                await self._node.refresh(self._bootstrap, num_parts=MAX_PARTS if self._num_looks == 0 else 1)
            self._num_looks += 1
        if self._was_alone and self._node.neighbours:
            self._was_alone = False
            self._num_recoveries += 1
            await self._bring_back()
        await self._node.measure_clocks()
        self._agree_on_time()
        self._check_clock()

    async def _recover(self) -> None:
        """Rejoin after an outage: no peer is to blame, and every peer that has ever answered may help to reconnect."""
        self._node.trust_again()
        await self._find_neighbours()

    async def _find_neighbours(self) -> None:
        """Ping bootstrap and remembered peers, then look up our own place: so neighbours and this node meet."""
        ways = dict.fromkeys(self._bootstrap) | dict.fromkeys(list(self._node.seen)[-16:])
        await asyncio.gather(*(self._node.ping(peer_id) for peer_id in ways))
        self._node.trust_again()  # a peer that did not answer may do so once others have told us its addresses
        await self._node.find_nearest(self._node.place)

    async def _bring_back(self) -> None:
        """Spread our live records again: the nodes that stored them may have left."""
        now = self._clock()
        self._own = {topic: own for topic, own in self._own.items() if own.expires_at > now}
        await asyncio.gather(*(self._spread(topic, own.raw) for topic, own in self._own.items()))

    def _agree_on_time(self) -> None:
        """Adopt the majority's time. Records stored by another time would expire too early, or never."""
        shift_s = agreed_shift(self._node.clock_offsets(), yields=bool(self._bootstrap))
        if shift_s and isinstance(self._clock, SwarmClock):
            self._clock.shift(shift_s)
            self._node.time_has_changed()
            logger.info("this daemon's time was %+.0f s behind the others': it has adopted theirs", shift_s)

    def _wall_offset_s(self) -> float:
        """By how much the others' time is ahead of this machine's clock."""
        offset_s = self._node.clock_offset_s
        return offset_s + self._clock.wall_offset_s if isinstance(self._clock, SwarmClock) else offset_s

    def _check_clock(self) -> None:
        offset_s = self._wall_offset_s()
        if abs(offset_s) > MAX_CLOCK_OFFSET_S and not self._warned_of_clock:
            self._warned_of_clock = True
            logger.warning(
                "this machine's clock is %.0f s off; this daemon uses the others' time, but enable NTP",
                -offset_s,
            )
