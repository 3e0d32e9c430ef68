"""Records of serving peers: what was published is read, anything else is as good as absent."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from swarmtrain.chain.claim import CoordinatorRecord
from swarmtrain.chain.neighbours import Neighbours, stage_reports
from swarmtrain.chain.rebalancing import MoveRules, RebalanceRule
from swarmtrain.route.policies import RouterOptions
from swarmtrain.route.views import StageSnapshot
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.records import pack_record, parse_record

REPORT = PeerReport(
    2,
    "serving",
    "life",
    7,
    "digest",
    forward_ms=1.5,
    backward_ms=2.5,
    up_bytes_per_s=1e6,
    addresses=("/ip4/10.0.0.1/tcp/1/p2p/x",),
)


def test_the_router_sees_what_was_announced_of_lines() -> None:
    async def main() -> StageSnapshot:
        host = SimpleNamespace(peer_id="me", learn=lambda addresses, of: None)
        node = SimpleNamespace(forgive=lambda peer_id: None)
        options = RouterOptions(bytes_in=1e6, bytes_out=1e6)
        directory = SimpleNamespace(now=time.time)
        neighbours = Neighbours(2, cast(Any, host), cast(Any, node), cast(Any, directory), options=options)
        lines = {"free": (0.0, 0.0), "up": (1e5, 0.0), "down": (0.0, 1e5)}
        records = {
            name: pack_record(replace(REPORT, up_bytes_per_s=up, down_bytes_per_s=down))
            for name, (up, down) in lines.items()
        }
        found = {name: SimpleNamespace(value=value, expires_at=time.time() + 60.0) for name, value in records.items()}
        neighbours._take(cast(Any, found))
        return neighbours.router._table.snapshot

    offers = {offer.peer_id: offer for offer in asyncio.run(main()).offers}
    assert not offers["free"].link_bound
    for name in ("up", "down"):
        assert offers[name].announced_s == pytest.approx(10.0)


def test_only_reports_of_this_stage_count() -> None:
    values: dict[str, object] = {
        "good": pack_record(REPORT),
        "elsewhere": pack_record(replace(REPORT, stage=3)),
        "no-report": pack_record(MOVE_RULES),
        "raw": b"x",
        "dict": {"stage": 2},
    }

    async def lookup(topic: str) -> dict[str, Any]:
        assert topic == "stage.2"
        return {peer_id: SimpleNamespace(value=value) for peer_id, value in values.items()}

    found = asyncio.run(stage_reports(cast(Any, SimpleNamespace(lookup=lookup)), 2))
    assert found == {"good": REPORT}


MOVE_RULES = CoordinatorRecord(4, 10, "life", ("/ip4/10.0.0.1/tcp/1",), MoveRules(RebalanceRule.NONE, 0.3, 4, 7.0, 2.5))


def test_the_rules_of_moving_survive_the_directory_and_nonsense_does_not() -> None:
    packed = pack_record(MOVE_RULES)
    assert parse_record(CoordinatorRecord, packed) == MOVE_RULES
    for old, new in ((b"none", b"wild"), (msgpack.packb(0.3), msgpack.packb(float("nan")))):
        assert packed.count(old) == 1
        assert parse_record(CoordinatorRecord, packed.replace(old, new)) is None
