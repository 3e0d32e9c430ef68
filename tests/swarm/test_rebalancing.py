"""Peers that go where they are needed: newcomers with `--stage auto`, movers with permission, nobody in a balanced run.

One swarm of unequal machines is shared by the long tests of this file, which follow its life: it begins with four peers
in stage 0 and one slow one in each other stage, spreads by itself, rests, and ends with the reference's bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path

import pytest

from swarmtrain.chain.rebalancing import Costs
from swarmtrain.run.manifest import Manifest

from .comparison import References, assert_equals_reference, end_and_compare
from .conftest import short_directory
from .faults import last_step
from .harness import Daemon, Event, Swarm, tiny

pytestmark = [pytest.mark.swarm]
MINUTES = pytest.mark.long  # six peers that start, move and then rest

NUM_STAGES = 3
LOOK_S = 1.0
NUM_LOOKS = 40  # by everybody, before a swarm is said to rest
# Seconds for a microbatch: long beside the computing, so that machines on one processor differ by this alone.
PACES = (0.05, 0.05, 0.1, 0.1, 0.1, 0.2)
BEGIN = (0, 0, 0, 0, 1, 2)


def even_stages(*overrides: str) -> Manifest:
    """Three stages of about equal cost: the last one has fewer layers and the head."""
    return tiny("stages.count=3", "model.num_layers=5", "stages.layers=[2, 2, 1]", *overrides)


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    manifest = even_stages("schedule.steps=140")
    costs = Costs.of(manifest).costs
    assert max(costs) < 1.25 * min(costs)
    for place in short_directory():
        swarm = Swarm(manifest, place, min_peers=len(PACES))
        try:
            swarm.start_coordinator("--min-left", "1", "--min-stay", "1", "--look-every", str(LOOK_S))
            for stage, pace in zip(BEGIN, PACES, strict=True):
                paced = {"SWARMTRAIN_PACE": f"{pace}:0"}  # the last stage does both passes in one
                swarm.start_peer(0, "--stage", f"auto:{stage}", "--enable-test-faults", environment=paced)
            yield swarm
        finally:
            swarm.close()


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


def assignment(swarm: Swarm) -> list[int]:
    """Where each machine serves now; its last stage if it is on the way to another one."""
    return [int(served(peer)[-1]["detail"].split()[1]) for peer in swarm.peers]


def served(peer: Daemon) -> list[Event]:
    """A peer's words that it serves."""
    return [item for item in peer.events if item["event"] == "phase_reached" and item["phase"] == "serving"]


def served_after(swarm: Swarm, granted: Event) -> float:
    """When the peer that got this permission served its new stage."""
    (mover,) = [peer for peer in swarm.peers if peer.has("phase_reached", phase="identity", detail=granted["peer"])]
    return min((item["at"] for item in served(mover) if item["at"] > granted["at"]), default=float("inf"))


@MINUTES
def test_a_badly_distributed_swarm_spreads_with_no_more_moves_than_needed(swarm: Swarm) -> None:
    best, necessary = best_and_necessary()
    assert capacity(BEGIN) <= 0.5 * best
    assert necessary >= 2
    swarm.wait_serving()
    assert [int(served(peer)[0]["detail"].split()[1]) for peer in swarm.peers] == list(BEGIN)
    swarm.wait_until(lambda: capacity(assignment(swarm)) >= 0.9 * best, "0.9 of the best assignment is reached")
    granted = swarm.events("move_granted")
    assert len(granted) <= necessary + 1
    for first, second in combinations(granted, 2):
        if first["target"] == second["target"]:
            assert served_after(swarm, first) < second["at"], "two chased the same gap"


@MINUTES
def test_a_balanced_swarm_rests(swarm: Swarm) -> None:
    """After one more move at most: what is counted above is all there ever is."""
    _, necessary = best_and_necessary()
    looked_at = time.monotonic()
    swarm.wait_step(swarm.manifest.schedule.steps - 5, timeout_s=300.0)
    assert time.monotonic() - looked_at > NUM_LOOKS * LOOK_S, "too short to say anything"
    granted = swarm.events("move_granted")
    assert len(granted) <= necessary + 1
    assert max(event["at"] for event in granted) < swarm.events("step_applied")[-1]["at"] - NUM_LOOKS * LOOK_S
    assert capacity(assignment(swarm)) >= 0.9 * best_and_necessary()[0]
    assert not swarm.events("run_rolled_back")


@MINUTES
def test_movers_change_nothing_in_the_result(swarm: Swarm, reference: References) -> None:
    swarm.wait_end()
    assert_equals_reference(swarm, reference(swarm.manifest))
    moved = [peer for peer in swarm.peers if "moving" in peer.phases()]
    assert len(moved) >= best_and_necessary()[1]
    for peer in moved:
        assert peer.phases().count("serving") >= 2


def test_newcomers_go_where_they_are_needed(place: Path, reference: References) -> None:
    manifest = even_stages("schedule.steps=4")
    with Swarm(manifest, place, num_peers=1, min_peers=4) as swarm:
        for _ in range(3):
            swarm.start_peer(0, "--stage", "auto")
        swarm.wait_step(1)
        for peer in swarm.peers:
            swarm.wait_serving(peer)
        assert set(assignment(swarm)) == set(range(NUM_STAGES)), "a stage was left to nobody"
        swarm.wait_end()
        assert not swarm.events("move_granted")
        assert_equals_reference(swarm, reference(manifest))


def test_two_newcomers_and_a_mover_at_once(place: Path, reference: References) -> None:
    """The run goes on until all three have arrived, and a few steps more."""
    endless = ("schedule.steps=5000", "checkpoint.every=4", "checkpoint.keep=500")
    manifest = even_stages(*endless, "batch.microbatches_per_step=40")
    swarm = Swarm(manifest, place, min_peers=5)
    try:
        swarm.start_coordinator("--min-left", "1", "--min-stay", "1", "--look-every", str(LOOK_S), "--min-gain", "0.1")
        for stage in ("auto:0", "auto:0", "auto:0", "1", "2"):
            swarm.start_peer(0, "--stage", stage)
        granted = swarm.wait(None, "move_granted")
        assert granted["source"] == 0
        newcomers = [swarm.start_peer(1), swarm.start_peer(2)]
        swarm.wait_serving(*newcomers)
        swarm.wait_until(lambda: _num_arrived(swarm) >= 1, "the mover serves its new stage")
        swarm.wait_step(last_step(swarm) + 3)
        end_and_compare(swarm, reference)
        assert not swarm.events("run_rolled_back")
        waits = [event for event in swarm.events("run_waits") if event["at"] > granted["at"]]
        assert not [event for event in waits if "has no peers" in event["reason"]]
    finally:
        swarm.close()


def _num_arrived(swarm: Swarm) -> int:
    return sum(peer.phases().count("serving") - 1 for peer in swarm.peers if "moving" in peer.phases())
