"""Shares of time are those of the last minute, whatever came before."""

from __future__ import annotations

import pytest

from swarmtrain.observe.lately import LOOK_BACK_S, PARTS, Lately


def spent(**seconds: float) -> tuple[float, ...]:
    return tuple(seconds.get(part, 0.0) for part in PARTS)


def test_what_was_long_ago_does_not_count() -> None:
    """An hour of computing, then nothing to do."""
    lately = Lately()
    for second in range(3600):
        lately.note("p", second, spent(compute=float(second)))
    assert lately.shares("p", 3599.0)["compute"] == 1.0
    for second in range(120):
        lately.note("p", 3600.0 + second, spent(compute=3599.0, idle=1.0 + second))
    assert lately.shares("p", 3719.0)["idle"] == 1.0


def test_shares_add_up_and_cover_the_last_minute() -> None:
    lately = Lately()
    for second in range(400):
        busy = min(second, 370)
        lately.note("p", float(second), spent(compute=0.5 * busy, wire=0.5 * busy, idle=float(second - busy)))
    shares = lately.shares("p", 399.0)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["idle"] == pytest.approx(29 / LOOK_BACK_S, abs=0.1)
    assert shares["compute"] == shares["wire"]


def test_a_peer_that_restarts_or_falls_silent_has_none_of_its_past() -> None:
    lately = Lately()
    lately.note("p", 0.0, spent(compute=100.0))
    assert lately.shares("p", 0.0) == {}  # one note is no time
    lately.note("p", 10.0, spent(compute=110.0))
    lately.note("p", 20.0, spent(idle=1.0))  # its counters begin again
    assert lately.shares("p", 20.0) == {}
    lately.note("p", 30.0, spent(idle=11.0))
    assert lately.shares("p", 30.0)["idle"] == 1.0
    assert lately.shares("p", 100.0) == {}  # that is old


def test_what_is_kept_is_bounded() -> None:
    lately = Lately()
    for peer in range(50):
        for tick in range(1000):
            lately.note(f"p{peer}", tick / 4, spent(compute=tick / 4))
    assert max(len(notes) for notes in lately._notes.values()) < 20
    lately.keep(["p7"])
    assert list(lately._notes) == ["p7"]
    lately.note("p8", 1.0, (1.0, 2.0))  # what a stranger says is of another length
    assert list(lately._notes) == ["p7"]
