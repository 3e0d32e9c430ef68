"""A host dials a peer back: at the address from which it sees it, and at no other."""

from __future__ import annotations

import socket
from pathlib import Path

from swarmtrain.p2p.host import Host
from swarmtrain.p2p.network import HostOptions

from .host_helpers import LOOPBACK, run

STRANGER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def test_a_peer_is_dialed_at_the_port_that_it_names(tmp_path: Path) -> None:
    async def main() -> None:
        hosts = [await Host.start(HostOptions(state_dir=tmp_path / name, listen=LOOPBACK)) for name in ("a", "b")]
        try:
            here, there = hosts
            (reached,) = await there.connect(here.addresses())
            assert reached.error is None
            port = int(there.addresses()[0].split("/tcp/")[1].split("/")[0])
            assert await here.dial_back(there.peer_id, port, timeout_s=60.0) == (f"/ip4/127.0.0.1/tcp/{port}", "")
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))  # and does not listen
                address, error = await here.dial_back(there.peer_id, taken.getsockname()[1], timeout_s=60.0)
            assert address.startswith("/ip4/127.0.0.1/tcp/")
            assert error
            assert await here.dial_back(STRANGER, port, timeout_s=60.0) == ("", "it is connected through a relay only")
        finally:
            for host in hosts:
                await host.close()

    run(main())
