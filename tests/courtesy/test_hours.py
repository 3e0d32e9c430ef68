"""Hours of the day: across midnight, and on the two days of the year that have another length."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.courtesy.hours import Hours, parse_hours, parse_zone
from swarmtrain.errors import UsageError

BERLIN = ZoneInfo("Europe/Berlin")  # 2026: the clock goes forward on 29 March, back on 25 October


def at(text: str, *, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).timestamp()


@pytest.mark.parametrize(
    ("text", "time", "are_open", "change"),
    [
        ("22:00-07:00", "2026-06-01T21:59", False, "2026-06-01T22:00"),
        ("22:00-07:00", "2026-06-01T22:00", True, "2026-06-02T07:00"),
        ("22:00-07:00", "2026-06-02T06:59", True, "2026-06-02T07:00"),
        ("22:00-07:00", "2026-06-02T07:00", False, "2026-06-02T22:00"),
        ("09:00-12:00,13:00-24:00", "2026-06-01T12:30", False, "2026-06-01T13:00"),
        ("09:00-12:00,13:00-24:00", "2026-06-01T23:59", True, "2026-06-02T00:00"),
        ("09:00-12:00,12:00-13:00", "2026-06-01T11:59", True, "2026-06-01T13:00"),
    ],
)
def test_hours_open_and_close(text: str, time: str, are_open: bool, change: str) -> None:
    hours = parse_hours([text])
    assert hours.are_open(at(time), BERLIN) is are_open
    assert hours.next_change(at(time), BERLIN) == at(change)


def test_a_night_is_seven_hours_in_spring_and_nine_in_autumn_by_the_clock_on_the_wall() -> None:
    """23:00 to 07:00, which is eight hours on any other day."""
    hours = parse_hours(["23:00-07:00"])
    for day, length in (("2026-03-28", 7), ("2026-10-24", 9), ("2026-06-01", 8)):
        opened = at(f"{day}T23:00")
        assert not hours.are_open(opened - 60, BERLIN)
        closed = hours.next_change(opened, BERLIN)
        assert closed is not None
        assert closed - opened == length * 3600


def test_hours_that_a_day_leaves_out_come_the_day_after() -> None:
    hours = parse_hours(["02:10-02:50"])
    assert hours.next_change(at("2026-03-29T01:30"), BERLIN) == at("2026-03-30T02:10")
    opens_twice = at("2026-10-25T02:10"), at("2026-10-25T02:10", fold=1)
    assert opens_twice[1] - opens_twice[0] == 3600
    assert all(hours.are_open(time, BERLIN) for time in opens_twice)


def test_without_hours_the_whole_day_is_open() -> None:
    assert Hours().are_open(0.0, BERLIN)
    assert Hours().next_change(0.0, BERLIN) is None
    assert parse_hours(["00:00-12:00", "12:00-24:00"]).next_change(at("2026-06-01T11:00"), BERLIN) is None


@given(st.integers(0, 1439), st.integers(1, 1440), st.integers(1_700_000_000, 1_900_000_000))
def test_the_next_change_is_the_first_minute_at_which_the_answer_differs(start: int, end: int, time: int) -> None:
    if start == end % 1440:
        return
    hours = Hours(((start, end),))
    change = hours.next_change(float(time), BERLIN)
    assert change is not None
    assert time < change <= time + 50 * 3600
    assert hours.are_open(change, BERLIN) is not hours.are_open(float(time), BERLIN)
    assert hours.are_open(change - 1, BERLIN) is hours.are_open(float(time), BERLIN)


@pytest.mark.parametrize(
    "text",
    ["22-7", "22:00", "24:00-07:00", "22:60-07:00", "22:00-24:01", "07:00-07:00", "00:00-24:00", "x", "٢٢:00-07:00"],
)
def test_what_are_no_hours(text: str) -> None:
    with pytest.raises(UsageError, match="not hours of the day"):
        parse_hours([text])


def test_more_hours_than_a_day_has_are_refused() -> None:
    with pytest.raises(UsageError, match="too many"):
        parse_hours(["01:00-02:00"] * 25)


@pytest.mark.parametrize("name", ["Mars/Base", "../../etc/passwd", "/etc/passwd", "a" * 1000])
def test_what_is_no_time_zone(name: str) -> None:
    with pytest.raises(UsageError, match="no time zone"):
        parse_zone(name)
