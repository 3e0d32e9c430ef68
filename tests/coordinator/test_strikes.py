"""What is held against an identity: it adds up, fades, and suspends it for longer each time."""

from __future__ import annotations

import pytest

from swarmtrain.coordinator.members import MAX_RATE_RATIO, believable
from swarmtrain.coordinator.strikes import (
    FIRST_OUT_S,
    HALF_LIFE_S,
    LIMIT,
    MAX_OUT_S,
    MAX_REMEMBERED,
    Offence,
    Strikes,
)


def test_silence_suspends_at_once_and_small_things_when_they_add_up() -> None:
    strikes = Strikes()
    assert strikes.note("a", Offence.SILENT, 0.0)
    found = [strikes.note("b", Offence.FALSE_MISSING, float(second)) for second in range(4)]
    assert found == [False, False, False, True]
    assert set(strikes.suspended(4.0)) == {"a", "b"}


def test_strikes_fade() -> None:
    strikes = Strikes()
    for index in range(100):
        assert not strikes.note("a", Offence.FALSE_MISSING, index * 2 * HALF_LIFE_S)
    assert strikes.score("a", 1e9) == pytest.approx(0.0)


def test_each_suspension_is_twice_as_long_up_to_a_limit() -> None:
    strikes, now, found = Strikes(), 0.0, []
    for _ in range(12):
        assert strikes.note("a", Offence.SILENT, now)
        found.append(strikes.out_s("a", now))
        now += found[-1] + 1.0
        assert not strikes.suspended(now)
    assert found[:3] == [FIRST_OUT_S, 2 * FIRST_OUT_S, 4 * FIRST_OUT_S]
    assert found[-1] == MAX_OUT_S


def test_a_suspended_peer_is_not_suspended_again_meanwhile() -> None:
    strikes = Strikes()
    assert strikes.note("a", Offence.SILENT, 0.0)
    assert not strikes.note("a", Offence.SILENT, 1.0)
    assert strikes.out_s("a", 1.0) == FIRST_OUT_S - 1.0


def test_disputes_count_different_peers() -> None:
    strikes = Strikes()
    for _ in range(5):
        strikes.disputed("liar", "a")
    strikes.disputed("liar", "b")
    assert [strikes.num_disputes(peer) for peer in ("liar", "a", "b", "c")] == [2, 1, 1, 0]


def test_a_flood_of_identities_is_bounded() -> None:
    strikes = Strikes()
    for index in range(MAX_REMEMBERED + 10):
        strikes.note(f"p{index}", Offence.BLAMED, 0.0)
    assert strikes.score("p0", 0.0) == 0.0
    assert 0.0 < strikes.score(f"p{MAX_REMEMBERED}", 0.0) < LIMIT


def test_announced_rates_are_bounded_by_the_median_of_the_others() -> None:
    assert believable([(1e15, 1e15), (1e6, 4e6), (3e6, 4e6)])[0] == (MAX_RATE_RATIO * 2e6, MAX_RATE_RATIO * 4e6)
    assert believable([(1e15, 0.0), (1e6, 0.0)]) == [(MAX_RATE_RATIO * 1e6, 0.0), (1e6, 0.0)]
    honest = [(1e6, 1e7), (5e6, 2e7), (0.0, 0.0), (2e6, 1e7)]
    assert believable(honest) == honest
    assert believable([(1e15, 1.0)]) == [(1e15, 1.0)]
    assert believable([]) == []
