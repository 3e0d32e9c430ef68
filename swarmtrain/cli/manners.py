"""How `join` treats the machine that it runs on: its threads, behind which other programs, which names it looks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import psutil

from swarmtrain.errors import UsageError

MAX_PROGRAMS, MAX_NAME = 32, 80


def usual_threads() -> int:
    """The processor's cores that this process may use, less one for the machine's owner; at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or usable, usable) - 1)


def step_back(nice: int) -> None:
    """Let other programs go first, for the processor and for the disk; children inherit it. 0 changes nothing.

    Where a system has no such priority, or a container forbids it, the daemon runs as it is.
    """
    if not nice:
        return
    process = psutil.Process()
    with contextlib.suppress(psutil.Error, OSError):
        process.nice(max(nice, int(process.nice())) if os.name == "posix" else psutil.BELOW_NORMAL_PRIORITY_CLASS)
    with contextlib.suppress(psutil.Error, OSError, AttributeError, ValueError):
        process.ionice(psutil.IOPRIO_CLASS_BE, 7)


def checked_programs(names: Iterable[str]) -> tuple[str, ...]:
    """The names to look for. UsageError for one that no program has."""
    found = tuple(names)
    if len(found) > MAX_PROGRAMS:
        raise UsageError(f"--pause-while names {len(found)} programs", fix=f"name at most {MAX_PROGRAMS}")
    for name in found:
        if not name.strip() or len(name) > MAX_NAME:
            raise UsageError(f"--pause-while {name[:40]!r} is not the name of a program", fix="write it as game.exe")
    return found
