"""The machine that a daemon runs on: its network host, its control socket and its HTTP server.

Clocks, randomness and threads are `swarmtrain/world.py`'s. Daemons take a `Machine`; the command line gives them this
computer, the simulated swarm one that exists only in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from swarmtrain.courtesy.sensors import MachineSensors, Sensors
from swarmtrain.observe.control import Command, ControlServer
from swarmtrain.observe.http import Action, Handler, HttpServer, parse_address, same_port_as_before
from swarmtrain.p2p.host import Host
from swarmtrain.p2p.network import HostOptions, NetworkHost


class Door(Protocol):
    """A server that answers until it is closed."""

    @property
    def address(self) -> str:
        """HOST:PORT, or a path."""

    async def close(self) -> None:
        """Stop answering."""


class Machine(Protocol):
    """See the module."""

    async def start_host(self, options: HostOptions) -> NetworkHost:
        """Lock the state directory and join the network."""

    async def serve_control(self, state_dir: Path, commands: Mapping[str, Command]) -> Door:
        """Answer `swarmtrain status`, `pause`, … of this machine's user."""

    async def serve_http(
        self,
        routes: Mapping[str, Handler],
        address: str,
        option: str,
        note: Path | None = None,
        actions: Mapping[str, Action] | None = None,
        known_as: str = "",
    ) -> Door:
        """Answer HTTP on HOST:PORT, which `option` named; port 0: a free one, if possible that of `note`.

        `known_as`: see `HttpServer`.
        """

    def sensors(self, gpu_index: int | None) -> Sensors:
        """What it says of itself and its owner; None: of no GPU."""


class ThisMachine:
    """The computer that this process runs on."""

    async def start_host(self, options: HostOptions) -> NetworkHost:
        """See `Machine`."""
        return await Host.start(options)

    async def serve_control(self, state_dir: Path, commands: Mapping[str, Command]) -> Door:
        """See `Machine`."""
        server = ControlServer(state_dir / "control.sock", commands)
        await server.start()
        return server

    async def serve_http(
        self,
        routes: Mapping[str, Handler],
        address: str,
        option: str,
        note: Path | None = None,
        actions: Mapping[str, Action] | None = None,
        known_as: str = "",
    ) -> Door:
        """See `Machine`."""
        server = HttpServer(routes, actions, known_as)
        host, port = parse_address(address, option)
        await server.start(*(same_port_as_before(host, port, note) if note is not None else (host, port)))
        return server

    def sensors(self, gpu_index: int | None) -> Sensors:
        """See `Machine`."""
        return MachineSensors(gpu_index)
