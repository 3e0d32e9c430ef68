"""Peers whose parameters and moments lie on the host train beside peers where nothing does, to the same bits."""

from __future__ import annotations

import pytest

from swarmtrain.simulated.judge import References

from .conftest import Make
from .scenes import assert_reference, tiny

MIXED = ("on", "auto")


@pytest.mark.parametrize(
    "settings",
    [(), ("schedule.delay=1", "schedule.predict=true", "optimizer.kind=muon", "reduce.codec=none")],
    ids=["synchronous", "delayed"],
)
def test_replicas_with_and_without_offload_agree(
    simulated: Make, references: References, settings: tuple[str, ...]
) -> None:
    swarm = simulated(tiny(*settings))
    swarm.start_coordinator()
    lives = {
        (stage, offload): swarm.start_peer(f"{offload}{stage}", stage, offload=offload)
        for stage in range(3)
        for offload in MIXED
    }
    swarm.until(lambda: all(life.has("phase_reached", phase="serving") for life in lives.values()), "all serve")
    places = {key: life.status()["copied_bytes"] for key, life in lives.items()}
    assert_reference(swarm, references)
    assert all((bytes_by_side["device"] > 0) is (offload == "on") for (_, offload), bytes_by_side in places.items())
