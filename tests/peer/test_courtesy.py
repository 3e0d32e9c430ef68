"""What an owner changes while the daemon runs: the month's traffic is neither forgotten nor counted twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.courtesy.rules import Rules
from swarmtrain.courtesy.settings import Settings
from swarmtrain.courtesy.traffic import TrafficCap, counted
from swarmtrain.observe.events import Events
from swarmtrain.peer.courtesy import Courtesy
from swarmtrain.peer.daemon import PeerDaemon
from swarmtrain.rpc.limits import RateLimiter

CAPPED = Rules(traffic=TrafficCap(10**9, day=15))


def courtesy_of(rules: Rules, place: Path, carried: list[int]) -> Courtesy:
    courtesy = Courtesy(rules, cast(Any, None), Events(), place / "traffic" / "one.json")
    courtesy.meter(lambda: carried[0], lambda: 0)
    return courtesy


def test_a_cap_that_is_lifted_and_set_again_finds_what_was_used(tmp_path: Path) -> None:
    async def main() -> None:
        carried = [100_000_000]
        courtesy = courtesy_of(CAPPED, tmp_path, carried)
        await courtesy.look()
        assert courtesy.snapshot()["month"]["bytes"] == pytest.approx(counted(100_000_000))
        courtesy.change(Rules())
        carried[0] = 150_000_000
        await courtesy.look()
        assert courtesy.snapshot()["month"] is None
        courtesy.change(CAPPED)
        await courtesy.look()
        assert courtesy.snapshot()["month"]["bytes"] == pytest.approx(counted(150_000_000))

    asyncio.run(main())


def test_the_day_of_the_bill_is_that_of_the_options_whatever_the_page_changes(tmp_path: Path) -> None:
    async def main() -> None:
        options = SimpleNamespace(state_dir=tmp_path, max_up_bytes_per_s=0.0, max_down_bytes_per_s=0.0, courtesy=CAPPED)
        courtesy = courtesy_of(CAPPED, tmp_path, [0])
        daemon: Any = SimpleNamespace(_settings=Settings(), options=options, courtesy=courtesy)
        limiter = RateLimiter(max_up_bytes_per_s=None, max_down_bytes_per_s=None)
        await PeerDaemon.change(daemon, Settings(max_traffic=""), limiter)
        assert courtesy.rules.traffic is None
        await PeerDaemon.change(daemon, Settings(max_traffic="2GB/month"), limiter)
        assert courtesy.rules.traffic == TrafficCap(2 * 10**9, day=15)

    asyncio.run(main())
