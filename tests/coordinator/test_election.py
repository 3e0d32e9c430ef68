"""Which state a restarted coordinator goes by: not the first comer's, if more can know."""

from __future__ import annotations

import pytest

from swarmtrain.coordinator.election import elected, electorate

A, B, C, D = (("a", "1"), ("b", "1"), ("c", "1"), ("d", "1"))


@pytest.mark.parametrize(
    ("votes", "at_once", "in_the_end"),
    [
        ({}, "", ""),
        ({A: "wrong"}, "", "wrong"),  # the only one that is left: no other peer knows better
        ({A: "wrong", B: "right"}, "", "right"),  # the order of their digests decides
        ({A: "right", B: "right"}, "right", "right"),
        ({A: "wrong", B: "right", C: "right"}, "right", "right"),
        ({A: "wrong", D: "right"}, "", "right"),  # who was not there before makes the majority larger
        ({A: "right", B: "right", D: "wrong"}, "", "right"),
    ],
)
def test_more_than_half_decide_at_once_and_most_in_the_end(
    votes: dict[tuple[str, str], str], at_once: str, in_the_end: str
) -> None:
    assert elected(votes, [A, B, C], is_final=False) == at_once
    assert elected(votes, [A, B, C], is_final=True) == in_the_end


def test_one_of_one_is_not_waited_for() -> None:
    assert elected({A: "right"}, [A], is_final=False) == "right"


def test_a_peer_that_had_another_state_before_has_no_vote_unless_its_work_counted() -> None:
    assert electorate({A: "x", B: "x", C: "y"}, [D]) == {A, B, D}
    assert electorate({}, [A]) == {A}
