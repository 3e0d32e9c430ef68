"""Who is left out when peers that live cannot reduce together."""

from __future__ import annotations

from dataclasses import replace

from swarmtrain.coordinator.blame import MAX_STRIKES, Blame, Reply
from swarmtrain.coordinator.members import Member
from swarmtrain.p2p.errors import NetError
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.wire.messages import Prepared, Unprepared
from swarmtrain.wire.peer_report import PeerReport

MEMBER = Member("a", PeerReport(0, "serving", "1", 3), seen_at=0.0)
A, B, C = (replace(MEMBER, peer_id=name) for name in "abc")
GOOD = Prepared(1.0, "x")


def complains(*suspects: str) -> Unprepared:
    return Unprepared(b"", suspects, "no answer")


def left_out(replies: list[Reply], *, times: int = MAX_STRIKES) -> list[Member]:
    blame, found = Blame(), []
    for _ in range(times):
        found = blame.attempt([A, B, C], replies)
    return found


def test_one_failure_is_forgiven() -> None:
    assert left_out([complains("b"), GOOD, None], times=1) == []


def test_a_peer_that_another_cannot_reach_is_left_out_at_the_second_time() -> None:
    assert left_out([complains("b"), None, None]) == [B]


def test_a_peer_that_reaches_no_other_is_left_out_itself_and_not_the_others() -> None:
    assert left_out([complains("b", "c"), complains("a"), complains("a")]) == [A]
    assert left_out([complains("b", "c"), None, None]) == [A]


def test_missing_microbatches_are_no_complaint() -> None:
    assert left_out([Unprepared(b"\0\0\0\0", (), "not in the ledger"), None, None], times=9) == []


def test_a_dead_peer_is_not_blamed_twice() -> None:
    assert left_out([NetError("gone"), GOOD, GOOD], times=9) == []


def test_a_peer_that_refuses_again_and_again_is_left_out() -> None:
    assert left_out([GOOD, CallRefused("bad-roster"), GOOD]) == [B]


def test_strangers_and_the_accuser_itself_cannot_be_accused() -> None:
    assert left_out([complains("a", "zz"), None, None], times=9) == []


def test_the_minority_is_left_out_when_sums_differ() -> None:
    assert left_out([GOOD, Prepared(1.0, "y"), GOOD]) == [B]


def test_two_that_disagree_do_not_go_on_for_ever() -> None:
    blame = Blame()
    found = [blame.attempt([A, B], [GOOD, Prepared(1.0, "y")]) for _ in range(MAX_STRIKES)]
    assert len(found[-1]) == 1


def test_of_an_accuser_without_the_sum_and_an_accused_that_has_it_the_accuser_is_left_out() -> None:
    assert left_out([complains("b"), GOOD, GOOD]) == [A]


def test_who_is_accused_by_one_after_the_other_is_left_out_and_not_those_that_it_accuses() -> None:
    """Its line to all others is broken: in every attempt another one notices it first, and each accuses the other."""
    blame = Blame()
    with_b: list[Reply] = [None, complains("c"), complains("b")]
    with_a: list[Reply] = [complains("c"), None, complains("a")]
    assert blame.attempt([A, B, C], with_b) == []
    assert blame.attempt([A, B, C], with_a) == []
    assert blame.attempt([A, B, C], with_b) == [C]
