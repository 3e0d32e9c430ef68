"""Whom `swarmtrain local --kill-every` may kill: nobody without whom its stage would have nobody that serves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.local import Child, LocalOptions, LocalSwarm, replaceable
from swarmtrain.observe.control import ControlServer
from swarmtrain.run.presets import preset

GOOD = {"state": "serving", "step": 7, "doubt": ""}


def child(name: str, stage: int, exit_code: int | None = None) -> Child:
    """It has said that it serves."""
    process = cast(Any, SimpleNamespace(returncode=exit_code))
    return Child(name, stage, process, cast(Any, None), is_serving=True)


def spare(place: Path, peers: list[Child], stages: list[list[dict[str, Any]]] | None) -> list[str]:
    """Who can be spared when the coordinator sees `stages`; None: it does not answer."""

    async def status(request: dict[str, Any]) -> dict[str, Any]:
        return {"step": 7, "stages": stages}

    async def main() -> list[str]:
        swarm = LocalSwarm(LocalOptions(preset("nano"), place, num_peers=len(peers)), lambda event: None)
        swarm.peers = peers
        (place / "coordinator").mkdir()
        server = ControlServer(place / "coordinator" / "control.sock", {"status": status})
        if stages is not None:
            await server.start()
        try:
            return [peer.name for peer in replaceable(await swarm.serving_peers())]
        finally:
            await server.close()

    return asyncio.run(main())


def seen(*peers: dict[str, Any]) -> list[dict[str, Any]]:
    """One stage as the coordinator sees it."""
    return [{**GOOD, "name": f"peer{number}", **peer} for number, peer in enumerate(peers)]


def test_a_peer_can_be_spared_if_another_of_its_stage_serves(tmp_path: Path) -> None:
    peers = [child("peer0", 0), child("peer1", 0), child("peer2", 1)]
    assert spare(tmp_path, peers, [seen({}, {}), [{**GOOD, "name": "peer2"}]]) == ["peer0", "peer1"]


@pytest.mark.parametrize(
    "partner",
    [{"state": "syncing"}, {"state": "unknown"}, {"step": 6}, {"doubt": "its link broke"}, {"name": "somebody else"}],
)
def test_a_partner_that_only_looks_as_if_it_served_is_none(tmp_path: Path, partner: dict[str, Any]) -> None:
    assert spare(tmp_path, [child("peer0", 0), child("peer1", 0)], [seen({}, partner)]) == []


def test_a_partner_that_is_dead_already_is_none(tmp_path: Path) -> None:
    assert spare(tmp_path, [child("peer0", 0), child("peer1", 0, exit_code=-9)], [seen({}, {})]) == []


def test_nobody_is_killed_while_the_coordinator_cannot_say_who_serves(tmp_path: Path) -> None:
    assert spare(tmp_path, [child("peer0", 0), child("peer1", 0)], None) == []
