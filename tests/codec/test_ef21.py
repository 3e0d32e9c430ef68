"""EF21: the same estimate at both ends, or a refusal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import Decoder, NeedKeyframe, decode
from swarmtrain.codec.ef21 import MAX_LINKS, EF21Encoder
from swarmtrain.codec.payload import header_bytes, peek

from .generators import Case, cases, context, encoder, numbers, same_bits, squared

SPECS = ("ef21-topk10", "ef21-topk30:values=int8", "ef21-quant4", "ef21-quant2")
SHAPE = (5, 40)


def link(spec: str) -> EF21Encoder:
    made = encoder(spec)
    assert isinstance(made, EF21Encoder)
    return made


def is_keyframe(payload: bytes) -> bool:
    return peek(payload).flags == 1


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=15, deadline=None)
@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=10))
def test_both_ends_hold_the_same_bits(spec: str, seeds: list[int]) -> None:
    sender, receiver = link(spec), Decoder()
    for index, seed in enumerate(seeds):
        encoded = sender.encode(numbers("gaussian", SHAPE, seed), context())
        received = receiver.decode(encoded.payload, context()).tensor
        sender.commit(encoded.ticket)
        assert is_keyframe(encoded.payload) is (index == 0)
        assert same_bits(received, sender._links["b"].numbers)


@pytest.mark.parametrize(("spec", "share"), [("ef21-topk10:values=fp32", 0.1), ("ef21-topk30:values=fp32", 0.3)])
def test_a_constant_message_is_approached_by_the_contraction_of_the_codec(spec: str, share: float) -> None:
    sender, receiver = link(spec), Decoder()
    message = numbers("gaussian", SHAPE, 1)
    before = squared(message)
    for _ in range(8):
        received = receiver.decode(sender.encode(message, context()).payload, context()).tensor
        after = squared(message - received)
        assert after <= (1 - share) * before + 1e-6
        before = after


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_sizes_to_the_byte(case: Case) -> None:
    sender, inner = link("ef21-quant4"), encoder("quant4")
    expected = header_bytes(len(case.shape)) + 16 + inner.max_bytes(case.shape)
    assert len(sender.encode(case.tensor(), context()).payload) == sender.max_bytes(case.shape) == expected


@pytest.mark.parametrize("spec", SPECS)
def test_any_other_receiver_refuses_and_a_key_frame_helps(spec: str) -> None:
    sender, first, second = link(spec), Decoder(), Decoder()
    for seed in range(3):
        encoded = sender.encode(numbers("gaussian", SHAPE, seed), context())
        if seed < 2:
            first.decode(encoded.payload, context())
    with pytest.raises(NeedKeyframe):
        second.decode(encoded.payload, context())
    with pytest.raises(NeedKeyframe):
        decode(encoded.payload, context())
    with pytest.raises(NeedKeyframe):  # the right peer, but it knows this sender by another name
        first.decode(encoded.payload, context(sender="somebody else"))
    sender.abort(encoded.ticket)
    again = sender.encode(numbers("gaussian", SHAPE, 2), context())
    assert is_keyframe(again.payload)
    expected = decode(again.payload, context()).tensor
    assert same_bits(second.decode(again.payload, context()).tensor, expected)


def test_a_lost_message_a_repeated_one_and_a_late_one() -> None:
    sender, receiver = link("ef21-quant4"), Decoder()
    sent = [sender.encode(numbers("gaussian", SHAPE, seed), context()) for seed in range(4)]
    first = receiver.decode(sent[0].payload, context()).tensor
    assert same_bits(receiver.decode(sent[0].payload, context()).tensor, first)  # repeated: the same answer
    with pytest.raises(NeedKeyframe):  # number 1 is lost
        receiver.decode(sent[2].payload, context())
    second = receiver.decode(sent[1].payload, context()).tensor  # late, but in order after all
    third = receiver.decode(sent[2].payload, context()).tensor
    assert not same_bits(second, third)
    assert same_bits(receiver.decode(sent[3].payload, context()).tensor, sender._links["b"].numbers)


def test_the_answer_is_a_copy() -> None:
    sender, receiver = link("ef21-quant4"), Decoder()
    first = receiver.decode(sender.encode(numbers("gaussian", SHAPE, 1), context()).payload, context()).tensor
    first.zero_()
    second = receiver.decode(sender.encode(numbers("gaussian", SHAPE, 2), context()).payload, context()).tensor
    assert same_bits(second, sender._links["b"].numbers)  # what was done to the first answer is not in it


def test_each_receiver_has_its_own_link_and_old_ones_are_forgotten() -> None:
    sender = link("ef21-quant4")
    receivers = {str(index): Decoder() for index in range(MAX_LINKS + 3)}
    for round_number in range(2):
        for name, receiver in receivers.items():
            encoded = sender.encode(numbers("gaussian", SHAPE, round_number), context(receiver=name))
            receiver.decode(encoded.payload, context(receiver=name))
    assert len(sender._links) == MAX_LINKS
    encoded = sender.encode(numbers("gaussian", SHAPE, 9), context(receiver="0"))
    assert is_keyframe(encoded.payload)


def test_another_shape_and_a_reset_lead_to_key_frames() -> None:
    sender, receiver = link("ef21-quant4"), Decoder()
    for shape in (SHAPE, (40, 5), SHAPE):
        encoded = sender.encode(numbers("gaussian", shape, 1), context())
        assert is_keyframe(encoded.payload)
        receiver.decode(encoded.payload, context())
    sender.reset("stage")
    assert is_keyframe(sender.encode(numbers("gaussian", SHAPE, 1), context()).payload)
    follow_up = sender.encode(numbers("gaussian", SHAPE, 1), context())
    receiver.reset("stage")
    with pytest.raises(NeedKeyframe):
        receiver.decode(follow_up.payload, context())


def test_a_sender_that_misstates_the_outcome_is_refused() -> None:
    """What a peer whose arithmetic rounds differently would do: silent drift must be impossible."""
    sender, receiver = link("ef21-quant4"), Decoder()
    receiver.decode(sender.encode(numbers("gaussian", SHAPE, 1), context()).payload, context())
    held = sender._links["b"]
    drifted = held.numbers.clone()
    drifted[0, 0] = torch.nextafter(drifted[0, 0], torch.tensor(10.0))
    sender._links["b"] = type(held)(drifted, held.digest)
    with pytest.raises(NeedKeyframe):
        receiver.decode(sender.encode(numbers("gaussian", SHAPE, 2), context()).payload, context())
