"""Swarms that train with Muon end in the reference's bits, whatever dies: boundary kinds, tracking, ties, joins."""

from __future__ import annotations

import pytest

from swarmtrain.checkpoint import latest
from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    assert_as_good_as_reference,
    assert_reference,
    every_other,
    said,
    start_armed,
    tiny,
    wait_serving,
    wait_step,
    wait_struck,
)

SLOW = 0.2  # of machines: a step takes seconds


def by_muon(*overrides: str) -> Manifest:
    return tiny("optimizer.kind=muon", "optimizer.learning_rate=0.02", *overrides)


def start(swarm: SimulatedSwarm, *stages: int, speed: float = 1.0) -> None:
    swarm.start_coordinator(min_peers=len(stages))
    for index, stage in enumerate(stages):
        swarm.start_peer(f"peer{index}", stage, speed=speed)


def lose_one(swarm: SimulatedSwarm, point: str) -> None:
    """Of two peers of the middle stage one dies at `point`."""
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage)
    victim = start_armed(swarm, "victim", 1, f"{point}:3:kill")
    wait_struck(swarm, victim, point)


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("subspace", "before-answer"),
        ("subspace", "in-prepare"),
        ("subspace", "before-apply"),
        ("subspace", "after-apply"),
        ("dense", "before-apply"),
        ("learned", "in-prepare"),
        ("projected", "before-apply"),
    ],
)
def test_a_swarm_that_loses_a_peer_ends_in_the_references_bits(
    simulated: Make, references: References, kind: str, point: str
) -> None:
    swarm = simulated(by_muon(f"boundary.kind={kind}"))
    lose_one(swarm, point)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_muon_is_what_was_trained_with(references: References) -> None:
    """A control: the same run with AdamW ends elsewhere."""
    assert references(by_muon()).losses != references(tiny("optimizer.learning_rate=0.02")).losses


def test_newcomers_download_the_momentum_and_take_over(simulated: Make, references: References) -> None:
    swarm = simulated(by_muon("schedule.steps=11"))
    start(swarm, 0, 1, 2, speed=SLOW)
    wait_step(swarm, 2)
    newcomers = [swarm.start_peer(f"newcomer{stage}", stage, speed=SLOW) for stage in range(NUM_STAGES)]
    wait_serving(swarm, *newcomers)
    assert all(newcomer.has("sync_progress", percent=100) for newcomer in newcomers)
    for former in swarm.peers[:NUM_STAGES]:
        former.kill()  # the newcomers now hold the only copies
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_a_run_that_goes_back_to_a_checkpoint_goes_on_from_its_momentum(
    simulated: Make, references: References
) -> None:
    swarm = simulated(by_muon("schedule.steps=8", "checkpoint.every=2"))
    start(swarm, 0, 1, 2)
    wait_step(swarm, 5)
    swarm.run_for(0.1)
    swarm.peers[1].kill()  # the only one of its stage
    swarm.start_peer("peer1", 1)
    assert_reference(swarm, references)
    (back,) = said(swarm, "run_rolled_back")
    assert back.to_step in (2, 4)


def test_the_momentum_follows_a_subspace_that_moves(simulated: Make, references: References) -> None:
    swarm = simulated(
        by_muon("boundary.track_every=2", "boundary.track_rate=0.5", "checkpoint.every=3", "schedule.steps=8")
    )
    lose_one(swarm, "before-apply")
    assert_reference(swarm, references)
    found = latest(swarm.coordinator.state_dir / "checkpoints")
    assert found is not None
    assert found.basis_epoch == 4


@pytest.mark.parametrize("kind", ["subspace", "dense"])
def test_tied_embeddings_stay_equal(simulated: Make, references: References, kind: str) -> None:
    swarm = simulated(by_muon("model.tie_embeddings=true", f"boundary.kind={kind}"))
    lose_one(swarm, "in-prepare")
    assert_reference(swarm, references)


@pytest.mark.parametrize("codec", every_other(["powersgd2", "bf16", "lowrank100", "int8", "topk64"]))
def test_one_peer_per_stage_reduces_as_the_reference_does(simulated: Make, references: References, codec: str) -> None:
    swarm = simulated(by_muon(f"reduce.codec={codec}", "checkpoint.every=3"))
    start(swarm, 0, 1, 2)
    assert_reference(swarm, references)


@pytest.mark.parametrize("codec", ["int8", "powersgd2", "lowrank100"])
def test_replicas_agree_on_compressed_gradients(simulated: Make, references: References, codec: str) -> None:
    """What a share is rounded to depends on who has which microbatches: the loss agrees, the bits need not."""
    swarm = simulated(by_muon(f"reduce.codec={codec}"))
    lose_one(swarm, "after-apply")
    assert_as_good_as_reference(swarm, references)  # replicas had equal digests after every step
    assert all(event.compressed for event in said(swarm, "stage_prepared"))
