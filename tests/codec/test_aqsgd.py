"""AQ-SGD: the same memory of each sample at both ends, or a refusal; and the store it lives in."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import (
    CodecError,
    CorruptPayload,
    Decoder,
    Direction,
    MessageContext,
    NeedKeyframe,
    SampleStore,
    decode,
    make_encoder,
    parse_spec,
)
from swarmtrain.codec.aqsgd import AQSGDEncoder
from swarmtrain.codec.payload import header_bytes
from swarmtrain.codec.samples import SampleState

from .generators import context, encoder, numbers, same_bits, squared

SPECS = ("aqsgd-quant4", "aqsgd-quant2:key=quant8", "aqsgd-topk30", "aqsgd-topk10:values=int8,key=fp32")
ROW = (3, 40)


def sample_encoder(spec: str, store: SampleStore | None = None) -> AQSGDEncoder:
    made = make_encoder(parse_spec(spec), boundary=0, direction=Direction.FORWARD, store=store)
    assert isinstance(made, AQSGDEncoder)
    return made


def batch(samples: tuple[int, ...], epoch: int) -> torch.Tensor:
    """Activations that move a little from epoch to epoch."""
    rows = [numbers("gaussian", ROW, sample) + 0.05 * numbers("gaussian", ROW, 1000 + 7 * epoch) for sample in samples]
    return torch.stack(rows)


def of(samples: tuple[int, ...], sender: str = "a", receiver: str = "b") -> MessageContext:
    return context(sender=sender, receiver=receiver, samples=samples)


@pytest.mark.parametrize("spec", SPECS)
def test_both_ends_hold_the_same_bits_after_many_epochs(spec: str) -> None:
    sender, receiver = sample_encoder(spec), Decoder()
    order = random.Random(1)
    for epoch in range(5):
        samples = list(range(8))
        order.shuffle(samples)
        for start in range(0, 8, 2):
            pair = tuple(samples[start : start + 2])
            encoded = sender.encode(batch(pair, epoch), of(pair))
            receiver.decode(encoded.payload, of(pair))
            sender.commit(encoded.ticket)
    theirs = receiver._sample_state()._store
    for sample in range(8):
        assert sender._store.digest(sample) == theirs.digest(sample) is not None


@pytest.mark.parametrize(("spec", "factor"), [("aqsgd-quant4", 0.3), ("aqsgd-quant2", 0.9), ("aqsgd-topk30", 0.8)])
def test_the_error_of_a_sample_that_stays_the_same_shrinks_geometrically(spec: str, factor: float) -> None:
    sender, receiver = sample_encoder(f"{spec}:key=quant8"), Decoder()
    start, message = batch((1, 2), 0), batch((1, 2), 3)
    errors = []
    for visit in range(4):
        encoded = sender.encode(start if visit == 0 else message, of((1, 2)))
        received = receiver.decode(encoded.payload, of((1, 2))).tensor
        sender.commit(encoded.ticket)
        errors.append(squared(received - message) ** 0.5)
    grain = 3e-4 * squared(message) ** 0.5  # of the fp16 store
    assert all(later <= factor * earlier + grain for earlier, later in itertools.pairwise(errors))


def test_first_visits_and_unconfirmed_samples_are_key_frames_of_a_known_size() -> None:
    sender = sample_encoder("aqsgd-quant4")
    head, part = header_bytes(3), 29
    key, difference = encoder("fp16").max_bytes(ROW), encoder("quant4").max_bytes(ROW)
    first = sender.encode(batch((1, 2), 0), of((1, 2)))
    assert len(first.payload) == sender.max_bytes((2, *ROW)) == head + 2 * (part + key)
    unconfirmed = sender.encode(batch((1, 2), 1), of((1, 2)))
    assert len(unconfirmed.payload) == head + 2 * (part + key)
    sender.commit(first.ticket)  # too late: another message was sent since
    assert len(sender.encode(batch((1,), 1), of((1,))).payload) == head + part + key
    sender.commit(unconfirmed.ticket)
    mixed = sender.encode(batch((2, 3), 2), of((2, 3)))
    assert len(mixed.payload) == head + 2 * part + difference + key


@pytest.mark.parametrize("spec", SPECS)
def test_another_receiver_gets_a_key_frame_and_refuses_differences(spec: str) -> None:
    sender, first, second = sample_encoder(spec), Decoder(), Decoder()
    encoded = sender.encode(batch((1, 2), 0), of((1, 2)))
    first.decode(encoded.payload, of((1, 2)))
    sender.commit(encoded.ticket)
    difference = sender.encode(batch((1, 2), 1), of((1, 2)))
    for stranger in (second.decode, decode):
        with pytest.raises(NeedKeyframe):
            stranger(difference.payload, of((1, 2)))
    sender.abort(difference.ticket)
    again = sender.encode(batch((1, 2), 1), of((1, 2), receiver="c"))
    second.decode(again.payload, of((1, 2), receiver="c"))


def test_a_receiver_whose_memory_came_from_elsewhere_refuses() -> None:
    senders = [sample_encoder("aqsgd-quant4") for _ in range(2)]
    receiver = Decoder()
    for epoch, sender in enumerate(senders):
        encoded = sender.encode(batch((1,), epoch), of((1,), sender=str(epoch)))
        receiver.decode(encoded.payload, of((1,), sender=str(epoch)))
        sender.commit(encoded.ticket)
    stale = senders[0].encode(batch((1,), 2), of((1,), sender="0"))
    with pytest.raises(NeedKeyframe):
        receiver.decode(stale.payload, of((1,), sender="0"))
    fresh = senders[1].encode(batch((1,), 2), of((1,), sender="1"))
    receiver.decode(fresh.payload, of((1,), sender="1"))


def test_a_refused_message_changes_nothing_and_a_repeated_one_gives_the_same_answer() -> None:
    sender, receiver = sample_encoder("aqsgd-quant4"), Decoder()
    first = sender.encode(batch((1,), 0), of((1,)))
    receiver.decode(first.payload, of((1,)))
    sender.commit(first.ticket)
    second = sender.encode(batch((1, 2), 1), of((1, 2)))
    answer = receiver.decode(second.payload, of((1, 2))).tensor
    assert same_bits(receiver.decode(second.payload, of((1, 2))).tensor, answer)
    sender.commit(second.ticket)
    third = sender.encode(batch((1, 2), 2), of((1, 2)))
    store = receiver._sample_state()._store
    store.discard(2)
    before = store.digest(1)
    with pytest.raises(NeedKeyframe):
        receiver.decode(third.payload, of((1, 2)))
    assert store.digest(1) == before


def test_sample_ids_must_fit_the_tensor() -> None:
    sender = sample_encoder("aqsgd-quant4")
    for samples in ((), (1,), (1, 1), (1, 2, 3), (-1, 2), (1, 1 << 64)):
        with pytest.raises(CodecError):
            sender.encode(batch((1, 2), 0), of(samples))
    encoded = sender.encode(batch((1, 2), 0), of((1, (1 << 64) - 1)))
    with pytest.raises(CorruptPayload):
        Decoder().decode(encoded.payload, of((1, 2)))


@pytest.mark.parametrize("replicas", [2, 4])
def test_under_uniform_routing_differences_hit_with_probability_one_in_2r_minus_1(replicas: int) -> None:
    """Both ends must have met at the sample's last visit of either. Anything else is a key-frame or a refusal."""
    choice = random.Random(replicas)
    senders = [sample_encoder("aqsgd-quant4") for _ in range(replicas)]
    receivers = [Decoder() for _ in range(replicas)]
    key_bytes = len(senders[0].encode(batch((1,), 0), of((1,))).payload)
    for sender in senders:
        sender.reset("start")
    hits = tries = 0
    samples = 60
    for epoch in range(16):
        for sample in range(samples):
            i, j = choice.randrange(replicas), choice.randrange(replicas)
            now = of((sample,), sender=str(i), receiver=str(j))
            message = batch((sample,), epoch)
            encoded = senders[i].encode(message, now)
            hit = len(encoded.payload) < key_bytes
            try:
                receivers[j].decode(encoded.payload, now)
            except NeedKeyframe:
                hit = False
                senders[i].abort(encoded.ticket)
                encoded = senders[i].encode(message, now)
                receivers[j].decode(encoded.payload, now)
            senders[i].commit(encoded.ticket)
            if epoch >= 8:  # first visits cannot hit; here fewer than (1 - 1/R)^16 are
                hits, tries = hits + hit, tries + 1
    expected = 1 / (2 * replicas - 1)
    deviation = (expected * (1 - expected) / tries) ** 0.5
    assert abs(hits / tries - expected) <= 3 * deviation + (1 - 1 / replicas) ** 16


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(0, 400),
    operations=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=40),
)
def test_the_store_never_exceeds_its_budget_and_never_returns_anything_else(
    budget: int, operations: list[tuple[int, int, bool]]
) -> None:
    store = SampleStore(budget_bytes=budget)
    written: dict[int, SampleState] = {}
    for sample, length, forget in operations:
        if forget:
            store.discard(sample)
            assert store.get(sample) is None
        else:
            state = SampleState.of(os.urandom(length))
            store.put(sample, state)
            written[sample] = state
        assert store.used_bytes <= budget
        for known in range(10):
            held = store.get(known)
            assert held is None or held == written[known]


def test_the_least_recently_used_sample_goes_first() -> None:
    store = SampleStore(budget_bytes=30)
    for sample in range(3):
        store.put(sample, SampleState.of(bytes(10)))
    store.get(0)
    store.put(3, SampleState.of(bytes(10)))
    assert [store.get(sample) is not None for sample in range(4)] == [True, False, True, True]
    store.clear()
    assert len(store) == store.used_bytes == 0


def test_what_the_disk_damaged_is_a_miss() -> None:
    store = SampleStore()
    store.put(1, SampleState.of(b"0123456789"))
    os.pwrite(store._descriptor(), b"x", 3)
    assert store.get(1) is None
    assert len(store) == 0


def test_the_store_leaves_nothing_behind(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    store.put(1, SampleState.of(bytes(10)))
    assert len(store) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_with_a_full_disk_messages_are_key_frames_and_never_wrong(side: str, caplog: pytest.LogCaptureFixture) -> None:
    full = SampleStore()
    full._file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115 (the kernel says: no space left on device)
    sender = sample_encoder("aqsgd-quant4", full if side == "sender" else None)
    receiver = Decoder(store=full if side == "receiver" else None)
    for visit in range(3):
        encoded = sender.encode(batch((1, 2), visit), of((1, 2)))
        try:
            decoded = receiver.decode(encoded.payload, of((1, 2))).tensor
        except NeedKeyframe:
            assert (side, visit) == ("receiver", 1)  # the sender believed that it was remembered there
            sender.abort(encoded.ticket)
            continue
        assert encoded.received is not None
        assert same_bits(decoded, encoded.received)
        sender.commit(encoded.ticket)
    assert len(full) == 0
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1


def test_a_store_in_a_directory_that_is_gone_is_an_empty_one(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "missing")
    store.put(1, SampleState.of(bytes(10)))
    assert store.get(1) is None
