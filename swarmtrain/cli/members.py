"""`swarmtrain members`: who is in the run, who waits to be admitted, who is excluded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swarmtrain.cli.help import App
from swarmtrain.cli.operating import StateDirOption, ask_coordinator
from swarmtrain.cli.options import JsonOption, print_json

app = App(no_args_is_help=True)

PeerArgument = Annotated[
    str,
    typer.Argument(metavar="PEER", help="Its id, the last 8 characters of it, or a name that no other has."),
]


@app.callback()
def members() -> None:
    """Who is in the run of this machine's coordinator, who waits to be admitted, who is excluded."""


@app.command("list")
def list_members(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """List members, peers that wait for you, and excluded ones."""
    answer = ask_coordinator(state_dir, "members")
    if as_json:
        print_json(answer)
        return
    from swarmtrain.terminal import print_table, say

    say(f"admission: {answer['admission']}; {answer['num_members']} members, {answer['num_excluded']} excluded")
    if answer["members"]:
        rows = [
            (row["peer"][-8:], row["name"], where(row), str(row["serial"]), f"{row['microbatches']:,}")
            for row in answer["members"]
        ]
        print_table(("PEER", "NAME", "WHERE", "SERIAL", "MICROBATCHES"), rows, num_left=3)
    for row in answer["pending"]:
        say(f"waits for you: {row['name']} {row['peer_id']}", indent="    ")
    for row in answer["excluded"]:
        say(f"excluded at step {row['step'] + 1}: {row['name']} {row['peer'][-8:]}: {row['reason']}", indent="    ")


def where(row: dict[str, Any]) -> str:
    """`stage 2, serving`; or that it is away."""
    if row["stage"] is None:
        return "away"
    return f"stage {row['stage']}, {row['state']}" + (", on probation" if row["on_probation"] else "")


@app.command("admit")
def admit(peer: PeerArgument, state_dir: StateDirOption = None) -> None:
    """Admit a peer that waits; of one that does not wait yet, give the whole id."""
    _tell(state_dir, "members.admit", "admitted", peer=peer)


@app.command("ban")
def ban(
    peer: PeerArgument,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: shown to whoever looks at the run.")] = "",
    state_dir: StateDirOption = None,
) -> None:
    """Exclude a peer by its identity, for good. Its work in open steps is done again by others."""
    _tell(state_dir, "members.ban", "excluded", peer=peer, reason=reason)


@app.command("unban")
def unban(peer: PeerArgument, state_dir: StateDirOption = None) -> None:
    """Let an excluded peer take part again."""
    _tell(state_dir, "members.unban", "readmitted", peer=peer)


@app.command("forget")
def forget(peer: PeerArgument, state_dir: StateDirOption = None) -> None:
    """Take an admission back: the peer's certificate ends, and it needs an invite that counts to come back."""
    _tell(state_dir, "members.forget", "forgotten", peer=peer)


def _tell(state_dir: Path | None, command: str, done: str, **arguments: Any) -> None:
    answer = ask_coordinator(state_dir, command, **arguments)
    print(f"{done}: {answer['peer']}")
