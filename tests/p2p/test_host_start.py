"""A start that fails says which cause it was, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarmtrain.p2p.errors import (
    AddressError,
    AddressInUseError,
    BootstrapError,
    CannotListenError,
    HostError,
    HostOptionsError,
    IdentityError,
    P2pdFailedError,
    P2pdTimeoutError,
    P2pdUnusableError,
    StateDirectoryError,
    StateDirectoryInUseError,
)
from swarmtrain.p2p.host import Host, HostOptions
from swarmtrain.p2p.identity import Identity

from .host_helpers import LOOPBACK, hosts, run

pytestmark = pytest.mark.swarm


def start_fails(error_type: type[HostError], state_dir: Path, **options: Any) -> HostError:
    """Start a host that cannot start, twice (so that the first failure left nothing in the way); the error."""
    settings = {"listen": LOOPBACK, **options}
    for _ in range(2):
        with pytest.raises(error_type) as caught:
            run(Host.start(HostOptions(state_dir, **settings)))
        assert type(caught.value) is error_type
        assert not [child for child in psutil.Process().children() if "p2pd" in child.name()]
        assert not (state_dir / "sockets").exists()
    assert "\n" not in str(caught.value)
    return caught.value


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_address_in_use_names_the_address(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        error = start_fails(AddressInUseError, tmp_path / "a", listen=(address,))
    assert address in str(error)
    assert error.fix


def test_the_port_of_another_p2pd_counts_as_in_use(tmp_path: Path) -> None:
    """p2pd itself would share it silently (SO_REUSEPORT), and connections would go to either of the two."""

    async def main() -> None:
        async with hosts(tmp_path, 1) as (host,):
            address = host.addresses()[0].split("/p2p/")[0]
            with pytest.raises(AddressInUseError, match=address):
                await Host.start(HostOptions(tmp_path / "other", listen=(address,)))

    run(main())


@pytest.mark.parametrize("address", ["/ip4/192.0.2.1/tcp/0", "/ip6/2001:db8::1/tcp/4001"])
def test_an_address_of_another_machine_cannot_be_listened_on(tmp_path: Path, address: str) -> None:
    assert address in str(start_fails(CannotListenError, tmp_path / "a", listen=(address,))).replace(
        "/tcp/4001", "/tcp/4001"
    )


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:4001",
        "/ip4/127.0.0.1",
        "/ip4/127.0.0.1/udp/0/quic-v1",
        "/dns4/localhost/tcp/0",
        "/ip4/1.2.3/tcp/0",
    ],
)
def test_a_listen_address_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    start_fails(AddressError, tmp_path / "a", listen=(address,))


def test_p2pd_missing_not_executable_or_no_program(tmp_path: Path) -> None:
    error = start_fails(P2pdUnusableError, tmp_path / "a", p2pd_binary=tmp_path / "none")
    assert "no such file" in str(error)
    error = start_fails(P2pdUnusableError, tmp_path / "a", p2pd_binary=script(tmp_path / "plain", "x", 0o644))
    assert "not executable" in str(error)
    error = start_fails(P2pdUnusableError, tmp_path / "a", p2pd_binary=script(tmp_path / "text", "\0\1\2"))
    assert "not a program for this machine" in str(error)
    foreign = bytearray(Path(sys.executable).read_bytes()[:4096])
    foreign[18] ^= 0xFF  # the kind of machine in an ELF header
    (tmp_path / "foreign").write_bytes(foreign)
    (tmp_path / "foreign").chmod(0o755)
    error = start_fails(P2pdUnusableError, tmp_path / "a", p2pd_binary=tmp_path / "foreign")
    assert "not a program for this machine" in str(error)


def test_p2pd_that_never_gets_ready_is_a_timeout(tmp_path: Path) -> None:
    sleeper = script(tmp_path / "p2pd", "#!/bin/sh\nexec sleep 1000\n")
    error = start_fails(P2pdTimeoutError, tmp_path / "a", p2pd_binary=sleeper, start_timeout_s=0.3)
    assert "0.3 s" in str(error)


def test_p2pd_that_ends_shows_its_last_line(tmp_path: Path) -> None:
    ending = script(tmp_path / "p2pd", "#!/bin/sh\necho first\necho the reason\nexit 3\n")
    assert "the reason" in str(start_fails(P2pdFailedError, tmp_path / "a", p2pd_binary=ending))
    mute = script(tmp_path / "mute", "#!/bin/sh\nexit 3\n")
    assert "exit status 3" in str(start_fails(P2pdFailedError, tmp_path / "a", p2pd_binary=mute))
    noisy = script(tmp_path / "noisy", "#!/bin/sh\nhead -c 5000000 /dev/zero\nexit 1\n")  # one endless line
    assert len(str(start_fails(P2pdFailedError, tmp_path / "a", p2pd_binary=noisy))) < 3000
    lying = script(tmp_path / "lying", "#!/bin/sh\necho Peer ID: me\nexit 1\n")  # claims to be ready, is not
    start_fails(P2pdFailedError, tmp_path / "a", p2pd_binary=lying)


def test_all_bootstrap_peers_down_lists_each_with_its_reason(tmp_path: Path) -> None:
    addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}" for port in (1, 2)]
    error = start_fails(BootstrapError, tmp_path / "a", bootstrap=tuple(addresses))
    for address in addresses:
        assert f"{address}: connection refused" in str(error)


def test_one_reachable_bootstrap_peer_is_enough_and_none_is_fine_if_not_required(tmp_path: Path) -> None:
    down = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"

    async def main() -> None:
        async with hosts(tmp_path, 1) as (first,):
            options = HostOptions(tmp_path / "a", listen=LOOPBACK, bootstrap=(down, *first.addresses()))
            second = await Host.start(options)
            results = {result.peer_id: result.error for result in await second.connect(options.bootstrap)}
            await second.close()
            assert results[first.peer_id] is None
            assert results[down.rsplit("/", 1)[1]]
        lonely = HostOptions(tmp_path / "b", listen=LOOPBACK, bootstrap=(down,), require_bootstrap=False)
        await (await Host.start(lonely)).close()

    run(main())


def test_a_host_may_name_itself_as_bootstrap_peer(tmp_path: Path) -> None:
    async def main() -> None:
        first = await Host.start(HostOptions(tmp_path / "a", listen=LOOPBACK))
        address = first.addresses()
        await first.close()
        again = await Host.start(HostOptions(tmp_path / "a", listen=LOOPBACK, bootstrap=address))
        assert again.addresses() == address, "the port was not remembered"
        await again.close()

    run(main())


def test_a_remembered_port_that_is_taken_is_replaced(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "listen.ports").write_text(f"{port}\n")

        async def main() -> None:
            host = await Host.start(HostOptions(tmp_path / "a", listen=LOOPBACK))
            assert f"/tcp/{port}/" not in host.addresses()[0]
            await host.close()

        run(main())
    assert (tmp_path / "a" / "listen.ports").read_text() != f"{port}\n"


def test_a_state_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = start_fails(StateDirectoryError, tmp_path / "file" / "state")
    assert str(tmp_path / "file" / "state") in str(error)


def test_two_daemons_on_one_state_directory(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 1) as (host,):
            with pytest.raises(StateDirectoryInUseError, match=f"process {os.getpid()}"):
                await Host.start(HostOptions(tmp_path / "host0", listen=LOOPBACK))
            assert host.is_ready
            assert (tmp_path / "host0" / "sockets" / "p2pd.sock").exists(), "the loser removed the winner's sockets"

    run(main())


@pytest.mark.parametrize("content", [b"", b"junk", bytes(68), b"\x08\x01\x12\x40" + bytes(64), bytes(100_000)])
def test_a_damaged_identity_is_an_error_and_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "identity.key").write_bytes(content)
    start_fails(IdentityError, tmp_path / "a")
    assert (tmp_path / "a" / "identity.key").read_bytes() == content


def test_contradicting_options(tmp_path: Path) -> None:
    relay = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    start_fails(HostOptionsError, tmp_path / "a", relay=True, behind_nat=True, use_relays=(relay,))
    start_fails(HostOptionsError, tmp_path / "a", behind_nat=True)
    start_fails(HostOptionsError, tmp_path / "a", listen=())
    start_fails(HostOptionsError, tmp_path / "a", announce=("/ip4/192.0.2.1/tcp/0",))
    start_fails(AddressError, tmp_path / "a", bootstrap=("/ip4/127.0.0.1/tcp/1",))
    assert not (tmp_path / "a").exists(), "options are checked before anything is touched"


def test_announced_addresses_replace_the_listen_addresses(tmp_path: Path) -> None:
    async def main() -> None:
        announce = ("/dns4/home.example.org/tcp/4001",)
        async with hosts(tmp_path, 1, announce=announce) as (host,):
            assert host.addresses() == (f"{announce[0]}/p2p/{host.peer_id}",)

    run(main())
