"""`swarmtrain VERB`: registers the verbs, and turns every expected error into one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from swarmtrain import __version__
from swarmtrain.cli import (
    audit,
    completion,
    coordinator,
    credit,
    doctor,
    evaluate,
    export,
    generate,
    join,
    local,
    manifests,
    plan,
    profile,
    sim,
    status,
    study,
    top,
    train,
)
from swarmtrain.cli.data import app as data_app
from swarmtrain.cli.help import App
from swarmtrain.cli.invites import app as invite_app
from swarmtrain.cli.members import app as members_app
from swarmtrain.cli.service import app as service_app
from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.observe.logs import printable

app = App(
    name="swarmtrain",
    help="Train one transformer across volunteers' machines over ordinary internet links.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "SWARMTRAIN", "help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data", help="Turn text into token shards.")
app.add_typer(invite_app, name="invite", help="Invites to the run of this machine's coordinator.")
app.add_typer(members_app, name="members", help="Members of the run of this machine's coordinator.")
app.add_typer(service_app, name="service", help="Have systemd start a peer with the machine, and again after a crash.")
VERBS = (local, coordinator, join, profile, doctor, status, credit, top, audit, train, evaluate, generate, export)
for verb in (*VERBS, study, manifests, plan, sim, completion):
    verb.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarmtrain {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        allow_from_autoenv=False,  # SWARMTRAIN_VERSION in the environment must not trigger --version
        help="Print the version.",
    ),
) -> None:
    """Train one transformer across volunteers' machines over ordinary internet links."""


def main() -> None:
    """The console script. Exit codes: see docs/errors.md."""
    completion.prepare()
    try:
        app()
    except SwarmtrainError as error:
        report(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
    except Exception:
        traceback.print_exc()
        print("ST-INTERNAL: this is a fault of swarmtrain; please report the lines above", file=sys.stderr)
        sys.exit(ExitCode.INTERNAL)


def report(error: SwarmtrainError) -> None:
    """One line: the id, what is wrong, what to do."""
    line = f"{error.error_id}: {error}"
    print(printable(f"{line} ({error.fix})" if error.fix else line), file=sys.stderr)  # may quote another machine
