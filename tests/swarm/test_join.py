"""Joining, leaving and pausing while others train: nobody waits, and every byte of a newcomer's state is verified."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from swarmtrain.coordinator.journal import Journal
from swarmtrain.model.buffers import StateLayout

from .comparison import References, assert_equals_reference, end_and_compare
from .faults import (
    NUM_STAGES,
    hold,
    last_step,
    open_ended,
    release,
    start_armed,
    three_stages,
    wait_killed,
    wait_phase,
    wait_stopped,
)
from .harness import PATIENCE, Daemon, Swarm, ask_daemon, swarmtrain, until

pytestmark = pytest.mark.swarm

SEVERAL_CHUNKS = ("model.hidden_size=128", "model.ffn_size=2048")  # of 1 MiB, in each part of a stage's state


def join_and_serve(swarm: Swarm, stage: int, gate: Daemon) -> Daemon:
    """Start a newcomer, and hold the run until it has been enrolled, so that enough steps are left to it."""
    hold(gate)
    newcomer = swarm.start_peer(stage)
    swarm.wait(newcomer, "phase_reached", phase="syncing")
    release(gate)
    swarm.wait_serving(newcomer)
    return newcomer


def test_newcomers_of_every_stage_follow_and_take_over(place: Path, reference: References) -> None:
    manifest = open_ended()
    with Swarm(manifest, place, num_peers=NUM_STAGES) as swarm:
        swarm.wait_step(2)
        gate = swarm.peers[1]
        newcomers = [join_and_serve(swarm, stage, gate) for stage in (0, 2)]
        assert all(newcomer.has("sync_progress", percent=100) for newcomer in newcomers)
        for former in (swarm.peers[0], swarm.peers[2]):
            former.kill()  # the newcomers now hold the only copies
        end_and_compare(swarm, reference)
        assert not swarm.events("run_rolled_back")


@pytest.mark.long
def test_a_newcomer_whose_line_just_carries_the_reductions_gets_its_state_beside_them(
    place: Path, reference: References
) -> None:
    """It is still receiving a step's sum when the next one is added up: that must not send it back to the start."""
    manifest = three_stages("schedule.steps=60", "model.hidden_size=64", "model.ffn_size=256")
    num_bytes = 4 * StateLayout(manifest, 1).gradient_size
    pace = 0.5 / manifest.batch.microbatches_per_step
    paced = {"SWARMTRAIN_PACE": f"{pace}:{pace}"}
    with Swarm(manifest, place, num_peers=1, min_peers=NUM_STAGES) as swarm:
        for stage in (1, 2):
            swarm.start_peer(stage, "--enable-test-faults", environment=paced if stage == 1 else None)
        swarm.wait_step(3)
        applied = [event["at"] for event in swarm.events("step_applied")]
        step_s = (applied[-1] - applied[0]) / (len(applied) - 1)
        line = f"{int(8 * num_bytes / (0.8 * step_s) / 1000)}kbit"
        newcomer = swarm.start_peer(1, "--max-down", line)
        swarm.wait_serving(newcomer)
        assert_one_download(newcomer)
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))


def assert_one_download(newcomer: Daemon) -> None:
    """It fetched the state of one step, and every chunk that it had counted."""
    steps = {event["step"] for event in newcomer.events if event["event"] == "sync_progress"}
    assert len(steps) == 1, f"it started over: {steps}"
    assert_every_chunk_counted(newcomer, *steps)


def assert_every_chunk_counted(newcomer: Daemon, step: int) -> None:
    """It fetched the state of this step in one go."""
    progress = [item for item in newcomer.events if item["event"] == "sync_progress" and item["step"] == step]
    percents = [event["percent"] for event in progress]
    assert percents == sorted(set(percents))
    assert percents[-1] == 100
    assert len(percents) > 2, "a state of one piece shows nothing"


def states_of(swarm: Swarm, peer: Daemon) -> dict[int, str]:
    """By step, the digest of the state that a peer reported."""
    peer_id = swarm.wait(peer, "phase_reached", phase="identity")["detail"]
    with Journal(swarm.coordinator_dir / "journal.sqlite", read_only=True) as journal:
        return {step: digest for step, _, peer, digest in journal.replicas() if peer == peer_id}


def test_a_donor_that_sends_a_wrong_chunk_is_dropped_and_named(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=80")  # no checkpoint before the end: donors are counted by chunks
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 1) as swarm:
        liar = start_armed(swarm, 1, "state-chunk:1:corrupt,state-chunk:2:corrupt")
        swarm.wait_step(2)
        liars_id = liar.status()["peer"]
        newcomer = join_and_serve(swarm, 1, swarm.peers[2])
        dropped = swarm.events("donor_dropped")
        # Once more, if the newcomer needed a later state and the liar had a lie left
        assert {event["peer"] for event in dropped} == {liars_id}
        assert {event["from"] for event in dropped} == {newcomer.name}
        assert all("wrong chunk" in event["reason"] for event in dropped)
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))


def test_a_donor_killed_in_the_middle_costs_only_its_own_chunks(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=30", *SEVERAL_CHUNKS)
    assert len(StateLayout(manifest, 1).chunks()) >= 9
    with Swarm(manifest, place, num_peers=2, min_peers=NUM_STAGES + 1) as swarm:
        # Its last stage is slow enough to leave a newcomer time to arrive, with few steps to compute.
        gate = swarm.start_peer(2, "--enable-test-faults", environment={"SWARMTRAIN_PACE": "0.03:0"})
        victim = start_armed(swarm, 1, "state-chunk:3:kill")
        swarm.wait_step(2)
        victims_id = victim.status()["peer"]
        newcomer = join_and_serve(swarm, 1, gate)
        wait_killed(swarm, victim, "state-chunk")
        (dropped,) = swarm.events("donor_dropped")
        assert dropped["peer"] == victims_id
        assert_every_chunk_counted(newcomer, dropped["step"])  # a slow one may have needed a later state, too
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        own, donors = states_of(swarm, newcomer), states_of(swarm, swarm.peers[1])
        assert own
        assert own == {step: donors[step] for step in own}


@pytest.mark.long
def test_a_transfer_of_states_is_disturbed_at_each_end(place: Path, reference: References) -> None:
    """A keeper dies while a checkpoint is fetched from it, a newcomer dies in its download, a link breaks in one."""
    manifest = three_stages("schedule.steps=30", "checkpoint.every=5", *SEVERAL_CHUNKS)
    slow = ("--max-down", "8mbit", "--enable-test-faults")  # a second for a chunk, four of which are on their way
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 1) as swarm:
        keeper = start_armed(swarm, 2, "state-chunk:1:kill")
        wait_killed(swarm, keeper, "state-chunk")
        swarm.wait(None, "checkpoint_written", step=5)
        donor = swarm.peers[1]
        donors_id = donor.status()["peer"]
        hold(donor)  # the run stands still, and this is the only one who has the state
        victim = swarm.start_peer(1, *slow)
        swarm.wait(victim, "sync_progress")
        victim.kill()
        assert not victim.has("sync_progress", percent=100)
        newcomer = swarm.start_peer(1, *slow)
        swarm.wait(newcomer, "sync_progress")
        ask_daemon(newcomer.state_dir, "cut")
        assert not newcomer.has("sync_progress", percent=100)
        swarm.wait_serving(newcomer)
        assert_one_download(newcomer)
        swarm.wait_end()
        dropped = [event for event in swarm.events("donor_dropped") if event["from"] == newcomer.name]
        assert [event["peer"] for event in dropped] == [donors_id]
        assert "lost" in dropped[0]["reason"]
        assert not swarm.events("checkpoint_failed")
        assert not swarm.events("run_rolled_back")
        assert_equals_reference(swarm, reference(manifest))


def wait_finished_work(peer: Daemon) -> None:
    """The peer has finished a microbatch of the step that is under way."""
    seen = peer.status()

    def has_more() -> bool:
        now = peer.status()
        if now["step"] == seen["step"] and now["microbatches"] > seen["microbatches"]:
            return True
        seen.update(now)
        return False

    until(has_more, f"{peer.name} has finished work")


def test_a_drained_peer_answers_for_its_work_and_leaves_with_exit_code_zero(place: Path, reference: References) -> None:
    """The last stage is slow enough for peers to be asked in the middle of a step, with work in their ledgers."""
    manifest = open_ended("batch.microbatches_per_step=24", "checkpoint.every=4")
    slow = {"SWARMTRAIN_PACE": "0.03:0"}
    with Swarm(manifest, place, num_peers=2, min_peers=2 * NUM_STAGES) as swarm:
        swarm.start_peer(2, "--enable-test-faults", environment=slow)
        leaving = [swarm.start_peer(0), swarm.start_peer(1)]
        leaving.append(swarm.start_peer(2, "--enable-test-faults", environment=slow))
        swarm.wait_step(2)
        asked_at = time.time()
        for peer in leaving[1:]:
            wait_finished_work(peer)
            ask_daemon(peer.state_dir, "drain")
        asked = swarmtrain("drain", "--state-dir", str(leaving[0].state_dir))
        assert asked.returncode == 0, asked.stderr
        for peer in leaving:
            swarm.wait(peer, "phase_reached", phase="gone")
            assert peer.process.wait(30 * PATIENCE) == 0
        end_and_compare(swarm, reference)
        lost = [event for event in swarm.events("work_replayed") if event["at"] >= asked_at]
        assert not lost, "what a drained peer had was lost"


def test_who_drains_with_work_that_others_have_done_goes_when_its_step_is_applied_without_it(place: Path) -> None:
    """It stood still with all that it had finished until the run had gone on without it."""
    manifest = open_ended("batch.microbatches_per_step=60")
    with Swarm(manifest, place, num_peers=2, min_peers=NUM_STAGES + 1) as swarm:
        gate, slow = swarm.peers[0], {"SWARMTRAIN_PACE": "0.1:0"}  # a step takes seconds: it can be held in the middle
        swarm.start_peer(2, "--enable-test-faults", environment=slow)
        leaving = start_armed(swarm, 1, "before-answer:1:stop", "--drain-timeout", "3600")
        wait_stopped(swarm, leaving, "before-answer")
        hold(gate)
        identity = swarm.wait(leaving, "phase_reached", phase="identity")["detail"]
        swarm.wait(swarm.coordinator, "peer_lost", peer=identity)
        until(lambda: gate.status()["open_microbatches"] == 0, "others have done what it had")
        leaving.resume()
        swarm.wait_until(lambda: len(swarm.events("peer_joined", peer=identity)) == 2, "it is heard again")
        until(lambda: leaving.status()["microbatches"] > 0, "it has finished work")
        leaving.process.send_signal(signal.SIGTERM)
        swarm.wait(leaving, "phase_reached", phase="draining")
        assert last_step(swarm) == 0
        assert not leaving.has("phase_reached", phase="gone")
        release(gate)
        swarm.wait(leaving, "phase_reached", phase="gone")
        assert leaving.process.wait(30 * PATIENCE) == 0
        swarm.wait_step(1)
        with Journal(swarm.coordinator_dir / "journal.sqlite", read_only=True) as journal:
            decision, _ = next(iter(journal.decisions()))
        assert identity not in [peer for peer, _ in decision.entries[1]]


def test_a_paused_peer_takes_no_work_gives_its_state_and_is_resumed(place: Path, reference: References) -> None:
    """As the only peer of its stage: the run stands still until a newcomer has the state, which only it can give."""
    manifest = open_ended()
    with Swarm(manifest, place, num_peers=NUM_STAGES) as swarm:
        resting, gate = swarm.peers[1], swarm.peers[2]
        swarm.wait_step(2)
        asked = swarmtrain("pause", "--state-dir", str(resting.state_dir))
        assert asked.returncode == 0, asked.stderr
        newcomer = swarm.start_peer(1)
        swarm.wait_serving(newcomer)
        assert newcomer.has("sync_progress", percent=100)
        swarm.wait_step(last_step(swarm) + 2)
        done = resting.status()
        assert done["state"] == "paused"
        swarm.wait_step(last_step(swarm) + 2)
        assert resting.status()["forwards"] == done["forwards"]
        assert not swarm.events("run_rolled_back")
        hold(gate)
        num_before = len(resting.phases())
        asked = swarmtrain("resume", "--state-dir", str(resting.state_dir))
        assert asked.returncode == 0, asked.stderr
        wait_phase(swarm, resting, "syncing", after=num_before)  # it has missed steps
        release(gate)
        wait_phase(swarm, resting, "serving", after=num_before)
        end_and_compare(swarm, reference)


def test_a_paused_peer_that_falls_behind_is_not_lost(place: Path) -> None:
    """One step behind, it may hold the last decision's sum, and is told of it; it does not, and lives all the same."""
    manifest = open_ended("batch.microbatches_per_step=24")
    with Swarm(manifest, place, num_peers=2, min_peers=NUM_STAGES + 1) as swarm:
        slow = {"SWARMTRAIN_PACE": "0.1:0"}  # a step takes seconds
        gate = swarm.start_peer(2, "--enable-test-faults", environment=slow)
        resting = swarm.start_peer(0)
        swarm.wait_step(1)
        ask_daemon(resting.state_dir, "pause")

        def num_behind() -> int:
            return int(swarm.coordinator.status()["step"] - resting.status()["step"])

        def num_signs() -> int:
            return int(resting.status()["traffic"]["sent"]["kinds"]["enroll"]["num_messages"])

        until(lambda: num_behind() == 1, "a step is done without the paused peer")
        gate.stop()
        first = num_signs()
        until(lambda: num_signs() >= first + 3, "it shows that it lives")
        assert num_behind() == 1, "the run did not stand still"
        assert resting.status()["refused"].get("unprepared") == 1, "told once, and believed"
        peer = resting.status()["peer"]
        assert peer in [member["peer"] for member in swarm.coordinator.status()["stages"][0]]
        assert not swarm.events("peer_lost", peer=peer)
        gate.resume()
