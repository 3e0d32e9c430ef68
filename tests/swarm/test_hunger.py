"""Real peers that run out of work get what waits at others of their stage; bits stay as they are."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from .comparison import References, assert_books_balance, end_and_compare
from .faults import wait_killed
from .harness import Daemon, Swarm, tiny

pytestmark = pytest.mark.swarm

# Passes that take a while, as on real machines, and as long on both stages: the last one does both in one job.
PACES = ("0.1:0.1", "0.2:0")


def test_work_that_waits_goes_to_a_peer_that_has_none(place: Path, reference: References) -> None:
    """Of the first stage, whose caller is the coordinator, and of the last one."""
    manifest = tiny("stages.count=2", "schedule.steps=5000", "batch.microbatches_per_step=16", "checkpoint.every=2")
    with closing(Swarm(manifest, place, num_peers=4)) as swarm:
        swarm.start_coordinator()
        for stage in (0, 0, 1, 1):
            start_slow(swarm, stage)

        def num_given(stage: int) -> int:
            peers = [peer for peer in swarm.peers if peer.stage == stage]
            return sum(peer.status()["refused"].get("elsewhere", 0) for peer in peers)

        swarm.wait_serving()
        swarm.wait_until(lambda: num_given(1) > 0, "the last stage shares its work")
        swarm.wait_until(lambda: num_given(0) > 0, "the first stage shares its work")
        assert sum(map(num_asked, swarm.peers)) >= num_given(0) + num_given(1)
        end_and_compare(swarm, reference)
    assert_books_balance(swarm)


def test_who_gives_and_who_takes_may_die_of_it(place: Path, reference: References) -> None:
    """One when it has taken work out of its queue and nobody knows, the other with what was just given to it."""
    manifest = tiny("stages.count=2", "schedule.steps=5000", "batch.microbatches_per_step=16", "checkpoint.every=2")
    with closing(Swarm(manifest, place, num_peers=4)) as swarm:
        swarm.start_coordinator()
        swarm.start_peer(0)
        start_slow(swarm, 1)
        victims = {point: start_slow(swarm, 1, f"{point}:1:kill") for point in ("in-gift", "given-work")}
        for point, victim in victims.items():
            wait_killed(swarm, victim, point)
        end_and_compare(swarm, reference)
        assert not swarm.events("run_rolled_back")


def start_slow(swarm: Swarm, stage: int, faults: str = "") -> Daemon:
    """A peer that may break as `faults` says."""
    environment = {"SWARMTRAIN_PACE": PACES[stage], "SWARMTRAIN_FAULTS": faults}
    return swarm.start_peer(stage, "--enable-test-faults", environment=environment)


def num_asked(peer: Daemon) -> int:
    return int(peer.status()["traffic"]["sent"]["kinds"].get("hungry", {}).get("num_messages", 0))
