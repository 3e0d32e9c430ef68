"""Every row of the failure table: the step completes, and the run ends in the bits of an undisturbed one."""

from __future__ import annotations

import pytest

from swarmtrain.simulated.judge import References, judge

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    assert_reference,
    every_other,
    phases,
    said,
    start_armed,
    tiny,
    wait_phase,
    wait_said,
    wait_step,
    wait_struck,
)

POINTS = ("before-forward", "after-forward", "before-backward", "before-answer", "in-prepare", "before-apply")
DURING_WORK = ("before-forward", "after-forward", "before-backward", "before-answer")
# Where a victim of the first, middle and last stage dies. In the last stage forward and backward are one job.
KILLS = [(point, stage) for point in (*POINTS, "after-apply") for stage in range(3) if (point, stage) != (POINTS[2], 2)]
STOPS = ("after-forward", "before-answer", "in-prepare")
SLOW = 0.1  # of machines: steps are so long that a peer can miss some and return


@pytest.mark.parametrize(("point", "stage"), every_other(KILLS))
def test_a_peer_killed_at_any_point_of_a_step_leaves_no_trace(
    simulated: Make, references: References, point: str, stage: int
) -> None:
    swarm = simulated(tiny())
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    victim = start_armed(swarm, "victim", stage, f"{point}:2:kill")
    for index in range(NUM_STAGES):
        swarm.start_peer(f"peer{index}", index)
    wait_struck(swarm, victim, point)
    if point == "in-prepare":
        wait_said(swarm, swarm.coordinator, "prepare_failed", stage=stage)
    if point in DURING_WORK:
        wait_said(swarm, swarm.coordinator if stage == 0 else swarm.lives[f"peer{stage - 1}"], "calls_rerouted")
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back"), "every stage has had a peer with its state"


def test_one_peer_of_every_stage_dies_in_the_same_step(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    swarm.start(num_peers=2 * NUM_STAGES)
    wait_step(swarm, 2)
    for stage in range(NUM_STAGES):
        swarm.serving(stage)[0].kill()
    assert_reference(swarm, references)
    lost = [event.stage for event in said(swarm, "peer_lost")]
    assert sorted(lost) == list(range(NUM_STAGES))
    assert not said(swarm, "run_rolled_back")


def test_a_peer_that_loses_its_power_is_missed_without_a_word(simulated: Make, references: References) -> None:
    """No peer is told, unlike with a SIGKILL: no stream ends, no address refuses."""
    swarm = simulated(tiny())
    swarm.start(num_peers=2 * NUM_STAGES)
    wait_step(swarm, 2)
    swarm.until(lambda: swarm.peers[1].status()["open_microbatches"] > 0, "it has work")
    victim = swarm.peers[1].peer_id
    swarm.peers[1].kill(power_loss=True)
    wait_said(swarm, swarm.coordinator, "peer_lost", peer=victim)
    assert_reference(swarm, references)


def test_finished_work_is_not_computed_again(simulated: Make, references: References) -> None:
    """The only peer of the middle stage dies with a whole step's microbatches; the others answer from their ledgers."""
    swarm = simulated(tiny())
    swarm.start_coordinator(min_peers=NUM_STAGES)
    first, last = swarm.start_peer("first", 0), swarm.start_peer("last", 2)
    victim = start_armed(swarm, "victim", 1, "in-prepare:1:kill")
    wait_struck(swarm, victim, "in-prepare")
    heir = swarm.start_peer("heir", 1)
    assert_reference(swarm, references)
    lost = swarm.manifest.batch.microbatches_per_step
    every_one = swarm.manifest.schedule.steps * lost
    ended = [next(life.said("peer_ended")) for life in (first, heir, last)]
    assert not said(swarm, "run_rolled_back")
    assert sum(event.microbatches for event in said(swarm, "work_replayed", step=1, stage=1)) >= lost
    assert ended[0].replayed >= lost  # it gave out once more what it had
    assert ended[2].from_ledger >= lost  # and so were the answers that had died with the victim
    assert [event.forwards for event in ended] == [every_one] * NUM_STAGES
    assert [event.recomputed for event in ended] == [0] * NUM_STAGES


@pytest.mark.parametrize(("stage", "point"), every_other(enumerate(STOPS)))
def test_a_stopped_peer_is_left_behind_and_catches_up(
    simulated: Make, references: References, stage: int, point: str
) -> None:
    """SIGSTOP in the middle of a step, SIGCONT when the run has gone on without it."""
    swarm = simulated(tiny("schedule.steps=14"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    sleeper = start_armed(swarm, "sleeper", stage, f"{point}:2:stop", speed=SLOW)
    for index in range(NUM_STAGES):
        swarm.start_peer(f"peer{index}", index, speed=SLOW)
    wait_struck(swarm, sleeper, point, "stop")
    wait_said(swarm, swarm.coordinator, "peer_lost", peer=sleeper.peer_id, stage=stage)
    wait_step(swarm, swarm.step + 2)  # no step waits for it
    before = len(phases(sleeper))
    sleeper.process.resume()
    wait_phase(swarm, sleeper, "syncing", after=before)
    wait_phase(swarm, sleeper, "serving", after=before)
    assert sleeper.has("sync_progress", percent=100)
    assert_reference(swarm, references)


@pytest.mark.parametrize("point", ["after-forward", "before-answer", "in-prepare"])
def test_cut_links_are_dialed_again_and_work_is_replayed(simulated: Make, references: References, point: str) -> None:
    swarm = simulated(tiny())
    swarm.start_coordinator(min_peers=2 * NUM_STAGES)
    cut = [start_armed(swarm, f"cut{stage}", stage, f"{point}:1:cut") for stage in range(NUM_STAGES)]
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage)
    for peer in cut:
        wait_struck(swarm, peer, point, "cut")
    assert_reference(swarm, references)
    assert not said(swarm, "peer_lost"), "who dials again is not lost"


def test_links_that_break_in_the_middle_of_messages_again_and_again(simulated: Make, references: References) -> None:
    """Whatever is on its way between any two machines, three times a virtual second."""
    swarm = simulated(tiny("batch.microbatches_per_step=24"))
    swarm.start(num_peers=2 * NUM_STAGES)
    wait_step(swarm, 1)
    num_broken = 0
    for index in range(12):
        swarm.run_for(0.33)
        num_broken += swarm.network.cut(f"peer{index % 6}")
    assert num_broken > 12
    assert_reference(swarm, references)


def test_a_damaged_answer_is_noticed_and_asked_for_again(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    swarm.start_coordinator(min_peers=NUM_STAGES)
    swarm.start_peer("first", 0)
    swarm.start_peer("middle", 1)
    liar = start_armed(swarm, "liar", 2, "before-answer:3:corrupt")
    wait_struck(swarm, liar, "before-answer", "corrupt")
    assert_reference(swarm, references)
    assert next(liar.said("peer_ended")).from_ledger >= 1


def test_a_peer_whose_state_diverged_is_named_and_its_work_does_not_count(
    simulated: Make, references: References
) -> None:
    swarm = simulated(tiny("schedule.steps=12"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 2)
    for index in range(NUM_STAGES + 1):
        swarm.start_peer(f"peer{index}", (0, 1, 1, 2)[index], speed=SLOW)
    liar = start_armed(swarm, "liar", 1, "before-apply:3:corrupt", speed=SLOW)
    diverged = wait_said(swarm, swarm.coordinator, "peer_diverged")
    assert liar.struck == ["corrupt at before-apply"]
    assert (diverged.peer, diverged.stage) == (liar.peer_id, 1)
    wait_phase(swarm, liar, "syncing")
    wait_phase(swarm, liar, "serving", after=phases(liar).index("syncing"))
    swarm.run_to_end()
    assert len(said(swarm, "peer_diverged")) == 1
    found = judge(swarm, references(swarm.manifest))  # what is said: the audit's words about that one step
    where = f"step {diverged.step + 1}, stage 1"
    assert found
    assert all(where in fault and "another state than its replicas" in fault for fault in found)
