"""`swarmtrain coordinator`: start or resume a run."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.numbers import MAX_PEERS, MAX_SECONDS, number
from swarmtrain.cli.options import (
    EventsOption,
    JsonOption,
    ManifestArgument,
    SetOption,
    StepsOption,
    TestFaultsOption,
    manifest_from,
    state_home,
)
from swarmtrain.cli.places import remember_coordinator
from swarmtrain.errors import UsageError
from swarmtrain.route.router import POLICIES


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("coordinator")(coordinator)


def coordinator(
    manifest: ManifestArgument,
    steps: StepsOption = None,
    set_: SetOption = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Journal, checkpoints and the run's key; the run resumes from it."),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Multiaddress to listen on; default: all IPv4 addresses, a free port."),
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Multiaddress that peers dial instead, for port forwarding."),
    ] = None,
    bootstrap: Annotated[list[str] | None, typer.Option(metavar="ADDRESS", help="Further bootstrap peers.")] = None,
    min_peers: Annotated[int, number(1, MAX_PEERS, help="Peers to wait for before the first step.")] = 1,
    invite_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the invite to this file, e.g. for peers in containers."),
    ] = None,
    admission: Annotated[
        str,
        typer.Option(metavar="MODE", help="Who is admitted: token, open or closed; see `swarmtrain invite`."),
    ] = "token",
    page: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Status page, API and metrics; port 0: a free one. `off`: none.")
    ] = "127.0.0.1:0",
    public_page: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="A page for everybody, without invite, metrics and downloads.")
    ] = "off",
    samples: Annotated[
        int, number(0, 1000, help="Tokens that a process of low priority here samples from each checkpoint; 0: none.")
    ] = 0,
    route: Annotated[
        str,
        typer.Option(
            metavar="POLICY", help="Routing policy for stage 0: finish-time, or swarm-latency for comparison."
        ),
    ] = "finish-time",
    rebalance: Annotated[
        str,
        typer.Option(
            metavar="RULE", help="Rule by which peers that joined with --stage auto move later: capacity or none."
        ),
    ] = "capacity",
    min_left: Annotated[int, number(1, MAX_SECONDS, help="Fewest peers that a move may leave in a stage.")] = 2,
    min_gain: Annotated[
        float, number(0, 10, help="Least gain in throughput for a move; less is enough among many peers.")
    ] = 0.15,
    min_stay: Annotated[float, number(0, MAX_SECONDS, help="Least seconds that a peer stays in a stage.")] = 60.0,
    look_every: Annotated[
        float, number(0.5, 3600, help="Seconds between two comparisons of the stages by a peer.")
    ] = 20.0,
    test_faults: TestFaultsOption = False,
    events: EventsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a run, or resume the one in STATE_DIR, and print the invite."""
    from swarmtrain.chain.rebalancing import MoveRules, RebalanceRule
    from swarmtrain.coordinator.enrolment import AdmissionRules, Mode

    run = manifest_from(manifest, set_, steps)
    for value, known, what in (
        (rebalance, tuple(RebalanceRule), "rebalancing rule"),
        (route, tuple(POLICIES), "routing policy"),
        (admission, tuple(Mode), "mode of admission"),
    ):
        if value not in known:
            raise UsageError(f"unknown {what} {value[:40]!r}", fix=f"use one of: {', '.join(known)}")
    directory = state_dir or state_home() / "runs" / f"{run.run.name}-{run.digest()[:12]}"
    from swarmtrain.cli.daemons import run_daemon
    from swarmtrain.cli.live import LiveView
    from swarmtrain.cli.live_text import run_frame, run_line
    from swarmtrain.cli.samples import SampleWriter
    from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
    from swarmtrain.observe.events import Event, Events
    from swarmtrain.observe.faults import Faults
    from swarmtrain.observe.http import checked_address
    from swarmtrain.reference import make_sampler, open_run_source

    options = CoordinatorOptions(
        manifest=run,
        state_dir=directory,
        listen=tuple(listen or ["/ip4/0.0.0.0/tcp/0"]),
        announce=tuple(announce or []),
        bootstrap=tuple(bootstrap or []),
        min_peers=min_peers,
        invite_file=invite_file,
        page=checked_address(page, "--page"),
        public_page=checked_address(public_page, "--public-page"),
        route=route,
        moves=MoveRules(RebalanceRule(rebalance), min_gain, min_left, min_stay, look_every),
        admission=AdmissionRules(Mode(admission)),
        faults=Faults.from_environment(enabled=test_faults),
    )

    daemons: list[CoordinatorDaemon] = []
    stack = contextlib.ExitStack()

    def make(sinks: Events) -> CoordinatorDaemon:
        if samples:
            sinks.add(stack.enter_context(contextlib.closing(SampleWriter(directory, samples))))
        daemons.append(CoordinatorDaemon(options, sinks, lambda item: make_sampler(item, open_run_source(item))))
        return daemons[0]

    def line(event: Event) -> str:
        return run_line(event, run, daemons[0].keeper.status.seconds_left())

    view = LiveView(sys.stdout, line, run_frame, all_events=events) if sys.stdout.isatty() and not as_json else None
    with remember_coordinator(directory), stack:
        run_daemon(make, CoordinatorDaemon.stop, view=view, state_dir=directory)
    status = daemons[0].keeper.status
    if view is not None and status.state != "complete":
        view.keep(f"stopped after step {status.step}; the peers keep their states and wait for the same command again")
