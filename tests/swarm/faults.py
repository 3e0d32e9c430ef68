"""Swarms that break at named points: armed peers, proof that the fault happened, and holding a run still."""

from __future__ import annotations

import signal

import psutil

from swarmtrain.run.manifest import Manifest

from .harness import Daemon, Swarm, ask_daemon, tiny, until

NUM_STAGES = 3


def three_stages(*overrides: str) -> Manifest:
    """First, middle and last: three stages of one small layer."""
    return tiny("stages.count=3", "model.num_layers=3", *overrides)


def open_ended(*overrides: str) -> Manifest:
    """As many steps as the test needs: `end_and_compare` ends the run at a checkpoint."""
    return three_stages("schedule.steps=5000", "checkpoint.every=10", "checkpoint.keep=500", *overrides)


def start_armed(swarm: Swarm, stage: int, faults: str, *extra: str) -> Daemon:
    """A peer that breaks as `faults` says."""
    return swarm.start_peer(stage, "--enable-test-faults", *extra, environment={"SWARMTRAIN_FAULTS": faults})


def restart_coordinator(swarm: Swarm, faults: str = "") -> Daemon:
    """The coordinator once more on its state directory, with faults before it."""
    if not faults:
        return swarm.start_coordinator()
    before = swarm.environment
    swarm.environment = {**before, "SWARMTRAIN_FAULTS": faults}
    try:
        return swarm.start_coordinator("--enable-test-faults")
    finally:
        swarm.environment = before


def wait_killed(swarm: Swarm, daemon: Daemon, point: str) -> None:
    """The fault happened: the daemon says so in its log, and SIGKILL ended it."""
    swarm.wait_until(lambda: not daemon.is_running, f"{daemon.name} is killed at {point}")
    assert daemon.process.returncode == -signal.SIGKILL
    assert f"test fault: kill at {point}" in daemon.log.read_text()


def wait_fault(swarm: Swarm, daemon: Daemon, action: str, point: str) -> None:
    """The fault happened, and the daemon lives: it says so in its log."""
    swarm.wait_until(
        lambda: f"test fault: {action} at {point}" in daemon.log.read_text(), f"{daemon.name}: {action} at {point}"
    )


def wait_stopped(swarm: Swarm, daemon: Daemon, point: str) -> None:
    """The fault happened: the daemon says so in its log, and stands still."""
    wait_fault(swarm, daemon, "stop", point)
    until(lambda: psutil.Process(daemon.pid).status() == psutil.STATUS_STOPPED, f"{daemon.name} has stopped")


def wait_phase(swarm: Swarm, peer: Daemon, phase: str, *, after: int) -> None:
    """The peer has reached a phase since its first `after` ones: at its start it may have been there before."""
    swarm.wait_until(lambda: phase in peer.phases()[after:], f"{peer.name} is {phase} again")


def hold(peer: Daemon) -> None:
    """Have the only peer of a stage take no work: the run stands still."""
    ask_daemon(peer.state_dir, "pause")


def release(peer: Daemon) -> None:
    """Let a held run go on."""
    ask_daemon(peer.state_dir, "resume")


def last_step(swarm: Swarm) -> int:
    """Steps applied so far."""
    return max((event["step"] for event in swarm.events("step_applied")), default=0)
