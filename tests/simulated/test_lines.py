"""Lines that are cut, one-way, slow or gone for a while, and transports that die: the bits stay as they are."""

from __future__ import annotations

import pytest

from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    assert_as_good_as_reference,
    assert_reference,
    every_other,
    repetition,
    said,
    tiny,
    wait_said,
    wait_step,
)

STAGES = {"a": 0, "b": 1, "c": 1, "d": 2}
CUTS = {  # what is lost: from, to
    "shares": ("c", "b"),
    "answers": ("b", "a"),
    "requests": ("a", "b"),
    "orders": ("coordinator", "b"),
    "reports": ("b", "coordinator"),
}


SLOW = 0.1  # of machines: all daemons learn of the end, also those that were cut off until shortly before


def start(swarm: SimulatedSwarm, speed: float = 1.0) -> None:
    swarm.start_coordinator(min_peers=len(STAGES))
    for name, stage in STAGES.items():
        swarm.start_peer(name, stage, speed=speed)


@pytest.mark.parametrize("cut", every_other(CUTS))
def test_a_line_that_carries_one_direction_only_leaves_no_trace(
    simulated: Make, references: References, cut: str
) -> None:
    """A reaches B, but nothing of B reaches A, for the rest of the run. Both still reach all other peers."""
    swarm = simulated(tiny("schedule.steps=9"))
    start(swarm, SLOW)
    wait_step(swarm, 2)
    swarm.network.block(*CUTS[cut])
    wait_step(swarm, 6)
    swarm.network.block(*CUTS[cut], False)  # so that all daemons learn of the end
    assert_reference(swarm, references)


def both_ways(swarm: SimulatedSwarm, one: list[str], other: list[str], blocked: bool) -> None:
    for a in one:
        for b in other:
            swarm.network.block(a, b, blocked)
            swarm.network.block(b, a, blocked)


@pytest.mark.parametrize("length_s", [repetition(2.0), 40.0])
@pytest.mark.parametrize("left", [["peer0"], ["peer1", "peer4"], ["peer0", "peer1", "peer2"], ["coordinator"]])
def test_a_partition_that_heals(simulated: Make, references: References, left: list[str], length_s: float) -> None:
    """One peer, a whole stage, a chain without a coordinator, a coordinator without a chain."""
    swarm = simulated(tiny("schedule.steps=10"))
    swarm.start_coordinator(min_peers=2 * NUM_STAGES)
    for index in range(2 * NUM_STAGES):
        swarm.start_peer(f"peer{index}", index % NUM_STAGES, speed=SLOW)
    wait_step(swarm, 2)
    right = [name for name in swarm.lives if name not in left]
    both_ways(swarm, left, right, True)
    heals_at = swarm.now + length_s
    swarm.until(lambda: swarm.now >= heals_at or swarm.step >= 6, "it has lasted")  # all must learn of the end
    both_ways(swarm, left, right, False)
    assert_reference(swarm, references)


@pytest.mark.parametrize("name", every_other(["coordinator", "peer0", "peer1", "peer2"]))
def test_a_transport_that_dies_and_comes_back(simulated: Make, references: References, name: str) -> None:
    """All streams are gone at once; the daemon stays, and so does its ledger."""
    swarm = simulated(tiny("schedule.steps=7"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    for index in range(NUM_STAGES + 1):
        swarm.start_peer(f"peer{index}", index % NUM_STAGES, speed=SLOW)
    wait_step(swarm, 2)
    host = swarm.lives[name].process.host
    assert host is not None
    host.process.call_soon(host.fail)
    swarm.run_for(3.0)
    host.process.call_soon(host.recover)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_a_slow_line_is_no_failure(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    start(swarm)
    wait_step(swarm, 1)
    for name in ("a", "c", "d"):
        swarm.network.line("b", name).bytes_per_s = 20e3
    assert_reference(swarm, references)
    assert not said(swarm, "peer_lost")


def test_a_peer_behind_a_slow_line_alone_on_its_stage(simulated: Make, references: References) -> None:
    """No other peer could take its work: the run waits for the peer and gets its answers."""
    swarm = simulated(tiny("schedule.steps=4"))
    for name in ("peer0", "peer2", "coordinator"):
        swarm.network.line("peer1", name).bytes_per_s = 5e3
    swarm.start(num_peers=NUM_STAGES)
    assert_reference(swarm, references)


# ---- compressed where a receiver would wait --------------------------------------------------------------------------

TWO_STAGES = ("stages.count=2", "model.num_layers=2")


def test_only_the_stage_that_the_step_waits_for_compresses_its_gradients(
    simulated: Make, references: References
) -> None:
    """One replica of the first stage has a narrow line."""
    manifest = tiny(*TWO_STAGES, "reduce.codec=int8", "reduce.selective=true", "schedule.steps=10")
    swarm = simulated(manifest)
    swarm.start_coordinator(min_peers=3)
    swarm.start_peer("narrow", 0, max_up_bytes_per_s=15e3)
    swarm.start_peer("wide", 0)
    swarm.start_peer("last", 1)
    assert_as_good_as_reference(swarm, references)
    prepared = said(swarm, "stage_prepared")
    compressed = [event.stage for event in prepared if event.compressed]
    exact = [event.stage for event in prepared if not event.compressed]
    assert compressed.count(0) >= 7
    assert compressed.count(1) == 0
    assert exact.count(1) == 10
    assert exact.count(0) >= 1  # measured first


@pytest.mark.parametrize("line", ["wide", "narrow"])
def test_gradients_are_compressed_where_their_receiver_would_wait(
    simulated: Make, references: References, line: str
) -> None:
    """The first stage has more to do: on a wide line a gradient is there before that is done, on a narrow one not."""
    sizes = ("model.hidden_size=64", "model.sequence_length=256", "batch.microbatches_per_step=16", "schedule.steps=7")
    manifest = tiny(*TWO_STAGES, "wire.backward=quant4:critical", "boundary.kind=dense", "reduce.codec=int8", *sizes)
    swarm = simulated(manifest)
    swarm.start_coordinator(min_peers=2)
    first = swarm.start_peer("first", 0)
    first.faults.pace_s = (0.02, 0.1)
    cap = {} if line == "wide" else {"max_up_bytes_per_s": 50e3}
    sender = swarm.start_peer("sender", 1, **cap)
    wait_step(swarm, 6)
    found = sender.status()["gradients"]
    assert_as_good_as_reference(swarm, references)
    assert sum(found.values()) >= 80, found
    if line == "wide":
        assert found["hidden"] >= 10, found
        assert found["waited_for"] < found["hidden"], found
    else:
        assert found["waited_for"] >= 10, found
        assert found["hidden"] <= 0.05 * found["waited_for"], found  # of those whose line was measured


def test_a_run_waits_for_an_owner_that_it_cannot_reach_and_says_so(simulated: Make, references: References) -> None:
    """The only peer of a stage is cut off: the coordinator says what is missing, and goes on when it is back."""
    swarm = simulated(tiny())
    swarm.start(num_peers=NUM_STAGES)
    wait_step(swarm, 2)
    others = [name for name in swarm.lives if name != "peer1"]
    both_ways(swarm, ["peer1"], others, True)
    wait_said(swarm, swarm.coordinator, "run_waits")
    both_ways(swarm, ["peer1"], others, False)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back"), "it has its state still"
