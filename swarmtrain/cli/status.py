"""`swarmtrain status`, `drain`, `pause` and `resume`: commands for the daemons of this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import JsonOption, print_json
from swarmtrain.cli.places import running
from swarmtrain.cli.status_text import status_lines
from swarmtrain.errors import UsageError
from swarmtrain.terminal import say

StateDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The daemon's state directory; default: all on this machine.")
]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command("status")(status)
    app.command("drain")(drain)
    app.command("pause")(pause)
    app.command("resume")(resume)
    app.command("page")(page)


def status(state_dir: StateDir = None, as_json: JsonOption = False) -> None:
    """Show what the daemons on this machine do, and why. A daemon that does not answer is an error only if named."""
    from swarmtrain.observe.control import ControlError, ask

    for directory in _directories(state_dir):
        try:
            answer = asyncio.run(ask(directory / "control.sock", "status"))
        except ControlError as error:
            if state_dir is not None:
                raise
            answer = {"kind": "unknown", "state": "not answering", "reason": str(error), "state_dir": str(directory)}
        if as_json:
            print_json(answer)
            continue
        for line in status_lines(answer):
            say(line, indent="    ")


def drain(state_dir: StateDir = None) -> None:
    """Have the peers of this machine finish their step and leave."""
    _tell_peers(state_dir, "drain", "draining")


def pause(state_dir: StateDir = None) -> None:
    """Have the peers of this machine finish their work and take no new work until `resume`."""
    _tell_peers(state_dir, "pause", "paused")


def resume(state_dir: StateDir = None) -> None:
    """Have paused peers of this machine serve again."""
    _tell_peers(state_dir, "resume", "resumed")


def page(
    state_dir: StateDir = None,
    show: Annotated[
        bool,
        typer.Option(
            "--open/--no-open", envvar="SWARMTRAIN_PAGE_OPEN", help="Open it in a browser, if this is a terminal."
        ),
    ] = True,
) -> None:
    """Print the address of this machine's peer's own page: what it does and why, what it gave, its limits to change."""
    import sys
    import webbrowser

    from swarmtrain.observe.control import ask

    for directory in _directories(state_dir, "peer"):
        url = str(asyncio.run(ask(directory / "control.sock", "page"))["url"])
        print(url)
        if show and sys.stdout.isatty():
            webbrowser.open(url)


def _tell_peers(state_dir: Path | None, command: str, done: str) -> None:
    from swarmtrain.observe.control import ask

    for directory in _directories(state_dir, "peer"):
        answer = asyncio.run(ask(directory / "control.sock", command))
        print(f"{done} {directory.name}")
        if answer.get("is_only"):
            say("  it alone has its stage's state: leave it running until the run has a checkpoint (`status` says so)")
        if reason := answer.get("pause"):
            say(f"  it still pauses: {reason}")


def _directories(state_dir: Path | None, kind: str | None = None) -> list[Path]:
    found = [state_dir] if state_dir is not None else running(kind)
    if not found:
        raise UsageError("no swarmtrain daemon runs on this machine", fix="start one, or name its --state-dir")
    return found
