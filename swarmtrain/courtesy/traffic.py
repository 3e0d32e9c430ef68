"""How much a machine may send and receive in a month, and the count of it, which survives restarts.

A month begins at midnight of the owner's day, as the bill of the line does. What is counted is what this program's
links carry, and a share for the headers below them (as the rate caps do). The count is written each time it has grown
by a thousandth of the cap: a crash loses at most that much of it, or what an idle line carries between two looks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import dataclass
from datetime import datetime, tzinfo
from pathlib import Path

from swarmtrain import world
from swarmtrain.courtesy.hours import local_time
from swarmtrain.errors import UsageError
from swarmtrain.rpc.limits import HEADERS
from swarmtrain.units import parse_size

log = logging.getLogger(__name__)

MAX_DAY = 28  # every month has it
PAUSE_SHARE = 0.99  # of the cap: what is left is for finishing the step, and for the heartbeats of a paused peer
WRITE_SHARE = 0.001
_CAP = re.compile(r"(.{1,40}?)\s*(?:/|per\s+)\s*month", re.IGNORECASE)


@dataclass(frozen=True)
class TrafficCap:
    """Bytes per month, sent and received together."""

    num_bytes: int
    day: int = 1  # of the month, on which it begins

    def is_spent(self, used: float, step_bytes: float) -> bool:
        """Whether the peer takes no more work: what is left may be needed to finish a step, of which one takes
        `step_bytes`."""
        return used >= min(PAUSE_SHARE * self.num_bytes, self.num_bytes - step_bytes)

    def month_began(self, wall: float, zone: tzinfo | None) -> datetime:
        """Local midnight of the day on which the month of `wall` began."""
        local = local_time(wall, zone)
        year, month = (local.year, local.month) if local.day >= self.day else _month_before(local.year, local.month)
        return datetime(year, month, self.day, tzinfo=zone)

    def month_ends(self, wall: float, zone: tzinfo | None) -> float:
        """Seconds since the epoch at which the next month begins."""
        began = self.month_began(wall, zone)
        year, month = (began.year + 1, 1) if began.month == 12 else (began.year, began.month + 1)
        return datetime(year, month, self.day, tzinfo=zone).timestamp()


def parse_traffic(text: str, day: int = 1) -> TrafficCap:
    """`200GB/month`. UsageError for anything else, and for nothing."""
    fix = "write it as 200GB/month"
    match = _CAP.fullmatch(text.strip())
    num_bytes = parse_size(match[1]) if match is not None else 0
    if not num_bytes:
        raise UsageError(f"{text[:40]!r} is not an amount of traffic in a month", fix=fix)
    return TrafficCap(num_bytes, day)


def counted(link_bytes: int) -> float:
    """What the line carries for so many bytes of the links."""
    return link_bytes * (1.0 + HEADERS)


class TrafficCount:
    """The bytes of one daemon in this month, beside those that other daemons of this machine have written down."""

    def __init__(self, path: Path, cap: TrafficCap, zone: tzinfo | None) -> None:
        """`path` is this daemon's own file; its neighbours in the directory are the other daemons'."""
        self.path, self.cap, self.zone = path, cap, zone
        self._began, self._bytes = _read(path)
        self._written = self._bytes
        self._others: dict[str, tuple[str, float]] = {}
        self._counted_before = 0.0  # of this process
        self.read_others()

    @property
    def own_bytes(self) -> float:
        """Of this daemon, in all its lives of this month."""
        return self._bytes

    @property
    def month_bytes(self) -> float:
        """Of all daemons that write into this directory."""
        return self._bytes + sum(count for began, count in self._others.values() if began == self._began)

    @property
    def needs_writing(self) -> bool:
        """Whether the file lags behind."""
        return abs(self._bytes - self._written) >= WRITE_SHARE * self.cap.num_bytes

    def note(self, link_bytes: int, wall: float) -> None:
        """This process's links have carried so many bytes since its start.

        A new month begins with none. A clock that is set back does not give back what was used.
        """
        total = counted(link_bytes)
        began = self.cap.month_began(wall, self.zone).date().isoformat()
        if began > self._began and self._began:
            self._bytes, self._written = 0.0, float("-inf")
        self._began = began
        self._bytes += max(0.0, total - self._counted_before)
        self._counted_before = total

    def read_others(self) -> None:
        """Look what the other daemons have written. May block."""
        with contextlib.suppress(OSError):
            files = [path for path in self.path.parent.glob("*.json") if path != self.path][:64]
            self._others = {path.name: _read(path) for path in files}

    def write(self) -> None:
        """Replace the file; what cannot be written is counted on in memory. May block."""
        self._written = self._bytes
        partial = self.path.with_suffix(".partial")
        try:
            world.make_directory(self.path.parent)
            world.check_disk(self.path)
            partial.write_text(json.dumps({"month": self._began, "bytes": round(self._bytes)}))
            world.sync(partial)
            partial.replace(self.path)
            world.sync(self.path.parent)
        except OSError as error:
            log.warning("the month's traffic cannot be written to %s: %s", self.path, error.strerror or error)


def _read(path: Path) -> tuple[str, float]:
    """The month and its bytes; of a file that is missing or damaged, none."""
    try:
        found = json.loads(path.read_text())
        month, count = str(found["month"]), float(found["bytes"])
    except (FileNotFoundError, NotADirectoryError):
        return "", 0.0
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is not a count of traffic: %s", path, error)
        return "", 0.0
    return (month, count) if 0.0 <= count < 2**62 else ("", 0.0)


def _month_before(year: int, month: int) -> tuple[int, int]:
    return (year - 1, 12) if month == 1 else (year, month - 1)
