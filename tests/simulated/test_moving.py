"""Rebalancing: newcomers without a stage, moves with permission, no moves in a balanced run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest

from swarmtrain.chain.rebalancing import Costs, MoveRules, RebalanceRule
from swarmtrain.observe.events import Event
from swarmtrain.peer.options import AUTO
from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    assert_reference,
    phases,
    repetition,
    said,
    tiny,
    wait_phase,
    wait_seen,
    wait_serving,
    wait_step,
)

LOOK_S = 1.0
RULES = MoveRules(RebalanceRule.CAPACITY, min_gain=0.15, min_left=1, min_stay_s=1.0, look_s=LOOK_S)
# Seconds for a microbatch: the last stage does both passes in one, so it is the forward that is slow.
PACES = (0.1, 0.1, 0.2, 0.2, 0.2, 0.4)
BEGIN = (0, 0, 0, 0, 1, 2)


def even_stages(*overrides: str) -> Manifest:
    """Three stages of about equal cost: the last one has fewer layers and the head."""
    manifest = tiny("model.num_layers=7", "stages.layers=[3, 3, 1]", *overrides)
    costs = Costs.of(manifest).costs
    assert max(costs) < 1.3 * min(costs)
    return manifest


def capacity(stages: Sequence[int]) -> float:
    """Microbatches per second of the weakest stage, with the machines in these stages."""
    rates = [0.0] * NUM_STAGES
    for stage, pace in zip(stages, PACES, strict=True):
        rates[stage] += 1.0 / pace
    return min(rates)


def best_and_necessary() -> tuple[float, int]:
    """The best assignment's capacity, and how many must move at least to have 0.9 of it; all of them tried."""
    assignments = list(product(range(NUM_STAGES), repeat=len(PACES)))
    best = max(capacity(stages) for stages in assignments)
    good = (stages for stages in assignments if capacity(stages) >= 0.9 * best)
    return best, min(sum(now != then for now, then in zip(stages, BEGIN, strict=True)) for stages in good)


def served(peer: Life) -> list[Event]:
    """A peer's words that it serves."""
    return list(peer.said("phase_reached", phase="serving"))


def assignment(swarm: SimulatedSwarm) -> list[int]:
    """Where each machine serves now; its last stage if it is on the way to another one."""
    return [int(served(peer)[-1].detail.split()[1]) for peer in swarm.peers]


def served_after(swarm: SimulatedSwarm, granted: Event) -> float:
    """When the peer that got this permission served its new stage."""
    (mover,) = [peer for peer in swarm.peers if peer.has("phase_reached", phase="identity", detail=granted.peer)]
    return min((item.at for item in served(mover) if item.at > granted.at), default=float("inf"))


def test_a_badly_distributed_swarm_spreads_with_no_more_moves_than_needed_and_then_is_stable(
    simulated: Make, references: References
) -> None:
    best, necessary = best_and_necessary()
    assert capacity(BEGIN) <= 0.5 * best
    assert necessary >= 2
    swarm = simulated(even_stages("schedule.steps=44", "batch.microbatches_per_step=5"))
    swarm.start_coordinator(min_peers=len(PACES), moves=RULES)
    for index, (stage, pace) in enumerate(zip(BEGIN, PACES, strict=True)):
        peer = swarm.start_peer(f"peer{index}", stage, speed=20.0, may_move=True)
        peer.faults.pace_s = (pace, 0.0)
    wait_serving(swarm, *swarm.peers)
    assert assignment(swarm) == list(BEGIN)
    wait_seen(swarm, lambda: capacity(assignment(swarm)) >= 0.9 * best, "0.9 of the best assignment is reached")
    assert not swarm.is_over
    rests_from = swarm.now
    assert_reference(swarm, references)
    granted = said(swarm, "move_granted")
    assert len(granted) <= necessary + 1
    for first, second in combinations(granted, 2):
        if first.target == second.target:
            assert served_after(swarm, first) < second.at, "two chased the same gap"
    assert swarm.now - rests_from > 20 * LOOK_S, "too short to say that it rests"
    assert capacity(assignment(swarm)) >= 0.9 * best
    assert not said(swarm, "run_rolled_back")
    moved = [peer for peer in swarm.peers if "moving" in phases(peer)]
    assert len(moved) >= necessary
    assert all(len(served(peer)) >= 2 for peer in moved)


def test_newcomers_go_where_they_are_needed(simulated: Make, references: References) -> None:
    swarm = simulated(even_stages("schedule.steps=4"))
    swarm.start_coordinator(min_peers=4, moves=RULES)
    swarm.start_peer("peer0", 0)
    for index in range(1, 4):
        swarm.start_peer(f"peer{index}", AUTO)
    wait_step(swarm, 1)
    assert set(assignment(swarm)) == set(range(NUM_STAGES)), "a stage has no peer"
    assert_reference(swarm, references)
    assert not said(swarm, "move_granted")


def test_two_newcomers_and_a_mover_at_once(simulated: Make, references: References) -> None:
    """No stage is empty, and no peer waits."""
    swarm = simulated(even_stages("schedule.steps=12", "batch.microbatches_per_step=12"))
    swarm.start_coordinator(min_peers=5, moves=RULES)
    for index, stage in enumerate((0, 0, 0, 1, 2)):
        swarm.start_peer(f"peer{index}", stage, speed=0.25, may_move=stage == 0)
    wait_seen(swarm, lambda: bool(said(swarm, "move_granted")), "a move is granted")
    granted = said(swarm, "move_granted")[0]
    assert granted.source == 0
    newcomers = [swarm.start_peer(f"newcomer{stage}", stage, speed=0.25) for stage in (1, 2)]
    wait_serving(swarm, *newcomers)
    wait_seen(swarm, lambda: served_after(swarm, granted) < float("inf"), "the mover serves its new stage")
    assert not swarm.is_over
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")
    waits = [event for event in said(swarm, "run_waits") if event.at > granted.at]
    assert not [event for event in waits if "no peers" in event.reason]


@pytest.mark.parametrize("when", ["moving", repetition("syncing")])
def test_a_moving_peer_may_die_on_its_way(simulated: Make, references: References, when: str) -> None:
    swarm = simulated(even_stages("schedule.steps=12", "batch.microbatches_per_step=12"))
    swarm.start_coordinator(min_peers=5, moves=RULES)
    for index, stage in enumerate((0, 0, 0, 1, 2)):
        swarm.start_peer(f"peer{index}", stage, speed=0.25, may_move=stage == 0)
    wait_seen(swarm, lambda: bool(said(swarm, "move_granted")), "a move is granted")
    granted = said(swarm, "move_granted")[0]
    (mover,) = [peer for peer in swarm.peers if peer.peer_id == granted.peer]
    wait_phase(swarm, mover, when)
    mover.kill()
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")
