"""What the rooms above see of a host: byte streams to peers, small calls, its options and its events.

`Host` is libp2p's; the simulated swarm has one in memory (swarmtrain/simulated/host.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from swarmtrain.p2p.addresses import Address, group_by_peer
from swarmtrain.p2p.dialing import Probe, connect_once
from swarmtrain.p2p.errors import HostOptionsError
from swarmtrain.p2p.identity import Identity

CallHandler = Callable[[str, bytes], Awaitable[bytes]]  # (peer id of the caller, request) -> answer


class StreamReceiver(Protocol):
    """What a link hands to its stream; called on the event loop's thread only (as `asyncio.BufferedProtocol`)."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go. Never empty."""

    def buffer_updated(self, num_bytes: int) -> None:
        """`num_bytes` were written to the start of the last buffer."""

    def stream_closed(self, error: Exception | None) -> None:
        """The stream is gone. Called exactly once; nothing is called after it."""

    def pause_writing(self) -> None:
        """The outgoing buffer is above its high-water mark: stop writing."""

    def resume_writing(self) -> None:
        """The outgoing buffer has drained."""


class ByteStream(Protocol):
    """An open pipe. Bytes that arrived before `start` are kept and delivered then."""

    @property
    def peer_id(self) -> str:
        """The authenticated identity at the other end."""

    def start(self, receiver: StreamReceiver) -> None:
        """Begin delivering to `receiver`. Call once, soon after the stream was opened or accepted."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue `data`; never blocks. The caller may not change it afterwards. Ignored after the stream closed."""

    @property
    def unsent_bytes(self) -> int:
        """What was written and is still here: falls while the other end takes anything."""

    def pause_reading(self) -> None:
        """Deliver nothing until `resume_reading`: back-pressure reaches the other end."""

    def resume_reading(self) -> None:
        """Undo `pause_reading`."""

    def close(self) -> None:
        """Flush what is queued, then close. Unread input is lost at the other end's peril: let the receiver close."""

    def abort(self) -> None:
        """Close at once, dropping what is queued."""


class Transport(Protocol):
    """Opens streams to peers by identity, and accepts theirs."""

    @property
    def peer_id(self) -> str:
        """This end's identity."""

    async def open(self, peer_id: str, *, timeout_s: float) -> ByteStream:
        """A new stream to `peer_id`; raises a `NetError` within `timeout_s` if that cannot be had."""

    async def is_up(self) -> bool:
        """Whether this end itself works. Asked when something has failed: if not, it says nothing about others."""

    def listen(self, accept: Callable[[ByteStream], None]) -> None:
        """Call `accept` for every incoming stream from now on."""


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


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How a daemon takes part in the network.

    `announce`: what others are told to dial instead of the listen addresses (port forwarding).
    `bootstrap`, `use_relays`: addresses with /p2p/…. `relay`: serve as a relay for others; needs a reachable address.
    `behind_nat`: True takes no direct connections for granted and keeps a reservation at every relay; None does so only
    if relays are given. `require_bootstrap`: a start with all bootstrap peers down is an error. `probe`: how to ask
    whether something listens; another one is needed only where p2pd is not on the same network as this process.
    """

    state_dir: Path
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    require_bootstrap: bool = True
    relay: bool = False
    use_relays: tuple[str, ...] = ()
    behind_nat: bool | None = None
    port_mapping: bool = False
    start_timeout_s: float = 15.0
    dial_timeout_s: float = 5.0
    health_interval_s: float = 5.0
    health_timeout_s: float = 10.0  # p2pd is ended after two health checks without an answer
    max_incoming_streams: int = 4096
    max_incoming_streams_per_peer: int = 64
    p2pd_binary: Path | None = None
    probe: Probe = connect_once

    @property
    def relays(self) -> tuple[str, ...]:
        """The relays at which a reservation is kept."""
        return self.use_relays if self.behind_nat is not False else ()

    def check(self) -> None:
        """Raise HostOptionsError or AddressError for options that cannot work."""
        if self.relay and self.behind_nat:
            raise HostOptionsError("a peer behind a NAT cannot serve as a relay", fix="drop one of the two options")
        if self.behind_nat and not self.use_relays:
            raise HostOptionsError("a peer behind a NAT needs a relay to be reached", fix="name at least one relay")
        if not self.listen:
            raise HostOptionsError("no listen address is given", fix="listen on /ip4/0.0.0.0/tcp/0")
        group_by_peer(self.bootstrap)
        group_by_peer(self.use_relays)
        for text in self.announce:
            if Address.parse(text).port == 0:
                raise HostOptionsError(f"the announced address {text} needs its real port")


class HostEventKind(StrEnum):
    """What a host tells its owner."""

    P2PD_DIED = "p2pd-died"  # all streams are gone; a restart is under way
    P2PD_RESTARTED = "p2pd-restarted"  # same identity, same port; streams can be opened again
    RESTART_FAILED = "restart-failed"  # it is tried again
    ADDRESSES_CHANGED = "addresses-changed"


@dataclass(frozen=True, slots=True)
class HostEvent:
    """One event with one line for people."""

    kind: HostEventKind
    detail: str
