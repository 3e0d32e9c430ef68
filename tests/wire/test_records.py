"""Directory records: short, bounded, and what breaks the schema is as good as absent."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.wire.errors import WireError
from swarmtrain.wire.field_types import MAX_ADDRESS, MAX_ADDRESSES
from swarmtrain.wire.peer_report import PeerReport, published
from swarmtrain.wire.records import MAX_RECORD_BYTES, pack_record, parse_record
from swarmtrain.wire.schema import PROTOCOL_VERSION, Message

REPORT = PeerReport(
    1, "serving", "life", 7, "digest", 3, 99, 1.5, 2.5, 0.5, 1e6, 2e6, True, True, 9.0, 4.0, ("/ip4/10.0.0.1/tcp/1",)
)
NAMES = [field.name for field in fields(REPORT)]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=8,
)


def values_of(report: PeerReport) -> list[Any]:
    return [list(value) if isinstance(value := getattr(report, name), tuple) else value for name in NAMES]


def forged(values: list[Any], *, version: int = PROTOCOL_VERSION, item: type[Message] = PeerReport) -> bytes:
    """A record with these values in its fields, whatever they are."""
    header: bytes = msgpack.packb([item.wire.kind, version, item.wire.fingerprint, values])
    return len(header).to_bytes(4, "little") + header


def test_what_was_published_is_read() -> None:
    assert parse_record(PeerReport, pack_record(REPORT)) == REPORT
    assert forged(values_of(REPORT)) == pack_record(REPORT)


def test_the_longest_report_fits_into_a_record() -> None:
    longest = replace(
        REPORT,
        state="s" * 16,
        incarnation="i" * 32,
        state_digest="d" * 64,
        addresses=published(["/ip4/" + "x" * (MAX_ADDRESS - 5)] * 9),
    )
    assert len(longest.addresses) == MAX_ADDRESSES
    assert len(pack_record(longest)) <= MAX_RECORD_BYTES - 256  # the envelope of the directory allows as much


def test_addresses_that_do_not_fit_are_left_out() -> None:
    assert published(["x" * (MAX_ADDRESS + 1), "a", "b"]) == ("a", "b")


@pytest.mark.parametrize("index", range(len(NAMES)))
def test_a_field_that_is_missing_voids_the_record(index: int) -> None:
    values = values_of(REPORT)
    del values[index]
    assert parse_record(PeerReport, forged(values)) is None
    assert parse_record(PeerReport, forged([*values_of(REPORT), 1])) is None


@pytest.mark.parametrize(
    "name", ["forward_ms", "backward_ms", "queue_ms", "up_bytes_per_s", "down_bytes_per_s", "served_s", "download_s"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300, "1", True, None, 1])
def test_a_time_or_rate_that_is_none_voids_the_record(name: str, value: object) -> None:
    values = values_of(REPORT)
    values[NAMES.index(name)] = value
    assert parse_record(PeerReport, forged(values)) is None
    if not isinstance(value, int) or isinstance(value, bool):
        with pytest.raises(WireError):
            pack_record(replace(REPORT, **{name: value}))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(NAMES) - 1), JSON | st.floats(0, 1e6) | st.integers(0, 10**6))
def test_any_value_of_a_field_is_read_as_it_is_or_voids_the_record(index: int, value: object) -> None:
    values = values_of(REPORT)
    values[index] = value
    found = parse_record(PeerReport, forged(values))
    if found is None:
        return
    assert values_of(found) == values
    for name in NAMES:
        read = getattr(found, name)
        assert type(read) is type(getattr(REPORT, name)), name
        if isinstance(read, int | float):
            assert 0 <= read < math.inf, name


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=64) | JSON)
def test_any_other_value_is_no_record(value: object) -> None:
    assert parse_record(PeerReport, value) is None


def test_another_version_another_kind_and_another_size_are_no_record() -> None:
    assert parse_record(PeerReport, forged(values_of(REPORT), version=PROTOCOL_VERSION + 1)) is None
    assert parse_record(PeerReport, pack_record(REPORT) + b"x") is None
    assert parse_record(PeerReport, bytes(MAX_RECORD_BYTES + 1)) is None
    assert parse_record(PeerReport, bytearray(pack_record(REPORT))) is None
