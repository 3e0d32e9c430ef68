"""One frame of `swarmtrain top`, from snapshots, as something that rich draws. Pure.

Names and reasons come from other machines: what is not printable is shown as `?`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarmtrain.cli.status_text import why
from swarmtrain.observe.logs import printable

Snapshot = Mapping[str, Any]
GOOD, WARNING, BAD, FAINT, TITLE = "green", "yellow", "red", "dim", "bold"
_BARS = "▁▂▃▄▅▆▇█"
_PARTS = ("compute", "queue", "wire", "reduce", "idle")
_NAME_WIDTH = 15
_MIN_WIDTH_OF_PARTS = 105  # narrower windows leave the columns of the time split out
_FIXED = 9  # lines besides peers, links and events


def frame(now: Snapshot, before: Snapshot, losses: Sequence[float], width: int, height: int) -> Group:
    """The window's content. `before` is an older snapshot: shares of time are of the time since then."""
    lines: list[RenderableType] = _head(now, losses, width)[:height]
    room = min(max(3, height - _FIXED - _num_events(height)), height - len(lines) - 1)
    room_below = height - len(lines) - 1
    if room > 0:
        table = _table(now, before, room, width)
        room_below -= table.row_count
        lines.append(table)
    links = _links(now)
    if room_below > 3 and links:
        lines += [Text(""), line("busiest links  " + links, FAINT)]
        room_below -= 2
    if room_below > 2:
        news = now.get("news", [])[-(room_below - 2) :]
        lines += [Text(""), *(_event(item) for item in reversed(news))]
    return Group(*lines)


def line(text: str, style: str = "") -> Text:
    """One line of the window, cut where it ends."""
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest values as bars."""
    shown = [value for value in values if value == value][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def _head(now: Snapshot, losses: Sequence[float], width: int) -> list[RenderableType]:
    last, style = now["last"] or {}, {"training": GOOD, "complete": GOOD}.get(now["state"], WARNING)
    numbers = [f"step {now['step']}/{now['steps']}"]
    if last:
        numbers.append(f"loss {last['loss']:.4f}")
    if now["val_loss"] is not None:
        numbers.append(f"validation {now['val_loss']:.4f}")
    if last:
        numbers.append(f"{last['tokens_per_s']:,.0f} tokens/s")
    numbers.append(f"checkpoint at {now['checkpoint_step']}")
    bars = sparkline(losses, min(60, width - 6))
    return [
        line(f"{now['name']}  run {now['run']}", TITLE),
        line(why(now) + (f"; next: {now['next']}" if now["next"] else ""), style),
        line("  ".join(numbers)),
        line(f"loss  {bars}" if bars else "", FAINT),
        line(_split(now["split"]), FAINT),
        Text(""),
    ]


def _split(split: Snapshot | None) -> str:
    if not split:
        return "last step  nothing measured yet"
    parts = {name: split[f"{name}_s"] for name in ("lease", "reduce", "apply")}
    total = sum(parts.values()) or 1.0
    return "last step  " + "  ".join(f"{name} {s:.2f} s {100 * s / total:.0f} %" for name, s in parts.items())


def _table(now: Snapshot, before: Snapshot, room: int, width: int) -> Table:
    """At most `room` rows: a peer each, and one for every stage that has none."""
    older = {peer["peer"]: peer for peers in before["stages"] for peer in peers}
    with_parts = width >= _MIN_WIDTH_OF_PARTS
    table = Table(box=None, pad_edge=False, header_style=TITLE)
    for name in ("STAGE", "PEER", "STATE"):
        table.add_column(name, no_wrap=True)
    for name in ("STEP", "DONE", "FWD+BWD", "LAST", *(part[:6].upper() for part in _PARTS if with_parts)):
        table.add_column(name, justify="right", no_wrap=True)
    peers = [(stage, peer) for stage, members in enumerate(now["stages"]) for peer in members or [None]]
    num_shown = len(peers) if len(peers) <= room else room - 1
    for stage, peer in peers[:num_shown]:
        if peer is None:
            table.add_row(str(stage), "no peers", style=BAD)
        else:
            style = BAD if peer["doubt"] else "" if peer["state"] == "serving" else WARNING
            table.add_row(*_cells(peer, older.get(peer["peer"]), with_parts), style=style)
    if num_shown < len(peers):
        table.add_row("", f"and {len(peers) - num_shown} more", style=FAINT)
    return table


def _cells(peer: Snapshot, older: Snapshot | None, with_parts: bool) -> list[Text]:
    cells = [
        str(peer["stage"]),
        _name(peer),
        "link broken" if peer["doubt"] else peer["state"],
        str(peer["step"]),
        str(peer["microbatches"]),
        f"{peer['forward_ms'] + peer['backward_ms']:.1f} ms",
        f"{peer['silent_s']:.0f} s",
    ]
    if with_parts:
        cells += [f"{share:.0f} %" for share in _shares(peer["spent"], older["spent"] if older else {})]
    return [line(cell) for cell in cells]


def _name(peer: Snapshot) -> str:
    name = Text(printable(peer["name"]))
    name.truncate(_NAME_WIDTH)  # by the width of its characters in a terminal
    return name.plain or str(peer["peer"][-8:])


def _shares(spent: Mapping[str, float], older: Mapping[str, float]) -> list[float]:
    """Per cent by part since the older snapshot; since the start if the peer is new or has restarted."""
    recent = {part: spent.get(part, 0.0) - older.get(part, 0.0) for part in _PARTS}
    if min(recent.values()) < 0 or sum(recent.values()) <= 0:
        recent = {part: spent.get(part, 0.0) for part in _PARTS}
    total = sum(recent.values()) or 1.0
    return [100 * recent[part] / total for part in _PARTS]


def _links(now: Snapshot) -> str:
    names = {peer["peer"]: _name(peer) for peers in now["stages"] for peer in peers}
    routes = sorted(now["routes"], key=lambda route: -route["share"])[:6]
    known = [route for route in routes if route["from"] in names and route["to"] in names]
    return "  ".join(f"{names[route['from']]} → {names[route['to']]} {100 * route['share']:.0f} %" for route in known)


def _event(item: Snapshot) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(item["at"]))
    return line(f"{clock}  {item['line']}", FAINT)


def _num_events(height: int) -> int:
    return max(0, min(8, height // 4))
