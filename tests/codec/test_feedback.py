"""Error feedback: the books balance, whatever is committed, aborted, dropped or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarmtrain.codec import Direction, Ticket, decode
from swarmtrain.codec.feedback import FeedbackEncoder
from swarmtrain.codec.mask import apply_mask

from .generators import context, encoder, numbers, same_bits, squared

SPECS = ("ef-topk10", "ef-quant2", "ef-quant4", "lowrank2-lep", "lowrank2-lep:carry", "ef-topk10:values=int8,carry")
SHAPE = (6, 40)


def feedback(spec: str) -> FeedbackEncoder:
    made = encoder(spec, Direction.BACKWARD)
    assert isinstance(made, FeedbackEncoder)
    return made


def at(step: int):  # type: ignore[no-untyped-def]
    return context(Direction.BACKWARD, step=step)


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=15, deadline=None)
@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=12))
def test_what_was_sent_and_what_is_left_add_up(spec: str, seeds: list[int]) -> None:
    sender = feedback(spec)
    wanted, sent = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    for seed in seeds:
        message = numbers("gaussian", SHAPE, seed)
        encoded = sender.encode(message, at(0))
        sender.commit(encoded.ticket)
        wanted += message
        sent += decode(encoded.payload, at(0)).tensor
    assert sender.residual is not None
    assert (wanted - sent - sender.residual).norm() <= 1e-5 * wanted.norm() + 1e-5


def test_an_exact_codec_leaves_nothing() -> None:
    sender = feedback("ef-topk100:values=fp32")
    for seed in range(3):
        sender.encode(numbers("gaussian", SHAPE, seed), at(0))
    assert sender.residual is not None
    assert squared(sender.residual) == 0


def test_the_residual_of_topk_stays_bounded() -> None:
    sender = feedback("ef-topk10:values=fp32")
    delta = 0.1
    largest = 0.0
    for seed in range(100):
        message = numbers("gaussian", SHAPE, seed)
        largest = max(largest, squared(message))
        sender.commit(sender.encode(message, at(0)).ticket)
        assert sender.residual is not None
        assert squared(sender.residual) <= 4 * (1 - delta) / delta**2 * largest


def test_feedback_delivers_what_plain_compression_loses() -> None:
    """Negative control: without feedback the same small entries are lost every time."""
    message = numbers("gaussian", SHAPE, 1)
    totals = {}
    for spec in ("ef-topk10:values=fp32", "topk10-separate:values=fp32"):
        sender = encoder(spec, Direction.BACKWARD)
        totals[spec] = sum(decode(sender.encode(message, at(0)).payload, at(0)).tensor for _ in range(60))
    errors = [squared(total / 60 - message) / squared(message) for total in totals.values()]
    assert errors[0] < 0.05
    assert errors[1] > 0.4


class Books(RuleBasedStateMachine):
    """Any order of encode, commit, abort, repeated calls and optimizer steps."""

    spec = "ef-topk10"

    def __init__(self) -> None:
        super().__init__()
        self.sender = feedback(self.spec)
        self.open: list[tuple[Ticket, torch.Tensor]] = []  # message minus what was sent
        self.closed: list[Ticket] = []
        self.expected = torch.zeros(SHAPE, dtype=torch.float64)
        self.step = 0

    @rule(seed=st.integers(0, 999))
    def encode(self, seed: int) -> None:
        message = numbers("gaussian", SHAPE, seed)
        encoded = self.sender.encode(message, at(self.step))
        left_out = message.double() - decode(encoded.payload, at(self.step)).tensor
        self.expected += left_out
        self.open.append((encoded.ticket, left_out))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ticket, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.sender.commit(ticket)
        self.closed.append(ticket)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ticket, left_out = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.sender.abort(ticket)
        self.expected -= left_out
        self.closed.append(ticket)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.closed))
        self.sender.abort(ticket)
        self.sender.commit(ticket)

    @rule()
    def next_step(self) -> None:
        if not self.open:  # tickets live for a bounded number of steps
            self.step += 1
            self.sender.on_step(self.step)
            if self.sender.residual is None:
                self.expected.zero_()

    @invariant()
    def books_balance(self) -> None:
        residual = self.sender.residual
        actual = torch.zeros(SHAPE, dtype=torch.float64) if residual is None else residual.double()
        assert (actual - self.expected).norm() <= 1e-4 * (1 + self.expected.norm())


class LowRankBooks(Books):
    spec = "lowrank2-lep:carry"


Books.TestCase.settings = LowRankBooks.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None
)
TestBooks = Books.TestCase
TestLowRankBooks = LowRankBooks.TestCase


@pytest.mark.parametrize("spec", SPECS)
def test_aborting_the_last_message_restores_the_residual_to_the_bit(spec: str) -> None:
    sender = feedback(spec)
    sender.commit(sender.encode(numbers("gaussian", SHAPE, 1), at(0)).ticket)
    before = sender.residual
    assert before is not None
    kept = before.clone()
    second = sender.encode(numbers("gaussian", SHAPE, 2), at(0))
    third = sender.encode(numbers("gaussian", SHAPE, 3), at(0))
    sender.abort(third.ticket)
    sender.abort(second.ticket)
    assert sender.residual is not None
    assert same_bits(sender.residual, kept)


@pytest.mark.parametrize(("pause", "carried"), [(1, True), (2, True), (3, False), (50, False)])
def test_a_residual_older_than_two_steps_is_not_used_unless_carried(pause: int, carried: bool) -> None:
    first, second = numbers("gaussian", SHAPE, 1), numbers("gaussian", SHAPE, 2)
    for spec, expected in (("ef-topk10", carried), ("ef-topk10:carry", True)):
        for told in (False, True):  # with and without on_step
            sender, fresh = feedback(spec), feedback(spec)
            sender.commit(sender.encode(first, at(10)).ticket)
            if told:
                for step in range(11, 11 + pause):
                    sender.on_step(step)
            same = sender.encode(second, at(10 + pause)).payload == fresh.encode(second, at(10 + pause)).payload
            assert same is not expected


def test_use_keeps_a_residual_alive() -> None:
    sender = feedback("ef-topk10")
    for step in range(0, 20, 2):
        sender.encode(numbers("gaussian", SHAPE, step), at(step))
    before = sender.residual
    sender.on_step(20)
    assert before is not None
    assert sender.residual is before


def test_another_shape_a_reset_and_a_roll_back_drop_the_residual() -> None:
    message = numbers("gaussian", SHAPE, 2)
    fresh = feedback("ef-topk10").encode(message, at(5)).payload
    for event in ("none", "shape", "reset", "roll-back"):
        sender = feedback("ef-topk10")
        sender.commit(sender.encode(numbers("gaussian", SHAPE, 1), at(7 if event == "roll-back" else 5)).ticket)
        if event == "shape":
            sender.encode(numbers("gaussian", (3, 40), 1), at(5))
        if event == "reset":
            sender.reset("changed stage")
        assert (sender.encode(message, at(5)).payload == fresh) is (event != "none")


def test_an_abort_does_not_bring_back_what_was_dropped() -> None:
    sender = feedback("ef-topk10")
    early = sender.encode(numbers("gaussian", SHAPE, 1), at(0))
    sender.encode(numbers("gaussian", SHAPE, 2), at(9))
    before = sender.residual
    sender.abort(early.ticket)
    assert sender.residual is before
    sender.reset("stage")
    assert sender.residual is None


def test_forward_feedback_offers_the_mask_it_used() -> None:
    sender = encoder("ef-topk10")
    sender.encode(numbers("gaussian", SHAPE, 1), context())
    encoded = sender.encode(numbers("gaussian", SHAPE, 2), context())
    assert encoded.aux is not None
    assert decode(encoded.payload, context()).aux == encoded.aux


@pytest.mark.parametrize("spec", ["ef-topk10:values=fp32", "ef-quant2", "lowrank2-lep"])
def test_behind_a_mask_the_books_balance_with_what_the_receiver_uses(spec: str) -> None:
    """The receiver zeroes what lies outside the forward mask: that was not delivered."""
    sender = feedback(spec)
    wanted, used = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    for seed in range(8):
        forward = encoder("topk30").encode(numbers("gaussian", SHAPE, 100 + seed), context())
        message = numbers("gaussian", SHAPE, seed)
        encoded = sender.encode(message, at(0), forward.aux)
        sender.commit(encoded.ticket)
        assert forward.aux is not None
        wanted += apply_mask(message.clone(), forward.aux)  # outside there is no gradient
        used += decode(encoded.payload, at(0), forward.aux).tensor
    assert sender.residual is not None
    assert (wanted - used - sender.residual).norm() <= 1e-5 * wanted.norm() + 1e-5
