"""Who is left out when peers that live cannot reduce together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarmtrain.coordinator.blame import MAX_STRIKES, Blame, Known, Reply
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


def left_out(replies: list[Reply], *, times: int = MAX_STRIKES, known: Known | None = None) -> list[Member]:
    blame, found = Blame(known), []
    for _ in range(times):
        found = blame.attempt([A, B, C], replies)
    return found


def test_one_failure_is_forgiven() -> None:
    assert left_out([complains("b"), GOOD, None], times=1) == []


def test_an_accusation_without_other_evidence_costs_the_accuser() -> None:
    """It is free: else one peer could have any other left out."""
    assert left_out([complains("b"), None, None]) == [A]


def test_a_peer_that_two_others_cannot_reach_is_left_out() -> None:
    assert left_out([complains("b"), None, complains("b")]) == [B]


@pytest.mark.parametrize(
    "known", [Known(disputes={"b": 2, "a": 1}), Known(strikes={"b": 1.0}), Known(work={"a": 9, "b": 3})]
)
def test_of_an_accuser_and_an_accused_the_one_with_the_worse_record_is_left_out(known: Known) -> None:
    assert left_out([complains("b"), None, None], known=known) == [B]


def test_a_peer_that_does_not_reduce_and_says_nothing_is_left_out() -> None:
    """Its stage would try again for ever."""
    assert left_out([GOOD, Unprepared(b"", (), ""), None]) == [B]


def test_a_peer_that_says_it_has_the_sum_and_refuses_the_others_shares_is_left_out() -> None:
    refused = Unprepared(b"", (), "refused", ("b",))
    assert left_out([refused, GOOD, refused]) == [B]
    assert left_out([refused, complains("c"), complains("b")]) != [A], "b has given it up, and says why"


def test_of_two_sums_the_one_counts_whose_peers_have_done_more() -> None:
    blame = Blame(Known(work={"a": 1, "b": 9}))
    found = [blame.attempt([A, B], [Prepared(1.0, "a small digest"), Prepared(1.0, "x")]) for _ in range(MAX_STRIKES)]
    assert found[-1] == [A]


def test_equal_digests_with_different_norms_are_different_sums() -> None:
    assert left_out([GOOD, Prepared(1e99, "x"), GOOD]) == [B]
    assert left_out([GOOD, Prepared(math.nan, "x"), GOOD]) == [B]


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
