"""The journal: what the run has decided, in SQLite. A decision that is in it will be carried out, whatever crashes.

Every applied step is one row of `steps`, its books in `entries` (which peer counted which microbatch on which
stage), its replicas' digests in `replicas`. Each step's `chain` is a hash over the previous chain and everything the
step wrote, and seals.py logs every write, so that `swarmtrain audit` finds a row that was altered or removed later.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from swarmtrain import world
from swarmtrain.coordinator.contributions import Contribution, read_contributions
from swarmtrain.coordinator.curve import PastStep, read_curve
from swarmtrain.coordinator.journal_files import JournalError, JournalFiles
from swarmtrain.coordinator.roll import SCHEMA as ROLL_SCHEMA
from swarmtrain.coordinator.roll import AdmissionRow, InviteRow
from swarmtrain.coordinator.seals import SCHEMA as LOG_SCHEMA
from swarmtrain.coordinator.seals import Row, Seals, broken_seals, chain_hash

SCHEMA_VERSION = 1
DATA_DIGEST = "data_digest"  # of the run's tokens: a key of `run`, which journals of older versions lack
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
  step INTEGER PRIMARY KEY, decided_at REAL NOT NULL, term INTEGER NOT NULL, loss REAL NOT NULL,
  grad_norm REAL NOT NULL, scale REAL NOT NULL, learning_rate REAL NOT NULL, stages TEXT NOT NULL, chain TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
  step INTEGER NOT NULL, stage INTEGER NOT NULL, microbatch INTEGER NOT NULL, peer TEXT NOT NULL,
  incarnation TEXT NOT NULL, PRIMARY KEY (step, stage, microbatch));
CREATE TABLE IF NOT EXISTS losses (
  step INTEGER NOT NULL, microbatch INTEGER NOT NULL, loss REAL NOT NULL, PRIMARY KEY (step, microbatch));
CREATE TABLE IF NOT EXISTS replicas (
  step INTEGER NOT NULL, stage INTEGER NOT NULL, peer TEXT NOT NULL, incarnation TEXT NOT NULL,
  state_digest TEXT NOT NULL, PRIMARY KEY (step, stage, peer, incarnation));
CREATE TABLE IF NOT EXISTS validations (step INTEGER PRIMARY KEY, loss REAL NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL, stages TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS names (peer TEXT PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS exclusions (
  number INTEGER PRIMARY KEY, at REAL NOT NULL, step INTEGER NOT NULL, peer TEXT NOT NULL, name TEXT NOT NULL,
  reason TEXT NOT NULL, is_lifted INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS timings (step INTEGER PRIMARY KEY, seconds REAL NOT NULL);
"""


@dataclass(frozen=True)
class ExclusionRow:
    """A peer was excluded from the run, or readmitted. Rows are never deleted, and no roll-back undoes them."""

    number: int
    at: float  # seconds since the epoch
    step: int  # applied steps
    peer: str
    name: str  # what the peer called itself
    reason: str
    is_lifted: bool


@dataclass(frozen=True)
class Decision:
    """An applied step as it was decided."""

    step: int
    term: int
    loss: float
    grad_norm: float
    scale: float
    learning_rate: float
    stages: tuple[tuple[str, float], ...]  # (digest, squared norm) of every stage's reduced gradient
    entries: Mapping[int, Mapping[tuple[str, str], list[int]]]  # stage -> member -> microbatches
    losses: Mapping[int, float]
    basis: str = ""  # digest of the basis to which the subspace moves with this step

    def content(self) -> str:
        """Everything that the chain covers, in one fixed form."""
        entries = [
            [stage, peer, incarnation, sorted(microbatches)]
            for stage in sorted(self.entries)
            for (peer, incarnation), microbatches in sorted(self.entries[stage].items())
        ]
        losses = [[microbatch, self.losses[microbatch].hex()] for microbatch in sorted(self.losses)]
        stages: list[object] = [[digest, norm.hex()] for digest, norm in self.stages]
        stages += [self.basis] if self.basis else []
        numbers = [self.loss.hex(), self.grad_norm.hex(), self.scale.hex(), self.learning_rate.hex()]
        return json.dumps([self.step, self.term, numbers, stages, entries, losses])


class Journal:
    """The run's journal. One writer; `audit` reads it while it is written."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._files = None if read_only else JournalFiles(path)
        try:
            self._db = world.open_database(path, read_only=read_only)
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")  # a commit is on the disk when it returns
                self._db.executescript(_SCHEMA + ROLL_SCHEMA + LOG_SCHEMA)
            self._db.execute("SELECT count(*) FROM steps").fetchone()
        except sqlite3.Error as error:
            raise JournalError(f"cannot open the journal {path}: {error}") from error
        self._seals = Seals(self._db)
        if self._files is not None:
            self._files.note()
        self._replicas: dict[tuple[int, int, str, str], str] = {}  # noted, and not written yet

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self, *, is_lost: bool = False) -> None:
        """Write what is left, and close the file. `is_lost`: close it unwritten, as a killed process does."""
        if not is_lost:
            with contextlib.suppress(JournalError):  # a close after an error must not hide that error
                self.flush()
        self._db.close()
        if self._files is not None:
            self._files.close()

    def check_place(self) -> None:
        """JournalGone if the files that are open are not those at the journal's path any more."""
        if self._files is not None:
            self._files.check()

    def get(self, key: str) -> str | None:
        """A fact about the run."""
        row = self._db.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set(self, key: str, value: str) -> None:
        """Note a fact about the run."""
        self._put("run", (key, value))

    def num_steps(self) -> int:
        """Steps decided so far: they are 0 .. num_steps - 1."""
        row = self._db.execute("SELECT max(step) FROM steps").fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def decide(self, decision: Decision, names: Mapping[str, str] | None = None, *, seconds: float = 0.0) -> float:
        """Write a decision; when this returns it is on disk. Only a roll-back of all stages undoes it.

        `names` are the new names of peers that took part, by peer id. `seconds`: what the step took. Returns the wall
        time that is noted as the decision's.
        """
        decided_at = world.wall()
        chain = chain_hash(self.last_chain(), decision.content())
        moved = [decision.basis] if decision.basis else []
        stages = json.dumps([*([digest, norm] for digest, norm in decision.stages), *moved])
        row = (
            decision.step,
            decided_at,
            decision.term,
            decision.loss,
            decision.grad_norm,
            decision.scale,
            decision.learning_rate,
            stages,
            chain,
        )
        with self._transaction():
            self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._seals.put("steps", row)
            self._db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", _entry_rows(decision))
            self._db.executemany(
                "INSERT INTO losses VALUES (?, ?, ?)", [(decision.step, i, x) for i, x in decision.losses.items()]
            )
            for peer, name in (names or {}).items():
                self._write("names", (peer, name))
            self._write("timings", (decision.step, seconds))
        return decided_at

    def note_replica(self, step: int, stage: int, peer: str, incarnation: str, digest: str) -> None:
        """A peer's state digest after `step` applied steps. The next write or `flush` writes it: a commit
        waits for the disk, and a step has as many digests as there are peers."""
        self._replicas[step, stage, peer, incarnation] = digest

    def flush(self) -> None:
        """Write the replicas that were noted, in one transaction; when this returns they are on disk."""
        if self._replicas:
            with self._transaction():
                pass

    def note_validation(self, step: int, loss: float) -> None:
        """Validation loss after `step` applied steps."""
        self._put("validations", (step, loss))

    def validation(self, step: int) -> float | None:
        """Validation loss after `step` applied steps, if it is known."""
        row = self._db.execute("SELECT loss FROM validations WHERE step = ?", (step,)).fetchone()
        return None if row is None else float(row[0])

    def note_checkpoint(self, step: int, path: str, state_digests: list[str]) -> None:
        """A checkpoint after `step` applied steps is on disk."""
        self._put("checkpoints", (step, path, json.dumps(state_digests)))

    def last_chain(self) -> str:
        """The chain hash of the last decision."""
        row = self._db.execute("SELECT chain FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        return "" if row is None else str(row[0])

    def last_decision(self) -> Decision | None:
        """The newest decision."""
        return next((decision for decision, _ in self.decisions(from_step=self.num_steps() - 1)), None)

    def replica_digests(self, step: int) -> dict[int, dict[tuple[str, str], str]]:
        """Stage -> (peer, incarnation) -> its state digest after `step` applied steps, as far as it was reported."""
        self.flush()
        query = "SELECT stage, peer, incarnation, state_digest FROM replicas WHERE step = ?"
        found: dict[int, dict[tuple[str, str], str]] = {}
        for stage, peer, incarnation, digest in self._db.execute(query, (step,)):
            found.setdefault(stage, {})[peer, incarnation] = digest
        return found

    def decisions(self, *, from_step: int = 0) -> Iterable[tuple[Decision, str]]:
        """All decisions in order, with the chain hash that was written."""
        columns = "step, term, loss, grad_norm, scale, learning_rate, stages, chain"
        query = f"SELECT {columns} FROM steps WHERE step >= ? ORDER BY step"
        for step, term, loss, norm, scale, rate, stages, chain in self._db.execute(query, (from_step,)).fetchall():
            entries: dict[int, dict[tuple[str, str], list[int]]] = {}
            rows = self._db.execute("SELECT stage, microbatch, peer, incarnation FROM entries WHERE step = ?", (step,))
            for stage, microbatch, peer, incarnation in rows:
                entries.setdefault(stage, {}).setdefault((peer, incarnation), []).append(microbatch)
            losses = dict(self._db.execute("SELECT microbatch, loss FROM losses WHERE step = ?", (step,)).fetchall())
            written = json.loads(stages)
            basis = str(written.pop()) if written and isinstance(written[-1], str) else ""
            pairs = tuple((digest, float(squared)) for digest, squared in written)
            yield Decision(step, term, loss, norm, scale, rate, pairs, entries, losses, basis), chain

    def contributions(self, *, before: int | None = None) -> dict[str, Contribution]:
        """Peer -> what counts as its own; of the first `before` steps, if it is given."""
        return read_contributions(self._db, self.num_steps() if before is None else before)

    def names(self) -> dict[str, str]:
        """Peer -> what it called itself when it last took part in a step."""
        return dict(self._db.execute("SELECT peer, name FROM names").fetchall())

    def exclude(self, step: int, peer: str, name: str, reason: str, *, is_lifted: bool = False) -> ExclusionRow:
        """Write that a peer is excluded, or not any more; when this returns it is on disk."""
        last = self._db.execute("SELECT max(number) FROM exclusions").fetchone()[0] or 0
        row = ExclusionRow(last + 1, world.wall(), step, peer, name, reason, is_lifted)
        self._put("exclusions", (row.number, row.at, row.step, row.peer, row.name, row.reason, int(row.is_lifted)))
        return row

    def exclusions(self) -> list[ExclusionRow]:
        """All exclusions and readmissions, in order."""
        columns = "number, at, step, peer, name, reason, is_lifted"
        rows = self._db.execute(f"SELECT {columns} FROM exclusions ORDER BY number").fetchall()
        return [
            ExclusionRow(number, at, step, peer, name, reason, bool(is_lifted))
            for number, at, step, peer, name, reason, is_lifted in rows
        ]

    def note_invite(
        self, number: int, name: str, uses: int, expires_at: float, *, is_revoked: bool = False
    ) -> InviteRow:
        """Write an invite, or its revocation."""
        row = InviteRow(number, world.wall(), name, uses, expires_at, is_revoked)
        self._put("invites", (row.number, row.at, row.name, row.uses, row.expires_at, int(row.is_revoked)))
        return row

    def invites(self) -> list[InviteRow]:
        """All invites, by number."""
        columns = "number, at, name, uses, expires_at, is_revoked"
        rows = self._db.execute(f"SELECT {columns} FROM invites ORDER BY number").fetchall()
        return [
            InviteRow(number, at, name, uses, expires_at, bool(is_revoked))
            for number, at, name, uses, expires_at, is_revoked in rows
        ]

    def admit(self, peer: str, name: str, kind: str, invite: int) -> AdmissionRow:
        """Write that a peer is admitted; when this returns it is on disk."""
        last = self._db.execute("SELECT max(serial) FROM admissions").fetchone()[0] or 0
        row = AdmissionRow(last + 1, world.wall(), peer, name, str(kind), invite)
        self._put("admissions", (row.serial, row.at, row.peer, row.name, row.kind, row.invite))
        return row

    def admissions(self) -> list[AdmissionRow]:
        """All admissions, in order."""
        columns = "serial, at, peer, name, kind, invite"
        rows = self._db.execute(f"SELECT {columns} FROM admissions ORDER BY serial").fetchall()
        return [AdmissionRow(*row) for row in rows]

    def num_admitted_by(self, invite: int) -> int:
        """How many admissions an invite was spent on."""
        return int(self._db.execute("SELECT count(*) FROM admissions WHERE invite = ?", (invite,)).fetchone()[0])

    def curve(self, max_points: int) -> list[PastStep]:
        """The run's history: see `read_curve`."""
        return read_curve(self._db, max_points)

    def chain_after(self, step: int) -> str:
        """The chain hash of the decision with which `step` steps were decided; empty if there is none."""
        row = self._db.execute("SELECT chain FROM steps WHERE step = ?", (step - 1,)).fetchone()
        return "" if row is None else str(row[0])

    def replicas(self) -> list[tuple[int, int, str, str]]:
        """(step, stage, peer, state digest) of every replica at every step."""
        self.flush()
        return self._db.execute("SELECT step, stage, peer, state_digest FROM replicas ORDER BY step, stage").fetchall()

    def peers_since(self, step: int) -> list[str]:
        """Peers that have reported a state after `step` applied steps or later."""
        rows = self._db.execute("SELECT DISTINCT peer FROM replicas WHERE step >= ? ORDER BY peer", (step,))
        return [str(row[0]) for row in rows]

    def checkpoints(self) -> list[tuple[int, str, list[str]]]:
        """(step, path, state digests) of every checkpoint."""
        rows = self._db.execute("SELECT step, path, stages FROM checkpoints ORDER BY step").fetchall()
        return [(step, path, json.loads(stages)) for step, path, stages in rows]

    def roll_back(self, step: int) -> None:
        """Delete everything after `step` applied steps: the run goes on from the checkpoint of that step."""
        with self._transaction():
            for table in ("steps", "entries", "losses", "timings"):
                self._db.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))
            for table in ("replicas", "validations"):
                self._db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
            self._seals.roll_back(step)

    def broken_seals(self) -> list[str]:
        """Rows that were altered, added or removed after they were written, and entries and losses of no step."""
        faults = broken_seals(self._db)
        for table in ("entries", "losses"):
            query = f"SELECT count(*) FROM {table} WHERE step NOT IN (SELECT step FROM steps)"
            if (count := self._db.execute(query).fetchone()[0]) > 0:
                faults.append(f"table {table}: {count} rows belong to no step")
        return faults

    def _put(self, table: str, row: Row) -> None:
        with self._transaction():
            self._write(table, row)

    def _write(self, table: str, row: Row) -> None:
        """Write a row and its seal, within the caller's transaction."""
        marks = ", ".join("?" * len(row))
        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", tuple(row))
        self._seals.put(table, row)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing. At its end it is on disk, with the noted replicas, in the file at the journal's path."""
        self.check_place()
        try:
            world.check_disk(self.path)
            self._db.execute("BEGIN IMMEDIATE")
            for key, digest in self._replicas.items():
                self._write("replicas", (*key, digest))
            yield
            self._db.execute("COMMIT")
            self._replicas.clear()
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error | OSError):
                raise JournalError(f"cannot write the journal {self.path}: {error}") from error
            raise
        self.check_place()


def _entry_rows(decision: Decision) -> list[tuple[Any, ...]]:
    return [
        (decision.step, stage, microbatch, peer, incarnation)
        for stage, members in decision.entries.items()
        for (peer, incarnation), microbatches in members.items()
        for microbatch in microbatches
    ]
