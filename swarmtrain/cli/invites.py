"""`swarmtrain invite`: invites to a run that can be counted, limited and revoked."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swarmtrain.cli.help import App
from swarmtrain.cli.numbers import MAX_COUNT, number
from swarmtrain.cli.operating import StateDirOption, ask_coordinator
from swarmtrain.cli.options import JsonOption, print_json
from swarmtrain.units import parse_duration

app = App(no_args_is_help=True)


@app.callback()
def invite() -> None:
    """Invites to the run of this machine's coordinator."""


@app.command("list")
def list_invites(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """List the invites: for whom, how often used, and whether they still admit anybody. Number 0 is the run's own."""
    answer = ask_coordinator(state_dir, "invites")
    if as_json:
        print_json(answer)
        return
    from swarmtrain.terminal import print_table

    rows = [
        (str(row["number"]), _whose(row), row["why_not"] or "counts", f"{row['used']}/{row['uses'] or 'any'}")
        for row in answer["invites"]
    ]
    print_table(("NUMBER", "FOR", "STATE", "USED"), rows, num_left=3)


def _whose(row: dict[str, Any]) -> str:
    return "the run's own" if row["number"] == 0 else str(row["name"])


@app.command("make")
def make(
    name: Annotated[
        str,
        typer.Option(
            "--for", metavar="NAME", envvar="SWARMTRAIN_INVITE_MAKE_FOR", help="For whom; shown in lists and events."
        ),
    ] = "",
    uses: Annotated[int, number(0, MAX_COUNT, help="How many peers it admits; 0: any number.")] = 1,
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long it counts, as 12h or 7d; `never`.")] = "7d",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an invite and print it. Give it to one person, over a channel that you trust: it contains a secret."""
    lasts_s = 0.0 if expires == "never" else parse_duration(expires)
    _show(ask_coordinator(state_dir, "invites.make", name=name, uses=uses, lasts_s=lasts_s), as_json=as_json)


@app.command("revoke")
def revoke(
    which: Annotated[int, typer.Argument(metavar="NUMBER", help="As `swarmtrain invite list` shows it.")],
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have an invite admit nobody from now on. Peers that it has admitted stay; see `swarmtrain members forget`."""
    answer = ask_coordinator(state_dir, "invites.revoke", number=which)
    if as_json:
        print_json(answer)
    else:
        print(f"revoked: invite {answer['number']}")


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print(answer["invite"])
