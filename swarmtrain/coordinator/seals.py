"""The journal's log of its own writes: each entry is chained to the one before, and the head is noted apart.

So no row of the journal can be altered, added or removed later without `swarmtrain audit` finding it. The log names a
row by its table and key and holds the hash of its content; what was rolled back is logged as such.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence

# How many leading columns are a row's key, for every table whose rows are logged one by one. The microbatches and
# losses of a step are covered by the step's own chain hash.
KEY_COLUMNS = {
    "run": 1,
    "steps": 1,
    "replicas": 4,
    "validations": 1,
    "checkpoints": 1,
    "names": 1,
    "exclusions": 1,
    "timings": 1,
    "invites": 1,
    "admissions": 1,
}
# Tables that a journal lacks until a coordinator of this version opens it.
ADDED_LATER = ("names", "exclusions", "timings", "invites", "admissions")
HEAD = "log_head"  # the row of `run` that is no part of the log: it names the log's last entry
SCHEMA = "CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY, entry TEXT NOT NULL, chain TEXT NOT NULL);"

Row = Sequence[object]


class Seals:
    """Writes the log. A call must be in the transaction of the write that it seals."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def put(self, table: str, row: Row) -> None:
        """A row was written."""
        self._add(["put", table, *_named(table, row)])

    def roll_back(self, step: int) -> None:
        """Everything after `step` applied steps was deleted."""
        self._add(["roll_back", step])

    def _add(self, entry: list[object]) -> None:
        last = self._db.execute("SELECT number, chain FROM log ORDER BY number DESC LIMIT 1").fetchone()
        number, before = (0, "") if last is None else last
        text = json.dumps(entry)
        chain = chain_hash(before, text)
        self._db.execute("INSERT INTO log VALUES (?, ?, ?)", (number + 1, text, chain))
        self._db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (HEAD, f"{number + 1} {chain}"))


def chain_hash(previous: str, content: str) -> str:
    """Hash of an entry and, through `previous`, of all entries before it."""
    return hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()


def broken_seals(db: sqlite3.Connection) -> list[str]:
    """What is wrong with the log, or with the rows that it covers."""
    try:
        expected, faults = _replay(db)
        for table in KEY_COLUMNS:
            faults += _compare(db, table, {key: content for (name, key), content in expected.items() if name == table})
    except (sqlite3.Error, ValueError, TypeError, KeyError, IndexError) as error:
        return [f"the journal's log or a row that it names cannot be read: {error}"]
    return faults


def _compare(db: sqlite3.Connection, table: str, expected: dict[str, str]) -> list[str]:
    """The differences between the rows of a table and what the log says of them."""
    faults: list[str] = []
    found: set[str] = set()
    for row in _rows(db, table):
        if row[0] == HEAD:
            continue
        key, content = _named(table, row)
        found.add(key)
        if key not in expected:
            faults.append(f"table {table}: row {key} was added later")
        elif expected[key] != content:
            faults.append(f"table {table}: row {key} was altered after it was written")
    return faults + [f"table {table}: row {key} was removed" for key in expected if key not in found]


def _rows(db: sqlite3.Connection, table: str) -> Iterable[Row]:
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    if table in ADDED_LATER and not db.execute(query, (table,)).fetchone()[0]:
        return ()
    return db.execute(f"SELECT * FROM {table}")


def _replay(db: sqlite3.Connection) -> tuple[dict[tuple[str, str], str], list[str]]:
    """(what each row must hash to, faults of the log itself)."""
    faults: list[str] = []
    expected: dict[tuple[str, str], str] = {}
    last, chain = 0, ""
    for number, text, written in db.execute("SELECT number, entry, chain FROM log ORDER BY number"):
        if number != last + 1:
            faults.append(f"table log: entries {last + 1} to {number - 1} were removed")
        last, chain = number, chain_hash(chain, text)
        if chain != written:
            faults.append(f"table log: entry {number} or one before it was altered")
            chain = written
        entry = json.loads(text)
        if entry[0] == "put":
            expected[entry[1], entry[2]] = entry[3]
        else:
            expected = {name: content for name, content in expected.items() if not _is_undone(name, entry[1])}
    head = db.execute("SELECT value FROM run WHERE key = ?", (HEAD,)).fetchone()
    if head is None or head[0] != f"{last} {chain}":
        faults.append("table log: its end is not the noted one")
    return expected, faults


def _is_undone(name: tuple[str, str], step: int) -> bool:
    """Whether going back to `step` applied steps removed this row: see `Journal.roll_back`."""
    table, key = name
    if table not in ("steps", "timings", "replicas", "validations"):
        return False
    first = int(json.loads(key)[0])
    return first >= step if table in ("steps", "timings") else first > step


def _named(table: str, row: Row) -> tuple[str, str]:
    """(key, hash of the content) of a row."""
    key = json.dumps(list(row[: KEY_COLUMNS[table]]))
    return key, hashlib.sha256(json.dumps(list(row)).encode()).hexdigest()
