"""The last peer with a stage's state leaves, or is paused and dies: a checkpoint comes first, and no step is lost."""

from __future__ import annotations

import pytest

from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    arm,
    assert_as_good_as_reference,
    assert_reference,
    every_other,
    leave,
    open_ended,
    restart_coordinator,
    said,
    tiny,
    wait_phase,
    wait_said,
    wait_step,
    wait_struck,
)

SLOW = 0.2
WAYS = {"no delay": (), "delay": ("schedule.delay=1",), "predicted": ("schedule.delay=1", "schedule.predict=true")}
MANIFESTS = {name: tiny("schedule.steps=8", *keys) for name, keys in WAYS.items()}


def start(swarm: SimulatedSwarm, *stages: int) -> None:
    swarm.start_coordinator(min_peers=len(stages))
    for index, stage in enumerate(stages):
        swarm.start_peer(f"peer{index}", stage, speed=SLOW)


def wait_work(swarm: SimulatedSwarm, peer: Life) -> None:
    """The peer has work of an open step in hand."""
    swarm.until(lambda: bool(peer.daemon.assignment.clock.ledgers), f"{peer.name} has work")


def assert_saved_and_nothing_lost(swarm: SimulatedSwarm) -> None:
    """A checkpoint was made because of it, and every step was applied once."""
    assert said(swarm, "last_holder"), "nobody noticed"
    assert said(swarm, "checkpoint_written")
    assert not said(swarm, "run_rolled_back")
    steps = [event.step for event in said(swarm, "step_applied")]  # type: ignore[attr-defined]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(("way", "stage"), every_other([(way, stage) for way in WAYS for stage in range(NUM_STAGES)]))
def test_the_only_peer_of_a_stage_is_drained(simulated: Make, references: References, way: str, stage: int) -> None:
    swarm = simulated(MANIFESTS[way])
    start(swarm, 0, 1, 2)
    wait_step(swarm, 3)
    leaving = swarm.peers[stage]
    wait_work(swarm, leaving)
    leaving.process.ask("drain")
    wait_phase(swarm, leaving, "gone")
    assert not leaving.errors
    swarm.start_peer("successor", stage)
    assert_reference(swarm, references)
    assert_saved_and_nothing_lost(swarm)


@pytest.mark.parametrize("way", WAYS)
def test_the_only_peer_of_a_stage_is_paused_and_dies(simulated: Make, references: References, way: str) -> None:
    swarm = simulated(MANIFESTS[way])
    start(swarm, 0, 1, 2)
    wait_step(swarm, 3)
    resting = swarm.peers[1]
    resting.process.ask("pause")
    wait_said(swarm, swarm.coordinator, "checkpoint_written")
    resting.kill(power_loss=True)
    swarm.start_peer("successor", 1)
    assert_reference(swarm, references)
    assert_saved_and_nothing_lost(swarm)


def test_it_says_why_it_stays(simulated: Make) -> None:
    swarm = simulated(open_ended())
    start(swarm, 0, 1, 2)
    wait_step(swarm, 2)
    resting = swarm.peers[1]
    arm(swarm.coordinator, "checkpoint-write:1:stop")  # until it is resumed, nothing is saved
    resting.process.ask("pause")
    swarm.until(lambda: "alone has stage 1's state" in resting.status()["reason"], "it says so")
    leave(resting)
    wait_phase(swarm, resting, "draining")
    wait_struck(swarm, swarm.coordinator, "checkpoint-write", "stop")
    swarm.until(lambda: "alone has stage 1's state" in resting.status()["next"], "it says so")
    swarm.coordinator.process.resume()
    wait_phase(swarm, resting, "gone")
    assert said(swarm, "checkpoint_written")
    assert not swarm.faults


@pytest.mark.parametrize("manifest", [MANIFESTS["no delay"], MANIFESTS["delay"]], ids=["no delay", "delay"])
@pytest.mark.parametrize("nth", [1, 3])
def test_the_coordinator_dies_while_it_saves_the_state(
    simulated: Make, references: References, manifest: Manifest, nth: int
) -> None:
    """The peer waits for the one that is started again, which makes the checkpoint."""
    swarm = simulated(manifest)
    start(swarm, 0, 1, 2)
    wait_step(swarm, 3)
    arm(swarm.coordinator, f"checkpoint-write:{nth}:kill")
    leaving = swarm.peers[2]
    wait_work(swarm, leaving)
    leaving.process.ask("drain")
    wait_struck(swarm, swarm.coordinator, "checkpoint-write")
    swarm.run_for(7.0)
    assert leaving.is_running, "it went although nothing was saved"
    restart_coordinator(swarm)
    wait_phase(swarm, leaving, "gone")
    swarm.start_peer("successor", 2)
    assert_reference(swarm, references)
    assert_saved_and_nothing_lost(swarm)


def test_both_replicas_of_a_stage_leave_at_once(simulated: Make, references: References) -> None:
    swarm = simulated(MANIFESTS["no delay"])
    start(swarm, 0, 1, 2, 1)
    wait_step(swarm, 3)
    leaving = [swarm.peers[1], swarm.peers[3]]
    for peer in leaving:
        leave(peer)
    for peer in leaving:
        wait_phase(swarm, peer, "gone")
    swarm.start_peer("successor", 1)
    assert_reference(swarm, references)
    assert_saved_and_nothing_lost(swarm)


@pytest.mark.parametrize("way", ["no delay", "delay"])
def test_all_peers_leave_at_once_and_come_back(simulated: Make, references: References, way: str) -> None:
    """Every one of them lost its memory."""
    swarm = simulated(MANIFESTS[way])
    start(swarm, 0, 1, 2)
    wait_step(swarm, 3)
    for peer in swarm.peers:
        leave(peer)
    swarm.until(lambda: not any(peer.is_running for peer in swarm.peers), "they are gone")
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage)
    assert_reference(swarm, references)
    assert_saved_and_nothing_lost(swarm)


def test_one_of_two_replicas_leaves_without_a_checkpoint(simulated: Make, references: References) -> None:
    swarm = simulated(MANIFESTS["no delay"])
    start(swarm, 0, 1, 2, 1)
    wait_step(swarm, 3)
    leaving = swarm.peers[3]
    leave(leaving)
    wait_phase(swarm, leaving, "gone")
    assert_reference(swarm, references)
    assert not said(swarm, "last_holder")


def test_a_run_whose_codecs_remember_loses_no_step_either(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=8", "reduce.codec=powersgd2"))
    start(swarm, 0, 1, 2)
    wait_step(swarm, 3)
    leaving = swarm.peers[1]
    leave(leaving)
    wait_phase(swarm, leaving, "gone")
    swarm.start_peer("successor", 1)
    assert_as_good_as_reference(swarm, references)
    assert_saved_and_nothing_lost(swarm)
