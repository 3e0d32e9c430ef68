"""`swarmtrain doctor` with real network daemons: what is reached, what is not, and what to do about it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from cli.programs import call
from p2p.host_helpers import LOOPBACK, run

from swarmtrain.doctor import Finding, Grade, Patient, clock, device, disk, examine, exit_code, memory
from swarmtrain.errors import ExitCode
from swarmtrain.p2p.host import Host
from swarmtrain.p2p.network import HostOptions
from swarmtrain.run.invite import Invite

STRANGER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
RUN_ID = "0" * 16


def invite(*addresses: str) -> Invite:
    return Invite(RUN_ID, bytes(32), addresses)


@pytest.fixture
def nobody() -> str:
    """An address of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}/p2p/{STRANGER}"


async def findings(patient: Patient) -> list[Finding]:
    found: list[Finding] = []
    await examine(patient, found.append)
    return found


def verdicts(found: list[Finding], name: str) -> list[Grade]:
    return [item.verdict for item in found if item.name == name]


def assert_every_fault_has_a_fix(found: list[Finding]) -> None:
    for item in found:
        assert (item.verdict in (Grade.BAD, Grade.ODD)) == bool(item.fix), item
        assert (item.verdict is Grade.BAD) == (item.exit_code is not ExitCode.DONE), item


def test_each_bootstrap_peer_is_tried_by_itself(tmp_path: Path, nobody: str) -> None:
    """One is there, one is not; and the one that is there belongs to no run."""

    async def main() -> list[Finding]:
        host = await Host.start(HostOptions(state_dir=tmp_path / "other", listen=LOOPBACK))
        try:
            both = invite(host.addresses()[0], nobody)
            return await findings(Patient(tmp_path / "state", listen=LOOPBACK, invite=both, look_s=0.1))
        finally:
            await host.close()

    found = run(main())
    assert [item.verdict for item in found if item.name in ("device", "memory", "disk", "p2pd", "ports")] == [
        "good"
    ] * 5
    reached, refused = [item for item in found if item.name == "bootstrap"]
    assert (reached.verdict, refused.verdict) == (Grade.GOOD, Grade.ODD)
    assert reached.detail.endswith(": connected")
    assert nobody in refused.detail
    assert "connection refused" in refused.detail
    assert verdicts(found, "run") == [Grade.BAD]
    assert exit_code(found) == ExitCode.UNREACHABLE
    assert_every_fault_has_a_fix(found)
    assert not (tmp_path / "state").exists()  # it leaves nothing behind


def test_the_verb_ends_with_what_a_daemon_would_end_with(tmp_path: Path, nobody: str) -> None:
    place = ("--state-dir", tmp_path / "state", "--listen", LOOPBACK[0])
    done = call("doctor", invite(nobody).text(), *place)
    assert done.code == 3
    assert f"bad     bootstrap  {nobody}: connection refused" in done.out
    assert "skipped run" in done.out
    assert done.out.endswith("1 to fix before this machine can take part\n")


def test_a_taken_port_is_a_finding(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        found = run(findings(Patient(tmp_path, listen=(address,))))
    assert verdicts(found, "ports") == [Grade.BAD]
    assert exit_code(found) == ExitCode.USAGE
    assert {item.name for item in found if item.verdict is Grade.SKIPPED} == {"bootstrap", "clock", "run"}
    assert_every_fault_has_a_fix(found)


def test_a_network_daemon_that_cannot_run_is_a_finding(tmp_path: Path) -> None:
    binary = tmp_path / "p2pd"
    binary.write_text("no program")
    found = run(findings(Patient(tmp_path, listen=LOOPBACK, p2pd_binary=binary)))
    assert verdicts(found, "p2pd") == [Grade.BAD]
    assert exit_code(found) == ExitCode.HARDWARE
    os.chmod(binary, 0o755)
    assert "not a program" in next(
        item.detail for item in run(findings(Patient(tmp_path, p2pd_binary=binary))) if item.name == "p2pd"
    )


def test_the_machine_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert disk(tmp_path / "file" / "below").exit_code is ExitCode.STORAGE
    assert disk(tmp_path / "a" / "b").verdict is Grade.GOOD
    assert not (tmp_path / "a").exists()
    assert memory(10**8).exit_code is ExitCode.HARDWARE
    assert device(99).exit_code is ExitCode.HARDWARE
    assert (clock(3.0).verdict, clock(-40.0).verdict) == (Grade.GOOD, Grade.BAD)
    assert "40.0 s ahead of" in clock(-40.0).detail
