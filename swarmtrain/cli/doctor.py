"""`swarmtrain doctor`: can this machine take part in a run, and if not, what has to be fixed?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.numbers import MAX_GPU, number
from swarmtrain.cli.options import JsonOption, print_json, state_home
from swarmtrain.cli.places import find_invite
from swarmtrain.errors import UsageError
from swarmtrain.terminal import say

if TYPE_CHECKING:
    from swarmtrain.doctor import Finding


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)


def doctor(
    invite: Annotated[
        str | None,
        typer.Argument(
            envvar="SWARMTRAIN_INVITE",
            help="The run to try; default: the coordinator of this machine, else the last run joined, else none.",
        ),
    ] = None,
    gpu: Annotated[int | None, number(0, MAX_GPU, help="Check this CUDA device instead of the CPU.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the daemon would write; default: the XDG state directory.")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Multiaddress to try; default: all IPv4 addresses, a free port."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check device, memory, disk, network daemon, ports, every bootstrap peer, clock and run; say what to fix."""
    from swarmtrain.doctor import Grade, Patient, examine, exit_code
    from swarmtrain.run.invite import parse_invite

    text = _known_invite(invite)
    patient = Patient(
        state_dir=(state_dir or state_home()).absolute(),
        gpu=gpu,
        listen=tuple(listen or ["/ip4/0.0.0.0/tcp/0"]),
        invite=parse_invite(text) if text else None,
    )
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        if as_json:
            print_json(finding.as_dict())
        else:
            say_finding(finding)

    asyncio.run(examine(patient, tell))
    num_bad = sum(finding.verdict is Grade.BAD for finding in findings)
    if as_json:
        print_json({"done": True, "bad": num_bad})
    elif num_bad:
        print(f"{num_bad} to fix before this machine can take part")
    else:
        print("this machine can take part" + ("" if text else ", as far as can be checked without an invite"))
    raise typer.Exit(exit_code(findings))


def _known_invite(given: str | None) -> str:
    """The invite that `join` would use; empty if there is none."""
    try:
        return find_invite(given)
    except UsageError:
        return ""


def say_finding(finding: Finding) -> None:
    """One line, and one for the fix."""
    indent = " " * 19
    say(f"{finding.verdict.value:<8}{finding.name:<10} {finding.detail}", indent=indent)
    if finding.fix:
        say(f"{indent}{finding.fix}", indent=indent)
