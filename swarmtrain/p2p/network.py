"""What a daemon needs of the host below it: a transport by peer id, small calls, addresses.

`Host` is libp2p's; the simulated swarm has one in memory (swarmtrain/simulated/host.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from swarmtrain.p2p.host_options import HostEvent, HostOptions
from swarmtrain.p2p.identity import Identity
from swarmtrain.p2p.p2pd_calls import CallHandler
from swarmtrain.p2p.transport import Transport


class CallNetwork(Protocol):
    """What a node needs of the host below it."""

    @property
    def peer_id(self) -> str:
        """This end's identity."""

    def addresses(self) -> tuple[str, ...]:
        """Where this end can be dialed, best first."""

    def known_addresses(self, peer_id: str) -> tuple[str, ...]:
        """Where a peer can be dialed, as far as this end knows."""

    def learn(self, addresses: Iterable[str], *, of: str | None = None) -> None:
        """Remember what a peer says of itself."""

    def hear(self, addresses: Iterable[str], *, of: str) -> None:
        """Remember what others say of a peer, unless something better is known."""

    async def call(self, peer_id: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """One small call; raises a NetError within `timeout_s`."""

    async def serve_calls(self, protocol: str, handler: CallHandler) -> None:
        """Answer calls of `protocol` from now on."""


class NetworkHost(Transport, CallNetwork, Protocol):
    """A started host."""

    @property
    def peer_id(self) -> str:
        """This daemon's identity on the network."""

    @property
    def options(self) -> HostOptions:
        """How it was started."""

    @property
    def identity(self) -> Identity:
        """The key behind `peer_id`."""

    @property
    def is_ready(self) -> bool:
        """False while the transport is away."""

    async def wait_ready(self) -> None:
        """Return when the transport is there; raises HostDownError if the host is closed meanwhile."""

    def subscribe(self, callback: Callable[[HostEvent], None]) -> None:
        """Call `callback` with every event from now on."""

    async def close(self) -> None:
        """End it, and everything that it has opened."""
