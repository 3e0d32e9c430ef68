"""A mover never empties a stage, whatever the order of messages; two peers never chase the same gap."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swarmtrain.route.moves import PATIENCE_S, Intent, LeaveAnswer, LeaveRequest, MoveArbiter, Mover, MoverState
from swarmtrain.route.rebalance import PeerCapacity, PlannedMove, RebalanceOptions, plan_moves

NUM_STAGES = 3
# Views may be as wrong as can be, so the arbiter's judgement of the gain is switched off: only its books count.
OPTIONS = RebalanceOptions(min_left=1, min_gain=-1e9)


class MoversUnderAnyOrder(RuleBasedStateMachine):
    """Peers with arbitrary beliefs, and a network that delays, reorders, doubles and loses every message."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.movers: dict[str, Mover] = {}
        self.in_flight: list[object] = []
        self.arbiter = MoveArbiter([1.0] * NUM_STAGES, OPTIONS)
        self.left: set[str] = set()  # on the way, serving nobody

    @initialize(stages=st.lists(st.integers(0, NUM_STAGES - 1), max_size=4))
    def start(self, stages: list[int]) -> None:
        for number, stage in enumerate([*range(NUM_STAGES), *stages]):
            mover = Mover(f"p{number}", stage, 1, random.Random(number))
            self.movers[mover.peer_id] = mover
            self.announce(mover)
        while self.in_flight:
            self.deliver(self.in_flight.pop())

    def announce(self, mover: Mover) -> None:
        self.in_flight.append((PeerCapacity(mover.peer_id, mover.stage, 1.0), mover.version))

    def peer(self, number: int) -> Mover:
        return list(self.movers.values())[number % len(self.movers)]

    def deliver(self, message: object) -> None:
        if isinstance(message, LeaveRequest):
            self.in_flight.append(self.arbiter.request(message))
        elif isinstance(message, LeaveAnswer):
            mover = self.movers[message.peer_id]
            version = mover.version
            if mover.answered(message):
                self.left.add(mover.peer_id)
            if mover.version != version:
                self.announce(mover)
        elif isinstance(message, tuple):
            self.arbiter.serving(*message)

    @rule(number=st.integers(0, 6), wanted=st.integers(1, NUM_STAGES - 1), prompt=st.booleans())
    def peer_wants_to_leave(self, number: int, wanted: int, prompt: bool) -> None:
        """Its view may be anything: it believes in a plan that names it, and sees no other intent."""
        mover = self.peer(number)
        if mover.peer_id in self.left:
            return
        plan = [PlannedMove(mover.peer_id, mover.stage, (mover.stage + wanted) % NUM_STAGES, 1.0)]
        for _ in range(2):
            request = mover.look(plan, (), self.now)
            self.now += 10.0
            if request is not None:
                self.in_flight.append(request)
        if prompt:
            self.network_delivers_the_newest(2, keep=False)

    @rule(number=st.integers(0, 6))
    def peer_loses_patience(self, number: int) -> None:
        mover = self.peer(number)
        self.now += PATIENCE_S
        version = mover.version
        mover.look((), (), self.now)
        if mover.version != version:
            self.announce(mover)

    @rule(count=st.integers(1, 3), keep=st.booleans())
    def network_delivers_the_newest(self, count: int, keep: bool) -> None:
        for _ in range(min(count, len(self.in_flight))):
            message = self.in_flight[-1]
            if not keep:
                self.in_flight.pop()
            self.deliver(message)

    @rule(number=st.integers(0, 1000), keep=st.booleans())
    def network_delivers_any(self, number: int, keep: bool) -> None:
        if self.in_flight:
            position = number % len(self.in_flight)
            self.deliver(self.in_flight[position] if keep else self.in_flight.pop(position))

    @rule(number=st.integers(0, 1000))
    def network_loses(self, number: int) -> None:
        if self.in_flight:
            self.in_flight.pop(number % len(self.in_flight))

    @rule(number=st.integers(0, 6))
    def peer_announces_again(self, number: int) -> None:
        mover = self.peer(number)
        if mover.peer_id not in self.left:
            self.announce(mover)

    @rule(number=st.integers(0, 6), fails=st.booleans())
    def mover_arrives(self, number: int, fails: bool) -> None:
        mover = self.peer(number)
        if mover.peer_id in self.left:
            assert mover.intent is not None
            self.left.remove(mover.peer_id)
            mover.arrived(mover.stage if fails else mover.intent.target)
            self.announce(mover)

    @rule(number=st.integers(0, 6))
    def coordinator_suspects_a_peer(self, number: int) -> None:
        """Wrongly: the peer is alive. It must not be counted again before it has announced a higher version."""
        self.arbiter.gone(self.peer(number).peer_id)

    @invariant()
    def no_stage_was_emptied(self) -> None:
        if self.movers:
            staying = {mover.stage for mover in self.movers.values() if mover.peer_id not in self.left}
            assert staying == set(range(NUM_STAGES))

    @invariant()
    def the_arbiter_never_counts_one_who_left(self) -> None:
        for stage in range(NUM_STAGES):
            truly = sum(m.stage == stage and m.peer_id not in self.left for m in self.movers.values())
            assert self.arbiter.num_staying(stage) <= truly


MoversUnderAnyOrder.TestCase.settings = settings(deadline=None, max_examples=250, stateful_step_count=40)
TestMoversUnderAnyOrder = MoversUnderAnyOrder.TestCase


class CarelessArbiter(MoveArbiter):
    """What happens without the books: it judges by who announced a stage, and forgets whom it let go."""

    def num_staying(self, stage: int) -> int:
        return sum(1 for assignment in self._assignments.values() if assignment.member.stage == stage)


def test_negative_control_an_arbiter_without_books_empties_a_stage() -> None:
    arbiter = CarelessArbiter([1.0, 1.0], OPTIONS)
    for peer_id in ("a", "b"):
        arbiter.serving(PeerCapacity(peer_id, 0, 1.0), 1)
    assert all(arbiter.request(LeaveRequest(peer_id, 1, 0, 1)).granted for peer_id in ("a", "b"))
    careful = MoveArbiter([1.0, 1.0], OPTIONS)
    for peer_id in ("a", "b"):
        careful.serving(PeerCapacity(peer_id, 0, 1.0), 1)
    answers = [careful.request(LeaveRequest(peer_id, 1, 0, 1)) for peer_id in ("a", "b")]
    assert [answer.granted for answer in answers] == [True, False]
    assert answers[1].why == "too few would stay"


def unbalanced() -> list[PeerCapacity]:
    return [PeerCapacity(f"a{i}", 0, 1.0) for i in range(7)] + [PeerCapacity(f"b{i}", 1, 1.0) for i in range(5)]


def test_two_peers_never_chase_the_same_gap() -> None:
    """Both see the gap and neither sees the other; the second is told that it is closed."""
    arbiter = MoveArbiter([1.0, 1.0])
    for member in unbalanced():
        arbiter.serving(member, 1)
    first = arbiter.request(LeaveRequest("a0", 1, 0, 1))
    second = arbiter.request(LeaveRequest("a1", 1, 0, 1))
    assert first.granted
    assert not second.granted
    assert second.why == "the gap is closed already"


def test_a_doubled_request_gets_the_same_answer() -> None:
    arbiter = MoveArbiter([1.0, 1.0])
    for member in unbalanced():
        arbiter.serving(member, 1)
    request = LeaveRequest("a0", 1, 0, 1)
    assert arbiter.request(request) == arbiter.request(request)
    assert arbiter.num_staying(0) == 6


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (LeaveRequest("nobody", 1, 0, 1), "not known"),
        (LeaveRequest("a0", 0, 0, 1), "not known"),
        (LeaveRequest("a0", 1, 1, 0), "not known"),
        (LeaveRequest("a0", 1, 0, 9), "no such stage"),
        (LeaveRequest("a0", 1, 0, 0), "no such stage"),
    ],
)
def test_requests_that_make_no_sense_are_refused(request_: LeaveRequest, why: str) -> None:
    arbiter = MoveArbiter([1.0, 1.0])
    for member in unbalanced():
        arbiter.serving(member, 1)
    answer = arbiter.request(request_)
    assert not answer.granted
    assert why in answer.why


def test_a_peer_asks_only_after_a_second_look_and_only_with_the_best_intent() -> None:
    members = unbalanced()
    plan = plan_moves(members, [1.0, 1.0], 1e6)
    mover = Mover(plan[0].peer_id, 0, 1, random.Random(0))
    assert mover.look(plan, (), 0.0) is None
    assert mover.state is MoverState.INTENDING
    assert mover.intent is not None
    assert mover.look(plan, (mover.intent,), 1.0) is None  # too soon
    better = Intent("zz", 0, 1, mover.intent.gain + 1.0)
    elsewhere = Intent("zz", 5, 6, mover.intent.gain + 1.0)
    assert mover.look(plan, (mover.intent, elsewhere), 20.0) is not None
    other = Mover(plan[0].peer_id, 0, 1, random.Random(0))
    other.look(plan, (), 0.0)
    assert other.look(plan, (better,), 20.0) is None
    assert other.state is MoverState.STAYING
    assert other.intent is None


def test_a_grant_that_is_waited_for_no_longer_is_void() -> None:
    plan = [PlannedMove("a", 0, 1, 1.0)]
    mover = Mover("a", 0, 1, random.Random(0))
    mover.look(plan, (), 0.0)
    request = mover.look(plan, (), 20.0)
    assert request is not None
    mover.look(plan, (), 20.0 + PATIENCE_S)
    assert mover.version == 2
    assert not mover.answered(LeaveAnswer("a", request.version, 1, granted=True))
    assert mover.state is MoverState.STAYING


def test_a_late_announcement_does_not_bring_back_a_peer_that_left_or_is_gone() -> None:
    arbiter = MoveArbiter([1.0, 1.0], OPTIONS)
    old = PeerCapacity("a", 0, 1.0)
    arbiter.serving(old, 1)
    arbiter.serving(PeerCapacity("a", 1, 1.0), 2)
    assert not arbiter.serving(old, 1)
    arbiter.gone("a")
    assert not arbiter.serving(old, 1)
    assert not arbiter.serving(PeerCapacity("a", 1, 1.0), 2)  # wrongly suspected: it must announce itself anew
    assert (arbiter.num_staying(0), arbiter.num_staying(1)) == (0, 0)
    assert arbiter.serving(PeerCapacity("a", 1, 1.0), 3)
    assert arbiter.num_staying(1) == 1


def test_after_giving_up_or_arriving_a_peer_is_counted_again() -> None:
    arbiter = MoveArbiter([1.0, 1.0], OPTIONS)
    mover = Mover("a", 0, 1, random.Random(0))
    for member in (PeerCapacity("a", 0, 1.0), PeerCapacity("b", 0, 1.0), PeerCapacity("c", 1, 1.0)):
        arbiter.serving(member, 1)
    plan = [PlannedMove("a", 0, 1, 1.0)]

    def ask(now: float) -> LeaveAnswer:
        mover.look(plan, (), now)
        request = mover.look(plan, (), now + 10.0)
        assert request is not None
        return arbiter.request(request)

    assert ask(0.0).granted  # the answer is lost
    assert arbiter.num_staying(0) == 1
    mover.look(plan, (), 10.0 + PATIENCE_S)
    assert arbiter.serving(PeerCapacity("a", mover.stage, 1.0), mover.version)
    assert arbiter.num_staying(0) == 2
    assert mover.answered(ask(100.0))
    mover.arrived(1)
    assert arbiter.serving(PeerCapacity("a", mover.stage, 1.0), mover.version)
    assert (arbiter.num_staying(0), arbiter.num_staying(1)) == (1, 2)
