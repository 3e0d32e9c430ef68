"""A receipt for people. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from swarmtrain.observe.events import called
from swarmtrain.units import show_count, show_duration

MAX_DAYS = 7  # shown; --json has all


def receipt_lines(receipt: Mapping[str, Any], note: str) -> list[str]:
    """Who, what, where, when. May contain control characters: print with `say`."""
    share, seconds = 100 * receipt["share"], receipt["seconds"]
    issued = time.strftime("%Y-%m-%d %H:%M", time.localtime(receipt["issued_at"]))
    return [
        f"{called(receipt['peer'], receipt['name'])} of {receipt['run_name']}, run {receipt['run']}, "
        f"after step {receipt['step']} ({issued})",
        f"  {receipt['microbatches']:,} microbatches, {show_count(receipt['tokens'])} tokens, "
        f"{share:.3g} % of the run's work, in {show_duration(seconds)} of steps",
        "  by stage: " + ", ".join(f"stage {stage} {count:,}" for stage, count in _in_order(receipt["stages"])),
        "  by day: " + _days(receipt["days"]),
        f"  receipt: {note}",
    ]


def _in_order(stages: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(stages.items(), key=lambda item: (len(item[0]), item[0]))


def _days(days: Mapping[str, int]) -> str:
    from swarmtrain.chain.receipt import EARLIER

    newest = sorted(day for day in days if day != EARLIER)[-MAX_DAYS:]
    before = sum(days.values()) - sum(days[day] for day in newest)
    named = [f"{day} {days[day]:,}" for day in newest]
    return ", ".join([*([f"earlier {before:,}"] if before else []), *named])
