"""How a host is set up, and what it tells its owner. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from swarmtrain.p2p.addresses import Address, group_by_peer
from swarmtrain.p2p.host_errors import HostOptionsError
from swarmtrain.p2p.probe import Probe, connect_once


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How a daemon takes part in the network.

    `announce`: what others are told to dial instead of the listen addresses (port forwarding).
    `bootstrap`, `use_relays`: addresses with /p2p/…. `relay`: serve as a relay for others; needs a reachable address.
    `behind_nat`: True takes no direct connections for granted and keeps a reservation at every relay; None does so only
    if relays are given. `require_bootstrap`: a start with all bootstrap peers down is an error. `probe`: how to ask
    whether somebody listens; another one is needed only where p2pd is not on the same network as this process.
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
