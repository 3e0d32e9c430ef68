"""One frame of `swarmtrain top`, from snapshots. Pure: plain lines that fit the window, and how each is to look.

Names and reasons come from other machines: whatever is not printable is shown as `?`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmtrain.cli.status_text import why
from swarmtrain.observe.logs import printable

Snapshot = Mapping[str, Any]
_BARS = "▁▂▃▄▅▆▇█"
_PARTS = ("compute", "queue", "wire", "reduce", "idle")
_WIDTH_OF_PARTS = 34
_FIXED = 9  # lines besides peers, links and events


@dataclass(frozen=True, slots=True)
class Line:
    """A line and how it is to look: "", "title", "good", "warn", "bad" or "faint"."""

    text: str
    look: str = ""


def frame(now: Snapshot, before: Snapshot, losses: Sequence[float], width: int, height: int) -> list[Line]:
    """The window's content. `before` is an older snapshot: shares of time are of the time since then."""
    lines = [*_head(now, losses, width), *_table(now, before, max(3, height - _FIXED - _num_events(height)), width)]
    room = height - len(lines) - 1
    if room > 2:
        links = _links(now)
        if links:
            lines += [Line(""), Line("busiest links  " + links, "faint")]
    room = height - len(lines) - 1
    if room > 1:
        news = now.get("news", [])[-(room - 1) :]
        lines += [Line(""), *(_event(item) for item in reversed(news))]
    return [Line(printable(line.text)[:width], line.look) for line in lines[:height]]


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest values as bars."""
    shown = [value for value in values if value == value][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def _head(now: Snapshot, losses: Sequence[float], width: int) -> list[Line]:
    last, look = now["last"] or {}, {"training": "good", "complete": "good"}.get(now["state"], "warn")
    numbers = [f"step {now['step']}/{now['steps']}"]
    if last:
        numbers.append(f"loss {last['loss']:.4f}")
    if now["val_loss"] is not None:
        numbers.append(f"validation {now['val_loss']:.4f}")
    if last:
        numbers.append(f"{last['tokens_per_s']:,.0f} tokens/s")
    numbers.append(f"checkpoint at {now['checkpoint_step']}")
    lines = [
        Line(f"{now['name']}  run {now['run']}", "title"),
        Line(why(now) + (f"; next: {now['next']}" if now["next"] else ""), look),
        Line("  ".join(numbers)),
    ]
    bars = sparkline(losses, min(60, width - 6))
    lines.append(Line(f"loss  {bars}" if bars else "", "faint"))
    lines.append(Line(_split(now["split"]), "faint"))
    return [*lines, Line("")]


def _split(split: Snapshot | None) -> str:
    if not split:
        return "last step  nothing measured yet"
    parts = {name: split[f"{name}_s"] for name in ("lease", "reduce", "apply")}
    total = sum(parts.values()) or 1.0
    return "last step  " + "  ".join(f"{name} {s:.2f} s {100 * s / total:.0f} %" for name, s in parts.items())


def _table(now: Snapshot, before: Snapshot, room: int, width: int) -> list[Line]:
    older = {peer["peer"]: peer for peers in before["stages"] for peer in peers}
    head = f"{'STAGE':<6}{'PEER':<17}{'STATE':<14}{'STEP':>7}{'DONE':>9}{'FWD+BWD':>10}{'LAST':>6}  "
    if width >= len(head) + _WIDTH_OF_PARTS:
        head += " ".join(f"{part[:6].upper():>6}" for part in _PARTS)
    rows: list[Line] = []
    for stage, peers in enumerate(now["stages"]):
        if not peers:
            rows.append(Line(f"{stage:<6}nobody", "bad"))
        rows += [_peer(peer, older.get(peer["peer"]), width >= len(head)) for peer in peers]
    if len(rows) > room:
        rows = [*rows[: room - 1], Line(f"      and {len(rows) - room + 1} more", "faint")]
    return [Line(head, "title"), *rows]


def _peer(peer: Snapshot, older: Snapshot | None, with_parts: bool) -> Line:
    state = "link broken" if peer["doubt"] else peer["state"]
    look = "bad" if peer["doubt"] else "" if peer["state"] == "serving" else "warn"
    busy_ms = peer["forward_ms"] + peer["backward_ms"]
    name = printable(peer["name"])[:15] or peer["peer"][-8:]
    text = f"{peer['stage']:<6}{name:<17}{state:<14}{peer['step']:>7}{peer['microbatches']:>9}"
    text += f"{busy_ms:>7.1f} ms{peer['silent_s']:>4.0f} s  "
    if with_parts:
        text += " ".join(f"{share:>4.0f} %" for share in _shares(peer["spent"], older["spent"] if older else {}))
    return Line(text, look)


def _shares(spent: Mapping[str, float], older: Mapping[str, float]) -> list[float]:
    """Per cent by part since the older snapshot; since the start if the peer is new or has restarted."""
    recent = {part: spent.get(part, 0.0) - older.get(part, 0.0) for part in _PARTS}
    if min(recent.values()) < 0 or sum(recent.values()) <= 0:
        recent = {part: spent.get(part, 0.0) for part in _PARTS}
    total = sum(recent.values()) or 1.0
    return [100 * recent[part] / total for part in _PARTS]


def _links(now: Snapshot) -> str:
    names = {
        peer["peer"]: printable(peer["name"])[:15] or peer["peer"][-8:] for peers in now["stages"] for peer in peers
    }
    routes = sorted(now["routes"], key=lambda route: -route["share"])[:6]
    known = [route for route in routes if route["from"] in names and route["to"] in names]
    return "  ".join(f"{names[route['from']]} → {names[route['to']]} {100 * route['share']:.0f} %" for route in known)


def _event(item: Snapshot) -> Line:
    clock = time.strftime("%H:%M:%S", time.localtime(item["at"]))
    return Line(f"{clock}  {item['line']}", "faint")


def _num_events(height: int) -> int:
    return max(0, min(8, height // 4))
