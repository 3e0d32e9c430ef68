"""Work stealing: which victims a thief asks and when, and which forwards are worth stealing."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.route.work_stealing import (
    MAX_EXCESS,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    MIN_WAIT_S,
    NUM_ASKED,
    StealPolicy,
    is_held_up,
    is_line_bound,
    is_worth_stealing,
)

STAGE = tuple(f"peer {number}" for number in range(40))
seconds = st.floats(0.0, 1e6)


def policy_of(seed: int = 0) -> StealPolicy[str]:
    return StealPolicy(random.Random(seed))


def test_some_of_a_large_stage_are_asked_and_all_of_a_small_one_and_none_twice() -> None:
    for seed in range(20):
        asked = policy_of(seed).victims(STAGE, 0.0)
        assert NUM_ASKED // 2 <= len(asked) == len(set(asked)) <= NUM_ASKED  # some were drawn twice
        assert set(asked) <= set(STAGE)
        assert sorted(policy_of(seed).victims(STAGE[:3], 0.0)) == list(STAGE[:3])
    assert policy_of().victims((), 0.0) == []


def test_every_peer_is_asked_as_often_as_the_others() -> None:
    asked = Counter(name for seed in range(6000) for name in policy_of(seed).victims(STAGE, 0.0))
    assert set(asked) == set(STAGE)
    assert max(asked.values()) < 1.3 * min(asked.values())


def test_the_last_victim_is_asked_first_and_once_until_it_has_nothing() -> None:
    for seed in range(20):
        policy = policy_of(seed)
        policy.stole(STAGE[7])
        asked = policy.victims(STAGE, 0.0)
        assert asked[0] == STAGE[7]
        assert len(asked) == len(set(asked)) <= NUM_ASKED
    policy.failed()
    firsts = {policy.victims(STAGE, 100.0 * number)[0] for number in range(1, 50)}
    assert len(firsts) > 10


def test_a_stage_that_lacks_work_is_asked_less_often_until_a_victim_gives() -> None:
    policy, now, pauses = policy_of(), 0.0, []
    for _ in range(8):
        assert policy.victims(STAGE, now)
        policy.failed()
        asked_at = now
        while not policy_may_ask(policy, now):
            now += MIN_PAUSE_S / 8
        pauses.append(now - asked_at)
    # The pause that a failed round makes is that after the next one.
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(MIN_PAUSE_S, rel=0.2)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S, rel=0.2)
    policy.stole(STAGE[0])
    assert policy.victims(STAGE, now)
    assert policy.victims(STAGE, now + 1.1 * MIN_PAUSE_S)


def policy_may_ask(policy: StealPolicy[str], now: float) -> bool:
    return bool(deepcopy(policy).victims(STAGE, now))


def test_short_work_is_not_worth_the_messages() -> None:
    policy = policy_of()
    assert policy.victims(STAGE, 10.0)
    assert policy.victims(STAGE, 10.0 + 0.9 * MIN_PAUSE_S) == []
    assert policy.victims(STAGE, 10.0 + 1.1 * MIN_PAUSE_S)


def test_a_stage_without_others_does_not_begin_the_pause() -> None:
    policy = policy_of()
    assert policy.victims((), 10.0) == []
    assert policy.victims(STAGE, 10.0)


@given(waiting_s=st.floats(0.0, MIN_WAIT_S), load_s=seconds, thief_load_s=seconds, thief_service_s=seconds)
def test_what_is_done_soon_stays(waiting_s: float, load_s: float, thief_load_s: float, thief_service_s: float) -> None:
    assert not is_worth_stealing(
        waiting_s=waiting_s, victim_load_s=load_s, thief_load_s=thief_load_s, thief_service_s=thief_service_s
    )


@given(load_s=st.floats(0.01, 1e6), excess=st.floats(1.001, 100.0), share=st.floats(0.0, 1.0))
def test_a_thief_that_would_hold_more_than_the_victim_gets_nothing_and_one_that_holds_less_does(
    load_s: float, excess: float, share: float
) -> None:
    """Whatever part of it is the new piece itself."""

    def is_stolen(total_s: float) -> bool:
        return is_worth_stealing(
            waiting_s=1e9, victim_load_s=load_s, thief_load_s=share * total_s, thief_service_s=(1.0 - share) * total_s
        )

    assert not is_stolen(MAX_EXCESS * load_s * excess)
    assert is_stolen(load_s)
    assert is_stolen(load_s / excess)


def test_two_peers_never_pass_one_piece_to_and_fro() -> None:
    """After a theft the victim does not get it back, as long as one piece is more than what loads differ by."""
    service_s, loads = 1.0, [6.0, 0.0]
    for _ in range(100):
        for victim, thief in ((0, 1), (1, 0)):
            if is_worth_stealing(
                waiting_s=9.0, victim_load_s=loads[victim], thief_load_s=loads[thief], thief_service_s=service_s
            ):
                loads[victim] -= service_s
                loads[thief] += service_s
    assert sorted(loads) == [3.0, 3.0]


@pytest.mark.parametrize(("wire_s", "is_it"), [(0.0, False), (0.9, False), (1.1, True)])
def test_a_peer_that_computes_faster_than_it_can_send_does_not_lack_work(wire_s: float, is_it: bool) -> None:
    assert is_line_bound(wire_s, 1.0) is is_it


@pytest.mark.parametrize(("backlog", "is_it"), [(0.0, False), (200.0, False), (201.0, True)])
def test_a_peer_that_cannot_send_its_results_wants_no_more(backlog: float, is_it: bool) -> None:
    assert is_held_up(backlog, 100.0) is is_it
