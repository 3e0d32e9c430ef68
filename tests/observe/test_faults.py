"""Faults on purpose happen only when asked for twice: by the variable and by the flag."""

from __future__ import annotations

import pytest

from swarmtrain.errors import UsageError
from swarmtrain.observe.faults import PACE_VARIABLE, VARIABLE, Action, Faults, Point, damaged


def armed(text: str, *, enabled: bool = True) -> Faults:
    return Faults.from_environment(enabled=enabled, environment={VARIABLE: text})


def test_without_the_flag_the_variable_has_no_effect() -> None:
    assert armed("after-forward:1:kill", enabled=False).armed == []
    assert armed("no fault at all", enabled=False).armed == []


def test_a_fault_happens_once_at_its_count() -> None:
    faults = armed("state-chunk:2:corrupt")
    assert [faults.hit(Point.STATE_CHUNK) for _ in range(4)] == [None, Action.CORRUPT, None, None]


def test_points_are_counted_apart() -> None:
    faults = armed("state-chunk:1:corrupt, before-answer:2:corrupt")
    assert faults.hit(Point.BEFORE_ANSWER) is None
    assert faults.hit(Point.STATE_CHUNK) is Action.CORRUPT
    assert faults.hit(Point.BEFORE_ANSWER) is Action.CORRUPT


def test_a_cut_calls_what_breaks_the_links() -> None:
    cuts: list[int] = []
    faults = armed("after-forward:1:cut")
    faults.cut = lambda: cuts.append(1)
    faults.hit(Point.AFTER_FORWARD)
    assert cuts == [1]


@pytest.mark.parametrize("text", ["x", "after-forward:1", "nowhere:1:kill", "after-forward:0:kill", "prepare:one:kill"])
def test_a_text_that_is_no_fault_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(UsageError, match=text.split(":")[0]):
        armed(text)


def test_damage_changes_exactly_one_bit() -> None:
    assert damaged(b"\0\0\0") == b"\0\1\0"
    assert damaged(b"") == b""


def test_a_pace_needs_the_flag_and_two_numbers() -> None:
    pace = {PACE_VARIABLE: "0.1:0.25"}
    assert Faults.from_environment(enabled=True, environment=pace).pace_s == (0.1, 0.25)
    assert Faults.from_environment(enabled=False, environment=pace).pace_s == (0.0, 0.0)
    for bad in ("", "1", "1:2:3", "-1:0", "nan:0", "1e9:0", "a:b"):
        with pytest.raises(UsageError, match="FORWARD:BACKWARD"):
            Faults.from_environment(enabled=True, environment={PACE_VARIABLE: bad})
