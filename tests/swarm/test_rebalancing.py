"""`swarmtrain join --stage auto`: newcomers go where they are needed. Movers are in tests/simulated/test_moving.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from .comparison import References, assert_equals_reference
from .harness import Swarm, tiny

pytestmark = pytest.mark.swarm

NUM_STAGES = 3


def assignment(swarm: Swarm) -> list[int]:
    """Where each machine serves."""
    serving = [swarm.wait(peer, "phase_reached", phase="serving") for peer in swarm.peers]
    return [int(event["detail"].split()[1]) for event in serving]


def test_newcomers_go_where_they_are_needed(place: Path, reference: References) -> None:
    manifest = tiny("stages.count=3", "model.num_layers=5", "stages.layers=[2, 2, 1]", "schedule.steps=4")
    with Swarm(manifest, place, num_peers=1, min_peers=4) as swarm:
        for _ in range(3):
            swarm.start_peer(0, "--stage", "auto")
        swarm.wait_step(1)
        assert set(assignment(swarm)) == set(range(NUM_STAGES)), "a stage was left to nobody"
        swarm.wait_end()
        assert not swarm.events("move_granted")
        assert_equals_reference(swarm, reference(manifest))
