"""Daemons as processes: nothing is left behind, whatever ends them; they come back on their state directory."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from .comparison import References, end_and_compare
from .faults import hold, release
from .harness import PATIENCE, REPOSITORY, Daemon, Swarm, clean_environment, swarmtrain, tiny, until

pytestmark = pytest.mark.swarm

GONE_S = 60.0  # libp2p's daemon does not outlive its parent; a busy machine takes its time


def ports(process: psutil.Process) -> list[int]:
    """TCP ports on which a process listens."""
    return [item.laddr.port for item in process.net_connections("tcp") if item.status == psutil.CONN_LISTEN]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def killed_without_trace(daemon: Daemon) -> None:
    """SIGKILL; its child goes, and its ports are free again."""
    children = daemon.children()
    listening = [port for child in children for port in ports(child)]
    assert children
    assert listening
    assert not any(is_free(port) for port in listening)
    daemon.kill()
    _, alive = psutil.wait_procs(children, timeout=GONE_S * PATIENCE)
    assert not alive
    assert all(is_free(port) for port in listening)


def test_killed_daemons_leave_nothing_and_come_back_on_their_state_directory(
    place: Path, reference: References
) -> None:
    manifest = tiny("schedule.steps=5000", "checkpoint.every=10", "checkpoint.keep=500")
    with Swarm(manifest, place, num_peers=5) as swarm:
        spare, gate = swarm.peers[4], swarm.peers[2]
        swarm.wait_step(1)
        identity = spare.status()["peer"]
        killed_without_trace(spare)
        hold(gate)
        again = swarm.start_peer(spare.stage, name=spare.name)
        swarm.wait(again, "phase_reached", phase="syncing")
        release(gate)
        swarm.wait_serving(again)  # a peer that starts while its only bootstrap peer is away gives up
        hold(gate)
        killed_without_trace(swarm.coordinator)
        invite = swarm.invite()
        swarm.start_coordinator()
        assert swarm.invite() == invite  # same identity, same ports
        assert again.has("phase_reached", phase="identity", detail=identity)
        release(gate)
        end_and_compare(swarm, reference)


def test_verbs_and_sigterm_end_peers_and_the_coordinator_with_code_0(place: Path) -> None:
    with Swarm(tiny("schedule.steps=100000"), place, num_peers=5) as swarm:
        swarm.wait_step(1)
        spare = swarm.peers[4]
        for verb, phase in (("pause", "paused"), ("resume", "joining")):
            asked = swarmtrain(verb, "--state-dir", str(spare.state_dir))
            assert asked.returncode == 0, asked.stderr
            swarm.wait(spare, "phase_reached", phase=phase)
        children = spare.children()
        assert spare.end(timeout_s=25) == 0  # its --drain-timeout is 20 s
        swarm.wait(spare, "phase_reached", phase="gone")
        assert spare.phases()[-2:] == ["draining", "gone"]
        step = swarm.coordinator.status()["step"]
        swarm.wait_step(step + 2)  # nobody waits for who has left
        assert swarm.coordinator.end(timeout_s=15) == 0
        others = swarm.living()
        for peer in others:
            children += peer.children()
        assert swarmtrain("drain", "--state-dir", str(others[0].state_dir)).returncode == 0
        for peer in others[1:]:
            peer.process.send_signal(signal.SIGTERM)
        for peer in others:  # not after 20 s and more: nobody is left who would apply the work that they hold
            assert peer.process.wait(20 * PATIENCE) == 0
        _, alive = psutil.wait_procs(children, timeout=GONE_S * PATIENCE)
        assert not alive
        for daemon in swarm.daemons:
            assert not (daemon.state_dir / "control.sock").exists()


@contextmanager
def local(place: Path, *extra: str) -> Iterator[subprocess.Popen[str]]:
    """`swarmtrain local --json` of a tiny run; whatever is left of it in the end is killed."""
    manifest = place / "tiny.toml"
    manifest.write_text(tiny("stages.count=2", *extra).canonical())
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "swarmtrain",
            "local",
            str(manifest),
            "--peers",
            "2",
            "--json",
            "--state-dir",
            str(place / "s"),
        ],
        stdout=subprocess.PIPE,
        stderr=(place / "local.log").open("w"),
        stdin=subprocess.DEVNULL,
        text=True,
        env=clean_environment({"XDG_STATE_HOME": str(place / "home")}),
        cwd=REPOSITORY,
        start_new_session=True,
    )
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        process.wait()
        for child in family:
            if child.is_running():
                child.kill()


def first_step(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until a step was applied; everything that has been started by then."""
    assert process.stdout is not None
    for line in process.stdout:
        if "loss" in json.loads(line):
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) == 2 * 3  # a coordinator, two peers, and libp2p's daemon of each
            return family
    raise AssertionError("it ended without a step")


def test_killing_local_leaves_nothing(place: Path) -> None:
    with local(place, "schedule.steps=100000") as process:
        family = first_step(process)
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=GONE_S * PATIENCE)
        assert not alive


def test_a_daemon_whose_parent_went_while_it_was_loading_goes_as_well(place: Path) -> None:
    command = f"SWARMTRAIN_DIE_WITH_PARENT=$$ {sys.executable} -m swarmtrain coordinator nano --state-dir {place / 'c'}"
    shell = subprocess.run(
        ["sh", "-c", f"{command} > /dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
        check=True,
        env=clean_environment({"XDG_STATE_HOME": str(place)}),
        cwd=REPOSITORY,
        timeout=90 * PATIENCE,
    )
    orphan = int(shell.stdout)
    until(lambda: not psutil.pid_exists(orphan), "it has gone by itself")
    assert not (place / "c" / "journal.sqlite").exists()  # before it did anything


def test_ctrl_c_drains_local_and_leaves_nothing(place: Path) -> None:
    with local(place, "schedule.steps=100000") as process:
        family = first_step(process)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120 * PATIENCE)
        assert process.returncode == 0
        gone = [json.loads(line) for line in rest.splitlines() if '"phase": "gone"' in line]
        assert len(gone) == 2
        _, alive = psutil.wait_procs(family, timeout=GONE_S * PATIENCE)
        assert not alive
