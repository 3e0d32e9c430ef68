"""What a peer is told when it shows a heartbeat."""

from __future__ import annotations

import pytest

from swarmtrain.coordinator.admission import Answer, StageBook, Standing, StateOffer, judge
from swarmtrain.coordinator.members import MAX_EXCLUDED, Member, Members
from swarmtrain.wire.messages import Directive, Heartbeat, Hop

from .contexts import changed, heartbeat

HEARTBEAT = heartbeat(1, "serving", "1", 5, "d5")
BOOK = StageBook(digest="d5")


def told(
    beat: Heartbeat,
    *,
    step: int = 5,
    book: StageBook = BOOK,
    decided: int | None = 4,
    prepared: bool = False,
    others: str = "",
) -> Answer:
    members = Members()
    members.heartbeat("a", beat, 0.0)
    if others:
        members.heartbeat("b", changed(HEARTBEAT, state=others), 0.0)
    member = members.get("a")
    assert member is not None
    return judge(member, members, Standing(step, decided, frozenset({("a", "1")} if prepared else ())), book)


def test_a_peer_with_the_runs_state_serves() -> None:
    assert told(HEARTBEAT).directive is Directive.SERVE


def test_a_peer_with_another_digest_does_not_serve() -> None:
    assert told(changed(HEARTBEAT, state_digest="zz")).directive is not Directive.SERVE


def test_after_a_restart_a_digest_that_no_peer_has_reported_is_not_held_against_it() -> None:
    assert told(HEARTBEAT, book=StageBook()).directive is Directive.SERVE


def test_a_peer_just_before_the_last_decision_is_kept() -> None:
    assert told(changed(HEARTBEAT, step=4, state_digest="d4"), decided=4).directive is Directive.SERVE


def test_a_peer_just_after_the_decision_under_way_is_kept() -> None:
    assert told(changed(HEARTBEAT, step=6, state_digest="d6"), decided=5).directive is Directive.SERVE


@pytest.mark.parametrize("state", ["joining", "syncing"])
@pytest.mark.parametrize("step", [0, 5])
def test_the_state_before_a_decision_is_of_no_use_without_the_sum_that_was_decided(step: int, state: str) -> None:
    """Not even if the seed or a checkpoint gives it: who serves with it cannot apply the step."""
    book = StageBook("d5", checkpoint=StateOffer(5, "d5", ("coordinator",)))
    newcomer = changed(HEARTBEAT, step=step, state=state)
    assert told(newcomer, step=step, book=book, decided=step).directive is Directive.WAIT
    assert told(changed(newcomer, step=9), step=step, book=book, decided=step).directive is Directive.WAIT
    assert told(newcomer, step=step, book=book, decided=step, prepared=True).directive is Directive.SERVE
    assert told(newcomer, step=step, book=book, decided=step - 1).directive is Directive.SERVE


@pytest.mark.parametrize(
    ("holder", "reason"), [("b", "step 5 is being applied"), ("", "no peer has the state of stage 1")]
)
def test_a_newcomer_hears_whether_the_step_is_being_applied_or_no_peer_is_left_to_do_so(
    holder: str, reason: str
) -> None:
    members = Members()
    members.heartbeat("a", changed(HEARTBEAT, state="syncing", step=0, state_digest=""), 0.0)
    members.heartbeat("b", HEARTBEAT, 0.0)
    member = members.get("a")
    assert member is not None
    answer = judge(member, members, Standing(5, 5, frozenset({(holder, "1")})), BOOK)
    assert answer.directive is Directive.WAIT
    assert reason in answer.reason


def test_while_a_decision_is_carried_out_a_stage_is_held_by_peers_that_have_its_sum_or_have_applied_it() -> None:
    members = Members()
    for peer_id, step in (("old", 4), ("other", 5), ("prepared", 5), ("applied", 6)):
        members.heartbeat(peer_id, changed(HEARTBEAT, step=step), 0.0)
    applying, before = Standing(5, 5, frozenset({("prepared", "1")})), Standing(5, 4)
    all_members = members.all()
    assert [member.peer_id for member in all_members if applying.holds(member)] == ["applied", "prepared"]
    assert [member.peer_id for member in all_members if before.holds(member)] == ["applied", "other", "prepared"]


def test_after_a_rollback_a_peer_one_step_ahead_goes_back() -> None:
    book = StageBook("d5", checkpoint=StateOffer(5, "d5", ("coordinator",)))
    answer = told(changed(HEARTBEAT, step=6, state_digest="d6"), book=book, decided=None)
    assert answer.directive is Directive.SYNC
    assert answer.offer == book.checkpoint


def test_after_a_rollback_to_the_beginning_the_state_follows_from_the_seed() -> None:
    answer = told(changed(HEARTBEAT, step=6), step=0, book=StageBook(), decided=None)
    assert answer.directive is Directive.SYNC
    assert answer.offer == StateOffer(0, "", ())


def test_a_newcomer_waits_while_others_have_the_state_and_fetches_what_they_keep() -> None:
    newcomer = changed(HEARTBEAT, state="syncing", step=0, state_digest="")
    assert told(newcomer, others="serving").directive is Directive.WAIT
    members = Members()
    members.heartbeat("a", newcomer, 0.0)
    members.listen(1, 5)
    book = StageBook("d5", snapshot=StateOffer(5, "d5", ("b",)))
    assert directive(members, book) is Directive.SYNC
    members.stop_listening(("a", "1"), 4)  # word of one that was missed before
    assert directive(members, book) is Directive.SYNC
    members.stop_listening(("a", "1"), 5)  # it missed a reduction: the old snapshot does not help it any more
    assert directive(members, book) is Directive.WAIT


@pytest.mark.parametrize("idle_state", ["paused", "draining"])
def test_a_newcomer_fetches_the_state_of_a_peer_that_has_it_and_takes_no_work(idle_state: str) -> None:
    newcomer = changed(HEARTBEAT, state="syncing", step=0, state_digest="")
    for book in (BOOK, StageBook()):  # after a restart no peer has reported a digest
        answer = told(newcomer, book=book, others=idle_state)
        assert answer.directive is Directive.SYNC
        assert answer.offer == StateOffer(5, "d5", ("b",))
    assert told(newcomer, book=StageBook("another"), others=idle_state).directive is Directive.WAIT
    assert told(newcomer, decided=5, others=idle_state).directive is Directive.WAIT  # it will be past that state soon


def test_a_newcomer_that_follows_is_not_sent_to_a_newer_state_that_another_was_given() -> None:
    members = Members()
    members.heartbeat("a", changed(HEARTBEAT, state="syncing", step=0, state_digest=""), 0.0)
    members.listen(1, 2)
    members.heartbeat("a", changed(HEARTBEAT, state="syncing", step=3, state_digest="d3"), 1.0)
    assert directive(members, StageBook("d6", snapshot=StateOffer(5, "d5", ("b",)))) is Directive.WAIT


@pytest.mark.parametrize(("digest", "told_to"), [("d5", Directive.WAIT), ("taken back", Directive.SYNC)])
def test_a_newcomer_whose_state_has_the_right_number_and_another_digest_fetches_it(
    digest: str, told_to: Directive
) -> None:
    members = Members()
    members.heartbeat("a", changed(HEARTBEAT, state="syncing", step=5, state_digest=digest), 0.0)
    members.listen(1, 5)
    members.heartbeat("a", changed(HEARTBEAT, state="syncing", step=5, state_digest=digest), 1.0)
    assert directive(members, StageBook("d6", snapshot=StateOffer(5, "d5", ("b",)))) is told_to


def test_after_a_restart_a_state_of_a_history_that_was_taken_back_is_not_the_runs() -> None:
    for state_term, expected in ((3, Directive.SERVE), (2, Directive.WAIT)):
        members = Members()
        members.heartbeat("a", changed(HEARTBEAT, state_term=state_term), 0.0)
        assert directive(members, StageBook(since=3), step=5) is expected


def directive(members: Members, book: StageBook, *, step: int = 6) -> Directive:
    member = members.get("a")
    assert member is not None
    return judge(member, members, Standing(step, step - 1), book).directive


def test_a_newcomer_in_the_middle_of_a_download_is_not_sent_to_another_state() -> None:
    members = Members()
    members.heartbeat("a", changed(HEARTBEAT, state="syncing", step=0), 0.0)
    members.listen(1, 5)
    members.listen(1, 9)
    member = members.get("a")
    assert member is not None
    assert member.listening_from == 5


def left_out(*, with_another: bool) -> Members:
    """A peer that the others could not work with in step 5."""
    members = Members()
    members.heartbeat("a", HEARTBEAT, 0.0)
    if with_another:
        members.heartbeat("b", HEARTBEAT, 0.0)
    members.remove("a", excluded_at=5)
    return members


def test_a_peer_that_the_others_cannot_work_with_must_fetch_a_later_state() -> None:
    members = left_out(with_another=True)
    members.heartbeat("a", HEARTBEAT, 1.0)
    assert directive(members, BOOK, step=5) is Directive.WAIT
    members.heartbeat("a", changed(HEARTBEAT, state="syncing"), 2.0)  # it has dropped its work, but not left the step
    assert directive(members, BOOK, step=5) is Directive.WAIT
    members.heartbeat("a", changed(HEARTBEAT, state="syncing", step=6, state_digest="d6"), 3.0)
    assert directive(members, StageBook("d6")) is Directive.SERVE


def test_a_peer_that_the_others_could_not_work_with_comes_back_when_they_are_gone() -> None:
    members = left_out(with_another=False)
    members.heartbeat("a", changed(HEARTBEAT, state="syncing"), 1.0)
    assert directive(members, BOOK, step=5) is Directive.SERVE
    members.admit("a")
    members.heartbeat("a", HEARTBEAT, 2.0)
    assert directive(members, BOOK, step=5) is Directive.SERVE
    assert members.of_stage(1, "serving")


def test_a_lost_peer_that_comes_back_before_the_decision_is_told_of_it() -> None:
    members = Members()
    members.heartbeat("a", HEARTBEAT, 0.0)
    members.remove("a")
    members.heartbeat("a", HEARTBEAT, 1.0)
    assert directive(members, BOOK) is Directive.SERVE


def test_only_what_a_living_incarnation_did_on_its_own_stage_counts() -> None:
    members = Members()
    members.heartbeat("a", HEARTBEAT, 0.0)
    assert members.counts(Hop(1, "a", "1"))
    assert not members.counts(Hop(2, "a", "1"))
    assert not members.counts(Hop(1, "a", "2"))
    assert not members.counts(Hop(1, "b", "1"))
    members.heartbeat("a", changed(HEARTBEAT, state="syncing"), 1.0)
    assert not members.counts(Hop(1, "a", "1"))


def test_the_memory_of_excluded_peers_is_bounded() -> None:
    members = Members()
    for number in range(MAX_EXCLUDED + 10):
        members.heartbeat(f"p{number}", HEARTBEAT, 0.0)
        members.remove(f"p{number}", excluded_at=5)
    assert len(members._excluded) == MAX_EXCLUDED


def test_a_member_is_what_its_newest_heartbeat_says() -> None:
    members = Members()
    members.heartbeat("a", HEARTBEAT, 0.0)
    member = members.get("a")
    assert isinstance(member, Member)
    assert (member.stage, member.step, member.state) == (1, 5, "serving")


def test_a_peer_that_could_not_be_heard_is_not_silent() -> None:
    members = Members()
    members.heartbeat("a", HEARTBEAT, 0.0)
    assert [member.peer_id for member in members.silent(30.0)] == ["a"]
    members.excuse(25.0)
    assert members.silent(30.0) == []
