"""`swarmtrain doctor`: can this machine take part in a run, and if not, what has to be fixed?"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.numbers import MAX_GPU, number
from swarmtrain.cli.options import (
    JsonOption,
    SetOption,
    ThreadsOption,
    checked_offload,
    manifest_from,
    print_json,
    state_home,
    use_threads,
)
from swarmtrain.cli.places import find_invite
from swarmtrain.errors import UsageError
from swarmtrain.terminal import say
from swarmtrain.units import show_gb

if TYPE_CHECKING:
    from swarmtrain.doctor import Finding
    from swarmtrain.run.manifest import Manifest
    from swarmtrain.trial import Measured

MAX_STAGE = 1023


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
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Try a stage of this preset or manifest instead: a microbatch, time and memory."
        ),
    ] = None,
    stage: Annotated[int, number(0, MAX_STAGE, help="With --preset: the stage to try.")] = 0,
    offload: Annotated[
        str, typer.Option(metavar="auto|on|off", help="With --preset and --gpu: as with `join`.")
    ] = "auto",
    threads: ThreadsOption = None,
    set_: SetOption = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the daemon would write; default: the XDG state directory.")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Multiaddress to try; default: all IPv4 addresses, a free port."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check device, memory, disk, network daemon, ports, every bootstrap peer, clock and run; say what to fix.

    With --preset: try one stage of it, without a network.
    """
    if preset is not None:
        _try(manifest_from(preset, set_), stage, gpu, checked_offload(offload), threads, as_json=as_json)
        return
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


def _try(run: Manifest, stage: int, gpu: int | None, offload: str, threads: int | None, *, as_json: bool) -> None:
    """One stage on this machine, in lines as they come."""
    from swarmtrain.native.bf16 import require_bf16
    from swarmtrain.peer.options import choose_device
    from swarmtrain.trial import try_stage

    device = choose_device(gpu)
    if run.is_rounded:
        require_bf16(device)
    use_threads(threads)

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True) if as_json else say(text)

    found = try_stage(run, stage, device, offload, note)
    if as_json:
        own = {"microbatch_s": found.microbatch_s, "tflops": found.tflops, "share_of_peak": found.share_of_peak}
        memory = {"device_bytes": found.device_bytes, "host_bytes": found.host_bytes}
        print_json({"stage": stage, **own, "measured": memory, "promised": found.way.as_dict()})
        return
    for line in trial_lines(found):
        say(line)


def trial_lines(found: Measured) -> list[str]:
    """What a trial came to, in lines."""
    told = found.way
    kept = "all on the device" if told.offload == 0 else f"{told.offload.name.lower()} on the host"
    how = kept + (", layers computed again" if told.recomputes else "")
    on_device = f"{show_gb(found.device_bytes)} of {show_gb(told.device_bytes)} told in advance"
    on_host = f"{show_gb(found.host_bytes)} of {show_gb(told.host_bytes)} told in advance"
    lines = [
        f"built        {found.build_s:,.1f} s, {found.num_parameters:,} parameters",
        f"microbatch   {found.microbatch_s:,.2f} s, {found.tokens / found.microbatch_s:,.0f} tokens/s; {how}",
        f"host memory  {on_host}",
        f"speed        {found.tflops:.3g} TFLOP/s, {found.share_of_peak:.0%} of a plain product's"
        f" {found.peak_tflops:.3g}",
    ]
    if found.device_bytes:
        lines.insert(2, f"device       {on_device}")
    return lines


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
