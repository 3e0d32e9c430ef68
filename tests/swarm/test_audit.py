"""`swarmtrain audit`: passes on sound books, and finds every row that was altered, added or removed, in every table.

The books are made here, around a checkpoint of the reference trainer; simulated/test_equality.py audits a swarm's.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmtrain.audit import audit
from swarmtrain.cli.main import app
from swarmtrain.coordinator.journal import DATA_DIGEST, Decision, Journal
from swarmtrain.coordinator.journal_files import JournalError
from swarmtrain.errors import ExitCode
from swarmtrain.p2p.errors import StateDirectoryInUseError
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.schedule import gradient_scale, learning_rate, mean_loss

from .harness import tiny

MANIFEST = tiny("schedule.steps=3", "model.num_layers=2", "stages.count=2", "batch.microbatches_per_step=2")
PEERS = (("peerA", "a"), ("peerB", "b"))
TABLES = ("run", "steps", "entries", "losses", "replicas", "validations", "checkpoints", "names", "log")


def decision(manifest: Manifest, step: int) -> Decision:
    """Consistent numbers for a step: two peers per stage, a microbatch each."""
    squares = [0.5 + step + stage for stage in range(manifest.stages.count)]
    norm, scale = gradient_scale(manifest, squares)
    losses = {i: 5.0 - 0.1 * step + 0.01 * i for i in range(manifest.batch.microbatches_per_step)}
    return Decision(
        step=step,
        term=1,
        loss=mean_loss(list(losses.values())),
        grad_norm=norm,
        scale=scale,
        learning_rate=learning_rate(manifest, step),
        stages=tuple((f"{step:032x}{stage:032x}", square) for stage, square in enumerate(squares)),
        entries={stage: {peer: [i] for i, peer in enumerate(PEERS)} for stage in range(manifest.stages.count)},
        losses=losses,
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory whose books balance."""
    directory = tmp_path_factory.mktemp("coordinator")
    trainer = ReferenceTrainer(MANIFEST, out=directory)
    reports = list(trainer.run())
    digests = [worker.state.digest() for worker in trainer.workers]
    with Journal(directory / "journal.sqlite") as journal:
        journal.set("manifest", MANIFEST.canonical())
        journal.set("term", "1")
        journal.set(DATA_DIGEST, trainer.source.digest)
        for step in range(3):
            journal.decide(decision(MANIFEST, step), {"peerA": "anna"} if step == 1 else None)
            for stage, digest in enumerate(digests):
                for peer in PEERS:
                    journal.note_replica(step + 1, stage, *peer, digest if step == 2 else f"{step}{stage}" * 32)
        journal.note_validation(3, 4.5)
        journal.note_checkpoint(3, Path(str(reports[-1].checkpoint)).name, digests)
    return directory


@pytest.fixture
def books(sound: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def execute(directory: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(directory / "journal.sqlite")
    with db:
        assert db.execute(statement, values).rowcount == 1
    db.close()


def columns(table: str) -> list[str]:
    """The columns of a table."""
    with sqlite3.connect(":memory:") as db:
        from swarmtrain.coordinator import journal, seals

        db.executescript(journal._SCHEMA + seals.SCHEMA)
        return [row[1] for row in db.execute(f"PRAGMA table_info({table})")]


def cells() -> list[tuple[str, str]]:
    return [(table, column) for table in TABLES for column in columns(table)]


def other(value: object) -> object:
    """A value of the same type that differs as little as possible."""
    if isinstance(value, int):
        return value + 1000
    if isinstance(value, float):
        return value * (1 + 2**-50) if value else 1e-300
    text = str(value)
    return text[:-1] + ("0" if text[-1:] != "0" else "1")


def test_sound_books_pass(sound: Path) -> None:
    found = audit(sound)
    assert found.passed, found.faults
    assert (found.num_steps, found.num_entries, found.num_replicas, found.num_checkpoints) == (3, 12, 12, 1)
    assert CliRunner().invoke(app, ["audit", str(sound)]).exit_code == 0


@pytest.mark.parametrize(("table", "column"), cells())
def test_an_altered_cell_is_found(books: Path, table: str, column: str) -> None:
    db = sqlite3.connect(books / "journal.sqlite")
    for row, value in db.execute(f"SELECT rowid, {column} FROM {table}").fetchall():
        copy = Path(shutil.copytree(books, books.with_name(f"copy-{row}")))
        execute(copy, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", other(value), row)
        assert not audit(copy).passed, (table, column, row)
        shutil.rmtree(copy)
    db.close()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("order", ["ASC", "DESC"])
def test_a_removed_row_is_found(books: Path, table: str, order: str) -> None:
    execute(books, f"DELETE FROM {table} WHERE rowid = (SELECT rowid FROM {table} ORDER BY rowid {order} LIMIT 1)")
    assert not audit(books).passed


@pytest.mark.parametrize("table", TABLES)
def test_an_added_row_is_found(books: Path, table: str) -> None:
    names = columns(table)
    db = sqlite3.connect(books / "journal.sqlite")
    row = list(db.execute(f"SELECT * FROM {table} ORDER BY rowid DESC LIMIT 1").fetchone())
    db.close()
    row[0] = other(row[0])
    execute(books, f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", *row)
    assert not audit(books).passed


@pytest.mark.parametrize("value", [None, "text", b"bytes", -1, 1e999])
def test_a_cell_of_another_type_is_found_and_does_not_break_the_audit(books: Path, value: object) -> None:
    if value is None:
        execute(books, "UPDATE steps SET stages = 'null' WHERE step = 1")
    else:
        execute(books, "UPDATE steps SET loss = ? WHERE step = 1", value)
    found = audit(books)
    assert not found.passed


def test_a_microbatch_that_is_counted_twice_is_named_even_if_it_was_written_so(tmp_path: Path) -> None:
    wrong = decision(MANIFEST, 0)
    entries = {**wrong.entries, 1: {PEERS[0]: [0], PEERS[1]: [0]}}
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.set("manifest", MANIFEST.canonical())
        with pytest.raises(JournalError):  # the journal itself refuses a second claimant
            journal.decide(Decision(**{**vars(wrong), "entries": entries}))
        journal.decide(Decision(**{**vars(wrong), "entries": {**wrong.entries, 1: {PEERS[0]: [0]}}}))
    found = audit(tmp_path)
    assert found.faults == ("step 0, stage 1: microbatches [1] do not balance",)


def test_replicas_that_disagree_are_named(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.set("manifest", MANIFEST.canonical())
        journal.decide(decision(MANIFEST, 0))
        journal.note_replica(1, 0, "peerA", "a", "1" * 64)
        journal.note_replica(1, 0, "peerB", "b", "2" * 64)
    (fault,) = audit(tmp_path).faults
    assert "peerB has another state" in fault


def spoil_file(checkpoint: Path) -> None:
    path = checkpoint / "stage-001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def spoil_file_and_index(checkpoint: Path) -> None:
    """With a right hash of the wrong file."""
    import hashlib

    spoil_file(checkpoint)
    (index,) = checkpoint.glob("*.json")
    content = json.loads(index.read_text())
    name = "stage-001.safetensors"
    del content["index_digest"]
    (entry,) = [item for item in content["stages"] if item["file"] == name]
    entry["sha256"] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    index.write_text(json.dumps(content))


def cut_file(checkpoint: Path) -> None:
    path = checkpoint / "stage-000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("spoil", [spoil_file, spoil_file_and_index, cut_file])
def test_an_altered_checkpoint_is_found(books: Path, spoil: Callable[[Path], None]) -> None:
    (checkpoint,) = (books / "checkpoints").glob("step-*")
    spoil(checkpoint)
    found = audit(books)
    assert not found.passed
    assert "checkpoint of step 3" in found.faults[0]


def test_a_checkpoint_that_was_trained_on_other_data_is_found(books: Path) -> None:
    with Journal(books / "journal.sqlite") as journal:
        journal.set(DATA_DIGEST, "0" * 64)  # as if the run had been begun with other tokens
    (fault,) = audit(books).faults
    assert fault == "checkpoint of step 3: it was trained on other data than the journal's"


def test_books_of_an_older_version_do_not_know_their_data_and_pass(books: Path) -> None:
    (checkpoint,) = (books / "checkpoints").glob("step-*")
    index = json.loads((checkpoint / "checkpoint.json").read_text())
    del index["index_digest"], index["data_digest"]
    (checkpoint / "checkpoint.json").write_text(json.dumps(index))
    assert audit(books).passed


def test_a_failed_audit_has_the_exit_code_of_divergence_and_says_what_is_wrong(books: Path) -> None:
    execute(books, "UPDATE losses SET loss = loss + 1 WHERE step = 1 AND microbatch = 0")
    result = CliRunner().invoke(app, ["audit", str(books)])
    assert result.exit_code == ExitCode.DIVERGED
    assert "WRONG: step 1" in result.output
    as_json = CliRunner().invoke(app, ["audit", str(books), "--json"])
    assert json.loads(as_json.output)["passed"] is False


def test_going_back_is_no_fault_and_the_second_course_counts(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.set("manifest", MANIFEST.canonical())
        for step in range(3):
            journal.decide(decision(MANIFEST, step))
            journal.note_replica(step + 1, 0, "peerA", "a", "1" * 64)
        journal.roll_back(1)
        journal.decide(decision(MANIFEST, 1))
        journal.note_replica(2, 0, "peerA", "a", "2" * 64)
    found = audit(tmp_path)
    assert found.passed, found.faults
    assert found.num_steps == 2


def test_a_journal_has_one_writer_and_any_number_of_readers(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        journal.set("manifest", MANIFEST.canonical())
        with pytest.raises(StateDirectoryInUseError):
            Journal(path)
        assert audit(tmp_path).passed
    with Journal(path) as again:
        assert again.get("manifest") == MANIFEST.canonical()


def test_what_is_no_journal_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal"):
        audit(tmp_path)
    (tmp_path / "journal.sqlite").write_bytes(b"certainly not SQLite" * 100)
    with pytest.raises(JournalError):
        audit(tmp_path)
