"""A peer that runs out of work: whom it tells, and what those make of it."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from swarmtrain.route.finish_time import HUNGER_LIFE, MAX_HUNGRY
from swarmtrain.route.hunger import MIN_PAUSE_S, NUM_TOLD, REMEMBERED, Appetite, is_held_up
from swarmtrain.route.router import Router
from swarmtrain.route.views import HUNGRY, LinkView, PeerView

from .routers import MEBI, make_router, peer

STAGE = [peer(name) for name in "abcdefgh"]


def appetite_of(callers: list[str], seed: int = 0) -> Appetite[str]:
    appetite: Appetite[str] = Appetite(random.Random(seed))
    for caller in callers:
        appetite.called_by(caller)
    return appetite


def attentive(peers: list[PeerView], **options: float) -> Router:
    """Neither explores nor overhears."""
    return make_router(peers, exploration=0.0, deafness=0.0, **options)


# -- whom to tell


def test_who_was_never_called_tells_nobody() -> None:
    assert appetite_of([]).whom_to_tell(0.0) == []


def test_of_many_callers_some_are_told_and_of_few_nobody() -> None:
    for seed in range(50):
        told = appetite_of([f"caller {i}" for i in range(100)], seed).whom_to_tell(0.0)
        assert 1 <= len(told) <= NUM_TOLD
        assert len(set(told)) == len(told)
        assert set(told) <= {f"caller {i}" for i in range(100 - REMEMBERED, 100)}
        assert len(appetite_of(list("abcdef"), seed).whom_to_tell(0.0)) == 1
        assert appetite_of(list("abcde") * 6, seed).whom_to_tell(0.0) == []
    assert max(len(appetite_of([f"{i}" for i in range(32)], seed).whom_to_tell(0.0)) for seed in range(9)) == NUM_TOLD


def test_who_calls_often_is_told_often() -> None:
    calls = ["often"] * 20 + list("abcdef") * 2
    told = Counter(appetite_of(calls, seed).whom_to_tell(0.0)[0] for seed in range(1000))
    assert told["often"] == pytest.approx(625, abs=60)


def test_short_work_is_not_worth_a_message_each() -> None:
    appetite = appetite_of(list("abcdef"))
    assert len(appetite.whom_to_tell(10.0)) == 1
    assert appetite.whom_to_tell(10.0 + 0.9 * MIN_PAUSE_S) == []
    assert len(appetite.whom_to_tell(10.0 + 1.1 * MIN_PAUSE_S)) == 1


def test_a_peer_whose_uplink_is_the_reason_is_held_up_and_not_hungry() -> None:
    assert not is_held_up(0, 1000)
    assert not is_held_up(2000, 1000)
    assert is_held_up(2001, 1000)


# -- what a sender makes of it


def test_the_next_piece_goes_to_the_one_that_said_it_last_and_only_one_piece() -> None:
    router = attentive(STAGE)
    router.hungry("c", now=0.0)
    router.hungry("f", now=0.1)
    picks = [router.pick(1.0, 0.2) for _ in range(3)]
    assert [pick.why for pick in picks if pick is not None] == [HUNGRY, HUNGRY, "best"]
    assert [pick.peer_id for pick in picks if pick is not None][:2] == ["f", "c"]


def test_a_preferred_peer_comes_before_a_hungry_one() -> None:
    router = attentive(STAGE)
    router.hungry("c", now=0.0)
    pick = router.pick(1.0, 0.1, prefer=("a",))
    assert pick is not None
    assert (pick.peer_id, pick.why) == ("a", "hint")


def feeds(router: Router, now: float = 0.1, exclude: frozenset[str] = frozenset(), num_bytes: float = 1.0) -> bool:
    pick = router.pick(num_bytes, now, exclude)
    return pick is not None and pick.why == HUNGRY


def test_who_may_not_be_asked_is_not_fed() -> None:
    router = attentive(STAGE)
    router.hungry("stranger", now=0.0)
    assert not feeds(router)
    router.hungry("c", now=0.0)
    assert not feeds(router, exclude=frozenset({"c"}))
    router.busy("c", 5.0, now=0.0)
    router.hungry("c", now=0.0)
    assert not feeds(router)
    router.failed("d", now=0.0)
    router.hungry("d", now=0.0)
    assert not feeds(router)
    router.hungry("e", now=0.0)
    assert feeds(router)  # the same router feeds whom it may


def test_a_hint_is_forgotten_when_somebody_else_has_fed_the_peer_long_since() -> None:
    router = attentive(STAGE)  # a microbatch takes a second
    router.hungry("c", now=0.0)
    assert not feeds(router, now=HUNGER_LIFE + 0.1)
    router.hungry("c", now=10.0)
    assert feeds(router, now=10.0 + HUNGER_LIFE - 0.1)


def test_who_holds_far_more_than_others_lacks_somebody_to_take_its_work_and_gets_no_more() -> None:
    router = attentive(STAGE)
    for name in "abdefgh" * 20:
        router.succeeded(name, wire_s=0.01, queue_s=0.0, compute_s=0.3, load_s=5.0, now=0.0)
    router.hungry("c", load_s=20.0, now=0.0)
    assert not feeds(router)
    router.hungry("c", load_s=8.0, now=0.0)
    assert feeds(router)
    router.observed("d", load_s=20.0, now=0.0)  # it said so itself, a moment ago
    router.hungry("d", load_s=0.0, now=0.0)
    assert not feeds(router)


def test_who_lacks_a_faster_wire_is_not_fed() -> None:
    """Else the share of a link that falls to a tenth would rise: its peer is hungry because of it."""
    router = attentive(STAGE)
    router.update_link("c", LinkView(goodput_bytes_per_s=MEBI, rtt_s=0.01, samples=5))
    router.hungry("c", now=0.0)
    assert feeds(router, num_bytes=0.5 * MEBI)  # half a second of wire, one of computing
    router.hungry("c", now=0.0)
    assert not feeds(router, num_bytes=2.0 * MEBI)
    router.update_link("c", LinkView(goodput_bytes_per_s=MEBI, rtt_s=0.01, samples=5, backlog_bytes=int(MEBI)))
    router.hungry("c", now=0.0)
    assert not feeds(router, num_bytes=0.5 * MEBI)


def test_who_announces_a_link_slower_than_its_processor_is_not_fed() -> None:
    router = attentive([*STAGE, peer("slow", up_bytes_per_s=0.1 * MEBI)], bytes_out=MEBI)
    router.hungry("slow", now=0.0)
    assert not feeds(router)


@pytest.mark.parametrize("load_s", [math.nan, math.inf, -1.0])
def test_a_hint_that_makes_no_sense_is_none(load_s: float) -> None:
    router = attentive(STAGE)
    router.hungry("c", load_s=load_s, now=0.0)
    assert not feeds(router)


def test_any_number_of_hints_is_remembered_up_to_a_bound() -> None:
    router = attentive([peer(f"p{i}") for i in range(200)])
    for i in range(200):
        router.hungry(f"p{i}", now=0.0)
    assert sum(feeds(router) for _ in range(200)) == MAX_HUNGRY


def test_a_newcomer_gets_work_although_all_others_say_all_the_time_that_they_are_hungry() -> None:
    router = make_router(STAGE, exploration=0.0)
    for step in range(200):
        for name in "abcdefg":
            router.hungry(name, now=0.1 * step)
        pick = router.pick(1.0, 0.1 * step)
        assert pick is not None
        if pick.peer_id == "h":
            return
    pytest.fail("the one that never said anything was never picked")


@pytest.mark.parametrize(("num_peers", "announced_s"), [(8, 1.0), (64, 1.0), (16, 50.0)])
def test_who_says_it_before_every_piece_gets_a_few_times_its_share_and_not_everything(
    num_peers: int, announced_s: float
) -> None:
    """However little it says that it holds, and however long it waits with its answers."""
    router = make_router([peer("liar", announced_s), *(peer(f"p{i}") for i in range(num_peers - 1))])
    fair = (1.0 / announced_s) / (1.0 / announced_s + num_peers - 1)
    num_picks, counts = 4000, Counter[str]()
    for number in range(num_picks):
        router.hungry("liar", now=0.1 * number)
        pick = router.pick(1.0, 0.1 * number)
        assert pick is not None
        counts[pick.peer_id] += 1
    share = counts["liar"] / num_picks
    assert share < 4.5 * fair + 0.01
    assert share > fair  # but it is heard


def test_of_two_peers_one_that_always_runs_out_of_work_leaves_some_to_the_other() -> None:
    router = make_router([peer("a"), peer("b")], exploration=0.0)
    counts = Counter[str]()
    for number in range(400):
        router.hungry("a", now=0.1 * number)
        pick = router.pick(1.0, 0.1 * number)
        assert pick is not None
        counts[pick.peer_id] += 1
    assert counts["b"] >= 0.2 * counts.total()


def test_hints_of_strangers_do_not_push_out_those_of_peers() -> None:
    router = attentive(STAGE)
    router.hungry("c", now=0.0)
    for number in range(10 * MAX_HUNGRY):
        router.hungry(f"stranger {number}", now=0.0)
    assert feeds(router)


def test_what_a_peer_says_of_itself_on_the_way_does_not_change_what_is_usual() -> None:
    """Else one of them could make all others look stuck, message by message."""
    router = attentive(STAGE)
    for name in "abdefgh" * 20:
        router.succeeded(name, wire_s=0.01, queue_s=0.0, compute_s=0.3, load_s=5.0, now=0.0)
    for _ in range(500):
        router.observed("a", load_s=0.0, now=0.0)
    router.hungry("c", load_s=8.0, now=0.0)
    assert feeds(router)


def test_the_published_router_does_not_listen() -> None:
    router = make_router(STAGE, "swarm-latency")
    router.hungry("h", now=0.0)
    assert not feeds(router)
