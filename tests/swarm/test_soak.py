"""A swarm that is hurt at random ends in the reference's bits; a swarm that runs for long does not grow."""

from __future__ import annotations

import random
from pathlib import Path

import psutil
import pytest

from swarmtrain.checkpoint import latest
from swarmtrain.run.presets import preset
from swarmtrain.soak import SMALL, SoakFailed, check, soak

from .comparison import References
from .faults import three_stages
from .harness import Daemon, Swarm

pytestmark = pytest.mark.swarm


@pytest.mark.timeout(600)
def test_two_minutes_of_random_faults_end_in_the_references_bits() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    manifest = preset("nano", [*SMALL, "schedule.steps=60"])
    survived = soak(manifest, minutes=2.0, seed=seed, pause_s=(1.0, 3.0))
    assert survived.total() >= 10


def test_a_run_with_other_weights_fails_the_check(place: Path, reference: References) -> None:
    """Negative control: the comparison that the soak rests on sees a difference."""
    one = reference(three_stages("schedule.steps=2"))
    other = reference(three_stages("schedule.steps=2", "run.seed=8"))
    (place / "coordinator").mkdir()
    (place / "coordinator" / "checkpoints").symlink_to(other.checkpoint.path.parent)
    assert latest(place / "coordinator" / "checkpoints") is not None
    with pytest.raises(SoakFailed, match="differs from the reference"):
        check(place, one.checkpoint)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_thousand_steps_leave_memory_and_files_flat(place: Path) -> None:
    manifest = preset(
        "nano",
        [
            "schedule.steps=2000",
            "model.hidden_size=32",
            "model.num_layers=4",
            "model.ffn_size=64",
            "checkpoint.every=100",
        ],
    )
    with Swarm(manifest, place) as swarm:
        swarm.wait_step(200, timeout_s=900)
        early = [footprint(daemon) for daemon in swarm.daemons]
        swarm.wait_step(1990, timeout_s=3000)
        late = [footprint(daemon) for daemon in swarm.daemons]
        for daemon, (early_bytes, early_files), (late_bytes, late_files) in zip(
            swarm.daemons, early, late, strict=True
        ):
            assert late_bytes <= 1.05 * early_bytes, f"{daemon.name} grew from {early_bytes} to {late_bytes} bytes"
            assert late_files <= early_files + 8, f"{daemon.name} has {late_files} open files, had {early_files}"


def footprint(daemon: Daemon) -> tuple[int, int]:
    """Resident bytes, and open files and sockets."""
    process = psutil.Process(daemon.pid)
    return int(process.memory_info().rss), process.num_fds()
