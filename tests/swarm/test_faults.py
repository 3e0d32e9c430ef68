"""Real processes that are stopped: libp2p's daemons go on without them. Other faults: tests/simulated/."""

from __future__ import annotations

from pathlib import Path

import pytest

from .comparison import References, end_and_compare
from .faults import (
    NUM_STAGES,
    hold,
    last_step,
    open_ended,
    release,
    start_armed,
    wait_phase,
    wait_stopped,
)
from .harness import Daemon, Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.long]

# Where a peer stops and comes back: the first, middle and last stage.
STOPS = ("after-forward:1", "before-answer:1", "in-prepare:2")


def catch_up(swarm: Swarm, sleepers: list[Daemon], gates: list[Daemon]) -> None:
    """Wake them up, and hold the run until they know that they are behind, so that enough steps are left to them."""
    for gate in gates:
        hold(gate)
    before = {sleeper.name: len(sleeper.phases()) for sleeper in sleepers}
    for sleeper in sleepers:
        sleeper.resume()
        wait_phase(swarm, sleeper, "syncing", after=before[sleeper.name])
    for gate in gates:
        release(gate)
    for sleeper in sleepers:
        wait_phase(swarm, sleeper, "serving", after=before[sleeper.name])
        assert sleeper.has("sync_progress", percent=100)


def test_stopped_peers_are_left_behind_and_catch_up(place: Path, reference: References) -> None:
    """On every stage, in the middle of a step."""
    manifest = open_ended()
    with Swarm(manifest, place, num_peers=NUM_STAGES, min_peers=2 * NUM_STAGES) as swarm:
        sleepers = [start_armed(swarm, stage, f"{point}:stop") for stage, point in enumerate(STOPS)]
        for sleeper, point in zip(sleepers, STOPS, strict=True):
            wait_stopped(swarm, sleeper, point.split(":")[0])
        names = [swarm.wait(peer, "phase_reached", phase="identity")["detail"] for peer in sleepers]
        for stage, name in enumerate(names):
            swarm.wait(None, "peer_lost", stage=stage, peer=name)
        swarm.wait_step(last_step(swarm) + 2)  # nobody waits for them
        catch_up(swarm, sleepers[1:], gates=[swarm.peers[0]])
        catch_up(swarm, sleepers[:1], gates=[swarm.peers[1], sleepers[1]])
        end_and_compare(swarm, reference)
