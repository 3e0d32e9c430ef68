"""The owner's courtesy in a whole swarm: each cause pauses the peer, is told, costs no work, and ends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from swarmtrain.courtesy.hours import parse_hours
from swarmtrain.courtesy.rules import Rules
from swarmtrain.courtesy.traffic import TrafficCap, counted
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.machine import EPOCH_S, Owner
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import (
    assert_reference,
    every_other,
    open_ended,
    phases,
    said,
    tiny,
    wait_phase,
    wait_seen,
    wait_serving,
    wait_step,
)

SLOW = 0.04  # so few steps take long


def start(swarm: SimulatedSwarm, rules: Rules, *, speed: float = SLOW) -> Life:
    """One peer of each stage, and a second one of the middle stage that has an owner."""
    swarm.start_coordinator(min_peers=4)
    for stage in range(3):
        swarm.start_peer(f"peer{stage}", stage, speed=speed)
    return swarm.start_peer("owned", 1, speed=speed, courtesy=rules)


def pauses(swarm: SimulatedSwarm, peer: Life, cause: str) -> dict[str, Any]:
    """It pauses because of that, says so, and takes no more work; returns its status."""
    swarm.until(lambda: "status" in peer.process.commands, "it answers its owner")
    wait_seen(
        swarm,
        lambda: peer.status()["state"] == "paused" and peer.status()["cause"] == cause and peer.status()["next"],
        cause,
    )
    status = peer.status()
    assert status["courtesy"]["pause"]["cause"] == cause
    assert status["reason"]
    assert status["next"]
    return status


def hhmm(seconds: float) -> str:
    """The time of day so many seconds after the start of a simulated world, in UTC."""
    return f"{datetime.fromtimestamp(EPOCH_S, UTC) + timedelta(seconds=seconds):%H:%M}"


def game(owner: Owner) -> None:
    owner.programs = {"Game.exe"}


def gpu(owner: Owner) -> None:
    owner.gpu_users = ("blender",)


def heat(owner: Owner) -> None:
    owner.gpu_celsius = 84.0


def power(owner: Owner) -> None:
    owner.gpu_watts = 260.0


def load(owner: Owner) -> None:
    owner.others_cpu = 0.5


def typing(owner: Owner) -> None:
    owner.input_idle_s = 1.0


def nothing(owner: Owner) -> None:
    owner.programs, owner.gpu_users = set(), ()
    owner.gpu_celsius, owner.gpu_watts, owner.others_cpu, owner.input_idle_s = 60.0, 50.0, 0.0, 3600.0


CASES = [
    ("program", Rules(programs=("game",)), game),
    ("gpu_used", Rules(yields_gpu=True), gpu),
    ("gpu_hot", Rules(max_gpu_celsius=80.0), heat),
    ("gpu_power", Rules(max_gpu_watts=200.0), power),
    ("in_use", Rules(idle_s=20.0), load),
    ("in_use", Rules(idle_s=20.0), typing),
]


@pytest.mark.parametrize(
    ("cause", "rules", "begin"), every_other(CASES), ids=lambda item: getattr(item, "__name__", None)
)
def test_a_machine_that_its_owner_needs_is_left_alone_until_it_is_free_again(
    simulated: Make, references: References, cause: str, rules: Rules, begin: Callable[[Owner], None]
) -> None:
    """The run goes on without it, in the reference's bits, and none of its work is done twice."""
    swarm = simulated(tiny("schedule.steps=14"))
    peer = start(swarm, rules)
    nothing(peer.machine.owner)
    wait_serving(swarm, peer)
    swarm.until(lambda: peer.status()["microbatches"] > 0, "it has work")
    begin(peer.machine.owner)
    pauses(swarm, peer, cause)
    swarm.until(lambda: peer.status()["open_microbatches"] == 0, "it has finished what it had")
    done, before = peer.status()["forwards"], swarm.step
    wait_step(swarm, before + 2)
    assert peer.status()["forwards"] == done
    nothing(peer.machine.owner)
    wait_serving(swarm, peer)
    assert_reference(swarm, references)
    assert not said(swarm, "work_replayed")
    assert not said(swarm, "peer_lost")


def test_hours_of_the_day_across_midnight(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=12"))
    rules = Rules(hours=parse_hours([f"{hhmm(-3600)}-{hhmm(60)}", f"{hhmm(120)}-{hhmm(600)}"]), time_zone="UTC")
    peer = start(swarm, rules)
    wait_serving(swarm, peer)
    status = pauses(swarm, peer, "off_hours")
    opens = status["courtesy"]["pause"]["ends_at"]
    assert opens - EPOCH_S == pytest.approx(120.0, abs=60.0)
    assert status["next"] == f"work again at {hhmm(opens - EPOCH_S)}"
    wait_serving(swarm, peer)
    assert swarm.now >= opens - EPOCH_S
    assert_reference(swarm, references)


def test_a_peer_that_starts_outside_its_hours_waits_without_fetching_a_state(simulated: Make) -> None:
    swarm = simulated(open_ended())
    swarm.start_coordinator(min_peers=3)
    for stage in range(3):
        swarm.start_peer(f"peer{stage}", stage, speed=SLOW)
    wait_step(swarm, 2)
    peer = swarm.start_peer(
        "owned", 1, courtesy=Rules(hours=parse_hours([f"{hhmm(180)}-{hhmm(600)}"]), time_zone="UTC")
    )
    pauses(swarm, peer, "off_hours")
    swarm.run_for(20.0)
    assert not peer.has("sync_progress")
    assert "serving" not in phases(peer)
    wait_serving(swarm, peer)
    assert not swarm.faults


def test_what_the_owner_asks_for_outlives_other_causes(simulated: Make) -> None:
    """A snooze does not end in the middle of a game, and a game does not end a snooze."""
    swarm = simulated(open_ended())
    peer = start(swarm, Rules(programs=("game",)))
    wait_serving(swarm, peer)
    peer.process.ask("pause")
    pauses(swarm, peer, "paused")
    peer.machine.owner.programs = {"game"}
    swarm.run_for(20.0)
    peer.process.ask("resume")
    pauses(swarm, peer, "program")
    peer.process.ask("pause")
    peer.machine.owner.programs = set()
    swarm.run_for(60.0)
    pauses(swarm, peer, "paused")
    peer.process.ask("resume")
    wait_serving(swarm, peer)
    assert not swarm.faults


def test_a_months_traffic_is_exact_to_two_percent_across_restarts(simulated: Make) -> None:
    """The daemon is killed again and again on the way to its cap, and leaves once in good order."""
    cap = TrafficCap(3_000_000)
    swarm = simulated(open_ended())
    rules = Rules(traffic=cap, time_zone="UTC")
    peer = start(swarm, rules, speed=0.2)
    wait_serving(swarm, peer)
    nodes = [peer.daemon.assignment.peer.node]  # of all its processes

    def carried() -> int:
        return sum(node.traffic().total_bytes for node in nodes)

    for goal in (0.25, 0.5, 0.75):
        wait_seen(swarm, lambda goal=goal: carried() > goal * cap.num_bytes, f"{goal:.0%} of the cap")  # type: ignore[misc]
        if goal == 0.5:
            peer.process.ask("drain")
            swarm.until(lambda: not peer.is_running, "it has ended")
        else:
            peer.kill()
        before = len(phases(peer))
        swarm.start_peer("owned", 1, courtesy=rules)
        wait_phase(swarm, peer, "serving", after=before)
        nodes.append(peer.daemon.assignment.peer.node)
    status = pauses(swarm, peer, "traffic")
    swarm.until(lambda: peer.status()["open_microbatches"] == 0, "it has finished what it had")
    assert counted(carried()) == pytest.approx(cap.num_bytes, rel=0.02)
    assert status["courtesy"]["month"]["bytes"] == pytest.approx(cap.num_bytes, rel=0.02)
    ends = datetime.fromtimestamp(status["courtesy"]["pause"]["ends_at"], UTC)
    began = datetime.fromtimestamp(EPOCH_S, UTC)
    assert (ends.day, ends.hour, ends.minute) == (1, 0, 0)
    assert timedelta(0) < ends - began <= timedelta(days=31)
    peer.machine.step_clock((ends - began).total_seconds())  # the next month comes
    wait_serving(swarm, peer)
    assert peer.status()["courtesy"]["month"]["bytes"] < 0.5 * cap.num_bytes
    assert not swarm.faults


@pytest.mark.parametrize("delay", [0, 1])
def test_the_only_peer_of_a_stage_pauses_for_a_game_and_its_machine_is_switched_off(
    simulated: Make, references: References, delay: int
) -> None:
    swarm = simulated(tiny("schedule.steps=8", f"schedule.delay={delay}"))
    swarm.start_coordinator(min_peers=3)
    for stage in range(3):
        swarm.start_peer(f"peer{stage}", stage, speed=SLOW, courtesy=Rules(programs=("game",)))
    wait_step(swarm, 3)
    peer = swarm.peers[1]
    peer.machine.owner.programs = {"game"}
    pauses(swarm, peer, "program")
    swarm.until(lambda: swarm.coordinator.has("checkpoint_written"), "a checkpoint of what it alone has")
    peer.kill(power_loss=True)
    swarm.start_peer("successor", 1)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_an_idle_peer_looks_at_its_machine_a_dozen_times_a_minute_at_most(simulated: Make) -> None:
    swarm = simulated(open_ended())
    peer = start(swarm, Rules(programs=("game",), idle_s=5.0))
    wait_serving(swarm, peer)
    before = peer.machine.owner.num_looks
    swarm.run_for(60.0)
    assert 0 < peer.machine.owner.num_looks - before <= 13
