"""What the terminals of a coordinator and of a volunteer show: a line per event, and a few lines that stay below. Pure.

Names and reasons come from other machines: what is not printable is shown as `?`.
"""

from __future__ import annotations

import re

from rich.console import Group, RenderableType
from rich.text import Text

from swarmtrain.cli.status_text import STALE_S, Snapshot, given, lately, run_figures, spent_here, told_figures, why
from swarmtrain.cli.top_text import FAINT, GOOD, TITLE, WARNING, line, peer_table
from swarmtrain.observe.activity import Cause
from swarmtrain.observe.events import (
    ActivityChanged,
    Event,
    PhaseReached,
    StepApplied,
    SyncProgress,
    called,
)
from swarmtrain.run.invite import parse_invite
from swarmtrain.run.manifest import Manifest
from swarmtrain.units import show_duration

BAR_WIDTH = 12
MAX_TABLE = 12  # rows
_SPARE = 8  # lines of the window that the table leaves to events
_ADDRESS = re.compile(r"/(?:ip4|ip6|dns\d?)/([^/]+)/(?:tcp|udp)/(\d+)")
_TROUBLE = (
    Cause.COORDINATOR_AWAY,
    Cause.BANNED,
    Cause.NEXT_STAGE_EMPTY,
    Cause.PAUSED,
    Cause.OFF_HOURS,
    Cause.TRAFFIC,
    Cause.PROGRAM,
    Cause.GPU_USED,
    Cause.IN_USE,
    Cause.GPU_HOT,
    Cause.GPU_POWER,
)


def run_line(event: Event, manifest: Manifest, seconds_left: float | None) -> str:
    """What a coordinator's terminal says of an event; empty: nothing without --events."""
    match event:
        case StepApplied():
            figures = [f"step {event.step}/{manifest.schedule.steps}", f"loss {event.loss:.4f}"]
            figures.append(f"{event.tokens_per_s:,.0f} tokens/s")
            if seconds_left and event.step < manifest.schedule.steps:
                figures.append(f"{show_duration(seconds_left)} left")
            if event.val_loss is not None:
                figures.append(f"validation {event.val_loss:.4f}")
            return "  ".join(figures)
        case PhaseReached(phase="invite", detail=text):
            size = f"{manifest.schedule.steps} steps, {manifest.stages.count} stages"
            return f"run {parse_invite(text).run_id} of {manifest.run.name}: {size}\njoin with: swarmtrain join {text}"
        case PhaseReached(phase="page", detail=url):
            return f"watch it: {url}"
        case PhaseReached(phase="resume", detail=text):
            return f"resumes: {text}"
        case PhaseReached():
            return ""
    return "" if event.is_detail else event.line()


def peer_line(event: Event, name: str) -> str:
    """What a volunteer's terminal says of an event; empty: nothing without --events."""
    match event:
        case PhaseReached(phase="identity", detail=peer):
            return f"you are {called(peer, name)}"
        case PhaseReached(phase="network", detail=text):
            return f"listening at {_places(text)}"
        case PhaseReached(phase="manifest", detail=text):
            return f"run {text}"
        case PhaseReached(phase="stage", detail=text):
            return f"the run needs you on stage {text}"
        case PhaseReached(phase="fit", detail=text):
            return f"memory: the stage needs {text}"
        case PhaseReached(phase="gone", detail=reason):
            return f"you have left: {reason}"
        case PhaseReached(phase=phase, detail=detail):
            return f"{phase}: {detail}" if detail else phase
        case ActivityChanged(cause=cause) if cause in _TROUBLE:
            return event.line()
        case ActivityChanged() | SyncProgress():
            return ""  # shown below; a peer that ends is thanked last
    return "" if event.is_detail else event.line()


def _places(addresses: str) -> str:
    """`192.0.2.7:4001` for every multiaddress; as it is where there is none."""
    return ", ".join(dict.fromkeys(f"{host}:{port}" for host, port in _ADDRESS.findall(addresses))) or addresses


def run_frame(now: Snapshot, width: int, height: int) -> Group:
    """The run, and a row per peer; at most half a window."""
    style = GOOD if now["state"] in ("training", "complete") else WARNING
    following = f"; next: {now['next']}" if now["next"] else ""
    lines: list[RenderableType] = [
        Text("─" * width, FAINT, no_wrap=True),
        line(f"{now['name']}  run {now['run']}  {why(now)}{following}", style),
        line(f"{_bar(now['step'], now['steps'])} " + "  ".join(run_figures(now)), TITLE),
    ]
    room = min(MAX_TABLE, height - len(lines) - _SPARE)
    if room > 1:
        lines.append(peer_table(now, room, width))
    return Group(*lines)


def peer_frame(now: Snapshot, width: int, height: int) -> Group:
    """The run, what the peer does and why, and what it has given."""
    is_stale = now["silent_s"] is not None and now["silent_s"] > STALE_S
    is_busy = now["cause"] in ("working", "serving")
    return Group(
        Text("─" * width, FAINT, no_wrap=True),
        line(f"stage {now['stage']} of {now['run_name']}: {why(now)}", GOOD if is_busy else WARNING),
        line(
            f"run   {_bar(now['step'], now['steps'])} " + "  ".join(told_figures(now)), WARNING if is_stale else TITLE
        ),
        line(f"you   {given(now)}"),
        line(f"      {spent_here(now)}"),
        line(f"time  {lately(now['lately']) or 'nothing measured yet'}; last minute", FAINT),
    )


def _bar(done: int, total: int) -> str:
    filled = BAR_WIDTH * min(done, total) // max(1, total)
    return f"{'━' * filled}{'╌' * (BAR_WIDTH - filled)}"
