"""The run's history for people, read from its journal: loss, speed and validation by step, of bounded length."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from swarmtrain.coordinator.contributions import has_table


@dataclass(frozen=True, slots=True)
class PastStep:
    """One step as the journal has it."""

    step: int  # applied steps with this one
    at: float
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float | None  # it took; journals of older versions do not say
    val_loss: float | None


def read_curve(db: sqlite3.Connection, max_points: int) -> list[PastStep]:
    """About `max_points` steps, evenly chosen, as many steps with a validation loss, and the last step."""
    num_steps, num_validations = (
        int(db.execute(query).fetchone()[0])
        for query in ("SELECT coalesce(max(step) + 1, 0) FROM steps", "SELECT count(*) FROM validations")
    )
    timings = "timings" if has_table(db, "timings") else "(SELECT NULL AS step, NULL AS seconds)"
    numbered = "SELECT step, row_number() OVER (ORDER BY step) AS number FROM validations"
    query = (
        "SELECT s.step + 1, decided_at, s.loss, grad_norm, learning_rate, seconds, v.loss FROM steps s "
        f"LEFT JOIN {timings} t ON t.step = s.step LEFT JOIN validations v ON v.step = s.step + 1 "
        "WHERE (s.step + 1) % ? = 0 OR s.step + 1 = ? "
        f"OR s.step + 1 IN (SELECT step FROM ({numbered}) WHERE number % ? = 0) ORDER BY s.step"
    )
    strides = (_stride(num_steps, max_points), num_steps, _stride(num_validations, max_points))
    return [PastStep(*row) for row in db.execute(query, strides)]


def _stride(count: int, max_points: int) -> int:
    return max(1, -(-count // max_points))
