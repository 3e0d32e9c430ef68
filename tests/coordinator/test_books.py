"""The books of one step: rosters name each microbatch once, losses leave gaps, gaps lead to plans that fill them."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.coordinator.books import StepBooks
from swarmtrain.wire.messages import Hop

NUM_STAGES = 3


def hop(stage: int, peer: int, life: int = 0) -> Hop:
    """Peer `peer` of a stage in its `life`-th incarnation."""
    return Hop(stage, f"s{stage}p{peer}", f"i{life}")


def route(*peers: int) -> list[Hop]:
    return [hop(stage, peer) for stage, peer in enumerate(peers)]


def key(item: Hop) -> tuple[str, str]:
    return item.peer_id, item.incarnation


def filled(num_microbatches: int, seed: int) -> StepBooks:
    """Every microbatch answered at least once over random routes; some twice."""
    rng = random.Random(seed)
    books = StepBooks(NUM_STAGES, num_microbatches)
    for microbatch in range(num_microbatches):
        for _ in range(rng.choice((1, 1, 2))):
            books.record(microbatch, float(microbatch), route(*(rng.randrange(3) for _ in range(NUM_STAGES))))
    return books


def test_a_stage_balances_when_every_microbatch_is_in_the_sum_of_some_peer() -> None:
    books = StepBooks(NUM_STAGES, 2)
    assert not books.balances(0)
    books.record(0, 1.0, route(0, 0, 0))
    assert not books.balances(0)
    assert books.missing(0) == [1]
    books.record(1, 2.0, route(1, 0, 1))
    assert all(books.balances(stage) for stage in range(NUM_STAGES))


def test_a_route_through_dead_peers_claims_only_what_the_living_have() -> None:
    books = StepBooks(NUM_STAGES, 1)
    books.record(0, 1.0, [hop(0, 0), hop(2, 0)])
    assert [books.balances(stage) for stage in range(NUM_STAGES)] == [True, False, True]


def test_the_first_loss_stands() -> None:
    books = StepBooks(NUM_STAGES, 1)
    books.record(0, 1.0, route(0, 0, 0))
    books.record(0, 1.5, route(1, 1, 1))
    assert books.losses == {0: 1.0}


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_a_roster_names_every_microbatch_exactly_once(num_microbatches: int, seed: int) -> None:
    books = filled(num_microbatches, seed)
    for stage in range(NUM_STAGES):
        shares = books.roster(stage)
        assert sorted(i for ids in shares.values() for i in ids) == list(range(num_microbatches))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(0, 10**6), st.integers(0, NUM_STAGES - 1), st.integers(0, 2))
def test_a_lost_peer_is_in_no_roster_and_its_gaps_have_plans(
    num_microbatches: int, seed: int, stage: int, peer: int
) -> None:
    books = filled(num_microbatches, seed)
    lost = hop(stage, peer)
    before = books.roster(stage)
    voided = books.lose(stage, key(lost))
    assert voided >= len(before.get(key(lost), []))
    gaps = books.missing(stage)
    for microbatch in range(num_microbatches):
        plan = books.replay_plan(microbatch)
        assert (plan is not None) == (microbatch in gaps)
        if plan is not None:
            assert plan.lowest_missing_stage == stage
            assert (plan.holder is None) == (stage == 0)
            assert [hint.stage for hint in plan.hints] == list(range(stage + 1, NUM_STAGES))
            books.record(microbatch, 0.0, [hop(stage, peer, life=1)])
    assert key(lost) not in books.roster(stage)


def test_another_incarnation_does_not_inherit_the_claims() -> None:
    books = StepBooks(NUM_STAGES, 1)
    books.record(0, 1.0, route(0, 0, 0))
    assert books.lose(1, key(hop(1, 0, life=1))) == 0
    assert books.balances(1)
    assert books.lose(1, key(hop(1, 0))) == 1
    assert not books.balances(1)


def test_a_peer_that_says_that_it_lacks_a_microbatch_answers_for_it_no_more() -> None:
    books = StepBooks(NUM_STAGES, 2)
    for microbatch in range(2):
        books.record(microbatch, 1.0, route(0, 0, 0))
    books.withdraw(1, [1], key(hop(1, 0)))
    assert books.missing(1) == [1]
    assert books.holder(1, 0) == hop(1, 0)


def test_a_plan_goes_to_the_stage_before_the_lowest_gap() -> None:
    books = StepBooks(NUM_STAGES, 1)
    books.record(0, 1.0, route(0, 0, 0))
    books.lose(1, key(hop(1, 0)))
    books.lose(2, key(hop(2, 0)))
    plan = books.replay_plan(0)
    assert plan is not None
    assert (plan.lowest_missing_stage, plan.holder, plan.hints) == (1, hop(0, 0), ())


def test_the_loss_of_a_route_that_does_not_count_is_not_written_and_asked_for_again() -> None:
    books = StepBooks(NUM_STAGES, 1)
    books.record(0, 99.0, route(0, 0, 0)[:2], num_hops=NUM_STAGES)
    books.record(0, 99.0, route(1, 1, 1)[2:], num_hops=NUM_STAGES)
    assert books.is_answered
    assert books.losses == {}
    assert not any(books.balances(stage) for stage in range(NUM_STAGES))
    plan = books.replay_plan(0)
    assert plan is not None
    assert plan.holder is None, "it is leased again"
    assert [item.stage for item in plan.hints] == [0, 1, 2]
    books.record(0, 1.0, route(0, 0, 1), num_hops=NUM_STAGES)
    assert books.losses == {0: 1.0}
    assert books.balances(0)
    assert books.replay_plan(0) is None
