"""The coordinator dies, or all do, or there are two: the run goes on, and ends in the bits of an undisturbed one."""

from __future__ import annotations

import random
import shutil
import sqlite3

import pytest

from swarmtrain.coordinator.journal import Journal
from swarmtrain.coordinator.split_brain import Superseded
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    arm,
    assert_reference,
    every_other,
    every_third,
    hold,
    release,
    repetition,
    restart_coordinator,
    said,
    start_armed,
    tiny,
    wait_said,
    wait_serving,
    wait_step,
    wait_struck,
)

POINTS = ("before-decision", "after-decision", "after-step", "checkpoint-write")


def start(swarm: SimulatedSwarm, *faults: str, num_peers: int = NUM_STAGES, speed: float = 1.0) -> Life:
    """A coordinator that breaks as `faults` say, and its peers."""
    coordinator = swarm.start_coordinator(min_peers=num_peers)
    arm(coordinator, *faults)
    for index in range(num_peers):
        swarm.start_peer(f"peer{index}", index % NUM_STAGES, speed=speed)
    return coordinator


@pytest.mark.parametrize("nth", [2, repetition(1)])
@pytest.mark.parametrize("point", POINTS)
def test_a_coordinator_killed_at_a_point_of_a_step_is_replaced(
    simulated: Make, references: References, point: str, nth: int
) -> None:
    swarm = simulated(tiny("checkpoint.every=2"))
    coordinator = start(swarm, f"{point}:{nth}:kill")
    wait_struck(swarm, coordinator, point)
    restart_coordinator(swarm)
    assert_reference(swarm, references)
    every_one = swarm.manifest.schedule.steps * swarm.manifest.batch.microbatches_per_step
    forwards = [next(peer.said("peer_ended")).forwards for peer in swarm.peers]
    assert not said(swarm, "run_rolled_back")
    assert forwards == [every_one] * NUM_STAGES, "what was finished was computed again"


@pytest.mark.parametrize(
    ("after_s", "away_s"), every_other([(0.02, 0.0), (0.11, 3.0), (0.2, 0.0), (0.29, 3.0), (0.35, 12.0)])
)
def test_a_coordinator_killed_at_any_instant_of_a_step_is_replaced(
    simulated: Make, references: References, after_s: float, away_s: float
) -> None:
    """Not only at points with names; also for longer than peers expect an answer."""
    swarm = simulated(tiny())
    coordinator = start(swarm)
    wait_step(swarm, 2)
    swarm.run_for(after_s)
    coordinator.kill()
    swarm.run_for(away_s)
    restart_coordinator(swarm)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")
    assert coordinator.machine.num_processes == 2


@pytest.mark.parametrize("times", [5, repetition(10)])
def test_a_coordinator_killed_many_times_at_points_of_a_step(
    simulated: Make, references: References, times: int
) -> None:
    rng = random.Random(20)
    swarm = simulated(tiny(f"schedule.steps={2 * times}", "checkpoint.every=4"))
    faults = [f"{rng.choice(POINTS[:3])}:{rng.randint(1, 2)}:kill" for _ in range(times)]
    coordinator = start(swarm, faults[0], num_peers=NUM_STAGES + 1)
    for number, fault in enumerate(faults):
        swarm.until(lambda: len(coordinator.struck) > number, f"{fault}, the {number}th")  # noqa: B023  # awaited here
        restart_coordinator(swarm, *faults[number + 1 : number + 2])
    assert_reference(swarm, references)
    assert coordinator.machine.num_processes == times + 1


@pytest.mark.parametrize("times", [6, repetition(20)])
def test_a_coordinator_killed_many_times_at_any_instant(simulated: Make, references: References, times: int) -> None:
    """Which may be before the run stands again."""
    rng = random.Random(21)
    swarm = simulated(tiny(f"schedule.steps={4 + 8 * times // 5}", "checkpoint.every=4"))
    coordinator = start(swarm, num_peers=NUM_STAGES + 1)
    wait_step(swarm, 1)
    for _ in range(times):
        swarm.run_for(rng.uniform(0.0, 2.0))
        assert not swarm.is_over
        coordinator.kill()
        restart_coordinator(swarm)
    assert_reference(swarm, references)
    assert coordinator.machine.num_processes == times + 1


def test_a_stopped_coordinator_goes_on_where_it_was(simulated: Make, references: References) -> None:
    """It stood still for longer than peers expect an answer, and no peer is lost because of that."""
    swarm = simulated(tiny())
    coordinator = start(swarm, num_peers=2 * NUM_STAGES)
    wait_step(swarm, 2)
    coordinator.process.stop()
    before = swarm.step
    swarm.run_for(30.0)
    assert swarm.step == before
    coordinator.process.resume()
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


@pytest.mark.parametrize("stages", [repetition(((0,),)), (1,), (0, 1, 2)])
def test_coordinator_and_peers_killed_together(
    simulated: Make, references: References, stages: tuple[int, ...]
) -> None:
    """With a replica of every stage that stays: nothing goes back."""
    swarm = simulated(tiny())
    coordinator = start(swarm, num_peers=2 * NUM_STAGES)
    wait_step(swarm, 3)
    coordinator.kill()
    for stage in stages:
        swarm.peers[stage].kill()
    swarm.run_for(1.0)
    restart_coordinator(swarm)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


@pytest.mark.parametrize("power_loss", [repetition(False), True])
def test_all_processes_killed_twice(simulated: Make, references: References, power_loss: bool) -> None:
    swarm = simulated(tiny("schedule.steps=11", "checkpoint.every=4"))
    start(swarm)
    for step in (5, 9):
        wait_step(swarm, step)
        wait_said(swarm, swarm.coordinator, "checkpoint_written", step=4 * (step // 4))
        for life in swarm.lives.values():
            life.kill(power_loss=power_loss)
        restart_coordinator(swarm)
        for stage in range(NUM_STAGES):
            swarm.start_peer(f"peer{stage}", stage)
    assert_reference(swarm, references)
    rolled_back = said(swarm, "run_rolled_back")
    assert rolled_back
    assert all(event.to_step >= 4 for event in rolled_back)


@pytest.mark.parametrize(("stage", "every"), every_third([(0, 0), (0, 4), (1, 0), (1, 4), (2, 0), (2, 4)]))
def test_a_stage_without_peers_stops_the_run_until_a_peer_joins(
    simulated: Make, references: References, stage: int, every: int
) -> None:
    swarm = simulated(tiny("schedule.steps=10", f"checkpoint.every={every}"))
    start(swarm)
    wait_step(swarm, 6)
    if every:
        wait_said(swarm, swarm.coordinator, "checkpoint_written", step=4)
    swarm.peers[stage].kill()
    missing = f"stage {stage} has no peers"
    swarm.until(
        lambda: any(event.reason == missing for event in said(swarm, "run_waits")),
        f"the coordinator says that stage {stage} has no peers",
    )
    assert not said(swarm, "run_rolled_back")
    swarm.start_peer("newcomer", stage)
    went_back = wait_said(swarm, swarm.coordinator, "run_rolled_back", stage=stage)
    written = [event.step for event in said(swarm, "checkpoint_written") if event.at < went_back.at]
    assert_reference(swarm, references)
    assert went_back.from_step >= 6
    assert went_back.to_step == max(written, default=0)
    assert bool(written) == bool(every)


def test_the_last_peer_of_a_stage_dies_between_a_decision_and_its_apply(
    simulated: Make, references: References
) -> None:
    """At the seed's state and at a checkpoint's: a newcomer has that state at once, but not the decided sum."""
    swarm = simulated(tiny("schedule.steps=12", "checkpoint.every=3"))
    swarm.start_coordinator(min_peers=NUM_STAGES)
    swarm.start_peer("peer0", 0)
    first, gate = start_armed(swarm, "first", 1, "before-apply:1:kill"), swarm.start_peer("gate", 2)
    wait_struck(swarm, first, "before-apply")
    second = swarm.start_peer("second", 1)
    wait_said(swarm, swarm.coordinator, "run_rolled_back", stage=1, from_step=0, to_step=0)
    wait_said(swarm, swarm.coordinator, "checkpoint_written", step=3)
    hold(gate)
    third = start_armed(swarm, "third", 1, "before-apply:1:kill")
    wait_serving(swarm, third)
    second.kill()
    release(gate)
    wait_struck(swarm, third, "before-apply")
    swarm.start_peer("fourth", 1)
    swarm.until(lambda: len(said(swarm, "run_rolled_back")) == 2, "the run has gone back once more")
    went_back = said(swarm, "run_rolled_back")[-1]
    assert went_back.from_step == went_back.to_step > 0
    assert_reference(swarm, references)


def move_elsewhere(swarm: SimulatedSwarm) -> None:
    """Copy what another machine needs to coordinate the run."""
    here, there = swarm.coordinator.state_dir, swarm.root / "redirected"
    there.mkdir()
    with sqlite3.connect(here / "journal.sqlite") as journal:
        journal.execute("VACUUM INTO ?", (str(there / "journal.sqlite"),))
    shutil.copy(here / "run.key", there)


def test_another_machine_takes_over_under_a_higher_term(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=8"))
    former = start(swarm)
    wait_step(swarm, 3)
    hold(swarm.peers[2])
    swarm.run_for(1.0)
    known = swarm.invite().bootstrap[0]
    move_elsewhere(swarm)
    swarm.start_coordinator("redirected", bootstrap=[known])
    swarm.until(lambda: not former.is_running, "the former coordinator has noticed")
    assert [type(error) for error in former.errors] == [Superseded]
    swarm.start_coordinator("coordinator", wait=False, bootstrap=[swarm.invite().bootstrap[0]])
    swarm.until(lambda: not former.is_running, "the former coordinator sees that it was replaced")
    assert [type(error) for error in former.errors] == [Superseded] * 2
    with Journal(former.state_dir / "journal.sqlite", read_only=True) as journal:
        assert journal.get("term") == "1", "it would take over by starting often enough"
    release(swarm.peers[2])
    assert_reference(swarm, references)


def test_two_coordinators_that_do_not_see_each_other_train_one_run(simulated: Make, references: References) -> None:
    """The former one is cut off from all others while another takes over; it comes back and is not obeyed."""
    swarm = simulated(tiny("schedule.steps=8"))
    former = start(swarm, speed=0.1)
    wait_step(swarm, 3)
    known = [address for peer in swarm.peers for address in peer.process.host.addresses()]
    move_elsewhere(swarm)
    for peer in swarm.peers:
        swarm.network.block("coordinator", peer.name)
        swarm.network.block(peer.name, "coordinator")
    swarm.start_coordinator("redirected", bootstrap=known)
    swarm.network.block("coordinator", "redirected")
    swarm.network.block("redirected", "coordinator")
    wait_step(swarm, swarm.step + 2)
    assert former.is_running
    for peer in swarm.peers:
        swarm.network.block("coordinator", peer.name, False)
        swarm.network.block(peer.name, "coordinator", False)
    swarm.network.block("coordinator", "redirected", False)
    swarm.network.block("redirected", "coordinator", False)
    swarm.until(lambda: not former.is_running, "the former coordinator has noticed")
    assert [type(error) for error in former.errors] == [Superseded]
    assert_reference(swarm, references)


def test_clocks_may_differ_by_seconds_and_for_a_while_by_an_hour(simulated: Make, references: References) -> None:
    """Within what docs/network.md allows; an owner sets a clock wrongly, and right again."""
    swarm = simulated(tiny("schedule.steps=10"))
    coordinator = start(swarm, num_peers=2 * NUM_STAGES, speed=0.1)
    swarm.peers[0].machine.step_clock(8.0)
    swarm.peers[1].machine.step_clock(-8.0)
    for life, seconds in [(coordinator, 3600.0), (swarm.peers[4], -3600.0), (coordinator, -3600.0)]:
        wait_step(swarm, swarm.step + 1)
        life.machine.step_clock(seconds)
        swarm.run_for(5.0)
        life.machine.step_clock(-seconds)
    assert not swarm.is_over
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")
