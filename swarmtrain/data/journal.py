"""The progress of a `prepare`: its plan, the finished shards, and the position in the inputs where they end.

The journal is a file in the output directory while that is incomplete. It is replaced after each finished shard, so
after a crash the next run loses at most one shard of work. A run continues only if its plan is the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from swarmtrain.data.documents import Cursor
from swarmtrain.data.files import atomic_write, sync_directory, writing
from swarmtrain.data.index import MAX_INDEX_BYTES, MAX_SHARDS, MAX_TOKENS, ShardEntry, integer, read_json, shard_entries
from swarmtrain.errors import DataError, UsageError

JOURNAL_FILE = ".prepare.json"
START_AGAIN = "choose another --out, or remove that directory to start again"

_TEMPORARY = re.compile(r"\..*\.tmp")
_OF_AN_ATTEMPT = re.compile(r"\.prepare\.json|tokenizer\.json|tokens-\d{6}\.bin|\..*\.tmp")

Plan = Mapping[str, Any]
"""Plain JSON: the options that shape the output, and name, size and modification time of each source."""


@dataclass(frozen=True)
class PreparationJournal:
    """A resumable state. `skip`: how many tokens of the piece at `cursor` are already in finished shards;
    `documents`: how many documents ended before that piece."""

    plan: Plan
    shards: tuple[ShardEntry, ...] = ()
    cursor: Cursor = field(default_factory=Cursor)
    skip: int = 0
    documents: int = 0

    def after(self, shards: list[ShardEntry], cursor: Cursor, skip: int, documents: int) -> PreparationJournal:
        """The state at the end of the last of `shards`."""
        return replace(self, shards=tuple(shards), cursor=cursor, skip=skip, documents=documents)


def save_journal(directory: Path, journal: PreparationJournal) -> None:
    """Replace the journal; atomic."""
    atomic_write(directory / JOURNAL_FILE, (json.dumps(asdict(journal)) + "\n").encode())


def load_journal(directory: Path) -> PreparationJournal | None:
    """The journal of an interrupted run, or None. `DataError` if it is damaged."""
    path = directory / JOURNAL_FILE
    if not path.exists():
        return None
    content = read_json(path, max_bytes=MAX_INDEX_BYTES)
    plan, cursor = content.get("plan"), content.get("cursor")
    if not isinstance(plan, dict) or not isinstance(cursor, dict):
        raise DataError(f"{path}: malformed", fix=START_AGAIN)
    return PreparationJournal(
        plan=plan,
        shards=shard_entries(path, content.get("shards")),
        cursor=Cursor(
            input=integer(path, cursor, "input", 0, MAX_SHARDS),
            position=integer(path, cursor, "position", 0, MAX_TOKENS),
            line=integer(path, cursor, "line", 0, MAX_TOKENS),
            part=integer(path, cursor, "part", 0, MAX_TOKENS),
        ),
        skip=integer(path, content, "skip", 0, MAX_TOKENS),
        documents=integer(path, content, "documents", 0, MAX_TOKENS),
    )


def without_times(plan: Plan) -> dict[str, Any]:
    """The plan as the index records it: the same wherever and whenever the same files are prepared."""
    sources = [{key: source[key] for key in ("name", "bytes")} for source in plan["sources"]]
    return {**plan, "sources": sources}


def require_same_plan(directory: Path, found: Plan, wanted: Plan) -> None:
    """`UsageError` that names the first difference, unless the plans are equal."""
    for key in wanted:
        if found.get(key) != wanted[key]:
            there, here = _brief(found.get(key)), _brief(wanted[key])
            detail = f"{key}: {there} there, {here} now" if there != here else f"{key} differ"
            raise UsageError(f"{directory} was begun with other options or inputs ({detail})", fix=START_AGAIN)


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep a second `prepare` out of `directory`. The lock vanishes with the process, however it ends."""
    with writing(directory):
        descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another data prepare is writing to {directory}") from error
        except OSError:  # some network file systems cannot lock directories: go on without the protection
            pass
        yield
    finally:
        os.close(descriptor)


def open_journal(directory: Path, plan: Plan) -> PreparationJournal:
    """The journal to continue from, or a new one in a directory that holds nothing of value."""
    journal = load_journal(directory)
    if journal is not None and journal.shards:
        require_same_plan(directory, journal.plan, plan)
        return journal
    if journal is None and any(not _TEMPORARY.fullmatch(path.name) for path in directory.iterdir()):
        raise UsageError(f"{directory} is not empty and holds no token shards", fix="choose another --out")
    if journal is None or journal.plan != plan:
        _remove(directory, _OF_AN_ATTEMPT)  # it finished no shard and had other options: nothing to keep
        journal = PreparationJournal(plan)
        save_journal(directory, journal)
    return journal


def clean_up(directory: Path) -> None:
    """Remove what only an unfinished directory needs."""
    _remove(directory, re.compile(rf"{re.escape(JOURNAL_FILE)}|{_TEMPORARY.pattern}"))


def _remove(directory: Path, names: re.Pattern[str]) -> None:
    with writing(directory):
        for path in list(directory.iterdir()):
            if names.fullmatch(path.name):
                path.unlink()
        sync_directory(directory)
