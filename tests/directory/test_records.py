"""Records: only what its owner said, about this run and topic, for at most a minute, within the caps."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.directory.records import (
    MAX_ENVELOPE_BYTES,
    MAX_VALUE_BYTES,
    Flaw,
    FlawedRecord,
    RecordChecker,
    RecordError,
    RecordStore,
    StoreLimits,
    TopicRule,
    dht_key,
    make_record,
    topic_of,
)
from swarmtrain.p2p.identity import Identity, RunKey

NOW = 1_000_000.0
OWNER = Identity.generate()
RAW = make_record(OWNER, "run", "topic", b"stage 3", NOW + 30.0)


def checker(now: float = NOW, run_id: str = "run", **rules: TopicRule) -> RecordChecker:
    return RecordChecker(run_id, rules, lambda: now)


def flaw_of(raw: bytes, topic: str = "topic", **options: Any) -> Flaw:
    with pytest.raises(FlawedRecord) as caught:
        checker(**options).check(raw, topic)
    return caught.value.flaw


def repacked(**changes: Any) -> bytes:
    """The good record with some of its fields replaced, its signature kept."""
    version, statement, signature, countersignature = msgpack.unpackb(RAW, raw=False)
    names = ["run_id", "topic", "peer_id", "expires_at", "value", "credential"]
    stated = dict(zip(names, statement, strict=True))
    others = {"version": version, "signature": signature, "countersignature": countersignature}
    assert changes.keys() <= stated.keys() | others.keys()
    stated, others = ({**fields, **{k: v for k, v in changes.items() if k in fields}} for fields in (stated, others))
    raw: bytes = msgpack.packb([others.pop("version"), list(stated.values()), *others.values()], use_bin_type=True)
    return raw


def test_a_good_record_is_read_as_it_was_made() -> None:
    assert repacked() == RAW  # so that what follows changes one thing at a time
    record = checker().check(RAW, "topic")
    assert (record.peer_id, record.value, record.expires_at) == (OWNER.peer_id, b"stage 3", NOW + 30.0)
    assert topic_of(RAW) == "topic"
    assert checker().check(make_record(OWNER, "run", "topic", b"raw", NOW + 1), "topic").value == b"raw"


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"value": b"stage 4"}, Flaw.FORGED),
        ({"credential": b"another's"}, Flaw.FORGED),
        ({"expires_at": NOW + 31.0}, Flaw.FORGED),
        ({"signature": bytes(64)}, Flaw.FORGED),
        ({"peer_id": b"\x00\x24\x08\x01\x12\x20" + Identity.generate().public_bytes}, Flaw.FORGED),
        ({"peer_id": b"\x12\x20" + bytes(32)}, Flaw.FORGED),
        ({"run_id": "other"}, Flaw.MISPLACED),
        ({"topic": "other"}, Flaw.MISPLACED),
        ({"version": 1}, Flaw.MALFORMED),
        ({"version": 4}, Flaw.MALFORMED),
        ({"peer_id": b""}, Flaw.MALFORMED),
        ({"peer_id": "text"}, Flaw.MALFORMED),
        ({"expires_at": math.nan}, Flaw.MALFORMED),
        ({"expires_at": math.inf}, Flaw.MALFORMED),
        ({"expires_at": int(NOW) + 30}, Flaw.MALFORMED),
        ({"signature": b"short"}, Flaw.MALFORMED),
        ({"countersignature": b"short"}, Flaw.MALFORMED),
        ({"value": "text"}, Flaw.MALFORMED),
        ({"value": bytes(MAX_VALUE_BYTES + 1)}, Flaw.OVERSIZED),
        ({"value": bytes(MAX_ENVELOPE_BYTES)}, Flaw.OVERSIZED),
        ({"topic": "t" * 200}, Flaw.OVERSIZED),
    ],
)
def test_what_was_tampered_with_is_refused_by_its_name(changes: dict[str, Any], flaw: Flaw) -> None:
    assert flaw_of(repacked(**changes)) is flaw


def test_records_are_bound_to_run_and_topic() -> None:
    assert flaw_of(RAW, topic="other") is Flaw.MISPLACED
    assert flaw_of(RAW, run_id="other") is Flaw.MISPLACED
    assert dht_key("a", "b/c") != dht_key("a/b", "c")


def test_records_live_until_their_expiry_and_a_minute_at_most() -> None:
    assert flaw_of(RAW, now=NOW + 30.0) is Flaw.EXPIRED
    assert checker(now=NOW + 29.9).check(RAW, "topic")
    assert flaw_of(make_record(OWNER, "run", "topic", b"", NOW + 75.0)) is Flaw.FAR_FUTURE
    assert checker().check(make_record(OWNER, "run", "topic", b"", NOW + 60.0), "topic")


def test_a_verdict_is_remembered_but_time_goes_on() -> None:
    now = NOW
    keeper = RecordChecker("run", {}, lambda: now)
    assert keeper.check(RAW, "topic") is keeper.check(RAW, "topic")
    now = NOW + 31.0
    with pytest.raises(FlawedRecord):
        keeper.check(RAW, "topic")
    assert keeper.dropped == {Flaw.EXPIRED: 1}


def test_a_topic_can_ask_for_the_runs_countersignature() -> None:
    run_key, other_key = RunKey.generate(), RunKey.generate()
    rule = TopicRule(countersigned_by=run_key.public_bytes)
    good = make_record(OWNER, "run", "topic", b"", NOW + 30.0, signer=run_key.sign)
    assert checker(topic=rule).check(good, "topic")
    assert checker().check(good, "topic"), "others can read it too"
    for bad in (RAW, make_record(OWNER, "run", "topic", b"", NOW + 30.0, signer=other_key.sign)):
        with pytest.raises(FlawedRecord) as caught:
            checker(topic=rule).check(bad, "topic")
        assert caught.value.flaw is Flaw.NOT_COUNTERSIGNED
    # the countersignature of one owner's record cannot be used for another's
    thief = Identity.generate()
    stolen = msgpack.unpackb(good)[3]
    theirs = msgpack.unpackb(make_record(thief, "run", "topic", b"", NOW + 30.0))
    with pytest.raises(FlawedRecord):
        checker(topic=rule).check(msgpack.packb([*theirs[:3], stolen]), "topic")


def test_a_topic_can_have_a_check_of_its_own() -> None:
    rule = TopicRule(accepts=lambda record: record.value == b"stage 3")
    assert checker(topic=rule).check(RAW, "topic")
    with pytest.raises(FlawedRecord) as caught:
        checker(topic=rule).check(make_record(OWNER, "run", "topic", b"stage 4", NOW + 30.0), "topic")
    assert caught.value.flaw is Flaw.REFUSED


@pytest.mark.parametrize("value", [b"x" * 2049, b"x" * 10_000, {}, [b"x"]])
def test_a_value_that_is_too_large_or_not_bytes_is_an_error_for_its_author(value: Any) -> None:
    with pytest.raises(RecordError):
        make_record(OWNER, "run", "topic", value, NOW)


@pytest.mark.parametrize("value", [3, "text", None, [1], {1: 2}])
def test_a_value_that_is_not_bytes_is_malformed(value: Any) -> None:
    assert flaw_of(repacked(value=value)) is Flaw.MALFORMED


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300), st.integers(0, len(RAW) - 1), st.integers(1, 255), st.integers(0, len(RAW)))
def test_any_bytes_and_any_damage_are_refused(noise: bytes, position: int, flip: int, cut: int) -> None:
    damaged = bytearray(RAW)
    damaged[position] ^= flip
    for raw in (noise, bytes(damaged), RAW[:cut] if cut < len(RAW) else RAW + b"x", RAW + noise + b"x"):
        with pytest.raises(FlawedRecord):
            checker().check(raw, "topic")


def test_the_largest_record_fits_its_envelope() -> None:
    run_key = RunKey.generate()
    value = bytes(MAX_VALUE_BYTES)
    raw = make_record(OWNER, "r" * 128, "t" * 128, value, NOW + 30.0, signer=run_key.sign)
    assert len(raw) <= MAX_ENVELOPE_BYTES
    assert RecordChecker("r" * 128, {}, lambda: NOW).check(raw, "t" * 128).value == value


class TestStore:
    LIMITS = StoreLimits(records_per_key=3, bytes_per_key=1000, records_per_owner=2, num_keys=4, total_bytes=1500)

    def make(self) -> RecordStore:
        self.now = NOW
        return RecordStore(self.LIMITS, lambda: self.now)

    def test_newer_replaces_older_and_never_the_other_way(self) -> None:
        store = self.make()
        assert store.put(1, "a", b"old", NOW + 10)
        assert store.put(1, "a", b"new", NOW + 20)
        assert store.put(1, "a", b"old", NOW + 10)
        assert store.get(1) == [b"new"]
        self.now = NOW + 15
        assert store.get(1) == [b"new"], "the older expiry ended the newer record"
        self.now = NOW + 20
        assert store.get(1) == []
        assert (store.num_records, store.num_bytes) == (0, 0)

    def test_a_full_key_lets_its_owners_renew_and_nobody_else_in(self) -> None:
        store = self.make()
        assert all(store.put(1, owner, b"x", NOW + 10) for owner in "abc")
        assert not store.put(1, "d", b"x", NOW + 10)
        assert store.put(1, "a", b"y", NOW + 20)
        self.now = NOW + 11
        assert store.put(1, "d", b"x", NOW + 20)

    def test_bytes_per_key_and_in_total_are_capped(self) -> None:
        store = self.make()
        assert store.put(1, "a", bytes(600), NOW + 10)
        assert not store.put(1, "b", bytes(600), NOW + 10)
        assert not store.put(1, "a", bytes(1001), NOW + 20), "a renewal may not outgrow the key"
        assert store.get(1) == [bytes(600)]
        assert store.put(2, "b", bytes(600), NOW + 10)
        assert not store.put(3, "c", bytes(600), NOW + 10)

    def test_owners_and_keys_are_capped(self) -> None:
        store = self.make()
        assert store.put(1, "a", b"", NOW + 10)
        assert store.put(2, "a", b"", NOW + 10)
        assert not store.put(3, "a", b"", NOW + 10)
        assert store.put(3, "b", b"", NOW + 10)
        assert store.put(4, "b", b"", NOW + 10)
        assert not store.put(5, "c", b"", NOW + 10)
        self.now = NOW + 20  # keys that nobody touches are swept
        assert store.put(5, "c", b"", NOW + 30)
        assert store.num_records == 1

    @settings(deadline=None, max_examples=100)
    @given(
        st.lists(
            st.tuples(
                st.integers(1, 5), st.sampled_from("abcd"), st.integers(0, 700), st.integers(1, 30), st.integers(0, 8)
            ),
            max_size=60,
        )
    )
    def test_the_caps_hold_and_the_counts_are_right_whatever_comes(
        self, puts: list[tuple[int, str, int, int, int]]
    ) -> None:
        store = self.make()
        for key, owner, num_bytes, life, pause in puts:
            store.put(key, owner, bytes(num_bytes), self.now + life)
            assert store.num_bytes <= self.LIMITS.total_bytes
            held = [store.get(k) for k in range(1, 6)]
            assert all(len(records) <= self.LIMITS.records_per_key for records in held)
            assert all(sum(map(len, records)) <= self.LIMITS.bytes_per_key for records in held)
            assert store.num_bytes == sum(len(raw) for records in held for raw in records)
            assert store.num_records == sum(map(len, held))
            self.now += pause


def test_a_record_counts_only_while_its_credential_entitles_its_owner() -> None:
    raw = make_record(OWNER, "run", "topic", b"stage 3", NOW + 30.0, credential=b"good")
    entitled = {(OWNER.peer_id, b"good")}
    judge = RecordChecker("run", {}, lambda: NOW, vouches=lambda *who: who in entitled)
    assert judge.check(raw, "topic").credential == b"good"
    with pytest.raises(FlawedRecord, match="uncertified"):
        judge.check(RAW, "topic")
    entitled.clear()  # it was revoked
    with pytest.raises(FlawedRecord, match="uncertified"):
        judge.check(raw, "topic")
    assert judge.dropped[Flaw.UNCERTIFIED] == 2
