"""Machines lose power and what was not synced: no decision, key or checkpoint that a daemon relies on is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swarmtrain.checkpoint import complete, open_checkpoint, set_aside
from swarmtrain.coordinator.journal import Journal
from swarmtrain.run.invite import parse_invite
from swarmtrain.simulated.disk import Disk
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.machine import Killed, SimulatedProcess
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import assert_reference, repetition, restart_coordinator, said, tiny, wait_said, wait_step

SYNCS = 6  # of a checkpoint of three stages: each stage, the index, and two directories


def steps_in_journal(life: Life) -> int:
    """What a coordinator that starts now would find."""
    with Journal(life.state_dir / "journal.sqlite") as journal:
        return journal.num_steps()


def lose_power(life: Life) -> None:
    """Lose power now. An unsynced file is lost too, which shows that the disk does lose files."""
    (life.state_dir / "unsynced").write_text("no daemon relies on this")
    life.kill(power_loss=True)
    assert "unsynced" in life.machine.disk.lost
    assert not (life.state_dir / "unsynced").exists()


def decided_and_lost(swarm: SimulatedSwarm) -> tuple[Life, int]:
    """The power fails when the third decision is in the journal and no peer was told. Returns the steps too."""
    swarm.start(num_peers=3)
    coordinator = swarm.coordinator
    wait_step(swarm, 2)
    swarm.until(lambda: coordinator.daemon.journal.num_steps() == 3, "the third decision")
    lose_power(coordinator)
    return coordinator, steps_in_journal(coordinator)


def test_a_decision_survives_that_was_made_when_the_power_failed(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    _, num_steps = decided_and_lost(swarm)
    assert num_steps == 3
    restart_coordinator(swarm)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_without_synced_commits_the_decision_would_be_lost(simulated: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: SQLite's NORMAL leaves commits in a log that is not synced."""
    real = Disk.open_database

    def careless(self: Disk, path: Path) -> object:
        return _Careless(real(self, path))

    class _Careless:
        """The connection, but `PRAGMA synchronous=FULL` sets NORMAL."""

        def __init__(self, database: object) -> None:
            self._database = database

        def execute(self, text: str, *arguments: object) -> object:
            return self._database.execute(text.replace("=FULL", "=NORMAL"), *arguments)  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self._database, name)

    monkeypatch.setattr(Disk, "open_database", careless)
    _, num_steps = decided_and_lost(simulated(tiny()))
    assert num_steps < 3


def fail_in_checkpoint(swarm: SimulatedSwarm, num_syncs: int, luck: random.Random | None) -> Life:
    """The power of the coordinator fails in the checkpoint of step 4, after so many syncs; that of step 2 is there."""
    swarm.start(num_peers=3)
    coordinator = swarm.coordinator
    wait_said(swarm, coordinator, "checkpoint_written", step=2)
    coordinator.machine.luck = luck
    coordinator.machine.syncs_left = num_syncs
    swarm.until(lambda: not coordinator.is_running, "the power fails")
    coordinator.machine.disk.settle()
    return coordinator


@pytest.mark.parametrize(
    ("num_syncs", "is_lucky"),
    [*((n, n % 2 == 1) for n in range(SYNCS)), *(repetition((n, n % 2 == 0)) for n in range(SYNCS))],
)
def test_the_power_fails_at_any_moment_of_writing_a_checkpoint(
    simulated: Make, references: References, num_syncs: int, is_lucky: bool
) -> None:
    """What counts as a checkpoint afterwards is whole: the one before, or the new one."""
    swarm = simulated(tiny("checkpoint.every=2"))
    coordinator = fail_in_checkpoint(swarm, num_syncs, random.Random(num_syncs) if is_lucky else None)
    assert is_lucky or any(name.startswith("checkpoints/") for name in coordinator.machine.disk.lost)
    found = complete(coordinator.state_dir / "checkpoints")
    assert found[0].name == "step-00000002"
    for path in found:
        for stage in range(swarm.manifest.stages.count):
            open_checkpoint(path).load(stage)  # checks its hash
    restart_coordinator(swarm)
    assert_reference(swarm, references)


def test_all_moments_of_writing_a_checkpoint_are_tried(simulated: Make) -> None:
    """One sync more, and there is nothing left to interrupt in this one."""
    swarm = simulated(tiny("checkpoint.every=2"))
    coordinator = fail_in_checkpoint(swarm, SYNCS, None)
    assert [path.name for path in complete(coordinator.state_dir / "checkpoints")][-1] == "step-00000004"


def test_without_synced_files_a_checkpoint_is_torn(simulated: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: only directories are synced, so a checkpoint has its name and not its content."""
    real = SimulatedProcess.sync
    monkeypatch.setattr(SimulatedProcess, "sync", lambda self, path: real(self, path) if path.is_dir() else None)
    swarm = simulated(tiny("checkpoint.every=2"))
    swarm.start(num_peers=3)
    coordinator = swarm.coordinator
    wait_said(swarm, coordinator, "checkpoint_written", step=2)
    coordinator.kill(power_loss=True)
    assert "checkpoints/step-00000002/stage-000.safetensors" in coordinator.machine.disk.lost
    assert (coordinator.state_dir / "checkpoints/step-00000002/stage-000.safetensors").stat().st_size == 0


def test_all_machines_lose_power_and_the_run_resumes_from_its_checkpoint(
    simulated: Make, references: References
) -> None:
    """All states are gone with the memories. The first checkpoint's directory is new, and must have survived, too."""
    swarm = simulated(tiny("checkpoint.every=2"))
    swarm.start(num_peers=3)
    wait_said(swarm, swarm.coordinator, "checkpoint_written", step=2)
    invite = swarm.invite()
    for life in swarm.lives.values():
        lose_power(life)
    restart_coordinator(swarm)
    for index in range(3):
        swarm.start_peer(f"peer{index}", index)
    assert_reference(swarm, references)
    assert parse_invite((swarm.coordinator.state_dir / "invite").read_text().strip()) == invite
    assert all(event.to_step >= 2 for event in said(swarm, "run_rolled_back"))  # type: ignore[attr-defined]


def restarted(swarm: SimulatedSwarm) -> tuple[tuple[str, str], tuple[str, str]]:
    """Who a peer and the coordinator are before and after both lose power."""
    swarm.start(num_peers=3)
    wait_step(swarm, 1)
    coordinator, peer = swarm.coordinator, swarm.peers[1]
    before = (coordinator.peer_id, peer.peer_id)
    lose_power(peer)
    lose_power(coordinator)
    restart_coordinator(swarm)
    swarm.until(lambda: coordinator.peer_id != "", "the coordinator is back")
    swarm.start_peer(peer.name, peer.stage)
    swarm.until(lambda: peer.peer_id != "", "the peer is back")
    return before, (coordinator.peer_id, peer.peer_id)


def test_a_daemon_is_the_same_after_a_loss_of_power(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    before, after = restarted(swarm)
    assert after == before
    assert_reference(swarm, references)


def test_without_a_synced_directory_a_daemon_would_be_another(simulated: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: keys were written so before, and only their content was synced."""
    real = SimulatedProcess.sync
    monkeypatch.setattr(SimulatedProcess, "sync", lambda self, path: None if path.is_dir() else real(self, path))
    before, after = restarted(simulated(tiny()))
    assert not set(before) & set(after)


def test_an_invite_is_whole_or_not_there(simulated: Make, references: References) -> None:
    """Seed 700010. Whatever the disk keeps of what was written when the coordinator came back."""
    swarm = simulated(tiny())
    swarm.start(num_peers=3)
    wait_step(swarm, 1)
    coordinator, invite = swarm.coordinator, swarm.invite()
    for number in range(12):
        coordinator.machine.luck = random.Random(number)
        coordinator.machine.syncs_left = number % 2  # of the invite: its file, its directory
        if coordinator.is_running:
            coordinator.kill(power_loss=True)
        restart_coordinator(swarm)
        swarm.until(lambda: not coordinator.is_running, "the power fails when the invite is written")
        coordinator.machine.disk.settle()
        path = coordinator.state_dir / "invite"
        assert not path.exists() or parse_invite(path.read_text().strip()) == invite
    coordinator.machine.syncs_left = None
    assert coordinator.machine.disk.lost
    restart_coordinator(swarm)
    assert_reference(swarm, references)


def test_a_checkpoint_that_was_set_aside_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the journal has grown past its step, it would count as one of a history that is not its own."""
    path = tmp_path / "step-00000004"
    path.mkdir()
    (path / "checkpoint.json").write_text("{}")
    disk = Disk(tmp_path)
    monkeypatch.setattr("swarmtrain.world.sync", disk.sync)
    assert len(set_aside(tmp_path, after=3)) == 1
    disk.lose_power()
    disk.settle()
    assert complete(tmp_path) == []


# ---- the disk itself -------------------------------------------------------------------------------------------------


def test_a_file_has_what_was_synced(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("old")
    two.write_text("never synced")
    disk.sync(one)
    disk.sync(tmp_path)
    one.write_text("new")
    disk.lose_power()
    disk.settle()
    assert (one.read_text(), two.read_text()) == ("old", "")
    assert disk.lost == ["one", "two"]


def test_a_rename_is_undone_unless_its_directory_was_synced(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    path = tmp_path / "partial"
    path.write_text("whole")
    disk.sync(path)
    disk.sync(tmp_path)
    path.rename(tmp_path / "final")
    disk.lose_power()
    disk.settle()
    assert [item.name for item in tmp_path.iterdir()] == ["partial"]
    path.rename(tmp_path / "final")
    disk.sync(tmp_path)
    disk.lose_power()
    disk.settle()
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("final", "whole")]


def test_with_luck_some_of_what_was_not_synced_is_left_or_torn(tmp_path: Path) -> None:
    found = set()
    for number in range(40):
        place = tmp_path / str(number)
        place.mkdir()
        disk = Disk(place)
        (place / "file").write_text("abcd")
        disk.lose_power(random.Random(number))
        disk.settle()
        found.add((place / "file").read_text() if (place / "file").exists() else None)
    assert found == {None, "", "ab", "abcd"}


def test_a_dead_process_syncs_nothing(simulated: Make) -> None:
    swarm = simulated(tiny())
    swarm.start(num_peers=3)
    process = swarm.coordinator.process
    swarm.coordinator.kill()
    with pytest.raises(Killed):
        process.sync(swarm.coordinator.state_dir)
