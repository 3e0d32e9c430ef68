"""Arguments and helpers that several verbs share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmtrain.cli.numbers import MAX_COUNT, MAX_THREADS, number
from swarmtrain.errors import UsageError
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import PRESETS, resolve_manifest

OFFLOADS = ("auto", "on", "off")


def preset_names(incomplete: str) -> list[str]:
    """For a shell that completes; where no preset fits, it offers files."""
    return [name for name in PRESETS if name.startswith(incomplete)]


ManifestArgument = Annotated[
    str,
    typer.Argument(
        metavar="PRESET|MANIFEST",
        help="A preset's name (see `swarmtrain presets`) or a TOML file.",
        autocompletion=preset_names,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        envvar="SWARMTRAIN_SET",
        help="Override a manifest key, as in boundary.k=8. May be repeated.",
    ),
]
CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="A checkpoint, or a directory of checkpoints, of which the newest is taken."
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option("--data", metavar="SOURCE", help="Data of the run, if it has moved; default: as in the manifest."),
]
JsonOption = Annotated[bool, typer.Option("--json", envvar="SWARMTRAIN_JSON", help="Print JSON, one object per line.")]
EventsOption = Annotated[
    bool, typer.Option("--events", help="Show every event in the terminal. Pipes get all of them, as JSON lines.")
]
TestFaultsOption = Annotated[
    bool,
    typer.Option(
        "--enable-test-faults",
        hidden=True,
        allow_from_autoenv=False,
        help="For tests: inject the faults in $SWARMTRAIN_FAULTS.",
    ),
]
ThreadsOption = Annotated[
    int | None,
    number(
        1, MAX_THREADS, "--threads", help="Compute threads; default: all cores. Results depend on it in the last bits."
    ),
]
StepsOption = Annotated[int | None, number(1, MAX_COUNT, "--steps", help="Shorthand for --set schedule.steps=N.")]


def manifest_from(text: str, overrides: list[str] | None, steps: int | None = None) -> Manifest:
    """Resolve a manifest argument with its overrides."""
    extra = [f"schedule.steps={steps}"] if steps is not None else []
    return resolve_manifest(text, [*(overrides or []), *extra])


def print_json(item: dict[str, Any]) -> None:
    """One object on one line, flushed: a program may be reading."""
    print(json.dumps(item), flush=True)


def state_home() -> Path:
    """The default directory of runs: $XDG_STATE_HOME/swarmtrain."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "swarmtrain"


def checked_offload(text: str) -> str:
    """What --offload says; UsageError if it is nothing of the kind."""
    if text not in OFFLOADS:
        raise UsageError(f"--offload is {text[:40]!r}", fix=f"use one of: {', '.join(OFFLOADS)}")
    return text


def use_threads(count: int | None) -> int:
    """Set the number of torch's threads, by default all cores; returns it."""
    import torch

    threads = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def lock_directory(path: Path) -> int:
    """Lock `path` until this process ends; UsageError if another process holds it. Returns the lock's descriptor."""
    import fcntl

    from swarmtrain.errors import StorageError

    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another directory") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"{path} is in use by another swarmtrain process", fix="choose another directory") from error
    return descriptor
