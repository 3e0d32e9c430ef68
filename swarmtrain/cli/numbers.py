"""Numeric options. Each has a lowest and a highest value: beyond them no verb has a meaning that anybody could want.

typer's own `min` and `max` let NaN pass, and what has only one of them lets infinity pass.
"""

from __future__ import annotations

import os
from typing import Any

import typer

from swarmtrain.units import check_between

MAX_COUNT = 10**9
MAX_PEERS = 10**6
MAX_STAGES = 1024  # of a manifest
MAX_SECONDS = 10**6 - 1  # times that peers are told must be below a million (`MoveRules`)
MAX_SEED = 2**63 - 1
MAX_GPU = 1023
MAX_THREADS = 4 * (os.cpu_count() or 1)  # more gain nothing, and a hundred thousand end in a segmentation fault
MAX_SHOWN = 10**6  # larger bounds only keep nonsense out: the help does not name them


def number(low: float, high: float, *names: str, help: str) -> Any:
    """An option that takes numbers from `low` to `high`; `UsageError` for every other."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None:
                check_between(parameter.opts[0], item, low, high)
        return value

    metavar = f"{low}..{high}" if high <= MAX_SHOWN else None
    return typer.Option(*names, help=help, metavar=metavar, callback=check)
