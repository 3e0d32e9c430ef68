"""`swarmtrain audit`: check a run's journal: every microbatch once per stage, all replicas equal."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import JsonOption, print_json
from swarmtrain.errors import ExitCode
from swarmtrain.terminal import say


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("audit")(audit)


def audit(
    state_dir: Annotated[Path, typer.Argument(help="A coordinator's state directory, or a local swarm's.")],
    as_json: JsonOption = False,
) -> None:
    """Prove that every microbatch was counted exactly once on every stage, and that all replicas agreed."""
    from swarmtrain.audit import audit as run_audit

    found = run_audit(state_dir)
    if as_json:
        print_json({**asdict(found), "passed": found.passed})
    else:
        say(
            f"{found.num_steps} steps, {found.num_entries} microbatches counted, "
            f"{found.num_replicas} replica digests, {found.num_checkpoints} checkpoints"
        )
        for fault in found.faults:
            say(f"WRONG: {fault}", indent="    ")
        say("passed: every microbatch once per stage, all replicas equal" if found.passed else "failed")
    if not found.passed:
        raise typer.Exit(ExitCode.DIVERGED)
