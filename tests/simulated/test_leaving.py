"""Leaving and pausing while others train: what a peer has finished counts, and no step waits for a paused peer."""

from __future__ import annotations

import pytest

from swarmtrain.coordinator.journal import Journal
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    assert_reference,
    every_other,
    hold,
    leave,
    open_ended,
    phases,
    release,
    said,
    start_armed,
    tiny,
    wait_phase,
    wait_said,
    wait_serving,
    wait_step,
    wait_struck,
)

SLOW = 0.2  # of machines: a step takes long enough to be asked in the middle of it


def start(swarm: SimulatedSwarm, *stages: int, speed: float = SLOW) -> None:
    swarm.start_coordinator(min_peers=len(stages))
    for index, stage in enumerate(stages):
        swarm.start_peer(f"peer{index}", stage, speed=speed)


def wait_finished_work(swarm: SimulatedSwarm, peer: Life) -> None:
    """The peer has finished a microbatch of the step that is under way."""
    seen = peer.status()

    def has_more() -> bool:
        now = peer.status()
        if now["step"] == seen["step"] and now["microbatches"] > seen["microbatches"]:
            return True
        seen.update(now)
        return False

    swarm.until(has_more, f"{peer.name} has finished work")


@pytest.mark.parametrize("stage", every_other(range(NUM_STAGES)))
def test_a_drained_peer_answers_for_its_work_and_goes(simulated: Make, references: References, stage: int) -> None:
    """Asked in the middle of a step, with work in its ledger."""
    swarm = simulated(tiny())
    start(swarm, 0, 1, 2, 0, 1, 2)
    wait_step(swarm, 2)
    leaving = swarm.peers[3 + stage]
    wait_finished_work(swarm, leaving)
    leaving.process.ask("drain")
    wait_phase(swarm, leaving, "gone")
    assert not swarm.is_over
    assert not leaving.errors
    assert_reference(swarm, references)
    assert not said(swarm, "work_replayed"), "what a drained peer had was lost"


def test_peers_of_every_stage_leave_at_once(simulated: Make, references: References) -> None:
    """By signals, in the middle of a step."""
    swarm = simulated(tiny())
    start(swarm, 0, 1, 2, 0, 1, 2)
    wait_step(swarm, 2)
    for peer in swarm.peers[3:]:
        leave(peer)
    swarm.until(lambda: not any(peer.is_running for peer in swarm.peers[3:]), "they are gone")
    assert all(phases(peer)[-2:] == ["draining", "gone"] for peer in swarm.peers[3:])
    assert_reference(swarm, references)
    assert not said(swarm, "work_replayed")


def test_a_drained_peer_whose_coordinator_is_gone_goes_when_its_time_is_over(simulated: Make) -> None:
    """No peer is left that would apply the work that it holds."""
    swarm = simulated(open_ended())
    start(swarm, 0, 1, 2)
    wait_step(swarm, 2)
    swarm.coordinator.kill()
    for peer in swarm.peers:
        leave(peer)
    swarm.until(lambda: not any(peer.is_running for peer in swarm.peers), "they are gone", limit_s=40.0)
    assert not swarm.faults


def test_a_draining_peer_whose_work_was_recomputed_leaves_when_its_step_is_applied(
    simulated: Make,
) -> None:
    """It stood still with all that it had finished until the run had gone on without it."""
    swarm = simulated(open_ended("batch.microbatches_per_step=60"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    gate = swarm.start_peer("gate", 0)
    swarm.start_peer("middle", 1)
    swarm.start_peer("last", 2, speed=0.2)
    leaving = start_armed(swarm, "leaving", 1, "before-answer:1:stop", drain_s=3600.0)
    wait_struck(swarm, leaving, "before-answer", "stop")
    hold(gate)
    wait_said(swarm, swarm.coordinator, "peer_lost", peer=leaving.peer_id)
    swarm.until(lambda: gate.status()["open_microbatches"] == 0, "others have done what it had")
    leaving.process.resume()
    identity = leaving.peer_id
    swarm.until(lambda: len(said(swarm, "peer_joined", peer=identity)) == 2, "it is heard again")
    swarm.until(lambda: leaving.status()["microbatches"] > 0, "it has finished work")
    leave(leaving)
    wait_phase(swarm, leaving, "draining")
    assert swarm.step == 0
    release(gate)
    wait_phase(swarm, leaving, "gone")
    with Journal(swarm.coordinator.state_dir / "journal.sqlite", read_only=True) as journal:
        decision, _ = next(iter(journal.decisions()))
    assert identity not in [peer for peer, _ in decision.entries[1]]
    assert not swarm.faults


def test_a_paused_peer_takes_no_work_gives_its_state_and_is_resumed(simulated: Make, references: References) -> None:
    """As the only peer of its stage: the run stands still until a newcomer has the state, which only it can give."""
    swarm = simulated(tiny("schedule.steps=16"))
    start(swarm, 0, 1, 2)
    resting = swarm.peers[1]
    wait_step(swarm, 2)
    resting.process.ask("pause")
    newcomer = swarm.start_peer("newcomer", 1, speed=SLOW)
    wait_serving(swarm, newcomer)
    assert newcomer.has("sync_progress", percent=100)
    wait_step(swarm, swarm.step + 2)
    done = resting.status()
    assert done["state"] == "paused"
    wait_step(swarm, swarm.step + 2)
    assert resting.status()["forwards"] == done["forwards"]
    assert not said(swarm, "run_rolled_back")
    before = len(phases(resting))
    resting.process.ask("resume")
    wait_phase(swarm, resting, "syncing", after=before)  # it has missed steps
    wait_phase(swarm, resting, "serving", after=before)
    assert_reference(swarm, references)


def test_a_paused_peer_that_falls_behind_is_not_lost(simulated: Make) -> None:
    """One step behind, it may hold the last decision's sum, and is told of it; it does not, and lives all the same."""
    swarm = simulated(open_ended("batch.microbatches_per_step=24"))
    start(swarm, 0, 1, 2, 0)
    gate, resting = swarm.peers[2], swarm.peers[3]
    wait_step(swarm, 1)
    resting.process.ask("pause")
    swarm.until(lambda: swarm.step - resting.status()["step"] == 1, "a step is done without the paused peer")
    gate.process.stop()

    def num_signs() -> int:
        return int(resting.status()["traffic"]["sent"]["kinds"]["heartbeat"]["num_messages"])

    first = num_signs()
    swarm.until(lambda: num_signs() >= first + 3, "it shows that it lives")
    assert swarm.step - resting.status()["step"] == 1, "the run did not stand still"
    assert resting.status()["refused"].get("unprepared") == 1, "told once, and believed"
    members = [member["peer"] for member in swarm.coordinator.status()["stages"][0]]
    assert resting.peer_id in members
    assert not said(swarm, "peer_lost", peer=resting.peer_id)
    gate.process.resume()
    wait_step(swarm, swarm.step + 1)
    assert not swarm.faults


def test_all_peers_are_paused_and_resumed(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    start(swarm, 0, 1, 2, 0, 1, 2)
    wait_step(swarm, 2)
    for peer in swarm.peers:
        peer.process.ask("pause")
    swarm.run_for(20.0)
    before = swarm.step
    swarm.run_for(20.0)
    assert swarm.step == before
    for peer in swarm.peers:
        peer.process.ask("resume")
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_a_peer_that_does_not_get_on_with_its_device_is_not_waited_for(simulated: Make, references: References) -> None:
    """It answers, and shows that it lives; its device hangs in the middle of a forward."""
    swarm = simulated(tiny())
    start(swarm, 0, 1, 2, 0, 1, 2, speed=1.0)
    wait_step(swarm, 2)
    hanging = swarm.peers[4]
    hanging.machine.hangs = True
    at = swarm.step
    wait_step(swarm, at + 2)
    hanging.machine.release_device()
    assert_reference(swarm, references)
