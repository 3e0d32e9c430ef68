"""What each peer has contributed, as the journal's books say it: by stage, by day, and in which time."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime


@dataclass
class Contribution:
    """Decided microbatches of one peer. Each counts once on each stage that the peer computed it on."""

    stages: Counter[int] = field(default_factory=Counter)
    days: Counter[str] = field(default_factory=Counter)  # by the UTC date on which their step was decided
    seconds: float = 0.0  # of the steps in which it had a part

    @property
    def microbatches(self) -> int:
        """Over all stages."""
        return self.stages.total()

    def add(self, counts: Iterable[tuple[int, int]], at: float, seconds: float) -> None:
        """A step was decided at wall time `at` and took `seconds`; `counts` are its microbatches here, by stage."""
        day = day_of(at)
        for stage, count in counts:
            self.stages[stage] += count
            self.days[day] += count
        self.seconds += seconds


def day_of(at: float) -> str:
    """The UTC date of a wall time: `2026-11-19`."""
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def read_contributions(db: sqlite3.Connection, num_steps: int) -> dict[str, Contribution]:
    """By peer, over the first `num_steps` steps of an open journal. One pass over their entries."""
    found: dict[str, Contribution] = {}
    query = (
        "SELECT peer, stage, date(decided_at, 'unixepoch'), count(*) FROM entries JOIN steps USING (step) "
        "WHERE step < ? GROUP BY 1, 2, 3"
    )
    for peer, stage, day, count in db.execute(query, (num_steps,)):
        contribution = found.setdefault(peer, Contribution())
        contribution.stages[stage] += count
        contribution.days[day] += count
    if has_table(db, "timings"):
        parts = "SELECT DISTINCT peer, step FROM entries WHERE step < ?"
        query = f"SELECT peer, sum(seconds) FROM ({parts}) JOIN timings USING (step) GROUP BY 1"
        for peer, seconds in db.execute(query, (num_steps,)):
            if peer in found:
                found[peer].seconds = seconds
    return found


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Whether the journal has this table: one of an older version may lack it, until a coordinator opens it."""
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    return bool(db.execute(query, (name,)).fetchone()[0])
