"""The hours of the day in which a peer may work, by the clock on the wall where the machine stands. Pure.

Seconds since the epoch are turned into local time for each question, so a day of 23 or 25 hours needs no rule of its
own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from swarmtrain.errors import UsageError

MAX_SPANS = 24
_SPAN = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", re.ASCII)
_DAY = 24 * 60
_SEARCH_MINUTES = 50 * 60  # an hour that a change of the clock leaves out comes a day later


def parse_zone(name: str) -> tzinfo | None:
    """The time zone of that name; None for the machine's own, which an empty name means."""
    if not name:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(
            f"there is no time zone {name[:40]!r}", fix="write it as Europe/Berlin, or leave it out"
        ) from error


def local_time(at: float, zone: tzinfo | None) -> datetime:
    """Seconds since the epoch as the clock on the wall shows them."""
    return datetime.fromtimestamp(at, zone)


@dataclass(frozen=True)
class Hours:
    """Spans of the day, in minutes from midnight: from the first to before the second. None at all: the whole day."""

    spans: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{_clock(start)}-{_clock(end)}" for start, end in self.spans)

    def are_open(self, at: float, zone: tzinfo | None) -> bool:
        """Whether work is welcome at that time."""
        if not self.spans:
            return True
        local = local_time(at, zone)
        minute = 60 * local.hour + local.minute
        return any(_contains(start, end, minute) for start, end in self.spans)

    def next_change(self, at: float, zone: tzinfo | None) -> float | None:
        """When they open or close next after `at`; None if they never do. Time zones change on whole minutes."""
        now = self.are_open(at, zone)
        first = at - at % 60 + 60
        times = (first + 60 * number for number in range(_SEARCH_MINUTES if self.spans else 0))
        return next((time for time in times if self.are_open(time, zone) is not now), None)


def parse_hours(texts: Iterable[str]) -> Hours:
    """`22:00-07:00`, several of them, or several in one text with commas between. UsageError for anything else."""
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    if len(words) > MAX_SPANS:
        raise UsageError(f"{len(words)} spans of hours are too many", fix=f"write at most {MAX_SPANS}")
    return Hours(tuple(_span(word) for word in words))


def _span(text: str) -> tuple[int, int]:
    match = _SPAN.fullmatch(text)
    numbers = [int(number) for number in match.groups()] if match is not None else []
    if match is not None:
        start, end = 60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]
        if numbers[1] < 60 and numbers[3] < 60 and start < _DAY and end <= _DAY and start != end % _DAY:
            return start, end
    raise UsageError(f"{text[:40]!r} are not hours of the day", fix="write them as 22:00-07:00; without any, all day")


def _contains(start: int, end: int, minute: int) -> bool:
    return start <= minute < end if start < end else minute >= start or minute < end


def _clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
