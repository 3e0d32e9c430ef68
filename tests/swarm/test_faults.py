"""Every row of the failure table: the step completes, and the run ends in the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .comparison import References, assert_equals_reference, assert_same_weights
from .faults import NUM_STAGES, hold, last_step, release, start_armed, three_stages, wait_killed
from .harness import Swarm

pytestmark = pytest.mark.swarm

# How often a victim of the first, middle and last stage reaches the point before it dies. The others' deaths can make
# it look slow; then work comes to it only now and then, by exploration. Every step comes to everybody.
KILLS = {
    "before-forward": (1, 1, 1),
    "after-forward": (1, 1, 1),
    "before-backward": (1, 1),  # in the last stage forward and backward are one job
    "before-answer": (1, 1, 1),
    "in-prepare": (1, 2, 3),
    "before-apply": (2, 3, 1),
    "after-apply": (3, 1, 2),
}


@pytest.mark.parametrize("point", KILLS)
def test_a_peer_killed_on_every_stage_leaves_no_trace(place: Path, reference: References, point: str) -> None:
    manifest = three_stages("schedule.steps=60")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + len(KILLS[point])) as swarm:
        victims = [start_armed(swarm, stage, f"{point}:{nth}:kill") for stage, nth in enumerate(KILLS[point])]
        for victim in victims:
            wait_killed(swarm, victim, point)
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))


def test_finished_work_is_not_computed_again(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=30")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 1) as swarm:
        victim = start_armed(swarm, 1, "before-answer:1:kill")
        wait_killed(swarm, victim, "before-answer")
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        ended = {peer.stage: swarm.wait(peer, "peer_ended") for peer in swarm.peers if peer is not victim}
        every_one = manifest.schedule.steps * manifest.batch.microbatches_per_step
        assert ended[0]["forwards"] == every_one
        assert ended[2]["forwards"] == every_one
        assert ended[2]["from_ledger"] >= 1  # the answer that died with the victim was given once more


def test_a_stopped_peer_is_left_behind_and_catches_up(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=30")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 1) as swarm:
        sleeper, gate = swarm.start_peer(1), swarm.peers[2]
        swarm.wait_step(2)
        sleeper.stop()
        lost = swarm.wait(None, "peer_lost", stage=1)
        swarm.wait_step(last_step(swarm) + 2)
        hold(gate)
        sleeper.resume()
        swarm.wait(sleeper, "phase_reached", phase="syncing")
        release(gate)
        swarm.wait_until(lambda: sleeper.phases().count("serving") == 2, "the sleeper serves again")
        assert lost["peer"] == sleeper.status()["peer"]
        assert sleeper.has("sync_progress", percent=100)
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))


def test_cut_links_are_dialed_again_and_work_is_replayed(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=30")
    faults = ("after-forward:1:cut", "before-answer:1:cut", "after-forward:1:cut")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=2 * NUM_STAGES) as swarm:
        cut = [start_armed(swarm, stage, fault) for stage, fault in enumerate(faults)]
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        for peer in cut:
            assert "test fault: cut" in peer.log.read_text()


def test_a_damaged_answer_is_noticed_and_asked_for_again(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=4")
    with Swarm(manifest, place, num_peers=2, min_peers=NUM_STAGES) as swarm:
        liar = start_armed(swarm, 2, "before-answer:3:corrupt")
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        assert "test fault: corrupt" in liar.log.read_text()
        assert swarm.wait(liar, "peer_ended")["from_ledger"] >= 1


def test_a_peer_whose_state_diverged_is_named_and_its_work_does_not_count(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=30")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 2) as swarm:
        swarm.start_peer(1)
        liar = start_armed(swarm, 1, "before-apply:3:corrupt")
        diverged = swarm.wait(None, "peer_diverged")
        assert "test fault: corrupt at before-apply" in liar.log.read_text()
        assert (diverged["peer"], diverged["stage"], diverged["step"]) == (liar.status()["peer"], 1, 2)
        swarm.wait(liar, "phase_reached", phase="syncing")
        swarm.wait_end()
        assert len(swarm.events("peer_diverged")) == 1
        assert_same_weights(swarm.checkpoint(), reference(manifest).checkpoint)
        assert swarm.losses() == reference(manifest).losses
        faults = swarm.audit().faults
        assert faults
        assert all("step 3, stage 1" in fault and "another state than its replicas" in fault for fault in faults)
