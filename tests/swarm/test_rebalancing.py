"""Peers that go where they are needed: newcomers with `--stage auto`, movers with permission, nobody in a balanced run.

One swarm is shared by the tests of this file, which follow its life: it begins with four peers in stage 0 and one in
each other stage, spreads by itself, rests, and ends with the reference's bits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from swarmtrain.chain.rebalancing import Costs
from swarmtrain.run.manifest import Manifest

from .comparison import References, assert_equals_reference
from .conftest import short_directory
from .faults import last_step
from .harness import Daemon, Event, Swarm, tiny, until

pytestmark = [pytest.mark.swarm]
MINUTES = pytest.mark.long  # six peers that start, move and then rest

NUM_STAGES = 3
LOOK_S = 1.0
NECESSARY = 2  # from 4-1-1 to 2-2-2


def even_stages(*overrides: str) -> Manifest:
    """Three stages of about equal cost: the last one has fewer layers and the head."""
    return tiny("stages.count=3", "model.num_layers=5", "stages.layers=[2, 2, 1]", *overrides)


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    manifest = even_stages("schedule.steps=100")
    costs = Costs.of(manifest).costs
    assert max(costs) < 1.25 * min(costs)
    for place in short_directory():
        swarm = Swarm(manifest, place, min_peers=6)
        try:
            rules = ("--min-left", "1", "--min-stay", "1", "--look-every", str(LOOK_S), "--min-gain", "0.5")
            swarm.start_coordinator(*rules)
            for stage in ("auto:0", "auto:0", "auto:0", "auto:0", "auto:1", "auto:2"):
                swarm.start_peer(0, "--stage", stage)
            yield swarm
        finally:
            swarm.close()


def stages_of(swarm: Swarm) -> Counter[int]:
    """How many peers serve each stage, as the coordinator counts."""
    stages = swarm.coordinator.status()["stages"]
    return Counter({number: sum(m["state"] == "serving" for m in found) for number, found in enumerate(stages)})


def first_stage(peer: Daemon) -> int:
    """Where a peer began to serve."""
    served = [item["detail"] for item in peer.events if item["event"] == "phase_reached" and item["phase"] == "serving"]
    return int(served[0].split()[1])


def served_after(swarm: Swarm, granted: Event) -> float:
    """When the peer that got this permission served its new stage."""
    (mover,) = [peer for peer in swarm.peers if peer.has("phase_reached", phase="identity", detail=granted["peer"])]
    served = [item["at"] for item in mover.events if item["event"] == "phase_reached" and item["phase"] == "serving"]
    return min((at for at in served if at > granted["at"]), default=float("inf"))


@MINUTES
def test_a_badly_distributed_swarm_spreads_with_no_more_moves_than_needed(swarm: Swarm) -> None:
    swarm.wait_serving()
    assert Counter(first_stage(peer) for peer in swarm.peers) == {0: 4, 1: 1, 2: 1}
    swarm.wait_until(lambda: len(swarm.events("move_granted")) >= NECESSARY, "two peers have permission to move")
    swarm.wait_until(lambda: _num_arrived(swarm) >= NECESSARY, "they serve their new stages")
    # Equal machines and equal stages: 2-2-2 is the best assignment there is.
    until(lambda: stages_of(swarm) == {0: 2, 1: 2, 2: 2}, "every stage has two peers")
    granted = swarm.events("move_granted")
    assert len(granted) <= NECESSARY + 1
    for first, second in combinations(granted, 2):
        if first["target"] == second["target"]:
            assert served_after(swarm, first) < second["at"], "two chased the same gap"


@MINUTES
def test_a_balanced_swarm_rests(swarm: Swarm) -> None:
    before = len(swarm.events("move_granted"))
    looked_at = time.monotonic()
    swarm.wait_step(min(last_step(swarm) + 30, swarm.manifest.schedule.steps - 5))
    assert time.monotonic() - looked_at > 2 * LOOK_S, "too short to say anything"
    assert len(swarm.events("move_granted")) == before
    assert not swarm.events("run_rolled_back")


@MINUTES
def test_movers_change_nothing_in_the_result(swarm: Swarm, reference: References) -> None:
    swarm.wait_end()
    assert_equals_reference(swarm, reference(swarm.manifest))
    moved = [peer for peer in swarm.peers if "moving" in peer.phases()]
    assert len(moved) >= NECESSARY
    for peer in moved:
        assert peer.phases().count("serving") >= 2


def test_newcomers_go_where_they_are_needed(place: Path, reference: References) -> None:
    manifest = even_stages("schedule.steps=4")
    with Swarm(manifest, place, num_peers=1, min_peers=4) as swarm:
        for _ in range(3):
            swarm.start_peer(0, "--stage", "auto")
        swarm.wait_step(1)
        counts = stages_of(swarm)
        assert min(counts.values()) >= 1, "a stage was left to nobody"
        assert sum(counts.values()) == 4
        swarm.wait_end()
        assert not swarm.events("move_granted")
        assert_equals_reference(swarm, reference(manifest))


def test_two_newcomers_and_a_mover_at_once(place: Path, reference: References) -> None:
    manifest = even_stages(
        "schedule.steps=60", "batch.microbatches_per_step=40"
    )  # long enough for three to arrive in it
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
        assert last_step(swarm) < manifest.schedule.steps, "they came too late to be of any use"
        swarm.wait_end()
        assert not swarm.events("run_rolled_back")
        waits = [event for event in swarm.events("run_waits") if event["at"] > granted["at"]]
        assert not [event for event in waits if "has no peers" in event["reason"]]
        assert_equals_reference(swarm, reference(manifest))
    finally:
        swarm.close()


def _num_arrived(swarm: Swarm) -> int:
    return sum(peer.phases().count("serving") - 1 for peer in swarm.peers if "moving" in peer.phases())
