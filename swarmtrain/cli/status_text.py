"""What people read about one daemon, from its snapshot: `status`, `top` and the live views say it alike. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from swarmtrain.observe.events import called
from swarmtrain.units import show_count, show_duration, show_size

Snapshot = Mapping[str, Any]

STALE_S = 5.0  # a peer hears from its coordinator every two seconds: older figures are marked
_PARTS_SHOWN = 0.005
_EXCLUDED_SHOWN = 5


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


def run_figures(now: Snapshot) -> list[str]:
    """Of a coordinator: step, how old that is, loss, speed, what is left. A run that waits has no speed."""
    last, figures = now["last"], [f"step {now['step']}/{now['steps']}"]
    age_s = now["now"] - now["last_applied_at"] if now["last_applied_at"] else 0.0
    if age_s > STALE_S:
        figures[0] += f", {show_duration(age_s)} ago"
    if last:
        figures.append(f"loss {last['loss']:.4f}")
    if now["val_loss"] is not None:
        figures.append(f"validation {now['val_loss']:.4f}")
    if last and now["state"] == "training":
        figures.append(f"{last['tokens_per_s']:,.0f} tokens/s")
    if now["seconds_left"]:
        figures.append(f"{show_duration(now['seconds_left'])} left")
    return figures


def told_figures(peer: Snapshot) -> list[str]:
    """The same of the run, as a peer was told by its coordinator."""
    figures, silent_s = [f"step {peer['step']}/{peer['steps']}"], peer["silent_s"]
    is_old = silent_s is not None and silent_s > STALE_S
    if is_old:
        figures[0] += f", as of {show_duration(silent_s)} ago"
    if peer["run_loss"] is not None:
        figures.append(f"loss {peer['run_loss']:.4f}")
    if is_old:
        return figures
    if peer["run_tokens_per_s"]:
        figures.append(f"{peer['run_tokens_per_s']:,.0f} tokens/s")
    if peer["seconds_left"]:
        figures.append(f"{show_duration(peer['seconds_left'])} left")
    return figures


def given(peer: Snapshot) -> str:
    """What counts as a peer's own: `96 microbatches, 98.3k tokens, 41 % of the run's work, in 3.2 h of steps`."""
    credit = peer["credit"]
    tokens, share = show_count(credit["tokens"]), 100 * credit["share"]
    done = f"{credit['microbatches']:,} microbatches, {tokens} tokens, {share:.3g} % of the run's work"
    return f"{done}, in {show_duration(credit['seconds'])} of steps" if credit["seconds"] else done


def spent_here(peer: Snapshot) -> str:
    """What it has cost since the daemon was started: `3.2 h, 8.2 MB up, 8.1 MB down`."""
    sent, received = (show_size(peer["traffic"][side]["total_bytes"]) for side in ("sent", "received"))
    return f"{show_duration(peer['now'] - peer['started_at'])}, {sent} up, {received} down"


def lately(shares: Mapping[str, float]) -> str:
    """`61 % compute, 20 % wire, 19 % idle`, of the last minute."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{100 * share:.0f} % {name}" for name, share in ordered if share >= _PARTS_SHOWN)


def _run(snapshot: Snapshot) -> list[str]:
    lines = [f"coordinator of {snapshot['name']}, run {snapshot['run']}: {why(snapshot)}"]
    if snapshot["next"]:
        lines.append(f"  next: {snapshot['next']}")
    lines.append("  " + "  ".join(run_figures(snapshot)))
    for stage, peers in enumerate(snapshot["stages"]):
        names = ", ".join(f"{called(peer['peer'], peer['name'])} {_state(peer)}" for peer in peers) or "no peers"
        lines.append(f"  stage {stage}: {names}")
    waiting = snapshot["pending"][-_EXCLUDED_SHOWN:]
    lines += [f"  waits for you: swarmtrain members admit {row['peer']}" for row in waiting]
    lines += [f"  excluded: {_excluded(row)}" for row in snapshot["excluded"][:_EXCLUDED_SHOWN]]
    if (more := snapshot["num_excluded"] - _EXCLUDED_SHOWN) > 0:
        lines.append(f"  excluded: {more} more")
    if snapshot["page"]:
        lines.append(f"  page: {snapshot['page']}")
    lines.append(f"  join with: swarmtrain join {snapshot['invite']}")
    return lines


def _excluded(row: Snapshot) -> str:
    return f"{called(row['peer'], row['name'])} at step {row['step']}: {row['reason']}"


def _state(peer: Snapshot) -> str:
    return "link broken" if peer["doubt"] else str(peer["state"])


def _peer(snapshot: Snapshot) -> list[str]:
    who = called(snapshot["peer"], snapshot["name"])
    lines = [f"{who} of {snapshot['run_name']}, run {snapshot['run']}: stage {snapshot['stage']}, {why(snapshot)}"]
    if snapshot["next"]:
        lines.append(f"  next: {snapshot['next']}")
    if month := snapshot["courtesy"]["month"]:
        lines.append(f"  this month: {show_size(month['bytes'])} of {show_size(month['limit'])} of traffic")
    lines.append("  " + "run: " + "  ".join(told_figures(snapshot)))
    lines.append(f"  given: {given(snapshot)}")
    lines.append(f"  here: {spent_here(snapshot)}, {show_size(snapshot['memory_bytes'])} of memory")
    if snapshot["lately"]:
        lines.append(f"  last minute: {lately(snapshot['lately'])}")
    return lines
