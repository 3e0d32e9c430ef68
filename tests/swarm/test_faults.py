"""Every row of the failure table: the step completes, and the run ends in the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .comparison import References, assert_equals_reference, assert_same_weights, end_and_compare
from .faults import (
    NUM_STAGES,
    hold,
    last_step,
    open_ended,
    release,
    start_armed,
    three_stages,
    wait_fault,
    wait_killed,
    wait_phase,
    wait_stopped,
)
from .harness import Daemon, Swarm

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
DURING_WORK = ("before-forward", "after-forward", "before-backward", "before-answer")
# Where a peer stops and comes back: the first, middle and last stage.
STOPS = ("after-forward:1", "before-answer:1", "in-prepare:2")


@pytest.mark.parametrize("point", KILLS)
def test_a_peer_killed_on_every_stage_leaves_no_trace(place: Path, reference: References, point: str) -> None:
    manifest = open_ended()
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + len(KILLS[point])) as swarm:
        victims = [start_armed(swarm, stage, f"{point}:{nth}:kill") for stage, nth in enumerate(KILLS[point])]
        for victim in victims:
            wait_killed(swarm, victim, point)
            if point == "in-prepare":
                swarm.wait(swarm.coordinator, "prepare_failed", stage=victim.stage)
        if point in DURING_WORK:
            swarm.wait(swarm.coordinator, "calls_rerouted")  # what the victim of the first stage had went elsewhere
        end_and_compare(swarm, reference)
        assert not swarm.events("run_rolled_back"), "every stage has had somebody with its state"


def test_finished_work_is_not_computed_again(place: Path, reference: References) -> None:
    """The only peer of the middle stage dies with a whole step's microbatches; the others answer from their ledgers."""
    manifest = three_stages("schedule.steps=6")
    with Swarm(manifest, place, num_peers=1, min_peers=NUM_STAGES) as swarm:
        victim, last = start_armed(swarm, 1, "in-prepare:1:kill"), swarm.start_peer(2)
        wait_killed(swarm, victim, "in-prepare")
        heir = swarm.start_peer(1)
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        lost = manifest.batch.microbatches_per_step
        every_one = manifest.schedule.steps * lost
        ended = [swarm.wait(peer, "peer_ended") for peer in (swarm.peers[0], heir, last)]
        assert not swarm.events("run_rolled_back")
        assert sum(event["microbatches"] for event in swarm.events("work_replayed", step=0, stage=1)) >= lost
        assert ended[0]["replayed"] >= lost  # it gave out once more what it had
        assert ended[2]["from_ledger"] >= lost  # and so were the answers that had died with the victim
        assert [event["forwards"] for event in ended] == [every_one] * NUM_STAGES
        assert [event["recomputed"] for event in ended] == [0] * NUM_STAGES


def catch_up(swarm: Swarm, sleepers: list[Daemon], gates: list[Daemon]) -> None:
    """Wake them up, and hold the run until they know that they are behind, so that enough steps are left to them."""
    for gate in gates:
        hold(gate)
    before = {sleeper.name: len(sleeper.phases()) for sleeper in sleepers}
    for sleeper in sleepers:
        sleeper.resume()
        wait_phase(swarm, sleeper, "syncing", after=before[sleeper.name])
    for gate in gates:
        release(gate)
    for sleeper in sleepers:
        wait_phase(swarm, sleeper, "serving", after=before[sleeper.name])
        assert sleeper.has("sync_progress", percent=100)


def test_stopped_peers_are_left_behind_and_catch_up(place: Path, reference: References) -> None:
    """On every stage, in the middle of a step."""
    manifest = open_ended()
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=2 * NUM_STAGES) as swarm:
        sleepers = [start_armed(swarm, stage, f"{point}:stop") for stage, point in enumerate(STOPS)]
        for sleeper, point in zip(sleepers, STOPS, strict=True):
            wait_stopped(swarm, sleeper, point.split(":")[0])
        names = [swarm.wait(peer, "phase_reached", phase="identity")["detail"] for peer in sleepers]
        for stage, name in enumerate(names):
            swarm.wait(None, "peer_lost", stage=stage, peer=name)
        swarm.wait_step(last_step(swarm) + 2)  # nobody waits for them
        catch_up(swarm, sleepers[1:], gates=[swarm.peers[0]])
        catch_up(swarm, sleepers[:1], gates=[swarm.peers[1], sleepers[1]])
        end_and_compare(swarm, reference)


def test_cut_links_are_dialed_again_and_work_is_replayed(place: Path, reference: References) -> None:
    manifest = open_ended()
    faults = ("after-forward:1:cut", "before-answer:1:cut", "after-forward:1:cut")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=2 * NUM_STAGES) as swarm:
        cut = [start_armed(swarm, stage, fault) for stage, fault in enumerate(faults)]
        for peer, fault in zip(cut, faults, strict=True):
            wait_fault(swarm, peer, "cut", fault.split(":")[0])
        end_and_compare(swarm, reference)


def test_a_damaged_answer_is_noticed_and_asked_for_again(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=4")
    with Swarm(manifest, place, num_peers=2, min_peers=NUM_STAGES) as swarm:
        liar = start_armed(swarm, 2, "before-answer:3:corrupt")
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        assert "test fault: corrupt" in liar.log.read_text()
        assert swarm.wait(liar, "peer_ended")["from_ledger"] >= 1


def test_a_peer_whose_state_diverged_is_named_and_its_work_does_not_count(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=60")
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=NUM_STAGES + 2) as swarm:
        swarm.start_peer(1)
        liar = start_armed(swarm, 1, "before-apply:3:corrupt")
        diverged = swarm.wait(None, "peer_diverged")
        assert "test fault: corrupt at before-apply" in liar.log.read_text()
        assert (diverged["peer"], diverged["stage"]) == (liar.status()["peer"], 1)
        swarm.wait(liar, "phase_reached", phase="syncing")
        swarm.wait_end()
        assert_same_weights(swarm.checkpoint(), reference(manifest).checkpoint)
        assert len(swarm.events("peer_diverged")) == 1
        assert swarm.losses() == reference(manifest).losses
        faults, where = swarm.audit().faults, f"step {diverged['step'] + 1}, stage 1"
        assert faults
        assert all(where in fault and "another state than its replicas" in fault for fault in faults)
