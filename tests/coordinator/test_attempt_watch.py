"""When an attempt at a reduction has failed, and who is named."""

from __future__ import annotations

import pytest

from swarmtrain.coordinator.attempt_watch import (
    COMPUTE_S,
    MIN_MOVED_BYTES,
    SILENT_S,
    SLOW_FACTOR,
    STALL_S,
    AttemptWatch,
    Pace,
)
from swarmtrain.reduce.all_reduce import Lacks
from swarmtrain.wire.messages import Preparing

LONG_S = 10 * STALL_S


def report(moved: int = 0, *, computes: bool = False, missing: str = "", unanswered: str = "") -> Preparing:
    lacks = Lacks.SHARES if missing else Lacks.OWNERS if unanswered else Lacks.NOTHING
    return Preparing(moved, computes, tuple(missing or unanswered), lacks)


def test_what_moves_goes_on_however_long_it_takes() -> None:
    watch, now = AttemptWatch("ab", 0.0), 0.0
    for turn in range(100):
        now += STALL_S / 2
        for peer in "ab":
            watch.heard(peer, report(turn * MIN_MOVED_BYTES), now)
        assert not watch.has_stalled(now)
        assert not watch.silent(now)


def test_a_member_without_reports_is_named_although_the_others_move() -> None:
    watch = AttemptWatch("abc", 0.0)
    for now in (10.0, 20.0, SILENT_S + 1.0):
        for peer in "ac":
            watch.heard(peer, report(int(now) * MIN_MOVED_BYTES), now)
    assert watch.silent(SILENT_S + 1.0) == ["b"]


def test_control_a_member_that_has_answered_need_not_report() -> None:
    watch = AttemptWatch("a", 0.0)
    watch.answered("a", 1.0)
    assert not watch.silent(LONG_S)


def stalled(**reports: Preparing) -> AttemptWatch:
    watch = AttemptWatch(reports, 0.0)
    for now in (1.0, LONG_S):
        for peer, item in reports.items():
            watch.heard(peer, item, now)
    assert watch.has_stalled(LONG_S)
    return watch


def test_whose_shares_are_missing_is_complained_of_and_not_the_owner_that_waits_for_them() -> None:
    watch = stalled(a=report(missing="c"), b=report(unanswered="ac"), c=report(unanswered="ab"))
    complaints = [watch.complaint(peer) for peer in "abc"]
    assert [item.suspects if item else None for item in complaints] == [("c",), (), ()]


def test_an_owner_that_does_not_answer_is_complained_of_when_all_shares_are_there() -> None:
    watch = stalled(a=report(unanswered="c"), b=report(unanswered="c"), c=report(unanswered="ab"))
    complaint = watch.complaint("a")
    assert complaint is not None
    assert complaint.suspects == ("c",)


def test_of_all_that_members_wait_for_the_first_in_the_chain_is_complained_of() -> None:
    """x sends no share; so b has no sum of its group, c has no sum of b's group, and d no answer of c."""
    chain = {
        "b": Preparing(0, False, ("x",), Lacks.SHARES),
        "c": Preparing(0, False, ("b",), Lacks.SUMS),
        "d": Preparing(0, False, ("c",), Lacks.ROOTS),
        "e": Preparing(0, False, ("d",), Lacks.OWNERS),
    }
    watch = stalled(**chain)
    found = {peer: complaint.suspects for peer in chain if (complaint := watch.complaint(peer)) is not None}
    assert found == {"b": ("x",), "c": (), "d": (), "e": ()}
    del chain["b"]
    assert {peer: item.suspects for peer in chain if (item := stalled(**chain).complaint(peer))}["c"] == ("b",)


def test_what_a_member_lacked_before_it_had_everything_says_nothing() -> None:
    watch = stalled(a=report(missing="b"), b=report(unanswered="c"), c=report(unanswered="b"))
    watch.answered("a", LONG_S)
    complaint = watch.complaint("b")
    assert complaint is not None
    assert complaint.suspects == ("c",)


def test_a_member_that_waits_for_no_peer_holds_the_attempt_up_itself() -> None:
    assert stalled(a=report(), b=report(missing="a")).complaint("a") is None


def test_a_device_may_take_its_time_but_not_for_ever() -> None:
    watch = AttemptWatch("a", 0.0)
    watch.heard("a", report(computes=True), 1.0)
    assert not watch.has_stalled(COMPUTE_S)
    assert watch.has_stalled(COMPUTE_S + 2.0)


def test_a_device_that_begins_late_has_as_long() -> None:
    """It makes the digest of a sum that took long to come."""
    watch, now = AttemptWatch("a", 0.0), 0.0
    while now < 2 * COMPUTE_S:
        now += STALL_S / 2
        watch.heard("a", report(int(now) * MIN_MOVED_BYTES, missing="b"), now)
    watch.heard("a", report(int(now) * MIN_MOVED_BYTES, computes=True), now)
    assert not watch.has_stalled(now + COMPUTE_S - 1.0)
    assert watch.has_stalled(now + COMPUTE_S + 1.0)


def test_a_trickle_is_no_progress() -> None:
    watch = AttemptWatch("a", 0.0)
    for now in range(1, int(STALL_S) + 5):
        watch.heard("a", report(now * 10, missing="b"), float(now))
    assert watch.has_stalled(STALL_S + 4.0)


EXPECTED_S = 4 * STALL_S
LARGE = Pace(200e6, EXPECTED_S)  # 200 MB in two minutes


def moved_at(watch: AttemptWatch, bytes_per_s: float, seconds: float, peers: str = "ab") -> bool:
    """Whether an attempt whose members move so much is still under way after so many seconds."""
    now = 0.0
    while now < seconds and not watch.has_stalled(now):
        now += 5.0
        for peer in peers:
            watch.heard(peer, report(int(now * bytes_per_s), missing="b"), now)
    return not watch.has_stalled(now)


def test_ten_times_slower_than_expected_is_still_progress() -> None:
    assert moved_at(AttemptWatch("ab", 0.0, LARGE), LARGE.num_bytes / EXPECTED_S / 10, 10 * EXPECTED_S)


@pytest.mark.parametrize("peers", ["a", "ab", "abcdefgh"])
def test_a_pace_at_which_it_would_take_hours_is_no_progress_however_many_share_it(peers: str) -> None:
    usual = LARGE.num_bytes / EXPECTED_S
    assert not moved_at(AttemptWatch(peers, 0.0, LARGE), usual / (2 * SLOW_FACTOR), 10 * EXPECTED_S, peers)


def test_control_the_same_bytes_are_progress_where_no_rate_is_known() -> None:
    usual = LARGE.num_bytes / EXPECTED_S
    assert moved_at(AttemptWatch("ab", 0.0, Pace(LARGE.num_bytes)), usual / (2 * SLOW_FACTOR), 10 * EXPECTED_S)


def test_a_trickle_is_no_progress_where_no_rate_is_known() -> None:
    assert not moved_at(AttemptWatch("ab", 0.0, Pace(LARGE.num_bytes)), 1000.0, 10 * EXPECTED_S)


def test_a_small_all_reduce_that_once_took_no_time_may_take_minutes() -> None:
    small = Pace(1e6, 0.01)
    assert moved_at(AttemptWatch("ab", 0.0, small), small.num_bytes / (8 * STALL_S), 8 * STALL_S)
