"""Joining while others train: no step waits, and every byte of a newcomer's state is verified."""

from __future__ import annotations

import pytest

from swarmtrain.coordinator.journal import Journal
from swarmtrain.model.buffers import StateLayout
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    assert_reference,
    every_other,
    hold,
    phases,
    repetition,
    said,
    start_armed,
    tiny,
    wait_phase,
    wait_said,
    wait_serving,
    wait_step,
    wait_struck,
)

SEVERAL_CHUNKS = ("model.hidden_size=128", "model.ffn_size=2048")  # of 1 MiB, in each part of a stage's state
SLOW = 0.2  # of machines: a step takes seconds


def start(swarm: SimulatedSwarm, *stages: int, speed: float = SLOW) -> None:
    """A coordinator and peers of these stages."""
    swarm.start_coordinator(min_peers=len(stages))
    for index, stage in enumerate(stages):
        swarm.start_peer(f"peer{index}", stage, speed=speed)


def assert_every_chunk_counted(newcomer: Life, step: int) -> None:
    """It fetched the state of this step in one go."""
    percents = [event.percent for event in newcomer.said("sync_progress", step=step)]
    assert percents == sorted(set(percents))
    assert percents[-1] == 100
    assert len(percents) > 2, "a state of one piece shows nothing"


def states_of(swarm: SimulatedSwarm, peer_id: str) -> dict[int, str]:
    """By step, the digest of the state that a peer reported."""
    with Journal(swarm.coordinator.state_dir / "journal.sqlite", read_only=True) as journal:
        return {step: digest for step, _, peer, digest in journal.replicas() if peer == peer_id}


def test_newcomers_of_every_stage_follow_and_take_over(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=11"))
    start(swarm, 0, 1, 2)
    wait_step(swarm, 2)
    newcomers = [swarm.start_peer(f"newcomer{stage}", stage, speed=SLOW) for stage in range(NUM_STAGES)]
    wait_serving(swarm, *newcomers)
    assert not swarm.is_over
    assert all(newcomer.has("sync_progress", percent=100) for newcomer in newcomers)
    for former in swarm.peers[:NUM_STAGES]:
        former.kill()  # the newcomers now hold the only copies
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_a_newcomer_before_the_first_step_downloads_nothing(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    start(swarm, 0, 1)
    newcomer = swarm.start_peer("newcomer", 2)
    assert_reference(swarm, references)
    assert not newcomer.has("sync_progress")


def test_a_listener_whose_line_just_carries_the_all_reduces(simulated: Make, references: References) -> None:
    """It is still receiving a step's sum when the next one is added up: that must not send it back to the start."""
    swarm = simulated(tiny("schedule.steps=20", "model.hidden_size=64", "model.ffn_size=256"))
    start(swarm, 0, 1, 2)
    wait_step(swarm, 3)
    applied = [event.at for event in said(swarm, "step_applied")]
    step_s = (applied[-1] - applied[0]) / (len(applied) - 1)
    num_bytes = 4 * StateLayout(swarm.manifest, 1).gradient_size
    newcomer = swarm.start_peer("newcomer", 1, speed=SLOW, max_down_bytes_per_s=num_bytes / (0.8 * step_s))
    wait_serving(swarm, newcomer)
    steps = {event.step for event in newcomer.said("sync_progress")}
    assert len(steps) == 1, f"it started over: {steps}"
    assert_every_chunk_counted(newcomer, *steps)
    assert_reference(swarm, references)


@pytest.mark.parametrize("num_lies", [repetition(1), 2])
def test_a_donor_that_sends_a_wrong_chunk_is_dropped_and_named(
    simulated: Make, references: References, num_lies: int
) -> None:
    swarm = simulated(tiny("schedule.steps=11"))  # no checkpoint before the end: donors are counted by chunks
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    liar = start_armed(swarm, "liar", 1, *[f"state-chunk:{nth + 1}:corrupt" for nth in range(num_lies)], speed=SLOW)
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage, speed=SLOW)
    wait_step(swarm, 2)
    newcomer = swarm.start_peer("newcomer", 1, speed=SLOW)
    wait_serving(swarm, newcomer)
    dropped = list(newcomer.said("donor_dropped"))
    assert {event.peer for event in dropped} == {liar.peer_id}
    assert all("wrong chunk" in event.reason for event in dropped)
    assert [life.name for life in swarm.lives.values() if life.has("donor_dropped")] == ["newcomer"]
    assert_reference(swarm, references)


def test_a_donor_killed_in_the_middle_costs_only_its_own_chunks(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=5", *SEVERAL_CHUNKS))
    assert len(StateLayout(swarm.manifest, 1).chunks()) >= 9
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    victim = start_armed(swarm, "victim", 1, "state-chunk:3:kill", speed=SLOW)
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage, speed=SLOW)
    wait_step(swarm, 2)
    victims_id = victim.peer_id
    newcomer = swarm.start_peer("newcomer", 1, speed=SLOW)
    wait_struck(swarm, victim, "state-chunk")
    wait_serving(swarm, newcomer)
    (dropped,) = newcomer.said("donor_dropped")
    assert dropped.peer == victims_id
    assert_every_chunk_counted(newcomer, dropped.step)
    ids = newcomer.peer_id, swarm.lives["peer1"].peer_id
    assert_reference(swarm, references)
    own, donors = states_of(swarm, ids[0]), states_of(swarm, ids[1])
    assert own
    assert own == {step: donors[step] for step in own}


def test_a_transfer_of_states_is_disturbed_at_each_end(simulated: Make, references: References) -> None:
    """A keeper dies while a checkpoint is fetched from it, a newcomer dies in its download, a link breaks in one."""
    swarm = simulated(tiny("schedule.steps=6", "checkpoint.every=3", *SEVERAL_CHUNKS))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage)
    keeper = start_armed(swarm, "keeper", 2, "state-chunk:1:kill")
    wait_struck(swarm, keeper, "state-chunk")
    wait_said(swarm, swarm.coordinator, "checkpoint_written", step=3)
    donor = swarm.lives["peer1"]
    hold(donor)  # the run stands still, and only this peer has the state
    victim = swarm.start_peer("victim", 1, max_down_bytes_per_s=1e6)  # a second for a chunk
    wait_said(swarm, victim, "sync_progress")
    victim.kill()
    assert not victim.has("sync_progress", percent=100)
    newcomer = swarm.start_peer("newcomer", 1, max_down_bytes_per_s=1e6)
    wait_said(swarm, newcomer, "sync_progress")
    newcomer.process.ask("cut")
    assert not newcomer.has("sync_progress", percent=100)
    wait_serving(swarm, newcomer)
    dropped = list(newcomer.said("donor_dropped"))
    assert [event.peer for event in dropped] == [donor.peer_id]
    assert "lost" in dropped[0].reason
    (step,) = {event.step for event in newcomer.said("sync_progress")}
    assert_every_chunk_counted(newcomer, step)
    assert_reference(swarm, references)
    assert not said(swarm, "checkpoint_failed")
    assert not said(swarm, "run_rolled_back")


def test_a_newcomer_whose_donors_all_die_asks_for_others(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=12"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 2)
    victims = [start_armed(swarm, f"victim{index}", 1, "state-chunk:1:kill", speed=SLOW) for index in range(2)]
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage, speed=SLOW)
    wait_step(swarm, 2)
    newcomer = swarm.start_peer("newcomer", 1, speed=SLOW)
    swarm.until(lambda: any(victim.struck for victim in victims), "a donor dies")
    wait_serving(swarm, newcomer)
    assert_reference(swarm, references)


def test_a_newcomer_arrives_while_the_coordinator_is_away(simulated: Make, references: References) -> None:
    """It has just been told what the run is."""
    swarm = simulated(tiny("schedule.steps=12"))
    start(swarm, 0, 1, 2)
    wait_step(swarm, 2)
    newcomer = swarm.start_peer("newcomer", 1)
    wait_phase(swarm, newcomer, "fit")
    swarm.coordinator.kill()
    swarm.run_for(3.0)
    swarm.start_coordinator(wait=False)
    wait_serving(swarm, newcomer)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_a_peer_killed_and_started_again_is_the_same_peer_with_an_empty_ledger(
    simulated: Make, references: References
) -> None:
    """At once, before any peer has missed it: another incarnation, whose lost work is done again."""
    swarm = simulated(tiny("schedule.steps=10"))
    start(swarm, 0, 1, 1, 2)
    wait_step(swarm, 2)
    victim = swarm.peers[1]
    identity = victim.peer_id
    swarm.until(lambda: victim.status()["microbatches"] % 3 == 1, "it has finished work of this step")
    victim.kill()
    before = len(phases(victim))
    swarm.start_peer("peer1", 1, speed=SLOW)
    wait_phase(swarm, victim, "serving", after=before)
    assert victim.peer_id == identity
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


@pytest.mark.parametrize("stage", every_other(range(NUM_STAGES)))
def test_the_only_peer_of_a_stage_restarts_in_the_middle_of_a_step(
    simulated: Make, references: References, stage: int
) -> None:
    """Before any peer has missed it. No other peer has its state: the run returns to the seed's."""
    swarm = simulated(tiny("schedule.steps=6"))
    start(swarm, 0, 1, 2, speed=1.0)
    wait_step(swarm, 3)
    swarm.run_for(0.1)
    swarm.peers[stage].kill()
    swarm.start_peer(f"peer{stage}", stage)
    assert_reference(swarm, references)
    assert said(swarm, "run_rolled_back")
