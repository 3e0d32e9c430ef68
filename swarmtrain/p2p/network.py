"""The interface of a host for the packages above: byte streams to peers, small calls, options and events.

`Host` implements it with libp2p; the simulated swarm has one in memory (swarmtrain/simulated/host.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from swarmtrain.p2p.addresses import Address, group_by_peer
from swarmtrain.p2p.confinement import P2pdLimits
from swarmtrain.p2p.dialing import Probe, connect_once
from swarmtrain.p2p.errors import HostOptionsError
from swarmtrain.p2p.identity import Identity

CallHandler = Callable[[str, bytes], Awaitable[bytes]]  # (peer id of the caller, request) -> answer


class StreamReceiver(Protocol):
    """The receiving side of a stream, called on the event loop's thread only (as `asyncio.BufferedProtocol`)."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next bytes. Never empty."""

    def buffer_updated(self, num_bytes: int) -> None:
        """`num_bytes` were written to the start of the last buffer."""

    def stream_closed(self, error: Exception | None) -> None:
        """The stream has ended. Called exactly once, as the last call."""

    def pause_writing(self) -> None:
        """The outgoing buffer is above its high-water mark: stop writing."""

    def resume_writing(self) -> None:
        """The outgoing buffer has drained."""


class ByteStream(Protocol):
    """An open stream. Bytes that arrive before `start` are kept and delivered then."""

    @property
    def peer_id(self) -> str:
        """The authenticated identity at the other end."""

    def start(self, receiver: StreamReceiver) -> None:
        """Begin delivering to `receiver`. Call once, soon after the stream was opened or accepted."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue `data`; never blocks. The caller may not change it afterwards. Ignored after the stream closed."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes written and still buffered here: the number falls while the other end reads."""

    def pause_reading(self) -> None:
        """Deliver nothing until `resume_reading`: back-pressure reaches the other end."""

    def resume_reading(self) -> None:
        """Undo `pause_reading`."""

    def close(self) -> None:
        """Flush the queue, then close. Input that is not read yet may be lost: let the receiving end close."""

    def abort(self) -> None:
        """Close at once and drop the queue."""


class Transport(Protocol):
    """Opens streams to peers by identity, and accepts theirs."""

    @property
    def peer_id(self) -> str:
        """This end's identity."""

    async def open(self, peer_id: str, *, timeout_s: float) -> ByteStream:
        """A new stream to `peer_id`; raises a `NetError` within `timeout_s` if it cannot be opened."""

    async def is_up(self) -> bool:
        """Whether this end itself works. While it does not, a failure says nothing about other peers."""

    def listen(self, accept: Callable[[ByteStream], None]) -> None:
        """Call `accept` for every incoming stream from now on."""


class CallNetwork(Protocol):
    """The part of a host that the directory needs."""

    @property
    def peer_id(self) -> str:
        """This end's identity."""

    def addresses(self) -> tuple[str, ...]:
        """The addresses at which this end can be dialed, best first."""

    def known_addresses(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of a peer, as far as this end knows them."""

    def learn(self, addresses: Iterable[str], *, of: str | None = None) -> None:
        """Remember the addresses that a peer states for itself."""

    def hear(self, addresses: Iterable[str], *, of: str) -> None:
        """Remember the addresses that others state for a peer, unless better ones are known."""

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
        """The options with which it was started."""

    @property
    def identity(self) -> Identity:
        """The key behind `peer_id`."""

    @property
    def is_ready(self) -> bool:
        """False while the transport is down."""

    async def wait_ready(self) -> None:
        """Return when the transport is up; raises HostDownError if the host is closed meanwhile."""

    async def dial_back(self, peer_id: str, port: int, *, timeout_s: float) -> tuple[str, str]:
        """Whether the machine behind a connected peer accepts a connection at `port`: (address, error, or empty)."""

    def subscribe(self, callback: Callable[[HostEvent], None]) -> None:
        """Call `callback` with every event from now on."""

    async def close(self) -> None:
        """End the host and everything that it has opened."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How a daemon takes part in the network.

    `announce`: addresses that others dial instead of the listen addresses (port forwarding).
    `bootstrap`, `use_relays`: addresses with /p2p/…. `relay`: serve as a relay for others; needs a reachable address.
    `behind_nat`: True expects no direct connections and keeps a reservation at every relay; None does so only if relays
    are given. `require_bootstrap`: fail the start if no bootstrap peer can be reached. `probe`: tests whether an
    address accepts connections; a test replaces it where p2pd is not on the same network as this process.
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
    health_timeout_s: float = 10.0  # p2pd is killed after two health checks without an answer
    max_incoming_streams: int = 4096
    max_incoming_streams_per_peer: int = 64
    p2pd_binary: Path | None = None
    p2pd_limits: P2pdLimits = field(default_factory=P2pdLimits)
    probe: Probe = connect_once

    @property
    def relays(self) -> tuple[str, ...]:
        """The relays at which this host keeps a reservation."""
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
    """The events of a host."""

    P2PD_DIED = "p2pd-died"  # all streams have ended; the host is restarting it
    P2PD_RESTARTED = "p2pd-restarted"  # same identity, same port; streams can be opened again
    RESTART_FAILED = "restart-failed"  # the host tries again
    ADDRESSES_CHANGED = "addresses-changed"


@dataclass(frozen=True, slots=True)
class HostEvent:
    """One event, with one line for people."""

    kind: HostEventKind
    detail: str
