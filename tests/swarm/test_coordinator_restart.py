"""The real coordinator dies and is started again: same identity, same port, a journal that was really written.

At every other point, and more often, it dies in tests/simulated/test_coordinator.py.
"""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import pytest

from .comparison import References, assert_equals_reference
from .faults import NUM_STAGES, restart_coordinator, three_stages, wait_killed
from .harness import Swarm

pytestmark = pytest.mark.swarm


@pytest.mark.parametrize("delay", [0, 1])
def test_a_coordinator_killed_after_a_decision_is_replaced(place: Path, reference: References, delay: int) -> None:
    manifest = three_stages("schedule.steps=6", "checkpoint.every=3", f"schedule.delay={delay}")
    swarm = Swarm(manifest, place, num_peers=NUM_STAGES)
    try:
        restart_coordinator(swarm, "after-decision:2:kill")
        for stage in range(NUM_STAGES):
            swarm.start_peer(stage)
        wait_killed(swarm, swarm.coordinator, "after-decision")
        swarm.start_coordinator()
        swarm.wait_end()
        every_one = manifest.schedule.steps * manifest.batch.microbatches_per_step
        forwards = [swarm.wait(peer, "peer_ended")["forwards"] for peer in swarm.peers]
        assert not swarm.events("run_rolled_back")
        assert forwards == [every_one] * NUM_STAGES, "what was finished was computed again"
        assert_equals_reference(swarm, reference(manifest))
    finally:
        swarm.close()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_coordinator_killed_twenty_times_at_any_instant(place: Path, reference: References) -> None:
    """Not only at points with names: after a time from the seed, which may end before the run stands again."""
    seed, times = random.SystemRandom().randrange(10**6), 20
    print(f"seed {seed}")
    rng = random.Random(seed)
    manifest = three_stages("schedule.steps=800", "checkpoint.every=20")
    with Swarm(manifest, place, num_peers=NUM_STAGES + 1) as swarm:
        swarm.wait_step(1)
        for _ in range(times):
            threading.Event().wait(rng.uniform(0.0, 3.0))  # the delay is the test, nothing is waited for
            assert not swarm.events("run_ended"), "the run was over before the coordinator was killed often enough"
            swarm.coordinator.kill()
            swarm.start_coordinator()
        swarm.wait_end(timeout_s=600.0)
        assert sum(daemon.process.returncode == -signal.SIGKILL for daemon in swarm.daemons) == times
        assert_equals_reference(swarm, reference(manifest))
