"""Work stealing: an idle peer takes work that waits at another peer of its stage; the bits stay the same."""

from __future__ import annotations

from itertools import product

import pytest

from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import arm, assert_reference, repetition, said, tiny, wait_said, wait_seen, wait_struck

# Passes that take as long on both stages: the last one does both in one job.
PACES = ((0.1, 0.1), (0.2, 0.0))
POINTS = ("in-steal", "stolen-work")
TWO_STAGES = ("stages.count=2", "model.num_layers=2", "batch.microbatches_per_step=16", "schedule.steps=4")


def start_slow(swarm: SimulatedSwarm, name: str, stage: int, *faults: str) -> Life:
    """A peer that may break as `faults` say."""
    peer = swarm.start_peer(name, stage)
    peer.faults.pace_s = PACES[stage]
    arm(peer, *faults)
    return peer


def test_work_that_waits_goes_to_a_peer_that_has_none(simulated: Make, references: References) -> None:
    """Of the first stage, whose caller is the coordinator, and of the last one."""
    swarm = simulated(tiny(*TWO_STAGES))
    swarm.start_coordinator(min_peers=4)
    for index, stage in enumerate((0, 0, 1, 1)):
        start_slow(swarm, f"peer{index}", stage)

    def num_given(stage: int) -> int:
        return sum(peer.status()["refused"].get("redirected", 0) for peer in swarm.serving(stage))

    wait_seen(swarm, lambda: num_given(0) > 0 and num_given(1) > 0, "both stages share their work")
    asked = [peer.status()["traffic"]["sent"]["kinds"].get("steal_request", {}) for peer in swarm.peers]
    assert sum(kind.get("num_messages", 0) for kind in asked) >= num_given(0) + num_given(1)
    assert_reference(swarm, references)


@pytest.mark.parametrize(
    ("action", "point", "stage"),
    [
        *product(("kill",), POINTS, (0, 1)),
        *(("stop", "in-steal", 0), repetition(("stop", "in-steal", 1))),
        *(repetition(("stop", "stolen-work", 0)), ("stop", "stolen-work", 1)),
        *(repetition(case) for case in product(("cut",), POINTS, (0, 1))),
    ],
)
def test_victim_and_thief_may_die_while_work_is_stolen(
    simulated: Make, references: References, point: str, action: str, stage: int
) -> None:
    """The victim dies when it has taken work out of its queue and no peer knows, the thief with stolen work."""
    swarm = simulated(tiny(*TWO_STAGES, "schedule.steps=14"))
    swarm.start_coordinator(min_peers=4)
    swarm.start_peer("other", 1 - stage)
    peers = [start_slow(swarm, f"peer{index}", stage, f"{point}:1:{action}") for index in range(2)]
    start_slow(swarm, "peer2", stage)
    wait_seen(swarm, lambda: any(peer.struck for peer in peers), f"{action} at {point}")
    victim = next(peer for peer in peers if peer.struck)
    for peer in peers:
        if peer is not victim:
            peer.faults.armed.clear()
    wait_struck(swarm, victim, point, action)
    if action == "stop":
        wait_said(swarm, swarm.coordinator, "peer_lost", peer=victim.peer_id)
        victim.process.resume()
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")
