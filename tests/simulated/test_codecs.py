"""Every way to send less, in swarms that lose a peer: against the reference, bit for bit where that is promised.

A middle peer receives and sends in both directions: masks, residuals and partners of both sides die with it. It dies
with a microbatch in its sum whose answer no other peer has, so another peer encodes that one with its own state,
and the last stage has finished it for the one that died.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmtrain.checkpoint import Checkpoint, latest
from swarmtrain.codec import Direction, MessageContext, make_encoder, parse_spec
from swarmtrain.data.prepare import PrepareOptions, prepare
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import SimulatedSwarm
from swarmtrain.wire.messages import Code, Work

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    assert_as_good_as_reference,
    assert_reference,
    every_other,
    every_third,
    repetition,
    said,
    start_armed,
    tiny,
    wait_said,
    wait_seen,
    wait_serving,
    wait_step,
    wait_struck,
)

POINT, NTH = "before-answer", 8  # by then it has sent much, in both directions

# forward, backward, boundary.kind
FORGETFUL = [
    ("topk20:values=int8", "topk20:values=int8", "dense"),
    ("quant2", "quant3", "subspace"),
    ("quant3", "quant2", "dense"),
    ("quant4", "quant6", "subspace"),
    ("quant6:group=64", "quant4:group=64", "dense"),
    ("quant4", "quant8", "learned"),
    ("minmax4", "minmax6", "subspace"),
    ("minmax2", "minmax3", "dense"),
    ("minmax8", "bf16", "subspace"),
    ("bf16", "fp32", "subspace"),
    ("fp32", "fp16", "subspace"),
    ("raw", "raw", "projected"),
    ("topk20-separate", "topk20-separate", "dense"),
    ("topk50:values=bf16", "topk50:values=fp32", "subspace"),
    ("topk10", "quant8", "dense"),
    ("quant8", "topk5-separate:values=int8", "learned"),
]
# What remembers: what was left out (ef, lep), a warm start (lowrank), what a partner has (ef21, aqsgd).
REMEMBERING = [
    ("ef-topk50", "topk50", "dense"),
    ("ef-topk25", "topk25", "subspace"),
    ("ef-quant4", "ef-quant2", "subspace"),
    ("quant4", "ef-topk20-separate:carry", "dense"),
    ("fp16", "lowrank2-lep:carry", "dense"),
    ("quant8", "lowrank2-lep", "subspace"),
    ("fp32", "lowrank2:factors=bf16", "dense"),
    ("ef21-topk50", "ef21-topk50", "subspace"),
    ("ef21-quant4", "ef21-quant6", "dense"),
    ("aqsgd-quant4", "quant8", "subspace"),
    ("aqsgd-topk25:key=quant8", "ef21-quant4", "dense"),
    ("quant8", "quant4:critical", "subspace"),
    ("topk50", "topk50:critical", "dense"),
    ("bf16", "lowrank4-lep:critical", "dense"),
]
COMPOSED = [
    ("ef21-topk50", "ef21-quant4", ("boundary.track_every=2", "boundary.track_rate=0.5")),
    ("ef-quant4", "lowrank2-lep:carry", ("boundary.track_every=2", "reduce.codec=powersgd2")),
    ("topk50", "topk50", ("reduce.codec=bf16", "model.tie_embeddings=true")),
    ("aqsgd-quant4", "quant8", ("reduce.codec=topk64",)),
    ("quant4", "quant8:critical", ("reduce.codec=int8", "reduce.selective=true")),
]


def manifest_of(forward: str, backward: str, kind: str, *overrides: str) -> Manifest:
    overrides = ("batch.microbatches_per_step=5", *overrides)
    return tiny(f"wire.forward={forward}", f"wire.backward={backward}", f"boundary.kind={kind}", *overrides)


def lose_a_middle_peer(swarm: SimulatedSwarm) -> None:
    """One peer of the first and of the last stage, two of the middle one until one of them died with work."""
    is_sticky = swarm.manifest.wire.forward.startswith(("ef21", "aqsgd"))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    first, last = swarm.start_peer("first", 0), swarm.start_peer("last", 2)
    middle = [start_armed(swarm, "middle0", 1, speed=0.5)]
    if is_sticky:  # who its partner is only the sender decides
        middle.append(swarm.start_peer("middle1", 1, speed=0.5))
        wait_step(swarm, 3)
        partner = max(middle, key=lambda peer: int(peer.status()["microbatches"]))
        wait_seen(swarm, lambda: partner.status()["open_microbatches"] >= 2, f"{partner.name} has work")
        partner.kill()
    else:
        victim = start_armed(swarm, "middle1", 1, f"{POINT}:{NTH}:kill")
        wait_struck(swarm, victim, POINT)
        swarm.until(lambda: last.status()["from_ledger"] >= 1, "the last stage had it finished for the one that died")
    wait_said(swarm, first, "calls_rerouted")  # work went elsewhere
    wait_said(swarm, swarm.coordinator, "peer_lost", stage=1)


def newest(swarm: SimulatedSwarm) -> Checkpoint:
    found = latest(swarm.coordinator.state_dir / "checkpoints")
    assert found is not None
    return found


@pytest.mark.parametrize(("forward", "backward", "kind"), every_third(FORGETFUL))
def test_what_remembers_nothing_ends_in_the_references_bits(
    simulated: Make, references: References, forward: str, backward: str, kind: str
) -> None:
    swarm = simulated(manifest_of(forward, backward, kind))
    lose_a_middle_peer(swarm)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


@pytest.mark.parametrize(("forward", "backward", "kind"), every_third(REMEMBERING))
def test_what_remembers_goes_on_without_the_dead_peers_memory(
    simulated: Make, references: References, forward: str, backward: str, kind: str
) -> None:
    """Who had which microbatch changes what is left out, so bits differ from the reference's."""
    swarm = simulated(manifest_of(forward, backward, kind))
    lose_a_middle_peer(swarm)
    assert_as_good_as_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


@pytest.mark.parametrize(("forward", "backward", "overrides"), every_other(COMPOSED))
def test_methods_compose_with_a_subspace_and_with_each_other(
    simulated: Make, references: References, forward: str, backward: str, overrides: tuple[str, ...]
) -> None:
    """A subspace that moves, boundary codecs and compressed reductions, all in one run."""
    swarm = simulated(manifest_of(forward, backward, "subspace", *overrides))
    lose_a_middle_peer(swarm)
    assert_as_good_as_reference(swarm, references)
    assert newest(swarm).basis_epoch == swarm.manifest.basis_epoch(swarm.manifest.schedule.steps)


# ---- two stages ------------------------------------------------------------------------------------------------------


def small(*overrides: str) -> Manifest:
    return tiny("stages.count=2", "model.num_layers=2", *overrides)


def survive(swarm: SimulatedSwarm, *, num_peers: int, stage: int = 0) -> None:
    """Replica counts differ between the stages on purpose; a replica of a stage dies in the middle of the run."""
    swarm.start_coordinator(min_peers=num_peers)
    for index in range(num_peers):
        swarm.start_peer(f"peer{index}", index % 2)
    wait_serving(swarm, *swarm.peers)
    wait_step(swarm, 3)
    swarm.serving(stage)[0].kill()
    assert len(swarm.serving(stage)) >= 1


@pytest.mark.parametrize("kind", every_other(["projected", "learned", "subspace", "dense"]))
def test_tied_embeddings_are_synchronized_in_one_group(simulated: Make, references: References, kind: str) -> None:
    """Through a codec; two replicas of the first stage, one of the last; one of the two is killed on the way."""
    swarm = simulated(
        small("model.tie_embeddings=true", f"boundary.kind={kind}", "wire.forward=quant8", "wire.backward=quant8")
    )
    survive(swarm, num_peers=3)
    assert_reference(swarm, references)
    assert said(swarm, "peer_lost")
    embeddings = [newest(swarm).load_stage(stage)["parameter/embedding.weight"] for stage in (0, 1)]
    assert embeddings[0].equal(embeddings[1])


@pytest.mark.parametrize("victim", [repetition(0), 1])
def test_all_stages_move_the_subspace_at_one_apply(simulated: Make, references: References, victim: int) -> None:
    swarm = simulated(
        small("boundary.track_every=2", "boundary.track_rate=0.5", "checkpoint.every=3", "schedule.steps=8")
    )
    survive(swarm, num_peers=4, stage=victim)
    assert_reference(swarm, references)
    late = newest(swarm)
    assert late.basis_epoch == 4 == swarm.manifest.basis_epoch(swarm.manifest.schedule.steps)
    bases = [late.load_stage(stage)["subspace/basis"] for stage in (0, 1)]
    assert bases[0].equal(bases[1])


def test_messages_of_another_epoch_of_the_subspace_are_refused(simulated: Make) -> None:
    """Of one that has not come yet, and of one that is over; from a peer that is otherwise honest."""
    swarm = simulated(small("boundary.track_every=2", "schedule.steps=12"))
    swarm.start(num_peers=2)
    wait_step(swarm, 4)
    sender, target = swarm.peers
    sender.process.ask("pause")
    swarm.run_for(5.0)  # nothing else is on its way
    encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.FORWARD)
    boundary = encoder.encode(torch.zeros(1, 16, 4), MessageContext(0, Direction.FORWARD)).payload
    status = swarm.coordinator.status()
    step = target.status()["step"]
    found: list[str] = []

    async def ask(epoch: int) -> None:
        tokens = bytes(17)
        work = Work(status["run"], status["term"], 1, step, 5, epoch, False, (), tokens, boundary)
        try:
            await sender.daemon.assignment.peer.node.call(target.peer_id, work, deadline_s=30.0)
        except CallRefused as refusal:
            found.append(refusal.code)

    for epoch in (0, 7):
        sender.process.spawn(ask(epoch), "a message of another epoch")
    swarm.until(lambda: len(found) == 2, "both are refused")
    assert found == [Code.STALE_BASIS] * 2
    sender.process.ask("resume")
    swarm.run_to_end()
    assert not swarm.faults


@pytest.mark.parametrize("codec", ["powersgd2", "lowrank100", "topk64", "int8"])
def test_one_peer_per_stage_reduces_as_the_reference_does(simulated: Make, references: References, codec: str) -> None:
    """With checkpoints on the way: what is left out is forgotten there, by peers and reference alike."""
    swarm = simulated(small(f"reduce.codec={codec}", "checkpoint.every=3"))
    swarm.start(num_peers=2)
    assert_reference(swarm, references)


@pytest.mark.parametrize("codec", every_other(["int8", "bf16", "lowrank100", "powersgd2", "topk64"]))
def test_replicas_agree_on_compressed_gradients_and_survive_a_death(
    simulated: Make, references: References, codec: str
) -> None:
    """What a share is rounded to depends on who has which microbatches: the loss agrees, the bits need not."""
    swarm = simulated(small(f"reduce.codec={codec}"))
    survive(swarm, num_peers=3)
    assert_as_good_as_reference(swarm, references)  # replicas had equal digests after every step
    assert all(event.compressed for event in said(swarm, "stage_prepared"))
    assert tuple(event.loss for event in said(swarm, "step_applied")) != references(swarm.manifest).losses


@pytest.mark.parametrize("wires", [("ef21-topk50", "ef21-topk50"), ("aqsgd-quant4", "quant8")])
def test_sticky_codecs_train_in_a_swarm_and_survive_a_death(
    simulated: Make, references: References, wires: tuple[str, str]
) -> None:
    """Two peers of each stage: partners are kept, and when one dies its partner finds another."""
    swarm = simulated(
        small(f"wire.forward={wires[0]}", f"wire.backward={wires[1]}", "boundary.kind=dense", "schedule.steps=12")
    )
    survive(swarm, num_peers=4, stage=1)
    wait_step(swarm, 10)
    asked = sum(peer.status()["refused"].get("need-keyframe", 0) for peer in swarm.serving())
    assert asked < 10 * 6 * 2  # differences were understood: not every message was refused
    assert_as_good_as_reference(swarm, references)


def test_aqsgd_sends_differences_when_samples_come_again(
    simulated: Make, references: References, tmp_path: Path
) -> None:
    """A corpus of one step's samples, and one peer per stage: key-frames at first, then differences only."""
    num_samples, window = 6, 17
    text, corpus = tmp_path / "text.txt", tmp_path / "corpus"
    text.write_bytes(bytes(33 + index * index % 90 for index in range(num_samples * window)))
    prepare(PrepareOptions((text,), corpus))
    wires = ("wire.forward=aqsgd-quant4", "wire.backward=quant8", "boundary.kind=dense")
    swarm = simulated(small(*wires, f"data.source={corpus}", "data.validation_fraction=0", "schedule.steps=14"))
    swarm.start(num_peers=2)
    wait_step(swarm, 12)
    made = swarm.serving(0)[0].status()["sticky"]["forward"]
    refused = sum(peer.status()["refused"].get("need-keyframe", 0) for peer in swarm.serving())
    assert_as_good_as_reference(swarm, references)
    assert made["key-frame"] <= 2 * num_samples  # the very first messages may have no partner yet
    assert made["difference"] >= 10 * num_samples
    assert refused == 0
