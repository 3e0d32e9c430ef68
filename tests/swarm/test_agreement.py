"""The simulated swarm is the real one: the same manifest and the same kill end in the same weights, told alike.

Also the one kill run of real processes: what dies here dies of SIGKILL, and its links are libp2p's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.checkpoint import latest
from swarmtrain.simulated.swarm import SimulatedSwarm

from .comparison import References, assert_equals_reference, assert_same_weights
from .faults import NUM_STAGES, start_armed, three_stages, wait_killed
from .harness import Swarm

pytestmark = pytest.mark.swarm

MANIFEST = three_stages("schedule.steps=6", "checkpoint.every=3")
POINT, STAGE = "in-prepare", 1
# When these are told depends on how fast a machine starts, computes and notices a broken link, not on the protocol:
TIMED = {
    "phase_reached",  # the real one serves a page as well
    "peer_joined",  # in the order in which processes start
    "run_waits",  # for peers that are still starting
    "run_resumes",
    "peer_doubted",  # a link that broke; libp2p's ends a moment later than a process in memory
    "peer_lost",  # silence has its own clock
    "peer_left",
    "calls_rerouted",  # told at most once a second
    "checkpoint_written",  # beside the training; which ones there are is compared
}


def kinds(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """What was told of the run and of the stage that lost a peer, in order, every kind once in a step.

    Other stages are prepared at the same time, so their news come between in any order; and a reduction is tried again
    until everybody has noticed the death, which may take one attempt or two.
    """
    found: list[str] = []
    told_in_step: set[str] = set()
    for event in events:
        name = event["event"]
        if name in TIMED or event.get("stage", STAGE) != STAGE or name in told_in_step:
            continue
        found.append(name)
        told_in_step.add(name)
        if name == "step_applied":
            told_in_step.clear()
    return found


def test_real_and_simulated_swarm_agree_about_a_kill(place: Path, reference: References) -> None:
    """The only peer of the middle stage dies with all that it has done in the first step; then another one joins."""
    with Swarm(MANIFEST, place, num_peers=1, min_peers=NUM_STAGES) as real:
        victim = start_armed(real, STAGE, f"{POINT}:1:kill")
        real.start_peer(2)
        wait_killed(real, victim, POINT)
        real.start_peer(STAGE)
        real.wait_end()
        assert_equals_reference(real, reference(MANIFEST))
        told = list(real.coordinator.events)
        written = [event["step"] for event in real.events("checkpoint_written")]

    with SimulatedSwarm(MANIFEST, seed="agreement", root=place / "simulated") as simulated:
        simulated.start_coordinator(min_peers=NUM_STAGES)
        simulated.start_peer("first", 0)
        simulated.start_peer("victim", STAGE).arm(POINT, 1, "kill")
        simulated.start_peer("last", 2)
        simulated.until(lambda: bool(simulated.lives["victim"].struck), "the victim is killed")
        simulated.start_peer("heir", STAGE)
        simulated.run_to_end()
        assert not simulated.faults
        ours = latest(simulated.coordinator.state_dir / "checkpoints")
        simulated_told = [event.as_dict() for _, event in simulated.coordinator.events]
        simulated_written = [event.step for event in simulated.coordinator.said("checkpoint_written")]

    assert ours is not None
    assert_same_weights(ours, real.checkpoint())
    assert kinds(told) == kinds(simulated_told)
    assert {"prepare_failed", "work_replayed", "step_applied", "run_ended"} <= set(kinds(told))
    assert written == simulated_written == [3, 6]
