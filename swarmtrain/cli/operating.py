"""How the operator's verbs reach the coordinator: through the control socket in its state directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmtrain.cli.places import running
from swarmtrain.errors import UsageError

StateDirOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The coordinator's state directory; default: the one that runs on this machine."),
]


def ask_coordinator(state_dir: Path | None, command: str, **arguments: Any) -> dict[str, Any]:
    """The coordinator's answer. UsageError unless exactly one is meant."""
    from swarmtrain.observe.control import ask

    found = [state_dir] if state_dir is not None else running("coordinator")
    if len(found) != 1:
        what = "no coordinator runs" if not found else f"{len(found)} coordinators run"
        raise UsageError(f"{what} on this machine", fix="name its --state-dir")
    return asyncio.run(ask(found[0] / "control.sock", command, **arguments))
