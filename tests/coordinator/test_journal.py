"""The journal is where it should be, waits for the disk no more often than it must, and remembers who took part."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.audit import audit
from swarmtrain.coordinator import daemon as daemon_module
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.coordinator.journal import Decision, Journal
from swarmtrain.coordinator.journal_files import JournalGone
from swarmtrain.coordinator.prepare import PreparedStage
from swarmtrain.coordinator.steps import StepDriver
from swarmtrain.coordinator.tally import Tally
from swarmtrain.observe.events import Events
from swarmtrain.run.presets import preset

from .contexts import bare_context

MANIFEST = preset("nano", ["stages.count=1"])


def decision(step: int) -> Decision:
    return Decision(step, 1, 2.5, 1.0, 1.0, 0.1, (("x", 1.0),), {0: {("a", "1"): [0]}}, {0: 2.5})


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    (tmp_path / "state").mkdir()
    with Journal(tmp_path / "state" / "journal.sqlite") as opened:
        yield opened


def delete(state: Path) -> None:
    shutil.rmtree(state)


def move(state: Path) -> None:
    state.rename(state.with_name("redirected"))


def put_a_copy_in_its_place(state: Path) -> None:
    move(state)
    shutil.copytree(state.with_name("redirected"), state)


def delete_the_log(state: Path) -> None:
    """What is committed lies there first."""
    (state / "journal.sqlite-wal").unlink()


AWAY = (delete, move, put_a_copy_in_its_place, delete_the_log)


@pytest.mark.parametrize("away", AWAY)
def test_a_journal_that_was_taken_away_is_noticed_before_anything_is_written(
    journal: Journal, away: Callable[[Path], None]
) -> None:
    journal.decide(decision(0))
    journal.check_place()
    away(journal.path.parent)
    for write in (journal.check_place, lambda: journal.decide(decision(1)), lambda: journal.set("term", "2")):
        with pytest.raises(JournalGone, match="removed or replaced") as caught:
            write()
        assert "put its state directory back" in caught.value.fix
    assert journal.num_steps() == 1


@pytest.mark.parametrize("away", AWAY)
def test_a_journal_that_is_taken_away_while_it_is_written_has_not_decided(
    journal: Journal, away: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite does not mind: it writes to files that no process will ever find."""
    put = journal._seals.put

    def put_after(*row: Any) -> None:
        put(*row)
        away(journal.path.parent)
        monkeypatch.undo()

    monkeypatch.setattr(journal._seals, "put", put_after)
    with pytest.raises(JournalGone):
        journal.decide(decision(0))


def test_control_readers_and_long_logs_leave_a_journal_where_it_is(journal: Journal) -> None:
    for step in range(600):
        journal.set("term", str(step))
        if step % 200 == 0:
            with Journal(journal.path, read_only=True) as reader:
                assert reader.get("term") == str(step)
    journal.check_place()


def one_stage(name: str = "") -> PreparedStage:
    member = cast(Any, SimpleNamespace(peer_id="a", key=("a", "1"), name=name))
    shares = {("a", "1"): list(range(MANIFEST.batch.microbatches_per_step))}
    return PreparedStage(0, "x", 1.0, (member,), shares, (), cast(Any, None), 0.0)


class Done:
    """The parts of a step around its decision: all microbatches are done, the one stage is prepared, and `told` lists
    the decisions that peers were told."""

    def __init__(self, journal: Journal, name: str = "") -> None:
        self.told: list[int] = []
        self._name = name
        self.context = bare_context(MANIFEST, journal=journal)
        self.driver = StepDriver(self.context, cast(Any, self))
        self.driver.leases = cast(Any, self)
        self.driver._preparer = cast(Any, self)

    idle_s = 0.0

    async def step(self) -> None:
        """A step whose microbatches have all been answered."""
        books = self.context.books[self.context.step] = StepBooks(1, MANIFEST.batch.microbatches_per_step)
        for index in range(books.num_microbatches):
            books.record(index, 2.5, ())
        await self.driver.step(checkpoint=False)

    async def repair(self, step: int, books: StepBooks) -> None:
        await asyncio.Event().wait()

    def groups(self) -> list[tuple[int, ...]]:
        return [(0,)]

    async def is_held(self, prepared: PreparedStage) -> bool:
        return True

    async def prepare(self, step: int, group: tuple[int, ...], books: StepBooks) -> list[PreparedStage]:
        return [one_stage(self._name)]

    async def carry_out(self, decided: Decision, prepared: list[PreparedStage], *, checkpoint: bool) -> Any:
        self.told.append(decided.step)
        self.context.step += 1


def test_no_peer_is_told_a_decision_that_is_nowhere_on_disk(journal: Journal) -> None:
    async def main() -> None:
        done = Done(journal)
        await done.step()
        assert done.told == [0]  # control
        delete(journal.path.parent)
        with pytest.raises(JournalGone):
            await done.step()
        assert done.told == [0]
        assert done.context.decided is not None
        assert done.context.decided.step == 0  # it is what peers that show up are told

    asyncio.run(main())


def test_a_coordinator_that_only_waits_notices_that_its_journal_is_gone(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "JOURNAL_S", 0.0)

    async def main() -> None:
        daemon = CoordinatorDaemon(CoordinatorOptions(MANIFEST, journal.path.parent), Events(), cast(Any, None))
        daemon.journal = journal
        watching = asyncio.create_task(daemon._watch_journal())
        await asyncio.sleep(0)
        assert not watching.done()
        delete(journal.path.parent)
        with pytest.raises(JournalGone):
            await watching

    asyncio.run(main())


def commits(journal: Journal, work: Callable[[], None]) -> int:
    statements: list[str] = []
    journal._db.set_trace_callback(statements.append)
    work()
    journal._db.set_trace_callback(None)
    return statements.count("COMMIT")


def on_disk(journal: Journal, table: str) -> int:
    with sqlite3.connect(journal.path) as db:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def note_replicas(journal: Journal, step: int, count: int = 50) -> None:
    for number in range(count):
        journal.note_replica(step, 0, f"peer{number}", "1", "d" * 64)


def test_the_replicas_of_a_step_cost_one_commit_and_are_on_disk_then(journal: Journal) -> None:
    journal.decide(decision(0))

    def work() -> None:
        note_replicas(journal, 1)
        journal.flush()
        journal.flush()

    assert commits(journal, work) == 1
    assert on_disk(journal, "replicas") == 50
    assert len(journal.replicas()) == 50
    assert set(journal.replica_digests(1)[0].values()) == {"d" * 64}


def test_late_replicas_go_with_the_next_decision_and_with_a_roll_back(journal: Journal) -> None:
    journal.set("manifest", MANIFEST.canonical())
    journal.decide(decision(0))
    note_replicas(journal, 1)
    assert commits(journal, lambda: journal.decide(decision(1))) == 1
    assert on_disk(journal, "replicas") == 50
    note_replicas(journal, 2)
    journal.roll_back(1)
    assert on_disk(journal, "replicas") == 50  # those of step 2 went back with it
    assert journal.broken_seals() == []


def test_what_was_noted_is_written_when_the_journal_is_closed(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        note_replicas(journal, 1, 3)
    with Journal(tmp_path / "journal.sqlite", read_only=True) as again:
        assert len(again.replicas()) == 3


def test_a_write_that_fails_keeps_the_replicas_for_the_next_one(journal: Journal) -> None:
    note_replicas(journal, 1, 3)
    journal.decide(decision(0))
    note_replicas(journal, 1, 5)
    with pytest.raises(Exception, match="UNIQUE"):
        journal.decide(decision(0))
    journal.decide(decision(1))
    assert on_disk(journal, "replicas") == 5
    assert journal.broken_seals() == []


def test_the_names_of_peers_that_took_part_outlive_them_and_the_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        asyncio.run(Done(journal, "anna's desktop").step())
    with Journal(path) as journal:
        assert journal.names() == {"a": "anna's desktop"}
        journal.roll_back(0)
        assert journal.names() == {"a": "anna's desktop"}
        again = Done(journal, "anna's laptop")
        again.context.tally.names = journal.names()
        asyncio.run(again.step())
        assert journal.names() == {"a": "anna's laptop"}
        assert journal.broken_seals() == []


def test_a_name_is_written_once(journal: Journal) -> None:
    tally = Tally()
    assert tally.new_names({"a": "anna", "b": ""}) == {"a": "anna"}
    assert tally.new_names({"a": "anna", "b": ""}) == {}
    assert tally.new_names({"a": "anne"}) == {"a": "anne"}


def older(path: Path) -> None:
    """Make of a journal one of the version before names and timings were kept."""
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE names")
        db.execute("DROP TABLE timings")


def test_a_journal_of_an_older_version_is_audited_and_opened(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        journal.set("manifest", MANIFEST.canonical())
    older(path)
    assert audit(tmp_path).passed
    with Journal(path, read_only=True) as journal:
        assert (journal.curve(10), journal.contributions()) == ([], {})
    with Journal(path) as journal:
        assert journal.names() == {}
        journal.decide(decision(0), {"a": "anna"})
        assert journal.curve(10)[0].seconds == 0.0
    assert not any("table names" in fault for fault in audit(tmp_path).faults)
    older(path)  # names that were written, and are not there any more
    assert 'table names: row ["a"] was removed' in audit(tmp_path).faults


def test_exclusions_outlive_restarts_and_roll_backs_and_are_sealed(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        first = journal.exclude(4, "peer", "attic", "it lied")
        journal.roll_back(0)
    with Journal(path) as journal:
        second = journal.exclude(5, "peer", "attic", "", is_lifted=True)
        assert journal.exclusions() == [first, second]
        assert (first.number, second.number) == (1, 2)
        assert journal.broken_seals() == []
        journal._db.execute("DELETE FROM exclusions WHERE number = 1")
        assert any("exclusions" in fault for fault in journal.broken_seals())
