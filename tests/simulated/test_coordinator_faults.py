"""What happens to the coordinator, and around it, must not cost the run what its peers still have."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from swarmtrain.coordinator.journal import Journal
from swarmtrain.coordinator.split_brain import StaleJournal, Superseded
from swarmtrain.p2p.errors import BootstrapError
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset
from swarmtrain.simulated.judge import References, judge
from swarmtrain.simulated.schedule import TINY
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .scenes import repetition

REFERENCES = References()


def tiny(**overrides: object) -> Manifest:
    """A run of two stages; names with two underscores for dots."""
    wanted: dict[str, object] = {
        "stages__count": 2,
        "model__num_layers": 2,
        "batch__microbatches_per_step": 4,
        "schedule__steps": 5,
        "checkpoint__every": 0,
        **overrides,
    }
    return preset("nano", [*TINY, *(f"{name.replace('__', '.')}={value}" for name, value in wanted.items())])


@contextmanager
def swarm_of(manifest: Manifest, root: Path, *, but: str = "") -> Iterator[SimulatedSwarm]:
    """Ends in the reference's bits with books that balance, or the test fails. `but`: what the judge may find."""
    with SimulatedSwarm(manifest, seed="1", root=root) as swarm:
        yield swarm
        swarm.run_to_end()
        assert [fault for fault in judge(swarm, REFERENCES(manifest)) if not but or but not in fault] == []


def never_went_back(swarm: SimulatedSwarm) -> bool:
    return not swarm.happened("run_rolled_back")


def all_leased(swarm: SimulatedSwarm, step: int) -> bool:
    """Whether all microbatches of a step were answered, and its stages are about to be prepared."""
    context = swarm.coordinator.daemon.context
    return context.step == step and step in context.books and len(context.books[step].losses) == 4


def block(swarm: SimulatedSwarm, one: Life, other: Life, *, blocked: bool = True) -> None:
    """Nothing passes between two machines."""
    for source, target in ((one, other), (other, one)):
        swarm.network.block(source.name, target.name, blocked)


def slow_down(swarm: SimulatedSwarm, speed: float = 0.1) -> None:
    """A step takes seconds."""
    for peer in swarm.peers:
        peer.machine.speed = speed


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_stage_whose_sum_died_with_its_holders_is_prepared_again_before_the_decision(
    tmp_path: Path, *, power_loss: bool
) -> None:
    with swarm_of(tiny(), tmp_path) as swarm:
        swarm.start(num_peers=3)
        holder, last, other = swarm.peers  # of stages 0, 1 and 0
        coordinator = swarm.coordinator
        swarm.until(lambda: swarm.step == 2, "two steps")
        block(swarm, coordinator, other)
        swarm.until(lambda: all_leased(swarm, 2), "a step is about to be prepared")
        last.machine.hangs = True
        swarm.until(lambda: coordinator.has("stage_prepared", step=3, stage=0), "stage 0 has its sum")
        assert coordinator.has("peer_lost", peer=other.peer_id)  # it has no part in that
        block(swarm, coordinator, other, blocked=False)
        swarm.until(lambda: len(list(coordinator.said("peer_joined", peer=other.peer_id))) == 2, "it is back")
        assert other.daemon.assignment.clock.step == 2
        holder.kill(power_loss=power_loss)
        swarm.run_for(2.5)  # longer than an answer counts without being asked again
        last.machine.release_device()
        swarm.until(lambda: swarm.step >= 3, "the step is applied")
        assert len(list(coordinator.said("stage_prepared", step=3, stage=0))) == 2
        assert never_went_back(swarm)


def reroutes(life: Life) -> dict[str, int]:
    """Calls of the next stage that went elsewhere, by cause."""
    daemon = life.daemon
    dispatcher = daemon.context.dispatcher if life.stage < 0 else daemon.assignment.dispatcher
    return dict(dispatcher.counters.rerouted)


@pytest.mark.parametrize("moment", ["leasing", "preparing"])
def test_no_peer_is_lost_when_the_coordinators_own_transport_is_down(tmp_path: Path, moment: str) -> None:
    with swarm_of(tiny(), tmp_path) as swarm:
        swarm.start(num_peers=4)
        coordinator = swarm.coordinator
        swarm.until(lambda: swarm.step == 2, "two steps")
        if moment == "preparing":
            swarm.until(lambda: all_leased(swarm, 2), "a step is about to be prepared")
        host = coordinator.process.host
        assert host is not None
        coordinator.process.call_soon(host.fail)
        swarm.run_for(25.0)  # longer than a peer may be silent, and longer than a dial takes
        assert swarm.step == 2
        coordinator.process.call_soon(host.recover)
        swarm.until(lambda: swarm.step >= 4, "the run goes on", limit_s=30.0)
        assert not coordinator.has("peer_lost")
        assert set(reroutes(coordinator)) <= {"own-transport", "busy", "redirected"}


def test_a_peer_does_not_shun_its_neighbours_when_its_own_transport_was_away(tmp_path: Path) -> None:
    with swarm_of(tiny(schedule__steps=12), tmp_path) as swarm:
        swarm.start(num_peers=3)  # two of stage 0, one of stage 1
        first = swarm.peers[0]
        swarm.until(lambda: swarm.step == 2, "two steps")
        sent = first.daemon.assignment.dispatcher.counters.sent
        swarm.until(lambda: first.daemon.assignment.dispatcher.counters.sent > sent, "it has called the next stage")
        host = first.process.host
        assert host is not None
        first.process.call_soon(host.fail)
        swarm.run_for(1.0)
        first.process.call_soon(host.recover)
        swarm.until(lambda: swarm.step >= 4, "the run goes on")
        causes = reroutes(first)
        assert causes.get("own-transport"), causes
        assert not {"failed", "unreachable", "timeout"} & set(causes), causes


@pytest.mark.parametrize("phase", ["", "network"])
def test_a_peer_that_starts_while_the_coordinator_is_away_waits_for_it_and_says_so(tmp_path: Path, phase: str) -> None:
    """Without a phase, no address of its invite answers; with one they do, but no coordinator is there."""
    with swarm_of(tiny(), tmp_path) as swarm:
        swarm.start_coordinator(min_peers=3)
        for stage in (0, 1):
            swarm.start_peer(f"peer{stage}", stage)
        swarm.until(lambda: len(swarm.serving()) == 2, "two of three serve")
        if not phase:
            swarm.coordinator.kill()
        newcomer = swarm.start_peer("newcomer", 0)
        if phase:
            swarm.until(lambda: newcomer.has("phase_reached", phase=phase), "it is in the network")
            swarm.coordinator.kill()
        swarm.run_for(150.0)
        assert newcomer.is_running
        waits = list(newcomer.said("phase_reached", phase="waiting"))
        assert 1 <= len(waits) <= 10, waits
        swarm.start_coordinator(min_peers=3)
        swarm.until(lambda: newcomer.has("phase_reached", phase="manifest"), "it has found the run")
        assert not newcomer.errors


def test_a_peer_gives_up_looking_for_its_run_when_it_was_told_for_how_long(tmp_path: Path) -> None:
    with swarm_of(tiny(), tmp_path) as swarm:
        swarm.start(num_peers=2)
        swarm.coordinator.kill()
        newcomer = swarm.start_peer("newcomer", 0, find_s=30.0)
        began = swarm.now
        swarm.until(lambda: not newcomer.is_running, "it gives up")
        assert 15.0 < swarm.now - began < 45.0
        assert isinstance(newcomer.errors[0], BootstrapError)
        swarm.start_coordinator()


def test_training_does_not_wait_for_a_slow_checkpoint(tmp_path: Path) -> None:
    with swarm_of(tiny(schedule__steps=60, checkpoint__every=1), tmp_path) as swarm:
        swarm.start(num_peers=2)
        coordinator = swarm.coordinator
        swarm.until(lambda: swarm.step == 2, "two steps")
        slow_down(swarm, 0.03)
        coordinator.machine.disk_s = (
            45.0  # a state is often written for longer than peers keep a copy that is not asked for
        )
        swarm.run_for(5.0)
        began, step = swarm.now, swarm.step
        count = len(list(coordinator.said("checkpoint_written")))
        swarm.until(lambda: len(list(coordinator.said("checkpoint_written"))) > count, "one is written all the same")
        assert swarm.now - began > 60.0
        assert swarm.step - step > (swarm.now - began) / 10.0, "training has waited for it"
        coordinator.machine.disk_s = 0.01
        slow_down(swarm, 4.0)
        failures = list(coordinator.said("checkpoint_failed"))
        assert failures
        assert all("left out" in failure.reason for failure in failures), failures


def copy_of(swarm: SimulatedSwarm, directory: Path, *, identity: bool) -> Path:
    """What the coordinator's directory holds now."""
    source = swarm.coordinator.state_dir
    directory.mkdir()
    for name in ("run.key", *(["identity.key"] if identity else [])):
        shutil.copy(source / name, directory)
    if (source / "checkpoints").exists():
        shutil.copytree(source / "checkpoints", directory / "checkpoints")
    places = (source / "journal.sqlite", directory / "journal.sqlite")
    with closing(sqlite3.connect(places[0])) as journal, closing(sqlite3.connect(places[1])) as copy:
        journal.backup(copy)
    return directory


@pytest.mark.parametrize("identity", [False, True])
def test_a_coordinator_on_an_old_copy_does_not_take_a_healthy_run_over(tmp_path: Path, *, identity: bool) -> None:
    with swarm_of(tiny(schedule__steps=30), tmp_path) as swarm:
        swarm.start(num_peers=2)
        slow_down(swarm)
        swarm.until(lambda: swarm.step == 2, "two steps")
        old = copy_of(swarm, tmp_path / "old", identity=identity)
        original = swarm.coordinator
        swarm.until(lambda: swarm.step == 8, "further steps")
        swarm.run_for(15.0)  # and they were announced
        here = swarm.peers[0].process.host
        assert here is not None
        second = swarm.start_coordinator("second", directory=old, bootstrap=here.addresses())
        assert not second.is_running
        assert isinstance(second.errors[0], StaleJournal), second.errors
        with Journal(old / "journal.sqlite", read_only=True) as journal:
            assert journal.get("term") == "1"
        assert original.is_running
        del swarm.lives["second"]
    assert never_went_back(swarm)


def test_a_coordinator_that_was_set_up_again_from_an_old_copy_ends_and_its_peers_keep_what_they_have(
    tmp_path: Path,
) -> None:
    """In the place of the one that died, where peers look for it: only they can tell it."""
    with swarm_of(tiny(schedule__steps=10), tmp_path) as swarm:
        swarm.start(num_peers=4)
        swarm.until(lambda: swarm.step == 2, "two steps")
        old = copy_of(swarm, tmp_path / "old", identity=True)
        swarm.until(lambda: swarm.step == 6, "further steps")
        life = swarm.coordinator
        life.kill()
        current, life.state_dir = life.state_dir, old
        swarm.start_coordinator()
        swarm.until(lambda: not life.is_running, "it ends", limit_s=60.0)
        swarm.run_for(0.1)
        assert isinstance(life.errors[0], StaleJournal), life.errors
        life.state_dir = current
        swarm.start_coordinator()
        swarm.until(lambda: swarm.step >= 8, "the run goes on")
        assert never_went_back(swarm)


@pytest.mark.parametrize("is_further", [False, True])
def test_a_coordinator_notices_that_another_process_has_its_identity_and_took_over(
    tmp_path: Path, *, is_further: bool
) -> None:
    """If the first one has got further meanwhile, the other one yields to it as soon as it is started again."""
    with swarm_of(tiny(schedule__steps=12), tmp_path) as swarm:
        swarm.start(num_peers=2)
        slow_down(swarm)
        swarm.until(lambda: swarm.step == 2, "two steps")
        if not is_further:
            swarm.peers[1].machine.hangs = True
        original, here = swarm.coordinator, swarm.peers[0].process.host
        assert here is not None
        copied = copy_of(swarm, tmp_path / "copy", identity=True)
        second = swarm.start_coordinator("second", directory=copied, bootstrap=here.addresses())
        swarm.until(lambda: not original.is_running, "the first one ends", limit_s=60.0)
        assert isinstance(original.errors[0], Superseded), original.errors
        assert "identity" in str(original.errors[0])
        if is_further:
            swarm.until(lambda: not second.is_running, "the second one ends", limit_s=60.0)
            assert isinstance(second.errors[0], StaleJournal)
            del swarm.lives["second"]
            swarm.start_coordinator(bootstrap=here.addresses())
        else:
            swarm.peers[1].machine.release_device()
        swarm.until(lambda: swarm.step >= 5, "the run goes on")
        assert never_went_back(swarm)


def test_a_wrong_first_comer_after_a_restart_is_not_the_truth(tmp_path: Path) -> None:
    """Its memory fails in the step of which the journal knows the decision only."""
    with swarm_of(tiny(schedule__steps=6), tmp_path, but="has another state than its replicas") as swarm:
        swarm.start(num_peers=5)
        coordinator, first, others = swarm.coordinator, swarm.peers[0], [swarm.peers[2], swarm.peers[4]]
        swarm.until(lambda: swarm.step == 2, "two steps")
        coordinator.arm("after-decision", 1, "kill")
        first.arm("before-apply", 1, "corrupt")
        swarm.until(lambda: not coordinator.is_running, "it dies")
        for other in others:
            block(swarm, coordinator, other)
        swarm.start_coordinator()
        swarm.until(lambda: first.daemon.assignment.clock.step == 3, "the first comer has applied the step")
        swarm.run_for(2.0)
        assert swarm.step == 2
        for other in others:
            block(swarm, coordinator, other, blocked=False)
        swarm.until(lambda: swarm.step >= 4, "the run goes on")
        assert coordinator.has("peer_diverged", peer=first.peer_id)
        assert never_went_back(swarm)


def test_a_coordinator_that_was_stopped_loses_no_peer(tmp_path: Path) -> None:
    with swarm_of(tiny(schedule__steps=12), tmp_path) as swarm:
        swarm.start(num_peers=4)
        swarm.until(lambda: swarm.step == 2, "two steps")
        process = swarm.coordinator.process
        process.stop()
        swarm.run_for(30.0)
        assert swarm.step == 2
        process.resume()
        swarm.until(lambda: swarm.step >= 5, "the run goes on", limit_s=30.0)
        assert not swarm.coordinator.has("peer_lost"), list(swarm.coordinator.said("peer_lost"))
        assert never_went_back(swarm)


@pytest.mark.parametrize(
    ("whose", "seconds"),
    [
        *(("coordinator", 3600.0), ("peers", -3600.0)),
        *(repetition(case) for case in (("coordinator", -3600.0), ("peers", 3600.0))),
        *(repetition(("peer0", seconds)) for seconds in (3600.0, -3600.0)),
    ],
)
def test_a_clock_that_is_set_in_the_middle_of_a_run_stops_nothing(tmp_path: Path, whose: str, seconds: float) -> None:
    with swarm_of(tiny(schedule__steps=30), tmp_path) as swarm:
        swarm.start(num_peers=4)
        slow_down(swarm)
        swarm.until(lambda: swarm.step == 2, "two steps")
        for life in swarm.peers if whose == "peers" else [swarm.lives[whose]]:
            life.machine.step_clock(seconds)
        swarm.until(lambda: swarm.step >= 10, "the run goes on", limit_s=60.0)
        newcomer = swarm.start_peer("newcomer", 1, speed=0.1)
        swarm.until(lambda: newcomer in swarm.serving(1), "others can join", limit_s=60.0)
        assert not swarm.coordinator.has("peer_lost"), list(swarm.coordinator.said("peer_lost"))
        assert never_went_back(swarm)


@pytest.mark.parametrize("seconds", [3600.0, repetition(-3600.0)])
def test_a_peer_whose_clock_is_an_hour_off_takes_part(tmp_path: Path, seconds: float) -> None:
    with swarm_of(tiny(schedule__steps=30), tmp_path) as swarm:
        swarm.start(num_peers=2)
        slow_down(swarm)
        swarm.until(lambda: swarm.step == 1, "a step")
        swarm._life("odd", 0).machine.step_clock(seconds)
        odd = swarm.start_peer("odd", 0, speed=0.1)
        swarm.until(lambda: odd in swarm.serving(0), "it serves", limit_s=60.0)
        swarm.until(lambda: odd.daemon.assignment.peer.counters.microbatches > 3, "it is given work", limit_s=60.0)


def test_a_coordinator_that_comes_back_with_another_time_goes_by_that_of_its_peers(tmp_path: Path) -> None:
    with swarm_of(tiny(schedule__steps=30), tmp_path) as swarm:
        swarm.start(num_peers=4)
        slow_down(swarm)
        swarm.until(lambda: swarm.step == 2, "two steps")
        swarm.coordinator.kill()
        swarm.run_for(5.0)
        swarm.coordinator.machine.step_clock(3600.0)
        swarm.start_coordinator()
        swarm.until(lambda: swarm.step >= 6, "the run goes on", limit_s=60.0)
        newcomer = swarm.start_peer("newcomer", 1, speed=0.1)
        swarm.until(lambda: newcomer in swarm.serving(1), "others can join", limit_s=60.0)
        assert never_went_back(swarm)
