"""A month's traffic: what a cap says, when a month ends, and a count that outlives processes and damaged files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from swarmtrain.courtesy.traffic import TrafficCap, TrafficCount, counted, parse_traffic
from swarmtrain.errors import UsageError


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize("text", ["200GB/month", "200 GB per month", "200gb / Month"])
def test_a_cap(text: str) -> None:
    assert parse_traffic(text, 5) == TrafficCap(200_000_000_000, 5)


@pytest.mark.parametrize("text", ["200GB", "GB/month", "0GB/month", "-1GB/month", "infGB/month", "1GB/week", "/month"])
def test_what_is_no_cap(text: str) -> None:
    with pytest.raises(UsageError):
        parse_traffic(text)


@pytest.mark.parametrize(
    ("day", "time", "ends"),
    [
        (1, "2026-01-31T23:59", "2026-02-01"),
        (1, "2026-12-31T12:00", "2027-01-01"),
        (28, "2026-02-27T23:59", "2026-02-28"),
        (28, "2026-02-28T00:00", "2026-03-28"),
        (15, "2027-01-14T00:00", "2027-01-15"),
    ],
)
def test_a_month_ends_on_the_day_of_the_bill(day: int, time: str, ends: str) -> None:
    assert TrafficCap(1, day).month_ends(at(time), UTC) == at(ends)


def count(place: Path, name: str = "one.json") -> TrafficCount:
    return TrafficCount(place / name, TrafficCap(1_000_000), UTC)


def test_it_goes_on_where_it_was_and_a_new_month_begins_with_nothing(tmp_path: Path) -> None:
    first = count(tmp_path)
    first.note(1000, at("2026-06-10"))
    first.note(3000, at("2026-06-11"))
    first.write()
    second = count(tmp_path)
    second.note(500, at("2026-06-30T23:59"))
    assert second.month_bytes == pytest.approx(counted(3500))
    second.note(700, at("2026-07-01"))
    assert second.month_bytes == pytest.approx(counted(200))
    assert second.needs_writing, "the file would bring the old month back"


def test_a_clock_that_is_set_back_gives_nothing_back(tmp_path: Path) -> None:
    found = count(tmp_path)
    found.note(1000, at("2026-06-10"))
    found.note(1000, at("2026-05-10"))
    assert found.month_bytes == pytest.approx(counted(1000))


def test_it_is_written_a_thousand_times_a_month_at_most(tmp_path: Path) -> None:
    found, num_writes = count(tmp_path), 0
    for link_bytes in range(0, 1_000_000, 100):
        found.note(link_bytes, at("2026-06-10"))
        if found.needs_writing:
            found.write()
            num_writes += 1
    assert 900 < num_writes <= 1050


def test_all_daemons_of_a_machine_count_together(tmp_path: Path) -> None:
    one, other, former = count(tmp_path), count(tmp_path, "other.json"), count(tmp_path, "former.json")
    other.note(2000, at("2026-06-10"))
    other.write()
    former.note(9000, at("2026-05-10"))
    former.write()
    one.note(1000, at("2026-06-10"))
    one.read_others()
    assert one.month_bytes == pytest.approx(counted(3000))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"month": "x", "bytes": -1}', '{"month": "x", "bytes": NaN}', "\0"])
def test_a_damaged_count_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_text(text)
    assert count(tmp_path).month_bytes == 0.0


def test_a_directory_that_cannot_be_written_does_not_stop_the_count(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = TrafficCount(tmp_path / "file" / "one.json", TrafficCap(1000), UTC)
    found.note(500, at("2026-06-10"))
    found.write()
    assert found.month_bytes == pytest.approx(counted(500))
