"""Numeric options, each with a lowest and a highest value.

typer's own `min` and `max` accept NaN, and infinity where only one of them is given.
"""

from __future__ import annotations

import os
from typing import Any

import typer

from swarmtrain.units import check_between

MAX_COUNT = 10**9
MAX_PEERS = 10**6
MAX_STAGES = 1024  # of a manifest
MAX_SECONDS = 10**6 - 1  # times that are sent to peers must be below a million (`MoveRules`)
MAX_SEED = 2**63 - 1
MAX_GPU = 1023
MAX_THREADS = 4 * (os.cpu_count() or 1)  # more threads gain nothing, and a hundred thousand end in a segmentation fault
MAX_SHOWN = 10**6  # larger bounds only reject nonsense: the help does not show them


def number(low: float, high: float, *names: str, help: str) -> Any:
    """An option that takes numbers from `low` to `high`; `UsageError` for all others."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None:
                check_between(parameter.opts[0], item, low, high)
        return value

    metavar = f"{low}..{high}" if high <= MAX_SHOWN else None
    return typer.Option(*names, help=help, metavar=metavar, callback=check)
