"""The router: shares follow speed, nobody starves, nobody is flooded, and failures are kept away from."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from swarmtrain.errors import UsageError
from swarmtrain.route.estimate import STALL_HALF_LIFE_S
from swarmtrain.route.finish_time import MAX_KNOWN
from swarmtrain.route.policies import RouterOptions
from swarmtrain.route.router import Router
from swarmtrain.route.views import LinkView, PeerView, StageSnapshot

from .routers import MEBI, Clock, make_router, peer


def shares_after(router: Router, service_s: dict[str, float], num_picks: int, num_bytes: float = 1.0) -> Counter[str]:
    """Picks per peer when every call succeeds at once with the peer's true compute time."""
    counts: Counter[str] = Counter()
    for _ in range(num_picks):
        pick = router.pick(num_bytes)
        assert pick is not None
        counts[pick.peer_id] += 1
        seconds = service_s[pick.peer_id]
        router.succeeded(pick.peer_id, wire_s=0.03, queue_s=0.0, compute_s=seconds / 3, backward_s=seconds * 2 / 3)
    return counts


# Shrinking thousands of picks takes minutes and makes nothing clearer.
GENERATE_ONLY = (Phase.explicit, Phase.reuse, Phase.generate)
SERVICE_TIMES = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=12)


@settings(deadline=None, phases=GENERATE_ONLY, max_examples=25)
@given(times=SERVICE_TIMES, seed=st.integers(0, 1000))
def test_shares_converge_to_rates_for_arbitrary_constant_rates(times: list[float], seed: int) -> None:
    service_s = {f"p{i}": seconds for i, seconds in enumerate(times)}
    router = make_router([peer(peer_id, seconds) for peer_id, seconds in service_s.items()], seed=seed)
    num_picks = 2000
    counts = shares_after(router, service_s, num_picks)
    total_rate = sum(1.0 / seconds for seconds in times)
    for peer_id, seconds in service_s.items():
        expected = num_picks / seconds / total_rate
        assert abs(counts[peer_id] - expected) <= 0.05 * expected + 6


@settings(deadline=None, phases=GENERATE_ONLY, max_examples=15)
@given(times=SERVICE_TIMES, lies=st.lists(st.floats(0.2, 5.0), min_size=12, max_size=12), seed=st.integers(0, 1000))
def test_shares_follow_measured_and_not_announced_speed(times: list[float], lies: list[float], seed: int) -> None:
    service_s = {f"p{i}": seconds for i, seconds in enumerate(times)}
    announced = [peer(peer_id, seconds * lie) for (peer_id, seconds), lie in zip(service_s.items(), lies, strict=False)]
    router = make_router(announced, seed=seed)
    shares_after(router, service_s, 500)  # learn
    num_picks = 2000
    counts = shares_after(router, service_s, num_picks)
    total_rate = sum(1.0 / seconds for seconds in times)
    for peer_id, seconds in service_s.items():
        expected = num_picks / seconds / total_rate
        assert abs(counts[peer_id] - expected) <= 0.05 * expected + 10


@settings(deadline=None, phases=GENERATE_ONLY, max_examples=15)
@given(times=st.lists(st.floats(0.05, 5.0), min_size=2, max_size=10), seed=st.integers(0, 1000))
def test_no_peer_starves_whatever_its_announced_queue_and_link(times: list[float], seed: int) -> None:
    rng = random.Random(seed)
    peers = [
        peer(f"p{i}", seconds, queue_ms=rng.choice([0.0, 5000.0]), down_bytes_per_s=rng.choice([0.0, 1e5, 1e8]))
        for i, seconds in enumerate(times)
    ]
    router = make_router(peers, seed=seed)
    counts: Counter[str] = Counter()
    for _ in range(2500):
        pick = router.pick(1e5)
        assert pick is not None
        counts[pick.peer_id] += 1
    assert set(counts) == {view.peer_id for view in peers}


def herd_share(num_senders: int, peers: list[PeerView], **options: float) -> float:
    """The largest peer's picks over its fair share, when fresh senders with the same view pick once at once."""
    snapshot = StageSnapshot(peers)
    counts: Counter[str] = Counter()
    for sender in range(num_senders):
        router = Router(clock=Clock(), rng=random.Random(sender), options=RouterOptions(**options))  # type: ignore[arg-type]
        router.update_peers(snapshot)
        pick = router.pick(1.0)
        assert pick is not None
        counts[pick.peer_id] += 1
    fair = num_senders / len(peers)
    return max(counts.values()) / fair


def test_a_hundred_senders_with_one_stale_view_do_not_herd() -> None:
    # One peer looks free, nineteen look busy: every sender sees the same.
    peers = [peer("free")] + [peer(f"p{i}", queue_ms=30_000.0) for i in range(19)]
    assert herd_share(100, peers) < 4.0
    # Negative control: whoever compares all candidates goes to the one that looks best.
    assert herd_share(100, peers, num_candidates=60) > 15.0


def test_a_link_that_falls_to_a_tenth_loses_its_share_within_ten_microbatches() -> None:
    # One second of compute and half a second of wire everywhere; then one link needs five seconds.
    peers = [peer(f"p{i}") for i in range(4)]
    router = make_router(peers, my_up_bytes_per_s=MEBI)
    goodput = dict.fromkeys((view.peer_id for view in peers), 2.0 * MEBI)

    def run(num_picks: int) -> Counter[str]:
        counts: Counter[str] = Counter()
        for _ in range(num_picks):
            pick = router.pick(MEBI)
            assert pick is not None
            counts[pick.peer_id] += 1
            wire_s = MEBI / goodput[pick.peer_id] + 0.025
            router.succeeded(pick.peer_id, wire_s=wire_s, queue_s=0.0, compute_s=1 / 3, num_bytes=MEBI)
        return counts

    before = run(400)
    assert before["p0"] == pytest.approx(100, abs=8)
    goodput["p0"] /= 10.0
    run(10)
    after = run(200)
    # Its fair share is now 1/4.5 of one of the others': 200 / (3 + 0.22) * 0.22 = 14.
    assert after["p0"] <= 20


def test_a_round_trip_alone_costs_no_share() -> None:
    """The latency policy halves a far peer's share although it computes as fast as the near one; ours does not."""
    shares = {}
    for policy in ("finish-time", "swarm-latency"):
        router = make_router([peer("near"), peer("far")], policy)
        counts: Counter[str] = Counter()
        for _ in range(1000):
            pick = router.pick(1.0)
            assert pick is not None
            counts[pick.peer_id] += 1
            wire_s = 1.0 if pick.peer_id == "far" else 0.01
            router.observed(pick.peer_id, rtt_s=2 * wire_s)
            router.succeeded(pick.peer_id, wire_s=wire_s, queue_s=0.0, compute_s=1 / 3)
        shares[policy] = counts["far"] / 1000
    assert shares["finish-time"] > 0.47
    assert shares["swarm-latency"] < 0.3


def test_a_newcomer_is_tried_soon_and_not_flooded() -> None:
    old = [peer(f"p{i}") for i in range(4)]
    router = make_router(old)
    shares_after(router, {view.peer_id: 1.0 for view in old}, 2000)
    router.update_peers([*old, peer("new")])
    counts = shares_after(router, {view.peer_id: 1.0 for view in [*old, peer("new")]}, 50)
    assert 5 <= counts["new"] <= 16


def test_connection_error_bans_with_a_doubled_back_off_until_success() -> None:
    router = make_router([peer("a"), peer("b")])
    clock = 0.0
    for back_off_s in (5.0, 10.0, 20.0):
        router.failed("a", now=clock)
        assert router.is_banned("a", now=clock + back_off_s - 0.01)
        assert all(router.pick(1.0, clock).peer_id == "b" for _ in range(50))  # type: ignore[union-attr]
        clock += back_off_s
        assert not router.is_banned("a", now=clock)
    router.succeeded("a", wire_s=0.1, queue_s=0.0, compute_s=0.1, now=clock)
    router.failed("a", now=clock)
    assert router.is_banned("a", now=clock + 4.9)
    assert not router.is_banned("a", now=clock + 5.0)


def test_a_newer_record_ends_a_ban_and_the_same_record_does_not() -> None:
    router = make_router([peer("a", expires_at=50.0), peer("b", expires_at=50.0)])
    router.failed("a", now=1.0)
    router.update_peers([peer("a", expires_at=50.0), peer("b", expires_at=50.0)])
    assert router.is_banned("a", now=2.0)
    router.update_peers([peer("a", expires_at=70.0), peer("b", expires_at=50.0)])
    assert not router.is_banned("a", now=2.0)


def test_two_timeouts_in_a_row_ban_and_one_slows_the_share() -> None:
    router = make_router([peer("a"), peer("b")])
    before = router.predict("a", 1.0)
    router.timed_out("a", 9.0, now=0.0)
    assert not router.is_banned("a", now=0.0)
    assert before is not None
    assert router.predict("a", 1.0) == pytest.approx(before + 9.0)
    router.timed_out("a", 9.0, now=0.0)
    assert router.is_banned("a", now=0.0)


def test_the_memory_of_a_stall_fades_so_that_the_peer_gets_its_share_again() -> None:
    """Its neighbours died, say, and the calls that waited for them timed out: that tells nothing of a minute later."""
    router = make_router([peer("a"), peer("b")])
    before = router.predict("a", 1.0, now=0.0)
    assert before is not None
    router.timed_out("a", 60.0, now=0.0)
    later = router.predict("a", 1.0, now=STALL_HALF_LIFE_S)
    assert later == pytest.approx(before + 30.0)

    def picks_of_a(start: float) -> int:
        picked = [router.pick(1.0, start + 0.01 * i) for i in range(200)]
        return sum(pick is not None and pick.peer_id == "a" for pick in picked)

    assert picks_of_a(0.0) < 40
    assert picks_of_a(20 * STALL_HALF_LIFE_S) > 70


def test_when_all_are_banned_the_bans_are_lifted() -> None:
    router = make_router([peer("a"), peer("b")])
    router.failed("a", now=0.0)
    router.failed("b", now=0.0)
    pick = router.pick(1.0, 0.0)
    assert pick is not None
    assert pick.why == "bans lifted"


def test_busy_is_no_ban_and_all_busy_says_how_long_to_wait() -> None:
    router = make_router([peer("a"), peer("b")])
    router.busy("a", 3.0, now=0.0)
    assert not router.is_banned("a", now=0.0)
    assert all(router.pick(1.0, 1.0).peer_id == "b" for _ in range(50))  # type: ignore[union-attr]
    router.busy("b", 9.0, now=0.0)
    pick = router.pick(1.0, 1.0)
    assert pick is not None
    assert (pick.peer_id, pick.why, pick.wait_s) == ("a", "all busy", pytest.approx(2.0))
    later = router.pick(1.0, 3.5)
    assert later is not None
    assert (later.peer_id, later.wait_s) == ("a", 0.0)


def test_excluded_expired_and_not_serving_peers_are_never_picked() -> None:
    peers = [peer("a"), peer("old", expires_at=10.0), peer("draining", state="draining"), peer("tried")]
    router = make_router(peers)
    picked = {router.pick(1.0, 11.0, exclude={"tried"}).peer_id for _ in range(200)}  # type: ignore[union-attr]
    assert picked == {"a"}
    assert router.pick(1.0, 11.0, exclude={"tried", "a"}) is None
    assert make_router([]).pick(1.0) is None


def test_hints_come_first_unless_banned() -> None:
    router = make_router([peer("fast", 0.1), peer("slow", 10.0)])
    pick = router.pick(1.0, 0.0, prefer=("gone", "slow"))
    assert pick is not None
    assert (pick.peer_id, pick.why) == ("slow", "hint")
    router.failed("slow", now=0.0)
    assert router.pick(1.0, 0.0, prefer=("slow",)).peer_id == "fast"  # type: ignore[union-attr]


def test_a_relayed_link_is_expected_to_be_five_times_slower_until_measured() -> None:
    router = make_router([peer("direct"), peer("relayed", relayed=True)], my_up_bytes_per_s=MEBI, default_rtt_s=1e-9)
    direct, relayed = router.predict("direct", MEBI), router.predict("relayed", MEBI)
    assert direct is not None
    assert relayed is not None
    assert relayed - direct == pytest.approx(4.0)
    router.update_link("relayed", LinkView(goodput_bytes_per_s=MEBI, rtt_s=0.0, samples=1))
    assert router.predict("relayed", MEBI) == pytest.approx(direct)


def test_own_backlog_and_rtt_enter_the_prediction_and_the_timeout() -> None:
    router = make_router([peer("a", 3.0)])
    router.update_link("a", LinkView(goodput_bytes_per_s=MEBI, rtt_s=0.2, backlog_bytes=int(2 * MEBI), samples=3))
    pick = router.pick(MEBI, 0.0)
    assert pick is not None
    assert pick.predicted_s == pytest.approx(3.0 + 0.1 + 1.0)
    assert pick.timeout_s == pytest.approx(3 * 4.1)
    assert make_router([peer("a", 0.01)]).pick(1.0).timeout_s == 2.0  # type: ignore[union-attr]


@settings(deadline=None, phases=GENERATE_ONLY, max_examples=60)
@given(
    fields=st.lists(
        st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 5),
        min_size=1,
        max_size=6,
    )
)
def test_records_full_of_nonsense_never_break_the_choice(fields: list[tuple[float, ...]]) -> None:
    peers = [
        peer(f"p{i}", forward_ms=a, backward_ms=b, queue_ms=c, up_bytes_per_s=d, down_bytes_per_s=e)
        for i, (a, b, c, d, e) in enumerate(fields)
    ]
    router = make_router(peers, bytes_in=MEBI, bytes_out=MEBI)
    for _ in range(20):
        pick = router.pick(MEBI, 0.0)
        assert pick is not None
        assert math.isfinite(pick.predicted_s)
        assert math.isfinite(pick.timeout_s)
        router.succeeded(pick.peer_id, wire_s=math.nan, queue_s=math.inf, compute_s=-1.0, num_bytes=math.nan, now=0.0)


def test_same_seed_same_picks() -> None:
    def picks(seed: int) -> list[str]:
        router = make_router([peer(f"p{i}", 1.0 + i) for i in range(9)], seed=seed)
        return [router.pick(1.0).peer_id for _ in range(200)]  # type: ignore[union-attr]

    assert picks(5) == picks(5)
    assert picks(5) != picks(6)


def test_estimates_of_vanished_peers_are_forgotten() -> None:
    ghosts = [f"ghost{number}" for number in range(100)]
    router = make_router([peer(name) for name in ("stays", *ghosts)])
    for name in ghosts:
        router.succeeded(name, wire_s=1.0, queue_s=0.0, compute_s=1.0, now=0.0)
        router.failed(name, now=0.0)
    assert min(len(router._table.estimates), len(router._table.troubles)) == len(ghosts)
    router.update_peers([peer("stays")])
    assert len(router._table.estimates) <= 18
    assert len(router._table.troubles) <= 18


def test_a_sender_remembers_a_bounded_number_of_peers_and_still_asks_all() -> None:
    router = make_router([peer(f"p{number}") for number in range(1000)])
    picks = Counter(router.pick(1.0).peer_id for _ in range(20_000))  # type: ignore[union-attr]
    assert MAX_KNOWN // 2 <= len(router._table.estimates) <= MAX_KNOWN
    assert len(picks) == 1000
    assert max(picks.values()) <= 3 * 20


def test_an_unknown_policy_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown routing policy"):
        make_router([], "fastest")
