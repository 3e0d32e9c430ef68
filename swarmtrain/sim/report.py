"""Results as text, JSON, CSV and plots."""

from __future__ import annotations

import csv
import os
import textwrap
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from swarmtrain.errors import MissingExtraError, StorageError
from swarmtrain.sim.meters import CAUSES
from swarmtrain.sim.run import Result, Sample
from swarmtrain.units import show_size


def as_dict(result: Result) -> dict[str, Any]:
    """Everything that matters, for --json. Rates are microbatches per second."""
    scenario = asdict(result.scenario)
    for heavy in ("mix", "layout", "trace"):
        scenario.pop(heavy)
    return {
        "scenario": scenario,
        "efficiency": round(result.efficiency, 4),
        "throughput": result.throughput,
        "bound": result.bound,
        "assigned": result.assigned,
        "mean_delay_s": round(result.mean_delay_s, 3),
        "mean_queue_s": round(result.mean_queue_s, 3),
        "bytes_per_microbatch": round(result.bytes_per_microbatch),
        "shares": {cause: round(share, 4) for cause, share in result.shares().items()},
        "events": result.events,
        "steps": result.num_steps,
        "trace_digest": f"{result.trace_digest:08x}",
        "simulated_events": result.num_events,
        "cpu_s": round(result.cpu_s, 1),
    }


_COLUMN = 18  # where values begin


def as_text(result: Result) -> str:
    """One screen of at most 80 columns."""
    scenario = result.scenario
    hours = (scenario.minutes - scenario.warmup_minutes) / 60.0
    idle = {cause: share for cause, share in result.shares().items() if cause not in ("useful", "wasted")}
    lines = [
        f"{scenario.num_peers} peers, {scenario.num_stages} stages, {scenario.minutes:g} minutes"
        f" ({scenario.warmup_minutes:g} of warm-up), seed {scenario.seed}",
        f"policies: routing {scenario.routing}, rebalancing {scenario.rebalance}",
        "",
        f"throughput        {result.throughput:10.3f} microbatches/s",
        f"upper bound       {result.bound:10.3f}   reached: {result.efficiency:.1%}",
        f"weakest stage     {result.assigned:10.3f}   of the bound: {result.assigned / (result.bound or 1.0):.1%}",
        f"time of machines  useful {result.shares()['useful']:.1%}, wasted {result.shares()['wasted']:.1%}, idle: "
        + ", ".join(f"{cause} {share:.1%}" for cause, share in idle.items()),
        f"one microbatch    {result.mean_delay_s:.1f} s, of which {result.mean_queue_s:.1f} s in queues;"
        f" {show_size(result.bytes_per_microbatch)} on the wire",
    ]
    if result.num_steps:
        lines.append(f"optimizer steps   {result.num_steps}")
    if result.events:
        lines.append("events per hour   " + ", ".join(f"{k} {v / hours:.0f}" for k, v in result.events.items()))
    lines.append(f"trace {result.trace_digest:08x}, {result.num_events} events in {result.cpu_s:.1f} s of CPU")
    return "\n".join(_folded(line) for line in lines)


def _folded(line: str) -> str:
    return textwrap.fill(line, 80, subsequent_indent=" " * _COLUMN, break_on_hyphens=False) if line else ""


TABLE_HEADERS = ("stages", "peers", "policies", "of the bound", "weakest", "moves/h")


def table_rows(results: list[Result]) -> list[tuple[str, ...]]:
    """One row per run under `TABLE_HEADERS`; runs that differ in their seed only share a row: mean and extremes."""
    groups: dict[tuple[int, int, str], list[Result]] = {}
    for result in results:
        key = (result.scenario.num_stages, result.scenario.num_peers, label(result))
        groups.setdefault(key, []).append(result)
    rows: list[tuple[str, ...]] = []
    for (num_stages, num_peers, name), group in groups.items():
        shares = sorted(result.efficiency for result in group)
        mean = sum(shares) / len(shares)
        spread = f" ({shares[0]:.3f}-{shares[-1]:.3f})" if len(shares) > 1 else ""
        assigned = sum(result.assigned / (result.bound or 1.0) for result in group) / len(group)
        hours = sum(result.scenario.minutes - result.scenario.warmup_minutes for result in group) / 60.0
        moves = sum(result.events.get("moves", 0) for result in group) / hours
        rows.append((str(num_stages), str(num_peers), name, f"{mean:.3f}{spread}", f"{assigned:.3f}", f"{moves:.0f}"))
    return rows


def check_out(directory: Path) -> None:
    """Refuse a directory that cannot be written to, and plots that cannot be drawn, before anything is simulated."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "study") from error
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise StorageError(f"cannot write to {directory}: {error.strerror}", fix="choose another --out") from error


SUMMARY_COLUMNS = [
    "num_peers",
    "num_stages",
    "minutes",
    "seed",
    "routing",
    "rebalance",
    "rebalance_period_s",
    "download_s",
    "speed_spread",
    "mean_life_s",
    "efficiency",
    "throughput",
    "bound",
    "assigned",
    "moves",
    "bytes_per_microbatch",
    "mean_delay_s",
]


def summary_row(result: Result) -> dict[str, Any]:
    """One line of the summary table: what was simulated, what came out."""
    row = {name: getattr(result.scenario, name) for name in SUMMARY_COLUMNS[:10]}
    row |= {
        "efficiency": f"{result.efficiency:.4f}",
        "throughput": f"{result.throughput:.5g}",
        "bound": f"{result.bound:.5g}",
        "assigned": f"{result.assigned:.5g}",
        "moves": result.events.get("moves", 0),
        "bytes_per_microbatch": f"{result.bytes_per_microbatch:.0f}",
        "mean_delay_s": f"{result.mean_delay_s:.1f}",
    }
    return row | {f"share {cause}": f"{share:.4f}" for cause, share in result.shares().items()}


def write_csv(results: list[Result], directory: Path) -> list[Path]:
    """`summary.csv` with one line per run, `samples-N.csv` with each run over time. Returns the files written."""
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        columns = [*SUMMARY_COLUMNS, *(f"share {cause}" for cause in CAUSES)]
        written.append(_write_table(directory / "summary.csv", columns, [summary_row(result) for result in results]))
        for number, result in enumerate(results):
            rows = [asdict(sample) for sample in result.samples]
            path = directory / f"samples-{number}.csv"
            written.append(_write_table(path, [entry.name for entry in fields(Sample)], rows))
    except OSError as error:
        raise StorageError(f"cannot write to {directory}: {error.strerror}", fix="choose another --out") from error
    return written


def _write_table(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> Path:
    temporary = path.with_suffix(".csv.part")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)
    return path


def label(result: Result) -> str:
    """The name of a run in a plot."""
    scenario = result.scenario
    rule = scenario.rebalance
    if rule == "queue":
        rule += f" {scenario.rebalance_period_s:g} s"
    return f"{rule}, {scenario.routing}"


def write_plots(results: list[Result], directory: Path) -> list[Path]:
    """`time.svg`: throughput over time. `shares.svg`: where machines' time went. `stages.svg`, if stages vary."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("matplotlib", "study") from error
    matplotlib.rcParams["svg.hashsalt"] = "swarmtrain"  # the same results give the same files
    written = [_plot_time(pyplot, results, directory), _plot_shares(pyplot, results, directory)]
    if len({result.scenario.num_stages for result in results}) > 1:
        written.append(_plot_stages(pyplot, results, directory))
    return written


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _plot_time(pyplot: Any, results: list[Result], directory: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for result in results:
        samples = result.samples
        interval = samples[1].time_s - samples[0].time_s if len(samples) > 1 else 60.0
        minutes = [sample.time_s / 60.0 for sample in samples]
        shares = [sample.finished / interval / sample.bound if sample.bound else 0.0 for sample in samples]
        axes.plot(minutes, shares, label=f"{result.scenario.num_stages} stages, {label(result)}", linewidth=1.0)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="minutes", ylabel="share of the upper bound", ylim=(0.0, 1.15))
    axes.legend(fontsize=7)
    return _save(pyplot, figure, directory / "time.svg")


def _plot_shares(pyplot: Any, results: list[Result], directory: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.35 * len(results)))
    names = [f"{result.scenario.num_stages} stages, {label(result)}" for result in results]
    left = [0.0] * len(results)
    for cause in CAUSES:
        widths = [result.shares()[cause] for result in results]
        axes.barh(range(len(results)), widths, left=left, label=cause)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(results)), names, fontsize=7)
    axes.set(xlabel="share of the machines' time", xlim=(0.0, 1.0))
    axes.legend(fontsize=7, ncols=len(CAUSES), loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return _save(pyplot, figure, directory / "shares.svg")


def _plot_stages(pyplot: Any, results: list[Result], directory: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    curves: dict[str, dict[int, list[float]]] = {}
    for result in results:
        curves.setdefault(label(result), {}).setdefault(result.scenario.num_stages, []).append(result.efficiency)
    for name, points in curves.items():
        stages = sorted(points)
        axes.plot(stages, [sum(points[s]) / len(points[s]) for s in stages], marker="o", label=name)
    axes.axhline(0.95, color="black", linewidth=0.8, linestyle="dotted")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts := sorted({stages for points in curves.values() for stages in points}), counts)
    axes.set(xlabel="stages", ylabel="share of the upper bound", ylim=(0.0, 1.05))
    axes.legend(fontsize=8)
    return _save(pyplot, figure, directory / "stages.svg")
