"""Why a peer is idle, cause by cause: what `swarmtrain status` says of it, and what next."""

from __future__ import annotations

from typing import Any

from swarmtrain.cli.status_text import status_lines
from swarmtrain.observe.activity import Cause
from swarmtrain.simulated.machine import EPOCH_S
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import arm, hold, open_ended, wait_phase, wait_seen, wait_serving, wait_step

TWO_STAGES = ("stages.count=2", "model.num_layers=2")


def idle_for(swarm: SimulatedSwarm, life: Life, cause: Cause, reason: str = "") -> dict[str, Any]:
    """Wait until the peer says that it is idle for this cause, and in words; its snapshot at that moment."""
    found: dict[str, Any] = {}

    def is_so() -> bool:
        found.update(life.status())
        return found["cause"] == cause and reason in found["reason"]

    wait_seen(swarm, is_so, f"{life.name} is idle because of {cause} {reason}")
    said = "\n".join(status_lines(found))  # what the verb prints
    assert found["reason"]
    assert found["reason"] in said
    assert found["next"] in said
    return found


def test_no_lease_and_the_coordinator_says_for_what_it_waits(simulated: Make) -> None:
    swarm = simulated(open_ended(*TWO_STAGES))
    swarm.start_coordinator(min_peers=1)
    last = swarm.start_peer("last", 1)
    wait_serving(swarm, last)
    status = idle_for(swarm, last, Cause.NO_LEASE, "no work has come: stage 0 has no peers")
    assert status["since"] <= EPOCH_S + swarm.now - 1.5
    run = swarm.coordinator.status()
    assert (run["state"], run["reason"]) == ("waiting", "stage 0 has no peers")


def test_banned_until_the_ban_ends(simulated: Make) -> None:
    """Its links break with every answer, again and again: the coordinator bans it for longer and longer."""
    swarm = simulated(open_ended(*TWO_STAGES, "batch.microbatches_per_step=12"))
    swarm.start(num_peers=2)
    first = swarm.peers[0]
    wait_step(swarm, 1)
    arm(first, *[f"before-answer:{nth}:cut" for nth in range(3, 40)])
    idle_for(swarm, first, Cause.BANNED, "the coordinator gives it no work")
    assert "cut at before-answer" in first.struck
    first.faults.armed.clear()
    wait_step(swarm, swarm.step + 2)
    assert first.status()["cause"] != Cause.BANNED


def test_paused(simulated: Make) -> None:
    swarm = simulated(open_ended(*TWO_STAGES))
    swarm.start(num_peers=3)
    wait_step(swarm, 1)
    hold(swarm.peers[0])
    assert idle_for(swarm, swarm.peers[0], Cause.PAUSED, "paused by its owner")["state"] == "paused"


def test_capped(simulated: Make) -> None:
    swarm = simulated(open_ended(*TWO_STAGES, "boundary.kind=dense", "model.sequence_length=64"))
    swarm.start_coordinator(min_peers=2)
    capped = swarm.start_peer("capped", 0, max_up_bytes_per_s=30e3 / 8)
    swarm.start_peer("last", 1)
    wait_serving(swarm, capped)
    idle_for(swarm, capped, Cause.CAPPED, "the upload cap of 30 kbit/s holds messages back")


def test_next_stage_empty_and_a_killed_peer_is_seen_at_once(simulated: Make) -> None:
    swarm = simulated(open_ended(*TWO_STAGES))
    swarm.start(num_peers=2)
    wait_step(swarm, 1)
    first, last = swarm.peers
    killed_at = swarm.now
    last.kill()

    def is_doubted() -> bool:
        peers = swarm.coordinator.status()["stages"][1]
        return not peers or bool(peers[0]["doubt"])

    wait_seen(swarm, is_doubted, "the coordinator shows the broken link")
    assert swarm.now < killed_at + 1.0
    status = idle_for(swarm, first, Cause.NEXT_STAGE_EMPTY, "stage 1 has no peers")
    assert status["since"] >= EPOCH_S + killed_at
    wait_seen(swarm, lambda: swarm.coordinator.status()["reason"] == "stage 1 has no peers", "the run waits")


def test_syncing_while_no_peer_has_the_state(simulated: Make) -> None:
    swarm = simulated(open_ended(*TWO_STAGES))
    swarm.start(num_peers=2)
    wait_step(swarm, 1)
    swarm.peers[1].kill()
    newcomer = swarm.start_peer("newcomer", 1)
    wait_phase(swarm, newcomer, "syncing")
    assert idle_for(swarm, newcomer, Cause.SYNCING, "no peer has the state of stage 1")["state"] == "syncing"


def test_coordinator_away(simulated: Make) -> None:
    swarm = simulated(open_ended(*TWO_STAGES))
    swarm.start(num_peers=2)
    wait_step(swarm, 1)
    swarm.coordinator.kill()
    killed_at = swarm.now
    status = idle_for(swarm, swarm.peers[0], Cause.COORDINATOR_AWAY)
    assert status["reason"] == "the coordinator does not answer"
    assert abs(status["since"] - EPOCH_S - killed_at) < 4.0


def test_the_parts_of_a_peers_time_add_up(simulated: Make) -> None:
    swarm = simulated(open_ended(*TWO_STAGES))
    swarm.start(num_peers=2)
    wait_step(swarm, 2)
    before = [peer.status() for peer in swarm.peers]
    wait_step(swarm, 8)
    for old, new in zip(before, [peer.status() for peer in swarm.peers], strict=True):
        assert abs(_spent(new) - _spent(old) - (new["now"] - old["now"])) < 0.02 * (new["now"] - old["now"])
        assert _spent(new) <= new["now"] - new["started_at"]  # nothing is counted twice


def _spent(status: dict[str, Any]) -> float:
    parts = dict(status["seconds"])
    idle = parts.pop("idle")
    return float(sum(parts.values()) + (sum(idle.values()) if isinstance(idle, dict) else idle))
