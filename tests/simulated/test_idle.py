"""What a volunteer's daemon costs while it has no work, counted: wakeups, log and traffic (docs/guide-volunteer.md).

A wakeup is a callback that the event loop runs. Seconds of a processor follow from their number; that figure is
measured, and stands in the guide.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from swarmtrain.courtesy.hours import parse_hours
from swarmtrain.courtesy.rules import Rules
from swarmtrain.courtesy.traffic import TrafficCap
from swarmtrain.simulated.loop import PROCESS
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import hold, open_ended, wait_phase, wait_seen, wait_step

MINUTE_S = 60.0
MAX_WAKEUPS_PER_S = 60.0
MAX_LOG_BYTES_PER_DAY = 1_000_000
MAX_LINK_BYTES_PER_DAY = 200_000_000
EVERYTHING = Rules(
    hours=parse_hours(["00:00-12:00", "12:00-24:00"]), idle_s=1.0, programs=("game",), traffic=TrafficCap(10**12)
)


def idle_peer(swarm: SimulatedSwarm, rules: Rules) -> Life:
    """It serves, and no work can come, since another stage has nobody who takes any."""
    swarm.start_coordinator(min_peers=3)
    peer = swarm.start_peer("idle", 0, courtesy=rules)
    for stage in (1, 2):
        swarm.start_peer(f"peer{stage}", stage)
    wait_step(swarm, 1)
    hold(swarm.peers[1])
    wait_seen(swarm, lambda: peer.status()["cause"] == "next_stage_empty", "it is idle")
    swarm.run_for(30.0)
    return peer


def count_wakeups(swarm: SimulatedSwarm, peer: Life, monkeypatch: pytest.MonkeyPatch) -> int:
    """Callbacks of its process in a minute."""
    run, process, count = asyncio.Handle._run, peer.process, 0

    def counted(handle: asyncio.Handle) -> None:
        nonlocal count
        count += handle._context.get(PROCESS) is process  # type: ignore[attr-defined]
        run(handle)

    monkeypatch.setattr(asyncio.Handle, "_run", counted)
    swarm.run_for(MINUTE_S)
    monkeypatch.undo()
    return count


@pytest.mark.parametrize("rules", [Rules(), EVERYTHING], ids=["without rules", "with every rule"])
def test_a_peer_without_work_sleeps(simulated: Make, monkeypatch: pytest.MonkeyPatch, rules: Rules) -> None:
    swarm = simulated(open_ended())
    peer = idle_peer(swarm, rules)
    num_events, carried = len(peer.events), peer.daemon.assignment.peer.node.traffic().total_bytes
    wakeups = count_wakeups(swarm, peer, monkeypatch)
    assert 0 < wakeups / MINUTE_S < MAX_WAKEUPS_PER_S
    per_day = 86400 / MINUTE_S
    logged = sum(len(json.dumps(event.as_dict())) for _, event in peer.events[num_events:])
    assert logged * per_day < MAX_LOG_BYTES_PER_DAY
    linked = (peer.daemon.assignment.peer.node.traffic().total_bytes - carried) * per_day
    assert linked < MAX_LINK_BYTES_PER_DAY
    print(f"{wakeups / MINUTE_S:.1f} wakeups/s, {logged * per_day:.0f} log bytes/day, {linked:.3g} bytes/day on links")


def test_a_paused_peer_sleeps_as_well(simulated: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = simulated(open_ended())
    peer = idle_peer(swarm, EVERYTHING)
    peer.process.ask("pause")
    wait_phase(swarm, peer, "paused")
    swarm.run_for(30.0)
    assert 0 < count_wakeups(swarm, peer, monkeypatch) / MINUTE_S < MAX_WAKEUPS_PER_S
