"""Places of handlers: who takes all it can get leaves places to all others."""

from __future__ import annotations

import pytest

from swarmtrain.rpc.limits import FREE_SHARE, LEAST_PLACES, HandlerTasks


def claim_all(tasks: HandlerTasks, peer_id: str) -> int:
    """Claim until refused; the number of places."""
    num_claimed = 0
    while tasks.try_claim(peer_id):
        num_claimed += 1
    return num_claimed


def test_an_identity_gets_half_of_the_places_and_the_next_a_share_of_the_rest() -> None:
    tasks = HandlerTasks(1024)
    assert claim_all(tasks, "a") == 512
    taken = claim_all(tasks, "b")
    assert LEAST_PLACES < taken <= 512 / FREE_SHARE
    assert not tasks.try_claim("a")
    assert tasks.try_claim("c")


@pytest.mark.parametrize("num_greedy", [1, 4, 16, 32])
def test_many_identities_that_take_all_they_can_get_leave_an_honest_peer_what_it_needs(num_greedy: int) -> None:
    tasks = HandlerTasks(4096)
    for number in range(num_greedy):
        claim_all(tasks, f"greedy{number}")
    assert all(tasks.try_claim("honest") for _ in range(LEAST_PLACES))


def test_a_place_that_is_given_back_is_there_again_for_its_holder_and_for_others() -> None:
    tasks = HandlerTasks(32)
    num_claimed = claim_all(tasks, "a")
    for _ in range(num_claimed):
        tasks.unclaim("a")
    assert tasks.num_free == 32
    assert claim_all(tasks, "b") == claim_all(HandlerTasks(32), "b") == num_claimed


def test_there_are_never_more_than_the_limit() -> None:
    tasks = HandlerTasks(20)
    assert sum(claim_all(tasks, f"{number}") for number in range(100)) == 20
    assert not tasks.try_claim("another")
