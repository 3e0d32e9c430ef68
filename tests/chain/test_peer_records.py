"""Records of serving peers: what was announced is read, anything else is as good as absent."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.chain.neighbours import Neighbours, PeerRecord
from swarmtrain.route.policies import RouterOptions
from swarmtrain.route.views import StageSnapshot

RECORD = PeerRecord("serving", 7, "life", 1.5, 2.5, 0.0, 1e6, False, ("/ip4/10.0.0.1/tcp/1/p2p/x",))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=8,
)


def test_what_was_announced_is_read() -> None:
    assert PeerRecord.from_value(RECORD.as_value()) == RECORD


def test_the_router_sees_what_was_announced_of_lines() -> None:
    async def main() -> StageSnapshot:
        host = SimpleNamespace(peer_id="me", learn=lambda addresses, of: None)
        node = SimpleNamespace(forgive=lambda peer_id: None)
        options = RouterOptions(bytes_in=1e6, bytes_out=1e6)
        directory = SimpleNamespace(now=time.time)
        neighbours = Neighbours(2, cast(Any, host), cast(Any, node), cast(Any, directory), options=options)
        lines = {"free": (0.0, 0.0), "up": (1e5, 0.0), "down": (0.0, 1e5)}
        records = {
            name: replace(RECORD, up_bytes_per_s=up, down_bytes_per_s=down).as_value()
            for name, (up, down) in lines.items()
        }
        found = {name: SimpleNamespace(value=value, expires_at=time.time() + 60.0) for name, value in records.items()}
        neighbours._take(cast(Any, found))
        return neighbours.router._table.snapshot

    offers = {offer.peer_id: offer for offer in asyncio.run(main()).offers}
    assert not offers["free"].link_bound
    for name in ("up", "down"):
        assert offers[name].announced_s == pytest.approx(10.0)


def test_a_field_that_is_missing_or_of_another_kind_voids_the_record() -> None:
    value = RECORD.as_value()
    for key in value:
        without = {name: item for name, item in value.items() if name != key}
        assert PeerRecord.from_value(without) is None, key
    wrong: list[tuple[str, Any]] = [("s", 1), ("s", "x" * 17), ("t", "x"), ("i", None), ("f", []), ("a", 5), ("a", [5])]
    wrong += [("t", True), ("t", 1.0), ("v", -1), ("v", 1 << 64), ("r", 1), ("p", "no"), ("a", "abc")]
    for key, item in wrong:
        assert PeerRecord.from_value({**value, key: item}) is None, (key, item)


def test_addresses_are_bounded() -> None:
    found = PeerRecord.from_value({**RECORD.as_value(), "a": [f"/ip4/10.0.0.{i}/tcp/1" for i in range(100)]})
    assert found is not None
    assert len(found.addresses) == 16


@settings(deadline=None, max_examples=150)
@given(JSON)
def test_any_value_is_read_or_ignored(value: object) -> None:
    assert PeerRecord.from_value(value) is None or isinstance(value, dict)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(RECORD.as_value())), JSON | st.floats(0, 1e6) | st.integers(0, 10**6))
def test_any_value_of_a_field_is_read_as_it_is_or_voids_the_record(key: str, item: object) -> None:
    value = {**RECORD.as_value(), key: item}
    found = PeerRecord.from_value(value)
    if found is None:
        assert PeerRecord.from_value(RECORD.as_value()) is not None  # it was this field
        return
    for field in fields(PeerRecord):
        read, announced = getattr(found, field.name), getattr(RECORD, field.name)
        assert type(read) is type(announced), field.name
        if isinstance(read, int | float):
            assert 0 <= read < math.inf, field.name
    unchanged = {name: each for name, each in found.as_value().items() if name != key}
    assert unchanged == {name: each for name, each in RECORD.as_value().items() if name != key}
    if isinstance(item, float):
        assert found.as_value()[key] == pytest.approx(item, abs=0.5)
    else:
        assert found.as_value()[key] == item


@pytest.mark.parametrize("key", ["f", "b", "q", "u", "n", "d", "w"])
@pytest.mark.parametrize("item", [math.nan, math.inf, -math.inf, -1.0, "1", True, None, 10**400])
def test_a_time_or_rate_that_is_none_voids_the_record(key: str, item: object) -> None:
    assert PeerRecord.from_value({**RECORD.as_value(), key: item}) is None
