"""p2pd has limits and no privileges; when it needs more it ends, the host says why, and another one serves."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
from pathlib import Path

import pytest

from swarmtrain.p2p.addresses import Address
from swarmtrain.p2p.confinement import (
    CAP_DAC_OVERRIDE,
    CAP_NET_BIND_SERVICE,
    MIB,
    P2pdLimits,
    confined,
    needed_capabilities,
)
from swarmtrain.p2p.errors import NetError, P2pdFailedError, P2pdUnusableError
from swarmtrain.p2p.host import Host, HostEvent, HostEventKind

from .host_helpers import Collector, echo_server, hosts, is_running, run, until
from .test_host_start import script, start_fails

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits are looked up in /proc"),
]


def status_of(process_id: int) -> dict[str, str]:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def environment_of(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/environ").read_text().split("\0")


def test_p2pd_runs_with_its_limits_and_gains_no_privileges(tmp_path: Path) -> None:
    async def main() -> None:
        limits = P2pdLimits(memory_bytes=512 * MIB, collect_above_bytes=256 * MIB, open_files=1000)
        async with hosts(tmp_path, 1, p2pd_limits=limits) as (host,):
            process = host.p2pd_process_id
            assert process is not None
            assert resource.prlimit(process, resource.RLIMIT_DATA) == (512 * MIB, 512 * MIB)
            assert resource.prlimit(process, resource.RLIMIT_NOFILE) == (1000, 1000)
            assert resource.prlimit(process, resource.RLIMIT_CORE) == (0, 0)
            assert f"GOMEMLIMIT={256 * MIB}" in environment_of(process)
            assert status_of(process)["NoNewPrivs"] == "1"

    run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to give up")
@pytest.mark.parametrize("inheritable", [False, True])
def test_a_p2pd_that_root_starts_has_no_capabilities(tmp_path: Path, inheritable: bool) -> None:
    shown = script(tmp_path / "p2pd", "#!/bin/sh\nexec grep ^Cap /proc/self/status\n")
    command = confined([str(shown)], P2pdLimits(), needed_capabilities([], Path("/")))
    if inheritable:
        command = ["setpriv", "--inh-caps=+chown", *command]
    assert set(lines_of(command).values()) == {"0" * 16}
    command = confined([str(shown)], P2pdLimits(), {CAP_NET_BIND_SERVICE})
    assert lines_of(command)["CapEff"] == f"{1 << CAP_NET_BIND_SERVICE:016x}"


def lines_of(command: list[str]) -> dict[str, str]:
    async def main() -> bytes:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return output

    lines = run(main()).decode().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_ends_with_the_daemon_even_if_the_two_never_spoke() -> None:
    parent = """
import subprocess, sys
from swarmtrain.p2p.confinement import P2pdLimits, confined
subprocess.Popen(confined(["/bin/sh", "-c", "echo $$; exec sleep 1000"], P2pdLimits(), ()))
sys.stdin.read()
"""

    async def main() -> None:
        pipe = asyncio.subprocess.PIPE
        daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdin=pipe, stdout=pipe)
        assert daemon.stdout is not None
        process_id = int(await daemon.stdout.readline())
        assert is_running(process_id)
        daemon.kill()
        await daemon.wait()
        await until(lambda: not is_running(process_id), "it ends with its parent")

    run(main())


def test_only_low_ports_and_other_users_directories_need_a_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    high, low, any_port = (Address.parse(f"/ip4/0.0.0.0/tcp/{port}") for port in (4001, 443, 0))
    assert needed_capabilities([high, any_port], Path("/")) == set()
    assert needed_capabilities([high, low], Path("/")) == {CAP_NET_BIND_SERVICE}
    foreign = os.stat_result((0o700, 0, 0, 0, 1234, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda path, **_: foreign)
    assert needed_capabilities([], tmp_path) == {CAP_DAC_OVERRIDE}


def test_a_p2pd_that_may_not_start_is_a_typed_error(tmp_path: Path) -> None:
    start_fails(P2pdFailedError, tmp_path / "a", p2pd_limits=P2pdLimits(memory_bytes=16 * MIB))
    nothing = script(tmp_path / "p2pd", "#!/there/is/no/such/shell\n")
    assert "No such file" in str(start_fails(P2pdUnusableError, tmp_path / "b", p2pd_binary=nothing))


def test_a_p2pd_that_needs_more_memory_ends_with_that_reason_and_another_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2) as (first, second):
            events: list[HostEvent] = []
            second.subscribe(events.append)
            echo_server(second)
            process = second.p2pd_process_id
            assert process is not None
            resource.prlimit(process, resource.RLIMIT_DATA, (0, 0))  # whatever it has, more it does not get
            await feed(first, second.peer_id, until_any=events)
            assert events[0].kind is HostEventKind.P2PD_DIED
            assert "MiB of memory that it may have" in events[0].detail
            await until(lambda: events[-1].kind is HostEventKind.P2PD_RESTARTED, "the owner is told")
            again = second.p2pd_process_id
            assert again is not None
            assert resource.prlimit(again, resource.RLIMIT_DATA)[0] == P2pdLimits().memory_bytes
            collector = Collector(await first.open(second.peer_id, timeout_s=60))
            await collector.send(b"x")
            await collector.receive(1)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert "MiB of memory that it may have" in caplog.text


async def feed(host: Host, peer_id: str, *, until_any: list[HostEvent]) -> None:
    """Open streams and send, more and more, until something happens."""
    streams = []
    async with asyncio.timeout(60):
        while not until_any:
            try:
                streams.append(Collector(await host.open(peer_id, timeout_s=5)))
                await streams[-1].send(bytes(MIB))
            except (NetError, ConnectionError):
                await asyncio.sleep(0)


def test_the_default_limits_are_above_what_a_p2pd_takes(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 1) as (host,):
            assert host.p2pd_process_id is not None
            taken = int(status_of(host.p2pd_process_id)["VmData"].split()[0]) * 1024
            assert taken < P2pdLimits().memory_bytes / 8

    run(main())
