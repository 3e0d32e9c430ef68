"""Two steps open at once (`schedule.delay = 1`): the same promises, and the all-reduce goes on behind the next step.

Each fault strikes while a peer, or the coordinator, really has two steps open.
"""

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
    every_third,
    hold,
    leave,
    release,
    restart_coordinator,
    said,
    start_armed,
    tiny,
    wait_phase,
    wait_said,
    wait_seen,
    wait_serving,
    wait_step,
    wait_struck,
)

POINTS = (
    "before-forward",
    "after-forward",
    "before-backward",
    "before-answer",
    "in-prepare",
    "before-apply",
    "after-apply",
)
KILLS = [(point, stage) for point in POINTS for stage in range(NUM_STAGES) if (point, stage) != ("before-backward", 2)]
SLOW = 0.1


def delayed(*overrides: str) -> Manifest:
    """Seven steps, none of which waits for the one before."""
    return tiny("schedule.delay=1", "schedule.steps=7", *overrides)


def open_steps(life: Life) -> int:
    """Steps of which a peer has work in hand."""
    assignment = life.daemon.assignment if life.daemon is not None and life.is_running else None
    return len(assignment.clock.ledgers) if assignment is not None else 0


def wait_two_steps(swarm: SimulatedSwarm, life: Life) -> None:
    """A peer has work of two steps, or the coordinator books."""
    if life is swarm.coordinator:
        swarm.until(
            lambda: [len(books.losses) > 0 for books in life.daemon.context.books.values()] == [True, True],
            "two steps have answers",
        )
    else:
        swarm.until(lambda: open_steps(life) == 2, f"{life.name} has work of two steps")


def most_open(swarm: SimulatedSwarm) -> int:
    """Let the run end; the most steps that a peer had work of at once."""
    most = 0

    def look() -> bool:
        nonlocal most
        most = max([most, *(open_steps(peer) for peer in swarm.peers)])
        return swarm.is_over

    swarm.until(look, "the end")
    return most


@pytest.mark.parametrize(
    "changes",
    [
        ("boundary.kind=subspace", "schedule.predict=true"),
        ("boundary.kind=projected",),
        ("boundary.kind=learned", "schedule.predict=true"),
        ("boundary.kind=dense", "model.tie_embeddings=true"),
        ("optimizer.kind=muon", "optimizer.learning_rate=0.02", "schedule.predict=true", "checkpoint.every=3"),
        ("wire.forward=quant8", "wire.backward=quant4", "schedule.delay_from=2"),
    ],
    ids=" ".join,
)
def test_a_swarm_ends_in_the_references_bits(simulated: Make, references: References, changes: tuple[str, ...]) -> None:
    swarm = simulated(delayed(*changes))
    swarm.start(num_peers=2 * NUM_STAGES)
    assert most_open(swarm) == 2
    assert_reference(swarm, references)


def test_a_move_of_the_subspace_is_a_barrier(simulated: Make, references: References) -> None:
    swarm = simulated(delayed("boundary.track_every=3", "schedule.predict=true"))
    swarm.start(num_peers=2 * NUM_STAGES)
    assert most_open(swarm) == 2
    assert_reference(swarm, references)
    assert not any(peer.status()["refused"].get("stale-basis") for peer in swarm.peers if peer.is_running)


@pytest.mark.parametrize(("point", "stage"), every_third(KILLS))
def test_a_peer_killed_at_any_point_with_two_steps_in_hand(
    simulated: Make, references: References, point: str, stage: int
) -> None:
    swarm = simulated(delayed("schedule.predict=true"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    victim = swarm.start_peer("victim", stage)
    for index in range(NUM_STAGES):
        swarm.start_peer(f"peer{index}", index)
    wait_step(swarm, 1)
    wait_two_steps(swarm, victim)
    arm(victim, f"{point}:1:kill")
    wait_struck(swarm, victim, point)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back"), "every stage has had a peer with its state"


def test_what_a_dead_peer_had_of_two_steps_is_computed_again(simulated: Make, references: References) -> None:
    """The first of them is held up by another peer, which stands still."""
    swarm = simulated(delayed("batch.microbatches_per_step=12"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    victim = swarm.start_peer("victim", 1)
    other = start_armed(swarm, "other", 1, "before-answer:1:stop")
    for stage in (0, 2):
        swarm.start_peer(f"peer{stage}", stage)

    def counted() -> list[int]:
        """Steps that are not reduced yet, and of which the coordinator counts on it."""
        books, count = swarm.coordinator.daemon.context.books, swarm.manifest.batch.microbatches_per_step
        holders = {step: [books[step].holder(1, i) for i in range(count)] for step in books}
        return [
            step
            for step in books
            if any(hop and hop.peer_id == victim.peer_id for hop in holders[step]) and not books[min(books)].is_answered
        ]

    swarm.until(lambda: len(counted()) == 2, "it has finished work of two steps")
    steps = counted()
    victim.kill()
    other.process.resume()
    assert_reference(swarm, references)
    assert {event.step for event in said(swarm, "work_replayed", stage=1)} >= {step + 1 for step in steps}  # type: ignore[attr-defined]


@pytest.mark.parametrize("point", ["", "before-decision", "after-decision", "after-step"])
def test_a_coordinator_that_dies_with_two_steps_open_costs_no_work(
    simulated: Make, references: References, point: str
) -> None:
    """It leases both again, and the peers answer from their ledgers."""
    swarm = simulated(delayed())
    coordinator = swarm.start_coordinator(min_peers=NUM_STAGES)
    for index in range(NUM_STAGES):
        swarm.start_peer(f"peer{index}", index)
    wait_two_steps(swarm, coordinator)
    if point:
        arm(coordinator, f"{point}:1:kill")
        wait_struck(swarm, coordinator, point)
    else:
        coordinator.kill()
    restart_coordinator(swarm)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")
    every_one = swarm.manifest.schedule.steps * swarm.manifest.batch.microbatches_per_step
    assert [next(peer.said("peer_ended")).forwards for peer in swarm.peers] == [every_one] * NUM_STAGES  # type: ignore[attr-defined]


def test_all_processes_die_with_two_steps_open(simulated: Make, references: References) -> None:
    swarm = simulated(delayed("checkpoint.every=2", "schedule.predict=true", "schedule.steps=9"))
    swarm.start(num_peers=2 * NUM_STAGES)
    wait_step(swarm, 3)
    wait_two_steps(swarm, swarm.coordinator)
    for life in (swarm.coordinator, *swarm.peers):
        life.kill(power_loss=True)
    swarm.start_coordinator(wait=False)
    for peer in list(swarm.peers):
        swarm.start_peer(peer.name, peer.stage)
    assert_reference(swarm, references)


@pytest.mark.parametrize("predict", ["true", "false"])
def test_newcomers_take_over_with_the_weights_of_both_steps(
    simulated: Make, references: References, predict: str
) -> None:
    """The state that they fetch has the weights that an open step computes with."""
    swarm = simulated(delayed("schedule.steps=16", f"schedule.predict={predict}"))
    for index in range(NUM_STAGES):
        if index == 0:
            swarm.start_coordinator(min_peers=NUM_STAGES)
        swarm.start_peer(f"peer{index}", index, speed=SLOW)
    wait_step(swarm, 2)
    newcomers = [swarm.start_peer(f"newcomer{stage}", stage, speed=SLOW) for stage in range(NUM_STAGES)]
    wait_serving(swarm, *newcomers)
    assert not swarm.is_over
    assert all(newcomer.has("sync_progress", percent=100) for newcomer in newcomers)
    wait_two_steps(swarm, newcomers[1])
    for former in swarm.peers[:NUM_STAGES]:
        former.kill()
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_a_run_that_lost_a_stage_with_two_steps_open_goes_back(simulated: Make, references: References) -> None:
    swarm = simulated(delayed("checkpoint.every=4", "schedule.steps=9"))
    swarm.start(num_peers=NUM_STAGES + 1)
    wait_step(swarm, 5)
    wait_two_steps(swarm, swarm.peers[1])
    swarm.peers[1].kill()
    swarm.start_peer("heir", 1)
    wait_said(swarm, swarm.coordinator, "run_rolled_back", stage=1)
    assert_reference(swarm, references)


def test_a_drained_peer_answers_for_its_work_of_two_steps(simulated: Make, references: References) -> None:
    swarm = simulated(delayed("batch.microbatches_per_step=12", "schedule.steps=9"))
    swarm.start(num_peers=2 * NUM_STAGES)
    leaving = swarm.peers[NUM_STAGES + 1]
    wait_two_steps(swarm, leaving)
    leave(leaving)
    wait_phase(swarm, leaving, "gone")
    assert not leaving.errors
    assert_reference(swarm, references)
    assert not said(swarm, "work_replayed"), "what a drained peer had was lost"


def test_a_paused_peer_gives_up_what_it_has_of_neither_step(simulated: Make, references: References) -> None:
    swarm = simulated(delayed("batch.microbatches_per_step=12", "schedule.steps=12"))
    swarm.start(num_peers=2 * NUM_STAGES)
    resting = swarm.peers[NUM_STAGES + 1]
    wait_two_steps(swarm, resting)
    hold(resting)
    wait_seen(swarm, lambda: resting.status()["open_microbatches"] == 0 and open_steps(resting) == 0, "all is applied")
    release(resting)
    wait_serving(swarm, resting)
    assert_reference(swarm, references)
    assert not said(swarm, "work_replayed")


def test_a_peer_that_stood_still_for_two_steps_is_left_behind_and_comes_back(
    simulated: Make, references: References
) -> None:
    swarm = simulated(delayed("schedule.steps=16"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    victim = start_armed(swarm, "victim", 1, speed=SLOW)
    for index in range(NUM_STAGES):
        swarm.start_peer(f"peer{index}", index, speed=SLOW)
    wait_two_steps(swarm, victim)
    step = swarm.step
    victim.process.stop()
    wait_step(swarm, step + 3)
    victim.process.resume()
    wait_phase(swarm, victim, "syncing")
    wait_serving(swarm, victim)
    assert_reference(swarm, references)


def test_codecs_that_remember_go_on_with_two_steps_open(simulated: Make, references: References) -> None:
    swarm = simulated(
        delayed("wire.forward=ef-topk25", "wire.backward=topk25", "checkpoint.every=3", "reduce.codec=powersgd2")
    )
    swarm.start(num_peers=2 * NUM_STAGES)
    assert most_open(swarm) == 2
    assert_as_good_as_reference(swarm, references)


@pytest.mark.parametrize("codec", ["topk64", "lowrank100"])
def test_one_peer_per_stage_with_a_codec_that_remembers_does_what_the_reference_does(
    simulated: Make, references: References, codec: str
) -> None:
    swarm = simulated(delayed(f"reduce.codec={codec}", "checkpoint.every=3", "schedule.predict=true"))
    swarm.start(num_peers=NUM_STAGES)
    assert most_open(swarm) == 2
    assert_reference(swarm, references)


def narrow(swarm: SimulatedSwarm, rate: float) -> None:
    """Lines between peers carry so many bytes a second in each direction."""
    names = [f"peer{index}" for index in range(2 * NUM_STAGES)]
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            swarm.network.line(name, other).bytes_per_s = rate


def run_on_narrow_lines(swarm: SimulatedSwarm, rate: float, speed: float) -> list[float]:
    """Seconds without a microbatch under way, by step."""
    narrow(swarm, rate)
    swarm.start_coordinator(min_peers=2 * NUM_STAGES)
    for index in range(2 * NUM_STAGES):
        swarm.start_peer(f"peer{index}", index % NUM_STAGES, speed=speed)
    swarm.run_to_end()
    timed = said(swarm, "step_timed")
    assert all(event.reduce_s > 0.0 for event in timed)  # type: ignore[attr-defined]
    return [event.waited_s for event in timed]  # type: ignore[attr-defined]


def test_the_pipeline_is_never_empty_while_an_all_reduce_goes_on_behind_it(
    simulated: Make, references: References
) -> None:
    """Of replicas on narrow lines: with a delay only before barriers, without one in every step."""
    waits = {}
    for delay in (0, 1):
        swarm = simulated(tiny(f"schedule.delay={delay}", "schedule.steps=8", "batch.microbatches_per_step=24"))
        waits[delay] = run_on_narrow_lines(swarm, 2e5, 0.05)
        assert_reference(swarm, references)
        swarm.close()
    assert all(wait > 0.0 for wait in waits[0])
    assert waits[1][:-1] == [0.0] * 7  # the last one has no step behind it
    assert waits[1][-1] > 0.0
