"""Who is there: heartbeats, restarts, losses. Times are given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.coordinator.members import MAX_EXCLUDED, SILENT_S, Members, may_be_scraped
from swarmtrain.reduce.partition import owned_elements
from swarmtrain.route.views import MIN_RATE
from swarmtrain.wire.messages import Heartbeat, Hop

from .contexts import changed, heartbeat


def beat(*, life: str = "a", stage: int = 0, state: str = "serving", step: int = 0, digest: str = "") -> Heartbeat:
    return heartbeat(stage, state, life, step, digest)


def test_a_heartbeat_makes_a_member_and_silence_ends_it() -> None:
    members = Members()
    assert members.heartbeat("p", beat(), now=0.0) is None
    assert members.silent(SILENT_S) == []
    assert [member.peer_id for member in members.silent(SILENT_S + 0.1)] == ["p"]
    members.heartbeat("p", beat(), now=5.0)
    assert members.silent(SILENT_S + 0.1) == []


@pytest.mark.parametrize(("announced", "taken"), [(0.0, 0.0), (5e6, 5e6), (5e-324, MIN_RATE), (1e15, 1e15)])
def test_announced_rates_are_taken_as_they_are_and_never_too_small_to_reckon_with(
    announced: float, taken: float
) -> None:
    members = Members()
    members.heartbeat("p", changed(beat(), up_bytes_per_s=announced, down_bytes_per_s=3e6), now=0.0)
    members.heartbeat("q", changed(beat(), up_bytes_per_s=3e6, down_bytes_per_s=announced), now=0.0)
    p, q = members.get("p"), members.get("q")
    assert p is not None
    assert q is not None
    assert p.rates == (taken, 3e6)
    assert q.rates == (3e6, taken)
    assert sum(owned_elements(1000, [item.rates for item in (p, q)])) == 1000


def test_a_restart_is_noticed_and_so_is_another_stage() -> None:
    members = Members()
    members.heartbeat("p", beat(life="a"), now=0.0)
    former = members.heartbeat("p", beat(life="b"), now=1.0)
    assert former is not None
    assert former.report.incarnation == "a"
    former = members.heartbeat("p", beat(life="b", stage=2), now=2.0)
    assert former is not None
    assert former.stage == 0
    assert members.heartbeat("p", beat(life="b", stage=2), now=3.0) is None


def test_work_counts_from_the_moment_in_which_a_peer_was_told_to_serve() -> None:
    """Others may find it, and have their answers through it, before its own next heartbeat says so."""
    members = Members()
    members.heartbeat("p", beat(state="joining"), now=0.0)
    hop = Hop(0, "p", "a")
    assert not members.counts(hop)
    members.admit("p")
    assert members.counts(hop)
    members.heartbeat("p", beat(state="syncing"), now=1.0)
    assert not members.counts(hop)


def test_an_admitted_peer_answers_for_its_work_and_one_that_fetched_a_state_first_says_that_it_is_ready() -> None:
    members = Members()
    for peer, state in (("j", "joining"), ("s", "syncing")):
        members.heartbeat(peer, beat(state=state), now=0.0)
    assert members.answering(0) == []
    members.admit("j")
    members.admit("s")
    assert [(member.peer_id, member.is_ready) for member in members.answering(0)] == [("j", True), ("s", False)]
    members.heartbeat("s", beat(), now=1.0)
    assert [member.is_ready for member in members.answering(0)] == [True, True]
    assert members.answering(1) == []


@pytest.mark.parametrize("before", ["joining", "serving", "syncing"])
def test_a_heartbeat_that_crossed_an_apply_does_not_take_a_serving_peer_back(before: str) -> None:
    members = Members()
    members.heartbeat("p", beat(state=before, step=3, digest="x"), now=0.0)
    members.note_step("p", 4, "y", 0.0)
    members.heartbeat("p", beat(step=3, digest="x"), now=1.0)
    member = members.get("p")
    assert member is not None
    assert (member.step, member.report.state_digest) == (4, "y")


def test_a_syncing_peer_is_believed_when_it_says_that_it_is_behind() -> None:
    members = Members()
    members.heartbeat("p", beat(step=3, digest="x"), now=0.0)
    members.note_step("p", 4, "y", 0.0)
    members.heartbeat("p", beat(state="syncing", step=0), now=1.0)
    member = members.get("p")
    assert member is not None
    assert member.step == 0


def test_an_excluded_incarnation_that_comes_back_is_known_until_it_is_told_to_serve() -> None:
    members = Members()
    members.heartbeat("p", beat(), now=0.0)
    members.remove("p", excluded_at=0)
    members.heartbeat("p", beat(), now=1.0)
    assert members.get("p").must_sync  # type: ignore[union-attr]
    assert not members.of_stage(0, "serving")  # whatever it says itself
    assert not members.counts(Hop(0, "p", "a"))
    members.heartbeat("p", beat(state="syncing"), now=2.0)
    assert members.get("p").excluded_at == 0  # type: ignore[union-attr]
    assert not members.get("p").must_sync  # type: ignore[union-attr]
    members.admit("p")
    members.heartbeat("p", beat(), now=3.0)
    assert members.get("p").excluded_at is None  # type: ignore[union-attr]
    assert members.counts(Hop(0, "p", "a"))


def test_after_a_rollback_no_peer_is_excluded() -> None:
    members = Members()
    members.heartbeat("p", beat(), now=0.0)
    members.remove("p", excluded_at=7)
    members.forget_steps()
    members.heartbeat("p", beat(), now=1.0)
    assert members.get("p").excluded_at is None  # type: ignore[union-attr]


def test_only_peers_that_wait_for_a_state_listen_and_each_from_its_own_step() -> None:
    members = Members()
    members.heartbeat("waiting", beat(state="syncing"), now=0.0)
    members.heartbeat("serving", beat(), now=0.0)
    members.listen(0, 5)
    members.heartbeat("later", beat(state="syncing"), now=1.0)
    members.listen(0, 7)
    assert {m.peer_id: m.listening_from for m in members.all()} == {"waiting": 5, "serving": None, "later": 7}
    members.heartbeat("waiting", beat(state="syncing"), now=2.0)  # a heartbeat keeps it
    assert members.get("waiting").listening_from == 5  # type: ignore[union-attr]
    members.heartbeat("waiting", beat(), now=3.0)  # a serving peer listens no more
    assert members.get("waiting").listening_from is None  # type: ignore[union-attr]


def test_a_hop_counts_only_for_the_incarnation_and_stage_that_is_there() -> None:
    members = Members()
    members.heartbeat("p", beat(life="a", stage=1), now=0.0)
    assert members.counts(Hop(1, "p", "a"))
    assert not members.counts(Hop(1, "p", "b"))
    assert not members.counts(Hop(0, "p", "a"))
    assert not members.counts(Hop(1, "q", "a"))
    members.heartbeat("p", beat(life="a", stage=1, state="syncing"), now=1.0)
    assert not members.counts(Hop(1, "p", "a"))


def test_the_excluded_are_remembered_within_bounds() -> None:
    members = Members()
    for number in range(MAX_EXCLUDED + 10):
        members.heartbeat(f"p{number}", beat(), now=0.0)
        members.remove(f"p{number}", excluded_at=0)
    assert len(members._excluded) == MAX_EXCLUDED
    assert members.all() == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.sampled_from(["serving", "syncing", "paused"]))))
def test_every_peer_is_in_one_place_at_a_time(beats: list[tuple[int, int, str]]) -> None:
    members = Members()
    for time, (peer, stage, state) in enumerate(beats):
        members.heartbeat(f"p{peer}", beat(stage=stage, state=state), now=float(time))
    last = {f"p{peer}": (stage, state) for peer, stage, state in beats}
    assert {m.peer_id: (m.stage, m.state) for m in members.all()} == last
    for stage in range(3):
        found = members.of_stage(stage, "serving")
        assert [m.peer_id for m in found] == sorted(p for p, place in last.items() if place == (stage, "serving"))


@pytest.mark.parametrize(
    ("address", "may"),
    [
        ("10.1.2.3:9100", True),
        ("703ad9c389bf:8080", True),
        ("attic.local:8080", True),
        ("127.0.0.1:9100", True),
        ("169.254.169.254:80", False),
        ("[::ffff:169.254.169.254]:80", False),
        ("[fe80::1]:80", False),
        ("0.0.0.0:80", False),
        ("2852039166:80", False),
        ("0xa9.0xfe.0xa9.0xfe:80", False),
        ("metadata.google.internal:80", False),
        ("host:80/path", False),
    ],
)
def test_addresses_that_are_nobodys_own_are_not_handed_on_to_prometheus(address: str, *, may: bool) -> None:
    assert may_be_scraped(address) is may
