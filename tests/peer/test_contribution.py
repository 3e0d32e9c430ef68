"""The curve of a volunteer's page: bounded, and not begun anew by a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtrain.peer.contribution import FILE, MAX_POINTS, Contribution


def test_a_year_fits_into_a_few_hundred_points(tmp_path: Path) -> None:
    found = Contribution(tmp_path)
    for minute in range(0, 365 * 24 * 60, 7):
        found.note(60.0 * minute, minute)
    assert MAX_POINTS / 4 < len(found.points) <= MAX_POINTS
    assert found.points[0] == (0.0, 0)
    assert found.points[-1][1] >= 365 * 24 * 60 - 14 * 1024
    assert found.points == sorted(found.points)


def test_the_newest_point_is_always_there_and_moves_until_its_minute_is_over(tmp_path: Path) -> None:
    found = Contribution(tmp_path)
    for second in range(0, 300, 15):
        found.note(float(second), second)
    assert found.points[-1] == (285.0, 285)
    assert len(found.points) <= 8, "20 looks"


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = Contribution(tmp_path)
    first.note(0.0, 5)
    first.note(100.0, 9)
    assert first.needs_writing
    first.write()
    assert not first.needs_writing
    assert Contribution(tmp_path).points == [(0.0, 5), (100.0, 9)]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[["x", 1]]', "null"])
def test_a_damaged_file_begins_a_new_curve(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert Contribution(tmp_path).points == []
