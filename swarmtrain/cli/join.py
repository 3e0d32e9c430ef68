"""`swarmtrain join`: host one stage of a run."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.manners import checked_programs, step_back, usual_threads
from swarmtrain.cli.numbers import MAX_GPU, MAX_SECONDS, MAX_THREADS, number
from swarmtrain.cli.options import EventsOption, JsonOption, TestFaultsOption, checked_offload, state_home
from swarmtrain.cli.places import find_invite, remember_invite, remember_peer
from swarmtrain.cli.profile import ProfileOption, is_from_profile
from swarmtrain.courtesy.hours import parse_hours, parse_zone
from swarmtrain.courtesy.rules import Rules
from swarmtrain.courtesy.traffic import MAX_DAY, parse_traffic
from swarmtrain.errors import UsageError
from swarmtrain.route.router import POLICIES
from swarmtrain.units import parse_duration, parse_rate, parse_size


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("join")(join)


def join(
    context: typer.Context,
    invite: Annotated[
        str | None,
        typer.Argument(
            envvar="SWARMTRAIN_INVITE",
            help="Printed by the coordinator; default: the coordinator of this machine, else the last run joined.",
        ),
    ] = None,
    stage: Annotated[
        str,
        typer.Option(
            metavar="N|auto|auto:N",
            help="The stage to host; auto: the one that needs it most, and later another one if that needs it"
            " more; auto:N: the same, starting with N.",
        ),
    ] = "auto",
    gpu: Annotated[int | None, number(0, MAX_GPU, help="Compute on this CUDA device.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Compute on the CPU (the default without --gpu).")] = False,
    threads: Annotated[
        int | None,
        number(1, MAX_THREADS, help="CPU threads for computing; default: the processor's cores less one."),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of this peer's identity, sockets and log.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="What this peer is called wherever it is named.")] = "",
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Multiaddress to listen on; default: all IPv4 addresses, a free port."),
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Multiaddress that other peers dial instead, for port forwarding."),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Relay through which this peer is reached; default: the run's relays."),
    ] = None,
    behind_nat: Annotated[
        bool, typer.Option("--behind-nat", help="This machine cannot be dialled: use a relay.")
    ] = False,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory limit, e.g. 8GB; default: free memory.")] = "",
    offload: Annotated[
        str,
        typer.Option(
            metavar="auto|on|off",
            help="Keep parameters and moments, and where needed sums of gradients, in the host's memory and run the"
            " optimizer there; auto: if the GPU is short of memory.",
        ),
    ] = "auto",
    max_samples: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Disk space in the state directory for the samples of an AQ-SGD run, per direction."
        ),
    ] = "1GiB",
    max_up: Annotated[str, typer.Option(metavar="RATE", help="Upload cap, e.g. 20mbit; default: none.")] = "",
    max_down: Annotated[str, typer.Option(metavar="RATE", help="Download cap, e.g. 100mbit; default: none.")] = "",
    hours: Annotated[
        list[str] | None,
        typer.Option(metavar="HH:MM-HH:MM", help="Work in these hours only, as 22:00-07:00. May be repeated."),
    ] = None,
    time_zone: Annotated[
        str, typer.Option(metavar="ZONE", help="Time zone of hours and months, e.g. Europe/Berlin; default: as here.")
    ] = "",
    only_when_idle: Annotated[
        str, typer.Option(metavar="TIME", help="Work only when nobody has used the machine for so long, e.g. 10min.")
    ] = "",
    pause_while: Annotated[
        list[str] | None,
        typer.Option(metavar="PROGRAM", help="Pause while a program of this name runs. May be repeated."),
    ] = None,
    yield_gpu: Annotated[
        bool, typer.Option("--yield-gpu", help="Pause while another process computes or draws on the GPU.")
    ] = False,
    max_gpu_temperature: Annotated[
        float | None, number(1, 120, help="Pause above so many degrees Celsius, until it is five degrees cooler.")
    ] = None,
    max_gpu_power: Annotated[
        float | None, number(1, 5000, help="Pause when the GPU draws more watts than this, for a minute or longer.")
    ] = None,
    max_traffic: Annotated[
        str,
        typer.Option(
            metavar="SIZE/month", help="Pause when so much was sent and received, e.g. 200GB/month, until it ends."
        ),
    ] = "",
    traffic_day: Annotated[int, number(1, MAX_DAY, help="Day on which that month begins.")] = 1,
    nice: Annotated[
        int, number(0, 19, help="How much other programs go first, for the processor and the disk; 0: not at all.")
    ] = 10,
    route: Annotated[
        str, typer.Option(metavar="POLICY", help="Routing policy: finish-time, or swarm-latency for comparison.")
    ] = "finish-time",
    drain_timeout: Annotated[
        float, number(0, MAX_SECONDS, help="Seconds for finishing the current step when leaving.")
    ] = 60.0,
    find_timeout: Annotated[
        float,
        number(0, MAX_SECONDS, help="Seconds to search for a run that is not found; 0: without limit."),
    ] = 0.0,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Serve Prometheus metrics at this address; port 0: a free one. Default: off."
        ),
    ] = "off",
    metrics_announce: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Address at which the run's Prometheus finds them, if different."),
    ] = "",
    test_faults: TestFaultsOption = False,
    profile: ProfileOption = None,
    events: EventsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Host one stage of a run. Ctrl-C drains; a second Ctrl-C leaves at once."""
    if cpu and is_from_profile(context, "gpu"):
        gpu = None
    if cpu and is_from_profile(context, "cpu") and gpu is not None:
        cpu = False
    if gpu is not None and cpu:
        raise UsageError("--gpu and --cpu contradict each other")
    chosen, may_move = _stage(stage)
    if route not in POLICIES:
        raise UsageError(f"unknown routing policy {route[:40]!r}", fix=f"use one of: {', '.join(POLICIES)}")
    checked_offload(offload)
    memory_bytes, samples_bytes = _memory(max_memory), parse_size(max_samples or "0")
    up_bytes_per_s, down_bytes_per_s = (parse_rate(cap) if cap else 0.0 for cap in (max_up, max_down))
    rules = Rules(
        hours=parse_hours(hours or ()),
        time_zone=time_zone,
        idle_s=parse_duration(only_when_idle) if only_when_idle else 0.0,
        programs=checked_programs(pause_while or ()),
        yields_gpu=yield_gpu,
        max_gpu_celsius=max_gpu_temperature or 0.0,
        max_gpu_watts=max_gpu_power or 0.0,
        traffic=parse_traffic(max_traffic, traffic_day) if max_traffic else None,
    )
    parse_zone(time_zone)
    text = find_invite(invite)
    step_back(nice)
    from swarmtrain.cli.daemons import run_daemon
    from swarmtrain.cli.live import LiveView
    from swarmtrain.cli.live_text import peer_frame, peer_line
    from swarmtrain.observe.events import Event, Events
    from swarmtrain.observe.faults import Faults
    from swarmtrain.observe.http import checked_address
    from swarmtrain.peer.daemon import PeerDaemon
    from swarmtrain.peer.options import PeerOptions, choose_device
    from swarmtrain.run.invite import parse_invite

    parsed = parse_invite(text)
    device = choose_device(gpu)
    key = hashlib.sha256(f"{parsed.run_id}:{stage}:{device}".encode()).hexdigest()[:8]
    directory = state_dir or state_home() / "peers" / f"{parsed.run_id}-stage{stage.replace(':', '')}-{key}"
    options = PeerOptions(
        invite=parsed,
        stage=chosen,
        may_move=may_move,
        state_dir=directory,
        device=device,
        threads=threads or usual_threads(),
        listen=tuple(listen or ["/ip4/0.0.0.0/tcp/0"]),
        announce=tuple(announce or []),
        relays=tuple(relay or (parsed.bootstrap if behind_nat else ())),
        behind_nat=behind_nat,
        max_memory_bytes=memory_bytes,
        max_samples_bytes=samples_bytes,
        offload=offload,
        max_up_bytes_per_s=up_bytes_per_s,
        max_down_bytes_per_s=down_bytes_per_s,
        name=name,
        route=route,
        drain_s=drain_timeout,
        find_s=find_timeout,
        courtesy=rules,
        traffic_dir=state_home() / "traffic",
        metrics=checked_address(metrics, "--metrics"),
        metrics_announce=checked_address(metrics_announce, "--metrics-announce"),
        faults=Faults.from_environment(enabled=test_faults),
    )
    remember_invite(text)

    def make(sinks: Events) -> PeerDaemon:
        return PeerDaemon(options, sinks)

    def line(event: Event) -> str:
        return peer_line(event, name)

    view = LiveView(sys.stdout, line, peer_frame, all_events=events) if sys.stdout.isatty() and not as_json else None
    with remember_peer(directory):
        run_daemon(make, lambda daemon: daemon.leave("asked to stop"), view=view, state_dir=directory)


def _stage(text: str) -> tuple[int, bool]:
    """(stage, may move later); stage -1: the coordinator assigns one."""
    if text == "auto":
        return -1, True
    number = text.removeprefix("auto:")
    if not number.isascii() or not number.isdigit() or len(number) > 6:
        raise UsageError(f"{text[:40]!r} is not a stage; write a number from 0 on, auto, or auto:N")
    return int(number), number != text


def _memory(text: str) -> int:
    """Bytes; 0 means no limit, which only an empty text may give."""
    num_bytes = parse_size(text or "0")
    if text and not num_bytes:
        raise UsageError(
            f"--max-memory is {text!r}; no stage fits into that", fix="without the option the limit is free memory"
        )
    return num_bytes
