"""What benchmarks share: contestants that take turns, ratios of neighbours in time, one table.

Machines get faster and slower while a benchmark runs. So contestants take turns within short rounds, in another order
each time, and a ratio compares only what ran in the same round. Given are the median of these ratios and quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.live import Live
from rich.text import Text

from swarmtrain.terminal import console

# Without a thread that redraws: it would take time from what is measured.
_LINE = Live(
    console=console(sys.stderr), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
)


@dataclass(frozen=True)
class Figure:
    """One result. `ratio` is the median; half of the rounds lie between `low` and `high`."""

    name: str
    ratio: float
    low: float
    high: float
    goal: float
    met: bool


def figure(name: str, ratios: Sequence[float], goal: float, *, at_least: bool = True) -> Figure:
    """A figure from one ratio per round; the goal is a lower bound, or an upper one with `at_least=False`."""
    low, ratio, high = quartiles(ratios)
    return Figure(name, ratio, low, high, goal, ratio >= goal if at_least else ratio <= goal)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every contestant in every round, after one round that does not count.

    `time.process_time` as clock leaves out the time that other programs had: for one thread on a busy machine.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            started = clock()
            contestants[name]()
            elapsed = clock() - started
            if number >= 0:
                seconds[name].append(elapsed)
        progress(f"round {number + 1} of {rounds}")
    progress("")
    return seconds


def speed_ratios(seconds: Mapping[str, Sequence[float]], name: str, baseline: str) -> list[float]:
    """How many times as fast as `baseline` `name` was, in each round."""
    return [theirs / own for own, theirs in zip(seconds[name], seconds[baseline], strict=True)]


def progress(text: str) -> None:
    """Show what is going on in the last line of a terminal; an empty text takes the line away."""
    if not _LINE.console.is_interactive:
        return
    if text:
        _LINE.start()
        _LINE.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
    else:
        _LINE.stop()


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="one JSON object per figure instead of a table")
    return options


def report(figures: Sequence[Figure], *, as_json: bool, notes: Sequence[str] = ()) -> None:
    """Print the results."""
    if as_json:
        for item in figures:
            print(json.dumps(asdict(item)), flush=True)
        return
    width = max(len(item.name) for item in figures)
    print(f"{'figure':<{width}}  {'ratio':>7}  {'quartiles':>15}  {'goal':>6}  met")
    for item in figures:
        spread = f"{item.low:.3f} - {item.high:.3f}"
        print(f"{item.name:<{width}}  {item.ratio:>7.3f}  {spread:>15}  {item.goal:>6g}  {'yes' if item.met else 'no'}")
    for note in notes:
        print(note)
