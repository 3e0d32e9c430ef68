"""The study's table: one row per method, means over its seeds with their spread. As CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

from swarmtrain.study.links import LINKS, TokenCosts, seconds_per_token
from swarmtrain.study.results import RunResult


@dataclass(frozen=True)
class Row:
    """One method. Spreads are from the smallest to the largest seed; None where too few seeds finished."""

    method: str
    seeds: int
    diverged: int
    parameters: int
    tokens: int
    val_loss: float | None
    val_loss_spread: float | None
    val_loss_codec_off: float | None
    forward_bytes_per_token: float
    backward_bytes_per_token: float
    encode_decode_us_per_token: float
    compute_us_per_token: float
    hours_20mbit: float
    hours_80mbit: float
    hours_500mbit: float
    hours_100gbit: float


def rows(results: Sequence[RunResult]) -> list[Row]:
    """The table, in the order in which methods first appear."""
    compute_s = common_compute_s(results)
    return [
        _row([result for result in results if result.method == name], compute_s)
        for name in dict.fromkeys(result.method for result in results)
    ]


def common_compute_s(results: Sequence[RunResult]) -> dict[str, float]:
    """Seconds per token of one stage, by method: the median over its seeds, since a busy machine disturbs some."""
    by_method: dict[str, list[float]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result.costs.stage_s)
    return {name: statistics.median(values) for name, values in by_method.items()}


def projected_seconds(result: RunResult, compute_s: float, bytes_per_s: float, tokens: int) -> float:
    """How long `tokens` tokens take over such links."""
    costs = TokenCosts(compute_s, result.costs.codec_s, result.costs.forward_bytes, result.costs.backward_bytes)
    return tokens * seconds_per_token(costs, bytes_per_s)


def _row(results: list[RunResult], compute_s: dict[str, float]) -> Row:
    first = results[0]
    own_s = compute_s[first.method]
    losses = [result.val_loss for result in results if result.val_loss is not None]
    off = [result.val_loss_codec_off for result in results if result.val_loss_codec_off is not None]
    tokens = max(result.tokens for result in results)
    hours = {
        name: statistics.fmean(projected_seconds(result, own_s, rate, tokens) for result in results) / 3600.0
        for name, rate in LINKS.items()
    }
    return Row(
        method=first.method,
        seeds=len(results),
        diverged=sum(result.val_loss is None for result in results),
        parameters=first.num_trained,
        tokens=tokens,
        val_loss=statistics.fmean(losses) if losses else None,
        val_loss_spread=max(losses) - min(losses) if len(losses) > 1 else None,
        val_loss_codec_off=statistics.fmean(off) if off else None,
        forward_bytes_per_token=statistics.fmean(result.costs.forward_bytes for result in results),
        backward_bytes_per_token=statistics.fmean(result.costs.backward_bytes for result in results),
        encode_decode_us_per_token=1e6 * statistics.median(result.costs.codec_s for result in results),
        compute_us_per_token=1e6 * own_s,
        hours_20mbit=hours["20mbit"],
        hours_80mbit=hours["80mbit"],
        hours_500mbit=hours["500mbit"],
        hours_100gbit=hours["100gbit"],
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
    """For people: losses with their spread, bytes, times in microseconds per token, minutes per link."""
    lines = [
        "| method | seeds | parameters | validation loss | spread | codec off | bytes/token forward | backward "
        "| codec µs/token | stage µs/token | min 20 Mbit/s | 80 Mbit/s | 500 Mbit/s | 100 Gbit/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        seeds = f"{row.seeds}" + (f" ({row.diverged} diverged)" if row.diverged else "")
        minutes = [60 * hours for hours in (row.hours_20mbit, row.hours_80mbit, row.hours_500mbit, row.hours_100gbit)]
        cells = [
            f"`{row.method}`",
            seeds,
            f"{row.parameters:,}",
            _number(row.val_loss, ".4f"),
            _number(row.val_loss_spread, ".4f"),
            _number(row.val_loss_codec_off, ".4f"),
            f"{row.forward_bytes_per_token:.1f}",
            f"{row.backward_bytes_per_token:.1f}",
            f"{row.encode_decode_us_per_token:.2f}",
            f"{row.compute_us_per_token:.2f}",
            *[f"{value:.3g}" for value in minutes],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
