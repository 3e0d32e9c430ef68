"""Joining, leaving and pausing while others train: nobody waits, and every byte of a newcomer's state is verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtrain.model.buffers import StateLayout

from .comparison import References, assert_equals_reference
from .faults import NUM_STAGES, hold, last_step, release, start_armed, three_stages, wait_killed
from .harness import Daemon, Swarm, ask_daemon

pytestmark = pytest.mark.swarm


def join_and_serve(swarm: Swarm, stage: int, gate: Daemon) -> Daemon:
    """Start a newcomer, and hold the run until it has been enrolled, so that enough steps are left to it."""
    hold(gate)
    newcomer = swarm.start_peer(stage)
    swarm.wait(newcomer, "phase_reached", phase="syncing")
    release(gate)
    swarm.wait_serving(newcomer)
    return newcomer


def test_newcomers_of_every_stage_follow_and_take_over(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=40")
    with Swarm(manifest, place, num_peers=NUM_STAGES) as swarm:
        swarm.wait_step(2)
        gate = swarm.peers[1]
        newcomers = [join_and_serve(swarm, stage, gate) for stage in (0, 2)]
        assert all(newcomer.has("sync_progress", percent=100) for newcomer in newcomers)
        for former in (swarm.peers[0], swarm.peers[2]):
            former.kill()  # the newcomers now hold the only copies
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
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
        assert newcomer.phases().count("syncing") == 1
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))


def test_a_donor_that_sends_a_wrong_chunk_is_dropped_and_named(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=80")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 1) as swarm:
        liar = start_armed(swarm, 1, "state-chunk:1:corrupt,state-chunk:2:corrupt")
        swarm.wait_step(2)
        liars_id = liar.status()["peer"]
        newcomer = join_and_serve(swarm, 1, swarm.peers[2])
        dropped = swarm.events("donor_dropped")
        assert [event["peer"] for event in dropped] == [liars_id]
        assert dropped[0]["from"] == newcomer.name
        assert "wrong chunk" in dropped[0]["reason"]
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))


def test_a_donor_killed_in_the_middle_costs_only_its_own_chunks(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=80")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 1) as swarm:
        victim = start_armed(swarm, 1, "state-chunk:1:kill")
        swarm.wait_step(2)
        newcomer = join_and_serve(swarm, 1, swarm.peers[2])
        wait_killed(swarm, victim, "state-chunk")
        assert newcomer.phases().count("syncing") == 1
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))


def test_a_drained_peer_answers_for_its_work_and_leaves_with_exit_code_zero(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=12")
    with Swarm(manifest, place, num_peers=2 * NUM_STAGES) as swarm:
        swarm.wait_step(2)
        leaving = swarm.peers[3:]
        for peer in leaving:
            ask_daemon(peer.state_dir, "drain")
        for peer in leaving:
            swarm.wait(peer, "phase_reached", phase="gone")
            assert peer.process.wait(30) == 0
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        assert not swarm.events("work_replayed"), "what a drained peer had was lost"


def test_a_paused_peer_takes_no_work_until_it_is_resumed(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=30")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 1) as swarm:
        resting, gate = swarm.start_peer(1), swarm.peers[2]
        swarm.wait_step(2)
        ask_daemon(resting.state_dir, "pause")
        swarm.wait_step(last_step(swarm) + 2)
        done = resting.status()
        assert done["state"] == "paused"
        swarm.wait_step(last_step(swarm) + 2)
        assert resting.status()["forwards"] == done["forwards"]
        hold(gate)
        ask_daemon(resting.state_dir, "resume")
        swarm.wait(resting, "phase_reached", phase="syncing")  # it has missed steps
        release(gate)
        swarm.wait_until(lambda: resting.phases().count("serving") == 2, "it serves again")
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
