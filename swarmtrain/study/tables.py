"""The study's table: one row per method, means over its seeds with the lowest and the highest. As CSV and Markdown."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

from swarmtrain.study.compare import common_stage_s, loss_at, paired_gaps, projected_seconds, shortest_s
from swarmtrain.study.links import LINKS
from swarmtrain.study.results import RunResult

BASELINE = "dense"


@dataclass(frozen=True)
class Row:
    """One method. Gaps are to `dense`, between runs of the same seed. None: no run finished, or there is no baseline.

    *_at_equal_time: the loss when the first method of the table has seen all tokens over such links.
    """

    method: str
    seeds: int
    diverged: int
    diverged_at_steps: str
    parameters: int
    tokens: int
    val_loss: float | None
    val_loss_lowest: float | None
    val_loss_highest: float | None
    gap: float | None
    gap_lowest: float | None
    gap_highest: float | None
    val_loss_codec_off: float | None
    forward_bytes_per_token: float
    backward_bytes_per_token: float
    encode_decode_us_per_token: float
    compute_us_per_token: float
    hours_20mbit: float
    hours_80mbit: float
    hours_500mbit: float
    hours_100gbit: float
    val_loss_at_equal_time_20mbit: float | None
    val_loss_at_equal_time_80mbit: float | None


def rows(results: Sequence[RunResult], stage_s: float | None = None) -> list[Row]:
    """The table, in the order in which methods first appear.

    `stage_s` is a stage's computing per token, the same for all methods; without it, the median of all runs.
    """
    if not results:
        return []
    common_s = common_stage_s(results) if stage_s is None else stage_s
    ends = {name: shortest_s(results, common_s, rate) for name, rate in LINKS.items()}
    baseline = [result for result in results if result.method == BASELINE]
    return [
        _row([result for result in results if result.method == name], baseline, common_s, ends)
        for name in dict.fromkeys(result.method for result in results)
    ]


def _row(results: list[RunResult], baseline: list[RunResult], stage_s: float, ends: dict[str, float]) -> Row:
    first = results[0]
    losses = [result.val_loss for result in results if result.val_loss is not None]
    off = [result.val_loss_codec_off for result in results if result.val_loss_codec_off is not None]
    gaps = paired_gaps(results, baseline) if first.method != BASELINE else []
    tokens = max(result.tokens for result in results)
    hours = {
        name: statistics.fmean(projected_seconds(result, stage_s, rate, tokens) for result in results) / 3600.0
        for name, rate in LINKS.items()
    }
    at_equal_time = {
        name: [loss_at(result, stage_s, LINKS[name], ends[name]) for result in results] for name in ("20mbit", "80mbit")
    }
    failed = [result for result in results if result.val_loss is None]
    return Row(
        method=first.method,
        seeds=len(results),
        diverged=len(failed),
        diverged_at_steps=" ".join(str(result.steps) for result in failed),
        parameters=first.num_trained,
        tokens=tokens,
        val_loss=_mean(losses),
        val_loss_lowest=min(losses, default=None),
        val_loss_highest=max(losses, default=None),
        gap=_mean(gaps),
        gap_lowest=min(gaps, default=None),
        gap_highest=max(gaps, default=None),
        val_loss_codec_off=_mean(off),
        forward_bytes_per_token=statistics.fmean(result.costs.forward_bytes for result in results),
        backward_bytes_per_token=statistics.fmean(result.costs.backward_bytes for result in results),
        encode_decode_us_per_token=1e6 * statistics.median(result.costs.codec_s for result in results),
        compute_us_per_token=1e6 * stage_s,
        hours_20mbit=hours["20mbit"],
        hours_80mbit=hours["80mbit"],
        hours_500mbit=hours["500mbit"],
        hours_100gbit=hours["100gbit"],
        val_loss_at_equal_time_20mbit=_mean_of_all(at_equal_time["20mbit"]),
        val_loss_at_equal_time_80mbit=_mean_of_all(at_equal_time["80mbit"]),
    )


def as_csv(table: Sequence[Row]) -> str:
    """Every column, full precision; an empty cell is unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [item.name for item in fields(Row)]
    writer.writerow(names)
    for row in table:
        values = [getattr(row, name) for name in names]
        writer.writerow(["" if value is None else value for value in values])
    return text.getvalue()


def as_markdown(table: Sequence[Row]) -> str:
    """For people: losses and gaps with lowest and highest, bytes, microseconds per token, seconds per link."""
    lines = [
        "| method | parameters | validation loss (lowest - highest) | gap to `dense`, same seeds | codec off "
        "| bytes/token forward, backward | codec µs/token | seconds at 20, 80, 500 Mbit/s, 100 Gbit/s "
        "| loss at equal time, 20, 80 Mbit/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        hours = (row.hours_20mbit, row.hours_80mbit, row.hours_500mbit, row.hours_100gbit)
        equal_time = (row.val_loss_at_equal_time_20mbit, row.val_loss_at_equal_time_80mbit)
        cells = [
            f"`{row.method}`",
            f"{row.parameters:,}",
            _loss(row),
            _span(row.gap, row.gap_lowest, row.gap_highest, "+.3f"),
            _number(row.val_loss_codec_off, ".3f"),
            f"{row.forward_bytes_per_token:.1f}, {row.backward_bytes_per_token:.1f}",
            f"{row.encode_decode_us_per_token:.1f}",
            "-" if row.val_loss is None else ", ".join(f"{3600 * value:,.1f}" for value in hours),
            ", ".join(_number(value, ".3f") for value in equal_time),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _loss(row: Row) -> str:
    """The loss, or where it ended; a note if some seeds diverged."""
    if not row.diverged:
        return _span(row.val_loss, row.val_loss_lowest, row.val_loss_highest, ".3f")
    where = f"at step {row.diverged_at_steps.replace(' ', ', ')}"
    if row.val_loss is None:
        return f"diverged {where}"
    found = _span(row.val_loss, row.val_loss_lowest, row.val_loss_highest, ".3f")
    return f"{found}; {row.diverged} of {row.seeds} diverged {where}"


def _span(value: float | None, lowest: float | None, highest: float | None, form: str) -> str:
    if value is None or lowest is None or highest is None:
        return "-"
    if lowest == highest:
        return format(value, form)
    return f"{value:{form}} ({lowest:{form}} - {highest:{form}})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    """None unless every seed has a value: means over other seeds than the row's would mislead."""
    known = [value for value in values if value is not None]
    return _mean(known) if len(known) == len(values) else None
