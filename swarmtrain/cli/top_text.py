"""One frame of `swarmtrain top`, from snapshots, as something that rich draws. Pure.

Names and reasons come from other machines: what is not printable is shown as `?`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarmtrain.cli.status_text import Snapshot, run_figures, why
from swarmtrain.observe.lately import PARTS
from swarmtrain.observe.logs import printable

GOOD, WARNING, BAD, FAINT, TITLE = "green", "yellow", "red", "dim", "bold"
_BARS = "▁▂▃▄▅▆▇█"
_NAME_WIDTH = 15
WORTH_TELLING = 0.05  # of a step
_WIDE, _MIDDLE = 110, 78  # narrower windows show two columns of the time split, or none
_SILENT_S = 6.0  # three heartbeats: what an older report says of the peer's time is not shown
_FIXED = 9  # lines besides peers, links and events


def frame(now: Snapshot, losses: Sequence[float], width: int, height: int) -> Group:
    """The window's content."""
    lines: list[RenderableType] = _head(now, losses, width)[:height]
    room = min(max(3, height - _FIXED - _num_events(height)), height - len(lines) - 1)
    room_below = height - len(lines) - 1
    if room > 0:
        table = peer_table(now, room, width)
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
    style = {"training": GOOD, "complete": GOOD}.get(now["state"], WARNING)
    numbers = run_figures(now)
    if now["checkpoint_step"]:
        numbers.append(f"checkpoint {now['checkpoint_step']}")
    bars = sparkline(losses, min(60, width - 6))
    return [
        line(f"{now['name']}  run {now['run']}", TITLE),
        line(why(now) + (f"; next: {now['next']}" if now["next"] else ""), style),
        line("  ".join(numbers)),
        line(f"loss  {bars}" if bars else "", FAINT),
        line(_split(now["split"]), FAINT),
        *([line(waits)] if (waits := _wait(now["split"])) else []),
        Text(""),
    ]


def _split(split: Snapshot | None) -> str:
    if not split:
        return "last step  nothing measured yet"
    parts = {name: split[f"{name}_s"] for name in ("lease", "reduce", "apply")}
    total = sum(parts.values()) or 1.0
    return "last step  " + "  ".join(f"{name} {s:.2f} s {100 * s / total:.0f} %" for name, s in parts.items())


def _wait(split: Snapshot | None) -> str:
    """How long nothing was under way because of an all-reduce, if that was long."""
    if not split:
        return ""
    total = sum(split[f"{name}_s"] for name in ("lease", "reduce", "apply"))
    if split["waited_s"] <= WORTH_TELLING * total:
        return ""
    waited = f"{split['waited_s']:.1f} of {total:.1f} s"
    return f"           waits for the all-reduce of stage {split['slowest_stage']}: {waited}"


def peer_table(now: Snapshot, room: int, width: int) -> Table:
    """At most `room` rows: a peer each, and one for every stage that has none. Shares of time are the last minute's."""
    parts = PARTS if width >= _WIDE else ("compute", "idle") if width >= _MIDDLE else ()
    table = Table(box=None, pad_edge=False, header_style=TITLE)
    for name in ("STAGE", "PEER", "STATE"):
        table.add_column(name, no_wrap=True)
    for name in ("STEP", "DONE", "FWD+BWD", "SEEN", *(part.upper() for part in parts)):
        table.add_column(name, justify="right", no_wrap=True)
    peers = [(stage, peer) for stage, members in enumerate(now["stages"]) for peer in members or [None]]
    num_shown = len(peers) if len(peers) <= room else room - 1
    for stage, peer in peers[:num_shown]:
        if peer is None:
            table.add_row(str(stage), "no peers", style=BAD)
        else:
            style = BAD if peer["doubt"] else "" if peer["state"] == "serving" else WARNING
            table.add_row(*_cells(peer, parts), style=style)
    if num_shown < len(peers):
        table.add_row("", f"and {len(peers) - num_shown} more", style=FAINT)
    return table


def _cells(peer: Snapshot, parts: Sequence[str]) -> list[Text]:
    cells = [
        str(peer["stage"]),
        _name(peer),
        "link broken" if peer["doubt"] else peer["state"],
        str(peer["step"]),
        str(peer["microbatches"]),
        f"{peer['forward_ms'] + peer['backward_ms']:.1f} ms",
        f"{peer['silent_s']:.0f} s",
    ]
    shares = peer["lately"] if peer["silent_s"] < _SILENT_S else {}
    cells += [f"{100 * shares[part]:.0f} %" if shares else "–" for part in parts]
    return [line(cell) for cell in cells]


def _name(peer: Snapshot) -> str:
    name = Text(printable(peer["name"]))
    name.truncate(_NAME_WIDTH)  # by the width of its characters in a terminal
    return name.plain or str(peer["peer"][-8:])


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
