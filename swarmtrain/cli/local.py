"""`swarmtrain local`: a whole swarm on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmtrain.cli.numbers import MAX_SEED, MAX_STAGES, MAX_THREADS, number
from swarmtrain.cli.options import (
    JsonOption,
    SetOption,
    StepsOption,
    lock_directory,
    manifest_from,
    preset_names,
    print_json,
    state_home,
)
from swarmtrain.errors import UsageError
from swarmtrain.observe.events import (
    CheckpointWritten,
    PeerJoined,
    PeerLeft,
    PeerLost,
    PhaseReached,
    RunEnded,
    RunResumes,
    RunWaits,
    StepApplied,
    event_from,
)
from swarmtrain.terminal import ProgressBar, on_terminal
from swarmtrain.units import parse_duration, show_duration

if TYPE_CHECKING:
    from swarmtrain.local import LocalSwarm

MIN_KILL_EVERY_S = 0.1
MAX_PROCESSES = 10_000


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("local")(local)


def local(
    manifest: Annotated[
        str, typer.Argument(metavar="PRESET|MANIFEST", help="What to train.", autocompletion=preset_names)
    ] = "nano",
    stages: Annotated[int | None, number(1, MAX_STAGES, help="Shorthand for --set stages.count=N.")] = None,
    peers: Annotated[
        int | None, number(1, MAX_PROCESSES, help="Peers in all; default: one per stage and two more.")
    ] = None,
    steps: StepsOption = None,
    set_: SetOption = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of the whole swarm; a run in it is resumed. Default: a new directory."
        ),
    ] = None,
    threads: Annotated[int, number(1, MAX_THREADS, help="Compute threads of each peer.")] = 1,
    kill_every: Annotated[
        str, typer.Option(metavar="TIME", help="Kill a peer at this interval, e.g. 15s, and watch the recovery.")
    ] = "",
    kill_coordinator: Annotated[
        bool, typer.Option("--kill-coordinator", help="With --kill-every: sometimes kill the coordinator instead.")
    ] = False,
    seed: Annotated[int, number(-MAX_SEED, MAX_SEED, help="Chooses the victims of --kill-every.")] = 0,
    sample: Annotated[int, number(0, 10**6, help="Tokens of text to generate at the end.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Run coordinator and peers as real processes on this machine: the first thing to try."""
    extra = [f"stages.count={stages}"] if stages is not None else []
    run = manifest_from(manifest, [*(set_ or []), *extra], steps)
    num_peers = peers or run.stages.count + 2
    if num_peers < run.stages.count:
        raise UsageError(f"{num_peers} peers cannot serve {run.stages.count} stages", fix="raise --peers")
    kill_every_s = max(MIN_KILL_EVERY_S, parse_duration(kill_every)) if kill_every else 0.0
    name = f"{run.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    directory = state_dir or state_home() / "local" / name
    lock_directory(directory)
    from swarmtrain.local import LocalOptions, LocalSwarm

    options = LocalOptions(
        manifest=run,
        state_dir=directory.resolve(),
        num_peers=num_peers,
        threads=threads,
        kill_every_s=kill_every_s,
        kill_coordinator=kill_coordinator,
        seed=seed,
    )
    with ProgressBar() as bar:
        show = _Json() if as_json else _Text(run.schedule.steps, bar)
        ended = asyncio.run(_run(LocalSwarm(options, show.event)))
    if ended is None:
        raise typer.Exit(0)
    show.done(ended, directory, sample)


async def _run(swarm: LocalSwarm) -> dict[str, Any] | None:
    """Run the swarm; Ctrl-C and SIGTERM drain it and return None."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(swarm.run())
    for item in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(item, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


class _Json:
    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "step_applied":
            keys = ("step", "loss", "tokens", "tokens_per_s", "grad_norm", "lr", "val_loss", "checkpoint")
            print_json({key: event[key] for key in keys if event.get(key) is not None})
        else:
            print_json(event)

    def done(self, ended: dict[str, Any], directory: Path, sample: int) -> None:
        print_json({"done": True, "checkpoint": ended["checkpoint"], "val_loss": ended["val_loss"]})


class _Text:
    """Steps as a bar, or a line per ten where no bar is drawn; a line for everything else that is worth one."""

    def __init__(self, num_steps: int, bar: ProgressBar) -> None:
        self.num_steps, self._bar = num_steps, bar
        self.serving: dict[str, int] = {}
        self._has_begun = False

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "killed":
            self._bar.keep(f"killed {event['victim']}" + (f" of stage {event['stage']}" if event["stage"] >= 0 else ""))
        if event["from"] != "coordinator":
            return
        match happened := event_from({key: value for key, value in event.items() if key != "from"}):
            case StepApplied():
                self._step(event)
            case PhaseReached(phase="page", detail=url):
                self._bar.keep(f"watch it: {url}")
            case PhaseReached() | PeerLeft() | RunEnded() | CheckpointWritten():
                return  # what every run brings
            case RunWaits() | RunResumes() if not self._has_begun:
                return  # peers are still starting
            case _ if not happened.is_detail:
                self._bar.keep(happened.line())
        if isinstance(happened, PeerJoined):
            self.serving[happened.peer] = happened.stage
        elif isinstance(happened, PeerLost):
            self.serving.pop(happened.peer, None)

    def _step(self, event: dict[str, Any]) -> None:
        self._has_begun = True
        left = (self.num_steps - event["step"]) * event["tokens"] / event["step"] / event["tokens_per_s"]
        stages = list(self.serving.values())
        counts = "-".join(str(stages.count(stage)) for stage in range(max(stages, default=-1) + 1))
        parts = [f"step {event['step']:>5}/{self.num_steps}", f"loss {event['loss']:7.4f}"]
        parts += [f"{event['tokens_per_s']:,.0f} tokens/s", f"peers {counts}"]
        if event.get("val_loss") is not None:
            parts.append(f"validation {event['val_loss']:.4f}")
        elif left > 0:
            parts.append(f"{show_duration(left)} left")
        line = "  ".join(parts)
        is_noted = event["step"] % 10 == 0 or event["step"] == 1
        if event.get("val_loss") is not None or (is_noted and not on_terminal()):
            self._bar.keep(line)
        speed = f"{event['tokens_per_s']:,.0f} tokens/s"
        figures = f"step {event['step']}/{self.num_steps} loss {event['loss']:.4f} {speed} peers {counts}"
        self._bar.update(event["step"], self.num_steps, figures)

    def done(self, ended: dict[str, Any], directory: Path, sample: int) -> None:
        loss = ended["val_loss"]
        print(f"\ndone: validation loss {loss:.4f}" if loss is not None else "\ndone")
        print(f"checkpoint: {ended['checkpoint']}\nproof: swarmtrain audit {directory}")
        if sample:
            from swarmtrain.cli.generate import generate

            print()
            generate(Path(ended["checkpoint"]), tokens=sample, threads=1)
