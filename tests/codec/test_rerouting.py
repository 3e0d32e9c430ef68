"""Random senders, receivers, resends, losses and aborts: the same tensors as on a fixed route, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import (
    Aux,
    Decoder,
    Direction,
    Encoder,
    Limits,
    MessageContext,
    NeedKeyframe,
    decode,
    make_encoder,
    parse_pair,
)
from swarmtrain.codec.payload import header_bytes
from swarmtrain.codec.registry import _reconstruct
from swarmtrain.codec.spec import CodecPair

from .generators import numbers, same_bits

FREE_PAIRS = (
    "fp32",
    "fp16/bf16",
    "quant4/quant8",
    "minmax8",
    "topk10",
    "topk10/quant8",
    "topk10-separate",
    "ef-topk10",
    "fp32/ef-topk10",
    "ef-quant4",
    "lowrank4",
    "lowrank4-lep",
    "lowrank4-lep:carry",
    "lowrank4-lep:critical",
)
STICKY_PAIRS = ("ef21-topk10", "ef21-quant4", "aqsgd-quant4", "aqsgd-topk30")
SHAPE = (2, 3, 24)
REPLICAS = 3


@dataclass(frozen=True)
class Delivery:
    """What the network does with one message of one microbatch."""

    sender: int
    receivers: tuple[int, ...]  # tried in turn, with the same bytes
    lost: int  # the first so many never see it
    repeated: bool  # the last one gets it twice
    abandoned: bool  # an earlier attempt of the whole microbatch was encoded and given up
    critical: bool


DELIVERIES = st.builds(
    Delivery,
    sender=st.integers(0, REPLICAS - 1),
    receivers=st.lists(st.integers(0, REPLICAS - 1), min_size=1, max_size=3).map(tuple),
    lost=st.integers(0, 2),
    repeated=st.booleans(),
    abandoned=st.booleans(),
    critical=st.booleans(),
)


@dataclass
class Side:
    """The replicas of the stages at both sides of a boundary."""

    pair: CodecPair
    encoders: dict[tuple[int, Direction], Encoder] = field(default_factory=dict)
    decoders: dict[tuple[int, Direction], Decoder] = field(default_factory=dict)

    def encoder(self, replica: int, direction: Direction) -> Encoder:
        spec = self.pair.forward if direction is Direction.FORWARD else self.pair.backward
        key = (replica, direction)
        if key not in self.encoders:
            self.encoders[key] = make_encoder(spec, boundary=0, direction=direction)
        return self.encoders[key]

    def decoder(self, replica: int, direction: Direction) -> Decoder:
        return self.decoders.setdefault((replica, direction), Decoder())


def context_of(index: int, direction: Direction, delivery: Delivery, receiver: int) -> MessageContext:
    return MessageContext(
        0,
        direction,
        step=index // 4,
        microbatch=index,
        sender=f"sender {delivery.sender}",
        receiver=f"receiver {receiver}",
        critical=delivery.critical,
        samples=(index % 3, 3 + index % 3),
    )


def send(side: Side, index: int, direction: Direction, delivery: Delivery, message: torch.Tensor, aux: Aux | None):  # type: ignore[no-untyped-def]
    """Deliver `message` as `delivery` says; whatever the last receiver decodes, and the mask at both ends."""
    encoder = side.encoder(delivery.sender, direction)
    now = context_of(index, direction, delivery, delivery.receivers[0])
    if delivery.abandoned:
        wasted = encoder.encode(message * 0.5 + 1, now, aux)
        encoder.abort(wasted.ticket)
        encoder.abort(wasted.ticket)
    encoded = encoder.encode(message, now, aux)
    answers = []
    for attempt, receiver in enumerate(delivery.receivers):
        if attempt < delivery.lost and attempt < len(delivery.receivers) - 1:
            continue
        seen_as = context_of(index, direction, delivery, receiver)
        for _ in range(1 + delivery.repeated):
            answers.append(side.decoder(receiver, direction).decode(encoded.payload, seen_as, aux))
    encoder.commit(encoded.ticket)
    encoder.abort(encoded.ticket)  # too late, and therefore without effect
    assert all(same_bits(answer.tensor, answers[0].tensor) for answer in answers)
    assert all(answer.aux == encoded.aux for answer in answers)
    return answers[-1].tensor, encoded.aux


@pytest.mark.parametrize("pair", FREE_PAIRS)
@settings(max_examples=15, deadline=None)
@given(deliveries=st.lists(DELIVERIES, min_size=1, max_size=12))
def test_free_codecs_decode_bit_for_bit_as_on_a_fixed_route(pair: str, deliveries: list[Delivery]) -> None:
    """The fixed route has the same senders: a residual is the sender's. Receivers, resends and aborts do not matter."""
    routed, fixed = Side(parse_pair(pair)), Side(parse_pair(pair))
    for index, delivery in enumerate(deliveries):
        calm = Delivery(delivery.sender, (0,), 0, False, False, delivery.critical)
        activation, gradient = numbers("gaussian", SHAPE, index), numbers("tiny", SHAPE, 100 + index)
        forward, aux = send(routed, index, Direction.FORWARD, delivery, activation, None)
        expected, fixed_aux = send(fixed, index, Direction.FORWARD, calm, activation, None)
        assert same_bits(forward, expected)
        assert aux == fixed_aux
        backward, _ = send(routed, index, Direction.BACKWARD, delivery, gradient, aux)
        expected, _ = send(fixed, index, Direction.BACKWARD, calm, gradient, aux)
        assert same_bits(backward, expected)


@pytest.mark.parametrize("pair", STICKY_PAIRS)
@settings(max_examples=30, deadline=None)
@given(deliveries=st.lists(DELIVERIES, min_size=1, max_size=15))
def test_sticky_codecs_return_the_senders_state_or_refuse(pair: str, deliveries: list[Delivery]) -> None:
    """The truth is what the addressed receiver would hold if it had seen all of the sender's messages to it."""
    side = Side(parse_pair(pair))
    witnesses: dict[tuple[int, int], Decoder] = {}
    for index, delivery in enumerate(deliveries):
        encoder = side.encoder(delivery.sender, Direction.FORWARD)
        addressed = delivery.receivers[0]
        now = context_of(index, Direction.FORWARD, delivery, addressed)
        message = numbers("gaussian", SHAPE, index)
        encoded = encoder.encode(message, now)
        witness = witnesses.setdefault((delivery.sender, addressed), Decoder())
        try:
            truth = witness.decode(encoded.payload, now).tensor
        except NeedKeyframe:
            pytest.fail("the sender built on a state that its receiver never had")
        delivered = False
        for attempt, receiver in enumerate(delivery.receivers):
            if attempt < delivery.lost:
                continue
            seen_as = context_of(index, Direction.FORWARD, delivery, receiver)
            try:
                answer = side.decoder(receiver, Direction.FORWARD).decode(encoded.payload, seen_as)
            except NeedKeyframe:
                continue
            assert same_bits(answer.tensor, truth)
            delivered = delivered or receiver == addressed
        if delivered:
            encoder.commit(encoded.ticket)
        else:
            encoder.abort(encoded.ticket)
            again = encoder.encode(message, now)  # must be a key-frame: decodable by anyone
            answer = decode(again.payload, now)
            witness.decode(again.payload, now)
            received = side.decoder(addressed, Direction.FORWARD).decode(again.payload, now)
            assert same_bits(received.tensor, answer.tensor)
            encoder.commit(again.ticket)


def test_a_state_used_in_spite_of_its_digest_would_give_another_tensor() -> None:
    """Negative control: the refusals above refuse something."""
    now = context_of(0, Direction.FORWARD, Delivery(0, (0,), 0, False, False, True), 0)
    encoder = make_encoder(parse_pair("ef21-quant4").forward, boundary=0, direction=Direction.FORWARD)
    right, wrong = Decoder(), Decoder()
    right.decode(encoder.encode(numbers("gaussian", SHAPE, 0), now).payload, now)
    stranger = make_encoder(parse_pair("ef21-quant4").forward, boundary=0, direction=Direction.FORWARD)
    wrong.decode(stranger.encode(numbers("gaussian", SHAPE, 9), now).payload, now)
    payload = encoder.encode(numbers("gaussian", SHAPE, 1), now).payload
    with pytest.raises(NeedKeyframe):
        wrong.decode(payload, now)
    change = _reconstruct(payload[header_bytes(3) + 16 :], Limits.exactly(SHAPE))
    misled = wrong._estimates._links[now.sender].numbers + change
    assert not torch.allclose(misled, right.decode(payload, now).tensor)
