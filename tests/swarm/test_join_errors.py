"""What a volunteer sees when joining goes wrong: one line, an id, the right exit code. And what `status` says."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtrain.errors import ExitCode
from swarmtrain.observe.events import Events
from swarmtrain.p2p.host import Host
from swarmtrain.p2p.network import HostOptions
from swarmtrain.peer.contacts import RunUnreachable
from swarmtrain.peer.daemon import PeerDaemon
from swarmtrain.peer.options import PeerOptions
from swarmtrain.run.invite import Invite, parse_invite

from .comparison import assert_books_balance
from .harness import LOOPBACK, Swarm, swarmtrain, tiny

pytestmark = pytest.mark.swarm


@pytest.fixture(scope="module")
def swarm(shared_place: Path) -> Iterator[Swarm]:
    """A swarm that lacks its last stage: it waits, and says so."""
    with Swarm(tiny("schedule.steps=100000"), shared_place, num_peers=3, min_peers=1) as made:
        made.wait_serving()
        yield made


def failed_join(swarm: Swarm, *arguments: str) -> tuple[int, str]:
    """Exit code and the only line of a join that fails."""
    done = swarmtrain("join", *arguments, "--listen", LOOPBACK, environment=swarm.environment)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ST-")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.returncode, lines[0]


def test_a_mistyped_invite(swarm: Swarm) -> None:
    code, line = failed_join(swarm, swarm.invite()[:-9], "--stage", "0")
    assert code == ExitCode.USAGE
    assert "not a valid invite" in line


def test_an_unreachable_bootstrap_peer_is_named(swarm: Swarm, tmp_path: Path) -> None:
    with socket.socket() as closed:  # bound and not listening: nobody else takes the port, nobody answers
        closed.bind(("127.0.0.1", 0))
        nobody = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{swarm.peers[0].status()['peer']}"
        invite = Invite("0123456789abcdef", bytes(32), (nobody,)).text()
        code, line = failed_join(swarm, invite, "--stage", "0", "--state-dir", str(tmp_path), "--find-timeout", "0.1")
    assert code == ExitCode.UNREACHABLE
    assert nobody.split("/")[4] in line


def test_a_run_without_a_coordinator(tmp_path: Path) -> None:
    async def main() -> None:
        host = await Host.start(HostOptions(state_dir=tmp_path / "host", listen=(LOOPBACK,)))
        try:
            invite = Invite("0123456789abcdef", bytes(32), host.addresses()[:1])
            options = PeerOptions(invite, 0, tmp_path / "peer", listen=(LOOPBACK,), find_s=2.0)
            with pytest.raises(RunUnreachable, match="no coordinator of run 0123456789abcdef") as caught:
                await PeerDaemon(options, Events()).run()
            assert caught.value.exit_code == ExitCode.UNREACHABLE
        finally:
            await host.close()

    asyncio.run(main())


def test_sigterm_ends_a_peer_that_is_still_looking_for_its_run(swarm: Swarm) -> None:
    found = parse_invite(swarm.invite())
    invite = Invite(
        "0123456789abcdef", found.run_key, found.bootstrap, found.secret
    ).text()  # nobody coordinates this one
    state_dir = swarm.directory / "looking"
    arguments = ["join", invite, "--stage", "0", "--listen", LOOPBACK, "--state-dir", str(state_dir)]
    daemon = swarm.start_daemon("looking", 0, state_dir, arguments)
    swarm.wait(daemon, "phase_reached", phase="network")
    assert daemon.end(timeout_s=10) == 0
    assert daemon.phases()[-1] == "gone"


def test_a_gpu_that_is_not_there_says_what_was_found(swarm: Swarm) -> None:
    code, line = failed_join(swarm, swarm.invite(), "--stage", "0", "--gpu", "97")
    assert code == ExitCode.HARDWARE
    assert "no GPU 97" in line
    assert "found" in line


def test_gpu_and_cpu_contradict_each_other(swarm: Swarm) -> None:
    code, line = failed_join(swarm, swarm.invite(), "--gpu", "0", "--cpu")
    assert code == ExitCode.USAGE
    assert "contradict" in line


def test_a_stage_that_the_run_does_not_have(swarm: Swarm, tmp_path: Path) -> None:
    code, line = failed_join(swarm, swarm.invite(), "--stage", "4", "--state-dir", str(tmp_path))
    assert code == ExitCode.HARDWARE
    assert "stages 0 to 3" in line


def test_a_stage_that_does_not_fit(swarm: Swarm, tmp_path: Path) -> None:
    code, line = failed_join(
        swarm, swarm.invite(), "--stage", "3", "--max-memory", "100MB", "--state-dir", str(tmp_path)
    )
    assert code == ExitCode.HARDWARE
    assert "needs about" in line


def test_two_daemons_on_one_state_directory(swarm: Swarm) -> None:
    code, line = failed_join(swarm, swarm.invite(), "--stage", "0", "--state-dir", str(swarm.peers[0].state_dir))
    assert code == ExitCode.USAGE
    assert "used by another daemon" in line
    manifest = str(swarm.directory / "run.toml")
    second = swarmtrain("coordinator", manifest, "--state-dir", str(swarm.coordinator_dir), "--listen", LOOPBACK)
    assert second.returncode == ExitCode.USAGE
    assert "ST-STATE-DIR-IN-USE" in second.stderr
    assert_books_balance(swarm)  # the second one has written nothing


def test_an_address_in_use(swarm: Swarm, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        done = swarmtrain(
            "join", swarm.invite(), "--listen", address, "--state-dir", str(tmp_path), environment=swarm.environment
        )
    assert done.returncode not in (0, ExitCode.INTERNAL)
    assert "Traceback" not in done.stderr
    assert address.rsplit("/", 1)[1] in done.stderr


def test_status_says_why_nothing_goes_on_and_what_to_do(swarm: Swarm) -> None:
    text = swarmtrain("status", environment=swarm.environment).stdout
    assert "stage 3 has no peers" in text
    assert "stage 3: no peers" in text
    assert f"swarmtrain join {swarm.invite()}" in text
    for peer in swarm.peers:
        assert f"stage {peer.stage}, idle since" in text


def test_status_as_json_has_every_daemon_of_this_machine(swarm: Swarm) -> None:
    lines = swarmtrain("status", "--json", environment=swarm.environment).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert sorted(item["kind"] for item in found) == ["coordinator", "peer", "peer", "peer"]
    (coordinator,) = [item for item in found if item["kind"] == "coordinator"]
    assert coordinator["state"] == "waiting"
    assert [len(stage) for stage in coordinator["stages"]] == [1, 1, 1, 0]
    alone = swarmtrain("status", "--json", "--state-dir", str(swarm.peers[1].state_dir), environment=swarm.environment)
    assert json.loads(alone.stdout)["stage"] == 1


def test_status_without_any_daemon_is_one_line(tmp_path: Path) -> None:
    done = swarmtrain("status", environment={"XDG_STATE_HOME": str(tmp_path)})
    assert done.returncode == ExitCode.USAGE
    assert "no swarmtrain daemon" in done.stderr


def test_join_without_an_invite_and_without_a_coordinator_names_the_three_ways(tmp_path: Path) -> None:
    done = swarmtrain("join", "--stage", "3", environment={"XDG_STATE_HOME": str(tmp_path)})
    assert done.returncode == ExitCode.USAGE
    assert "none was given" in done.stderr
    assert "SWARMTRAIN_INVITE" in done.stderr


def test_join_without_an_invite_finds_the_coordinator_of_this_machine(swarm: Swarm) -> None:
    """The last test of this file: it gives the swarm the peer that it lacks."""
    daemon = swarm.start_daemon("found", 3, swarm.directory / "found", ["join", "--stage", "3", "--listen", LOOPBACK])
    swarm.wait_serving(daemon)
    swarm.wait_step(1)
