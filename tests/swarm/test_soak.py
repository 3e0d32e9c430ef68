"""A swarm that is hurt at random ends in the reference's bits; a swarm that runs for long does not grow."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE

from swarmtrain.checkpoint import latest
from swarmtrain.run.presets import preset
from swarmtrain.soak import SMALL, SoakFailed, check, soak

from .comparison import References
from .faults import three_stages
from .harness import Daemon, Swarm

pytestmark = pytest.mark.swarm


@pytest.mark.timeout(900)
def test_random_faults_end_in_the_references_bits() -> None:
    """One short round of real processes; schedules of faults by the hundred are tests/simulated/test_seeds.py."""
    manifest = preset("nano", [*SMALL, "schedule.steps=24"])
    survived = soak(manifest, minutes=0.0, seed=7, pause_s=(0.5, 1.5), min_faults=3, round_s=300.0 * PATIENCE)
    assert survived.total() >= 3


def test_a_run_with_other_weights_fails_the_check(place: Path, reference: References) -> None:
    """Negative control: the comparison that the soak rests on sees a difference."""
    one = reference(three_stages("schedule.steps=2"))
    other = reference(three_stages("schedule.steps=2", "run.seed=8"))
    (place / "coordinator").mkdir()
    (place / "coordinator" / "checkpoints").symlink_to(other.checkpoint.path.parent)
    assert latest(place / "coordinator" / "checkpoints") is not None
    with pytest.raises(SoakFailed, match="differs from the reference"):
        check(place, one.checkpoint)


def test_a_round_that_hangs_is_a_failure_of_the_soak() -> None:
    """And not of the machine: the time that a test may take is longer."""
    manifest = preset("nano", [*SMALL, "schedule.steps=2"])
    with pytest.raises(SoakFailed, match="TimeoutError") as caught:
        soak(manifest, minutes=0.0, seed=1, pause_s=(1000.0, 1000.0), round_s=0.5)
    assert caught.value.fix is not None
    kept = Path(caught.value.fix.removeprefix("see ")).parent
    assert (kept / "reference").is_dir()
    shutil.rmtree(kept)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_thousand_steps_leave_memory_and_files_flat(place: Path) -> None:
    manifest = preset("nano", ["schedule.steps=2000", "checkpoint.every=100"])
    with Swarm(manifest, place) as swarm:
        seen: dict[int, list[Footprint]] = {}
        for step in (200, 800, 1400, 1980):
            samples = []
            for later in range(9):  # what is in flight at an instant differs: the median of some instants
                swarm.wait_step(step + later, timeout_s=3000)
                samples.append([part for daemon in swarm.daemons for part in footprints(daemon)])
            seen[step] = [middle(of_one) for of_one in zip(*samples, strict=True)]
            print(step, *seen[step], sep="\n  ")
        for daemon in range(0, len(seen[200]), 2):  # its own process, and libp2p's
            early, middle_of_run, late = (seen[step][daemon : daemon + 2] for step in (200, 800, 1980))
            assert resident(late) <= 1.05 * resident(early), f"{early} grew to {late}"
            assert late[0].resident_bytes <= 1.05 * early[0].resident_bytes, f"{early[0]} grew to {late[0]}"
            # How much garbage libp2p's process carries about is up to Go, and swings by a tenth: it must not go on.
            assert late[1].resident_bytes <= 1.1 * middle_of_run[1].resident_bytes, (
                f"{middle_of_run[1]} grew to {late[1]}"
            )
            for before, after in zip(early, late, strict=True):
                assert after.name == before.name
                assert after.num_files <= before.num_files + 8, f"{before} has opened more: {after}"


@dataclass(frozen=True)
class Footprint:
    """What one process takes of its machine."""

    name: str
    resident_bytes: int
    num_files: int  # sockets too


def footprints(daemon: Daemon) -> list[Footprint]:
    """The daemon's own, and that of libp2p's daemon, its child."""
    process = psutil.Process(daemon.pid)
    (child,) = process.children()
    return [
        Footprint(f"{daemon.name}: {part}", int(item.memory_info().rss), item.num_fds())
        for part, item in (("swarmtrain", process), ("p2pd", child))
    ]


def resident(parts: Sequence[Footprint]) -> int:
    """Of a daemon with its child."""
    return sum(part.resident_bytes for part in parts)


def middle(samples: Sequence[Footprint]) -> Footprint:
    """The median of each figure."""
    resident, files = (sorted(getattr(item, name) for item in samples) for name in ("resident_bytes", "num_files"))
    return Footprint(samples[0].name, resident[len(samples) // 2], files[len(samples) // 2])
