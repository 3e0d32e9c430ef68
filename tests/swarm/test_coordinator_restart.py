"""The coordinator dies, or all do: the run goes on where it was, and ends in the bits of an undisturbed one."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarmtrain.coordinator.journal import Journal
from swarmtrain.errors import ExitCode
from swarmtrain.run.invite import parse_invite

from .comparison import References, assert_equals_reference
from .faults import NUM_STAGES, hold, release, restart_coordinator, start_armed, three_stages, wait_killed
from .harness import Daemon, Swarm, until

pytestmark = pytest.mark.swarm


@contextmanager
def armed_coordinator(swarm: Swarm, faults: str) -> Iterator[Swarm]:
    """A swarm whose first coordinator breaks as `faults` says."""
    try:
        restart_coordinator(swarm, faults)
        for index in range(swarm.num_peers):
            swarm.start_peer(index % swarm.manifest.stages.count)
        yield swarm
    finally:
        swarm.close()


@pytest.mark.parametrize("point", ["before-decision:2", "after-decision:2", "after-step:3", "checkpoint-write:2"])
def test_a_coordinator_killed_at_a_point_of_a_step_is_replaced(place: Path, reference: References, point: str) -> None:
    manifest = three_stages("schedule.steps=6", "checkpoint.every=3")
    with armed_coordinator(Swarm(manifest, place, num_peers=NUM_STAGES), f"{point}:kill") as swarm:
        wait_killed(swarm, swarm.coordinator, point.split(":")[0])
        swarm.start_coordinator()
        swarm.wait_end()
        every_one = manifest.schedule.steps * manifest.batch.microbatches_per_step
        forwards = [swarm.wait(peer, "peer_ended")["forwards"] for peer in swarm.peers]
        assert not swarm.events("run_rolled_back")
        assert forwards == [every_one] * NUM_STAGES, "what was finished was computed again"
        assert_equals_reference(swarm, reference(manifest))


def kill_coordinator_often(place: Path, reference: References, times: int) -> None:
    manifest = three_stages(f"schedule.steps={3 * times}", "checkpoint.every=4")
    rng = random.Random(times)
    points = ("before-decision", "after-decision", "after-step")
    faults = [f"{rng.choice(points)}:{rng.randint(1, 2)}:kill" for _ in range(times)]
    with armed_coordinator(Swarm(manifest, place, num_peers=NUM_STAGES + 1), faults[0]) as swarm:
        for number, fault in enumerate(faults):
            wait_killed(swarm, swarm.coordinator, fault.split(":")[0])
            restart_coordinator(swarm, faults[number + 1] if number + 1 < times else "")
        swarm.wait_end()
        assert len([daemon for daemon in swarm.daemons if daemon.stage < 0]) == times + 1
        assert_equals_reference(swarm, reference(manifest))


def test_a_coordinator_killed_again_and_again(place: Path, reference: References) -> None:
    kill_coordinator_often(place, reference, 3)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_coordinator_killed_twenty_times(place: Path, reference: References) -> None:
    kill_coordinator_often(place, reference, 20)


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


def test_all_processes_killed_twice(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=14", "checkpoint.every=4")
    with Swarm(manifest, place, num_peers=NUM_STAGES) as swarm:
        for step in (5, 9):
            swarm.wait_step(step)
            swarm.wait(None, "checkpoint_written", step=4 * (step // 4))
            for daemon in swarm.daemons:
                if daemon.is_running:
                    daemon.kill()
            swarm.start_coordinator()
            for stage in range(NUM_STAGES):
                swarm.start_peer(stage, name=f"peer{stage}")
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        rolled_back = swarm.events("run_rolled_back")
        assert rolled_back
        assert all(event["to_step"] >= 4 for event in rolled_back)


@pytest.mark.parametrize(("every", "stage"), [(0, 0), (4, 2), pytest.param(4, 1, marks=pytest.mark.long)])
def test_a_stage_without_peers_stops_the_run_until_somebody_joins(
    place: Path, reference: References, every: int, stage: int
) -> None:
    manifest = three_stages("schedule.steps=16", f"checkpoint.every={every}")
    with Swarm(manifest, place, num_peers=NUM_STAGES) as swarm:
        swarm.wait_step(6)
        if every:
            swarm.wait(None, "checkpoint_written", step=4)
        swarm.peers[stage].kill()
        swarm.wait_until(
            lambda: any(f"stage {stage} has no peers since" in event["reason"] for event in swarm.events("run_waits")),
            f"the coordinator says that stage {stage} has no peers",
        )
        assert not swarm.events("run_rolled_back")
        swarm.start_peer(stage)
        went_back = swarm.wait(None, "run_rolled_back", stage=stage)
        written = [event["step"] for event in swarm.events("checkpoint_written") if event["at"] < went_back["at"]]
        swarm.wait_end()
        assert went_back["from_step"] >= 6
        assert went_back["to_step"] == max(written, default=0)
        assert bool(written) == bool(every)
        assert_equals_reference(swarm, reference(manifest))


def test_the_last_peer_of_a_stage_dies_between_a_decision_and_its_apply(place: Path, reference: References) -> None:
    """At the seed's state and at a checkpoint's: a newcomer has that state at once, but not the decided sum."""
    manifest = three_stages("schedule.steps=24", "checkpoint.every=1")
    with Swarm(manifest, place, num_peers=1, min_peers=NUM_STAGES) as swarm:
        first, gate = start_armed(swarm, 1, "before-apply:1:kill"), swarm.start_peer(2)
        wait_killed(swarm, first, "before-apply")
        second = swarm.start_peer(1)
        swarm.wait(None, "run_rolled_back", stage=1, from_step=0, to_step=0)
        swarm.wait_step(2)
        hold(gate)
        third = start_armed(swarm, 1, "before-apply:1:kill")
        swarm.wait_serving(third)
        second.kill()
        release(gate)
        wait_killed(swarm, third, "before-apply")
        swarm.start_peer(1)
        swarm.wait_until(lambda: len(swarm.events("run_rolled_back")) == 2, "the run has gone back once more")
        went_back = swarm.events("run_rolled_back")[-1]
        swarm.wait_end()
        assert went_back["from_step"] == went_back["to_step"] > 0
        assert_equals_reference(swarm, reference(manifest))


def restart_elsewhere(swarm: Swarm, name: str, known: str) -> Daemon:
    """A coordinator on another state directory than the swarm's."""
    current, swarm.coordinator_name = swarm.coordinator_name, name
    try:
        return swarm.start_coordinator("--bootstrap", known, wait=False)
    finally:
        swarm.coordinator_name = current


def test_another_machine_takes_over_under_a_higher_term(place: Path, reference: References) -> None:
    manifest = three_stages("schedule.steps=12")
    with Swarm(manifest, place, num_peers=NUM_STAGES) as swarm:
        swarm.wait_step(3)
        gate = swarm.peers[2]
        hold(gate)
        former = swarm.coordinator
        addresses = parse_invite(swarm.invite()).bootstrap
        elsewhere = place / "elsewhere"
        elsewhere.mkdir()
        with sqlite3.connect(swarm.coordinator_dir / "journal.sqlite") as journal:
            journal.execute("VACUUM INTO ?", (str(elsewhere / "journal.sqlite"),))
        shutil.copy(swarm.coordinator_dir / "run.key", elsewhere)
        swarm.coordinator_name = "elsewhere"
        swarm.start_coordinator("--bootstrap", addresses[0])
        until(lambda: not former.is_running, "the former coordinator has noticed")
        assert former.process.returncode == ExitCode.REFUSED
        assert "ST-SUPERSEDED" in former.log.read_text()
        again = restart_elsewhere(swarm, "coordinator", parse_invite(swarm.invite()).bootstrap[0])
        swarm.wait_until(lambda: not again.is_running, "the former coordinator sees that it was replaced")
        assert again.process.returncode == ExitCode.REFUSED
        with Journal(again.state_dir / "journal.sqlite", read_only=True) as journal:
            assert journal.get("term") == "1", "it would take over by starting often enough"
        release(gate)
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
