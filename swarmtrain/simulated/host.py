"""A host in memory, with the interface of `p2p/host.py`, on the simulated network (network.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from swarmtrain import world
from swarmtrain.p2p.addresses import Address
from swarmtrain.p2p.dialing import AddressBook
from swarmtrain.p2p.errors import BootstrapError, DialResult, HostDownError, PeerUnreachable
from swarmtrain.p2p.identity import Identity
from swarmtrain.p2p.network import ByteStream, CallHandler, HostEvent, HostEventKind, HostOptions
from swarmtrain.simulated.network import Network

if TYPE_CHECKING:
    from swarmtrain.simulated.machine import SimulatedMachine, SimulatedProcess

HEADER_BYTES = 60  # of a small call


class SimulatedHost:
    """See the module docstring. A `NetworkHost`."""

    def __init__(
        self, network: Network, machine: SimulatedMachine, process: SimulatedProcess, options: HostOptions
    ) -> None:
        self._network, self.machine, self.process = network, machine, process
        self.options = options
        world.make_directory(options.state_dir)
        self.identity = Identity.load_or_create(options.state_dir / "identity.key")
        self._book = AddressBook()
        self._ready = asyncio.Event()
        self._is_closed = False
        self._accept: Callable[[ByteStream], None] | None = None
        self._handlers: dict[str, CallHandler] = {}
        self._subscribers: list[Callable[[HostEvent], None]] = []
        self._ready.set()
        network.hosts[self.key] = self

    @classmethod
    async def start(
        cls, network: Network, machine: SimulatedMachine, process: SimulatedProcess, options: HostOptions
    ) -> SimulatedHost:
        """As `Host.start`: an error if no bootstrap peer answers and one is required."""
        options.check()
        self = cls(network, machine, process, options)
        process.host = self
        self._book.learn(options.bootstrap)
        results = []
        for text in options.bootstrap:
            peer_id = text.rpartition("/")[2]
            if peer_id != self.peer_id:
                found = await self._reach(peer_id, options.dial_timeout_s)
                results.append(DialResult(peer_id, (text,), found if isinstance(found, str) else None))
        if results and options.require_bootstrap and all(result.error for result in results):
            await self.close()
            raise BootstrapError(results)
        return self

    @property
    def peer_id(self) -> str:
        """See `NetworkHost`."""
        return self.identity.peer_id

    @property
    def key(self) -> tuple[str, str]:
        """Its place on the network."""
        return self.peer_id, self.machine.name

    @property
    def is_ready(self) -> bool:
        """See `NetworkHost`."""
        return self._ready.is_set() and not self._is_closed

    async def is_up(self) -> bool:
        """See `Transport`."""
        return self.is_ready

    async def wait_ready(self) -> None:
        """See `NetworkHost`."""
        await self._ready.wait()
        if self._is_closed:
            raise HostDownError("the host is closed")

    def addresses(self) -> tuple[str, ...]:
        """See `NetworkHost`."""
        return (f"{self.machine.address}/p2p/{self.peer_id}",)

    def known_addresses(self, peer_id: str) -> tuple[str, ...]:
        """See `NetworkHost`."""
        return tuple(str(address) for address in self._book.get(peer_id))

    def learn(self, addresses: Iterable[str], *, of: str | None = None) -> None:
        """See `NetworkHost`."""
        self._book.learn(addresses, of=of)

    def hear(self, addresses: Iterable[str], *, of: str) -> None:
        """See `NetworkHost`."""
        self._book.hear(addresses, of=of)

    async def dial_back(self, peer_id: str, port: int, *, timeout_s: float) -> tuple[str, str]:
        """See `NetworkHost`. Every port of a machine that is on and can be reached is open."""
        reached = await self._reach(peer_id, timeout_s)
        if isinstance(reached, str):
            return "", reached
        return str(Address.parse(reached.machine.address).with_port(port)), ""

    def subscribe(self, callback: Callable[[HostEvent], None]) -> None:
        """See `NetworkHost`."""
        self._subscribers.append(callback)

    def listen(self, accept: Callable[[ByteStream], None]) -> None:
        """See `Transport`."""
        self._accept = accept

    async def serve_calls(self, protocol: str, handler: CallHandler) -> None:
        """See `NetworkHost`."""
        self._handlers[protocol] = handler

    async def open(self, peer_id: str, *, timeout_s: float) -> ByteStream:
        """See `Transport`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_ready()
                other = await self._reach(peer_id, timeout_s)
                if isinstance(other, str):
                    raise PeerUnreachable(f"peer {peer_id}: {other}")
                if not self.is_ready:
                    raise HostDownError("p2pd does not answer")
                here, there = self._network.connect(self, other)
                other.process.call_soon(partial(other._accepted, there))
                return here
        except TimeoutError:
            if not self.is_ready:
                raise HostDownError(f"p2pd did not come back within {timeout_s:g} s") from None
            raise PeerUnreachable(f"peer {peer_id}: no answer within {timeout_s:g} s") from None

    def _accepted(self, stream: ByteStream) -> None:
        if self._accept is None or not self.is_ready:
            stream.abort()
        else:
            self._accept(stream)

    async def call(self, peer_id: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """See `NetworkHost`."""
        if not self.is_ready:
            raise HostDownError("p2pd is down")
        answer: asyncio.Future[bytes | str] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                other = await self._reach(peer_id, timeout_s)
                if isinstance(other, str):
                    raise PeerUnreachable(f"peer {peer_id}: {other}")
                self._send(other, len(payload), partial(other._serve, self, protocol, payload, answer))
                found = await answer
        except TimeoutError:
            raise PeerUnreachable(f"peer {peer_id}: no answer within {timeout_s:g} s") from None
        if isinstance(found, str):
            raise PeerUnreachable(f"peer {peer_id}: {found}")
        return found

    def _send(self, other: SimulatedHost, num_bytes: int, arrive: Callable[[], None]) -> None:
        """Call `arrive` at the other end, in its process; never, if the line is blocked."""
        source, target = self.machine.name, other.machine.name
        at = self._network.arrival(source, target, num_bytes + HEADER_BYTES)

        def deliver() -> None:
            if not self._network.is_blocked(source, target) and self._network.hosts.get(other.key) is other:
                self._network.note(source, target, num_bytes)
                other.process.call_soon(arrive)

        self._network.loop.call_at(at, deliver, context=self._network.context)

    def _serve(self, caller: SimulatedHost, protocol: str, payload: bytes, answer: asyncio.Future[bytes | str]) -> None:
        def settle(found: bytes | str) -> None:
            if not answer.done():
                answer.set_result(found)

        async def work() -> None:
            handler = self._handlers.get(protocol)
            try:
                found: bytes | str = (
                    "protocol not supported" if handler is None else await handler(caller.peer_id, payload)
                )
            except Exception as error:
                found = repr(error)
            self._send(caller, len(found), lambda: settle(found))

        self.process.spawn(work(), "answer a small call")

    async def _reach(self, peer_id: str, timeout_s: float) -> SimulatedHost | str:
        """The other end of a connection to a peer, or the reason why there is none."""
        network = self._network
        for key, other in network.hosts.items():
            if key[0] == peer_id and frozenset((key, self.key)) in network.connected:
                return other
        if not self._book.get(peer_id):
            return "no address is known"
        there = self._book.get(peer_id)[0].without_peer()
        machine = self.machine.by_address.get(str(there))
        if machine is None:
            await asyncio.sleep(timeout_s)
            return "no answer"
        name = machine.name
        round_trip = [network.arrival(self.machine.name, name, HEADER_BYTES), 0.0]
        await asyncio.sleep(round_trip[0] - network.loop.time() + network.line(name, self.machine.name).delay_s)
        blocked = network.is_blocked(self.machine.name, name) or network.is_blocked(name, self.machine.name)
        if blocked or machine.is_off:
            self._book.dialed(peer_id, reached=False)
            await asyncio.sleep(timeout_s)
            return "no answer"
        found = network.hosts.get((peer_id, name))
        if found is None or not found.is_ready:
            self._book.dialed(peer_id, reached=False)
            return "connection refused"
        self._book.dialed(peer_id, reached=True)
        network.connected[frozenset((found.key, self.key))] = None
        return found

    def fail(self) -> None:
        """The transport dies: all streams end, at both ends."""
        if not self.is_ready:
            return
        self._ready.clear()
        self._network.leave(self)
        for end in self._network.ends_of(self):
            end.abort()
        self._tell(HostEventKind.P2PD_DIED, "the transport has died")

    def recover(self) -> None:
        """The transport restarts, with the same identity."""
        if not self._is_closed:
            self._network.hosts[self.key] = self
            self._ready.set()
            self._tell(HostEventKind.P2PD_RESTARTED, "the transport runs again")

    def _tell(self, kind: HostEventKind, detail: str) -> None:
        for callback in self._subscribers:
            callback(HostEvent(kind, detail))

    async def close(self) -> None:
        """See `NetworkHost`."""
        if not self._is_closed:
            self._is_closed = True
            self._ready.set()
            self._network.leave(self)
            for end in self._network.ends_of(self):
                end.abort()
