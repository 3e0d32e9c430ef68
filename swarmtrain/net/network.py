"""What a daemon needs of the host below it: a transport by peer id, small calls, addresses.

`Host` is libp2p's; the simulated swarm has one in memory (swarmtrain/simulated/host.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swarmtrain.net.dht import CallNetwork
from swarmtrain.net.host_options import HostEvent, HostOptions
from swarmtrain.net.identity import Identity
from swarmtrain.net.transport import Transport


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
