"""Memory budgets: never exceeded, first come first served, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.rpc.limits import Budget, Reservation


def nothing() -> None:
    """A callback that is not expected to do anything."""


def test_reservations_wait_in_order_and_are_admitted_when_there_is_room() -> None:
    budget = Budget(100)
    admitted: list[str] = []
    first = budget.reserve(60, nothing)
    large = budget.reserve(80, lambda: admitted.append("large"))
    small = budget.reserve(10, lambda: admitted.append("small"))
    assert first.admitted
    assert not large.admitted
    assert not small.admitted, "a small one may not overtake for ever"
    first.release()
    assert admitted == ["large", "small"]
    assert budget.used_bytes == 90
    large.release()
    large.release()
    small.release()
    assert budget.used_bytes == 0


def test_leaving_the_queue_lets_the_next_one_in() -> None:
    budget = Budget(100)
    first, large = budget.reserve(60, nothing), budget.reserve(80, nothing)
    small = budget.reserve(10, nothing)
    large.release()
    assert small.admitted
    assert budget.used_bytes == 70
    first.release()
    small.release()


def test_a_full_child_blocks_itself_and_a_full_parent_blocks_all() -> None:
    parent = Budget(100)
    left, right = Budget(50, parent), Budget(80, parent)
    assert left.reserve(50, nothing).admitted
    waiting = left.reserve(10, nothing)
    assert not waiting.admitted
    assert right.reserve(20, nothing).admitted, "the other child has room"
    assert not right.reserve(40, nothing).admitted, "the parent has not"
    assert parent.used_bytes == 70


def test_a_large_one_that_waits_for_the_parent_is_not_overtaken_by_small_ones_of_others() -> None:
    parent = Budget(100)
    left, right = Budget(100, parent), Budget(100, parent)
    first = right.reserve(60, nothing)
    large = left.reserve(80, nothing)
    small = [right.reserve(10, nothing) for _ in range(3)]
    assert not any(reservation.admitted for reservation in (large, *small))
    first.release()
    assert large.admitted
    assert [reservation.admitted for reservation in small] == [True, True, False]


def test_a_child_is_never_larger_than_its_parent_and_the_impossible_is_an_error() -> None:
    child = Budget(500, Budget(100))
    assert child.limit_bytes == 100
    with pytest.raises(ValueError, match="never fit"):
        child.reserve(101, nothing)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 50)), max_size=60))
def test_no_limit_is_ever_exceeded_and_everything_ends_up_served(
    steps: list[tuple[bool, int, int]],
) -> None:
    parent = Budget(100)
    children = [Budget(50, parent), Budget(70, parent), Budget(100, parent)]
    live: list[Reservation] = []
    for reserve, which, num_bytes in steps:
        if reserve or not live:
            live.append(children[which].reserve(num_bytes, nothing))
        else:
            live.pop(num_bytes % len(live)).release()
        assert parent.used_bytes <= 100
        assert all(child.used_bytes <= child.limit_bytes for child in children)
        assert parent.used_bytes == sum(r.num_bytes for r in live if r.admitted)
    for reservation in list(live):
        reservation.release()
    assert parent.used_bytes == 0
    assert all(child.used_bytes == 0 for child in children)
    assert parent.reserve(100, nothing).admitted
