"""`swarmtrain completion`: verbs and options at the press of Tab."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

PROGRAM = "swarmtrain"
VARIABLE = "_SWARMTRAIN_COMPLETE"  # set by the script when the shell asks


class Shell(StrEnum):
    """Shells that typer knows a script for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("completion")(completion)


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell that will read it.")],
) -> None:
    """Print a script with which a shell completes verbs and options."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value))


def prepare() -> None:
    """Have typer answer if it is a shell that asks."""
    if os.environ.get(VARIABLE):
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
