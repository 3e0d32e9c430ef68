"""The study's plots: loss against tokens, against time over a link, and against bytes. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from swarmtrain.errors import MissingExtraError
from swarmtrain.study.compare import common_stage_s, projected_seconds
from swarmtrain.study.links import LINKS
from swarmtrain.study.results import RunResult

_SIZE = (9.0, 6.0)
Position = Callable[[RunResult, int], float]  # a run's horizontal position, given a number of tokens


def draw(results: Sequence[RunResult], directory: Path, link: str, stage_s: float | None = None) -> list[Path]:
    """Write the three plots as PNG; returns their paths. `stage_s` as in `tables.rows`."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "study") from error
    matplotlib.use("Agg")
    names = list(dict.fromkeys(result.method for result in results))
    common_s = common_stage_s(results) if stage_s is None else stage_s

    def by_tokens(result: RunResult, tokens: int) -> float:
        return float(tokens)

    def by_hours(result: RunResult, tokens: int) -> float:
        return projected_seconds(result, common_s, LINKS[link], tokens) / 3600.0

    def by_bytes(result: RunResult, tokens: int) -> float:
        return tokens * (result.costs.forward_bytes + result.costs.backward_bytes)

    directory.mkdir(parents=True, exist_ok=True)
    plots = {
        "loss-tokens": ("tokens", by_tokens, False),
        f"loss-time-{link}": (f"hours over {link} links, projected", by_hours, False),
        "loss-bytes": ("bytes over one boundary, both directions", by_bytes, True),
    }
    return [
        _plot(results, names, directory / f"{name}.png", label, position, is_log)
        for name, (label, position, is_log) in plots.items()
    ]


def _plot(
    results: Sequence[RunResult], names: list[str], path: Path, label: str, position: Position, is_log: bool
) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=_SIZE, dpi=120)
    for number, name in enumerate(names):
        group = [result for result in results if result.method == name]
        xs, ys = _mean_curve(group, position)
        style = ("-", "--", ":", "-.")[number // 10 % 4]
        axes.plot(xs, ys, style, label=name, linewidth=1.4)
    axes.set_xlabel(label)
    axes.set_ylabel("validation loss, mean over seeds")
    if is_log:
        axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _mean_curve(group: list[RunResult], position: Position) -> tuple[list[float], list[float]]:
    """Points that all seeds have; a diverged run has none from there on."""
    steps = sorted(set.intersection(*[{p.step for p in run.points if p.val_loss is not None} for run in group]))
    xs, ys = [], []
    for step in steps:
        found = [(run, point) for run in group for point in run.points if point.step == step]
        xs.append(statistics.fmean(position(run, point.tokens) for run, point in found))
        ys.append(statistics.fmean(point.val_loss for _, point in found if point.val_loss is not None))
    return xs, ys
