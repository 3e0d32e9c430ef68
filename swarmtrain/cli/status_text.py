"""The lines of `swarmtrain status` about one daemon, from its snapshot. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from swarmtrain.units import show_size

Snapshot = Mapping[str, Any]


def status_lines(snapshot: Snapshot) -> list[str]:
    """What the daemon does, why, since when, and what comes next. May contain control characters: print with `say`."""
    match snapshot["kind"]:
        case "coordinator":
            return _run(snapshot)
        case "peer":
            return _peer(snapshot)
    return [f"{snapshot.get('state_dir', '')}: {snapshot['state']} ({snapshot['reason']})"]


def why(snapshot: Snapshot) -> str:
    """`idle since 12:04:10 because stage 2 has no peers`"""
    state, cause, reason = snapshot["state"], snapshot["cause"], snapshot["reason"]
    since = time.strftime("%H:%M:%S", time.localtime(snapshot["since"]))
    if snapshot["kind"] == "peer" and state == "serving" and cause not in ("working", "serving"):
        return f"idle since {since} because {reason}"
    doing = "working" if cause == "working" else state
    return f"{doing} since {since}" + (f": {reason}" if reason else "")


def shares(seconds: Mapping[str, Any]) -> str:
    """`61 % compute, 20 % wire, 19 % idle (mostly no_lease)`"""
    idle = seconds["idle"]
    parts = {**{name: value for name, value in seconds.items() if name != "idle"}, "idle": sum(idle.values())}
    total = sum(parts.values()) or 1.0
    worst = max(idle, key=idle.__getitem__, default="")
    shown = [
        f"{100 * value / total:.0f} % {name}" + (f" (mostly {worst})" if name == "idle" and worst else "")
        for name, value in sorted(parts.items(), key=lambda item: -item[1])
        if value >= 0.005 * total
    ]
    return ", ".join(shown)


def _run(snapshot: Snapshot) -> list[str]:
    lines = [f"coordinator of {snapshot['name']} ({snapshot['run']}): {why(snapshot)}"]
    if snapshot["next"]:
        lines.append(f"  next: {snapshot['next']}")
    last = snapshot["last"]
    if last:
        lines.append(
            f"  step {snapshot['step']}/{snapshot['steps']}  loss {last['loss']:.4f}  "
            f"{last['tokens_per_s']:,.0f} tokens/s"
        )
    for stage, peers in enumerate(snapshot["stages"]):
        names = ", ".join(f"{peer['peer'][-8:]} {peer['state']}" for peer in peers) or "no peers"
        lines.append(f"  stage {stage}: {names}")
    if snapshot["page"]:
        lines.append(f"  page: {snapshot['page']}")
    lines.append(f"  join with: swarmtrain join {snapshot['invite']} --stage N")
    return lines


def _peer(snapshot: Snapshot) -> list[str]:
    lines = [f"peer {snapshot['peer'][-8:]} of run {snapshot['run']}: stage {snapshot['stage']}, {why(snapshot)}"]
    if snapshot["next"]:
        lines.append(f"  next: {snapshot['next']}")
    lines.append(
        f"  step {snapshot['step']}, {snapshot['microbatches']} microbatches done, "
        f"{show_size(snapshot['memory_bytes'])} of memory"
    )
    sent, received = (show_size(snapshot["traffic"][side]["total_bytes"]) for side in ("sent", "received"))
    lines.append(f"  {sent} sent, {received} received")
    lines.append(f"  time: {shares(snapshot['seconds'])}")
    return lines
