"""Hosts whose calls are function calls, for directories of many nodes: peers can vanish, be cut off, lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarmtrain.p2p.errors import HostDownError, PeerUnreachable
from swarmtrain.p2p.identity import Identity
from swarmtrain.p2p.network import CallHandler, HostEvent, HostEventKind


class MemoryNetwork:
    """Who is there, and who cannot be reached now."""

    def __init__(self) -> None:
        self.hosts: dict[str, MemoryHost] = {}
        self.cut_off: set[str] = set()
        self.num_calls = 0

    def host(self, *bootstrap: MemoryHost, behind_nat: bool = False) -> MemoryHost:
        """A new host that knows of `bootstrap`."""
        addresses = tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{other.peer_id}" for other in bootstrap)
        host = MemoryHost(self, MemoryOptions(addresses, behind_nat))
        self.hosts[host.peer_id] = host
        return host


@dataclass
class MemoryOptions:
    bootstrap: tuple[str, ...]
    behind_nat: bool


class MemoryHost:
    """As much of a Host as a Directory uses."""

    def __init__(self, network: MemoryNetwork, options: MemoryOptions) -> None:
        self.network = network
        self.options = options
        self.identity = Identity.generate()
        self.is_ready = True
        self.known: dict[str, tuple[str, ...]] = {}
        self.handlers: dict[str, CallHandler] = {}
        self.subscribers: list[Callable[[HostEvent], None]] = []

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    def addresses(self) -> tuple[str, ...]:
        return (f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer_id}",)

    def known_addresses(self, peer_id: str) -> tuple[str, ...]:
        return self.known.get(peer_id, ())

    def learn(self, addresses: Iterable[str], *, of: str | None = None) -> None:
        assert of is not None
        self.known[of] = tuple(addresses)

    def hear(self, addresses: Iterable[str], *, of: str) -> None:
        self.known.setdefault(of, tuple(addresses))

    async def wait_ready(self) -> None:
        assert self.is_ready

    def subscribe(self, callback: Callable[[HostEvent], None]) -> None:
        self.subscribers.append(callback)

    def restarted(self) -> None:
        """As after p2pd's death."""
        for callback in self.subscribers:
            callback(HostEvent(HostEventKind.P2PD_RESTARTED, ""))

    async def serve_calls(self, protocol: str, handler: CallHandler) -> None:
        self.handlers[protocol] = handler

    async def call(self, peer_id: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        await asyncio.sleep(0)  # let others run, as a real call does
        self.network.num_calls += 1
        if not self.is_ready:
            raise HostDownError("down")
        other = self.network.hosts.get(peer_id)
        if other is None or {peer_id, self.peer_id} & self.network.cut_off or protocol not in other.handlers:
            raise PeerUnreachable(f"peer {peer_id}: not there")
        try:
            return await other.handlers[protocol](self.peer_id, payload)
        except Exception as error:
            raise PeerUnreachable(f"peer {peer_id}: {error!r}") from None
