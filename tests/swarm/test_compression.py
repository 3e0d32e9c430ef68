"""Every way to send less, in real swarms: against the reference where the result is determined, and through a death.

Replica counts differ between the stages on purpose: a sum that only works for equal counts would show.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmtrain.checkpoint import Checkpoint
from swarmtrain.codec import Direction, MessageContext, make_encoder, parse_spec
from swarmtrain.data.prepare import PrepareOptions, prepare
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import Code, Work

from .comparison import References, assert_books_balance, assert_equals_reference
from .harness import Daemon, Swarm, tiny, until
from .intruder import Intruder, break_in

pytestmark = pytest.mark.swarm

STAGES = ("stages.count=2", "model.num_layers=2")


def small(*overrides: str) -> Manifest:
    """Two stages of one layer: a swarm of three daemons and its coordinator."""
    return tiny(*STAGES, "schedule.steps=24", *overrides)


def survives(swarm: Swarm, *, at_step: int, stage: int = 0, has_residual: bool = False) -> dict[str, Any]:
    """Kill a replica of a stage in the middle of the run, which ends without it; the victim's last status."""
    swarm.wait_serving()
    swarm.wait_step(at_step)
    assert len(swarm.living(stage)) > 1
    victim = swarm.living(stage)[0]
    if has_residual:  # which of them has had messages enough to look at it is up to the router
        until(lambda: any(map(shows_residual, swarm.living(stage))), "somebody's residual was looked at")
        victim = next(filter(shows_residual, swarm.living(stage)))
    last_status = victim.status()
    victim.kill()
    swarm.wait_end()
    assert not victim.is_running
    assert swarm.events("peer_lost"), "nobody noticed that a peer died"
    assert len(swarm.losses()) == swarm.manifest.schedule.steps
    return last_status


def shows_residual(peer: Daemon) -> bool:
    return peer.status()["residual_cosine"] is not None


def embedding(checkpoint: Checkpoint, stage: int) -> object:
    return checkpoint.load_stage(stage)["parameter/embedding.weight"]


@pytest.mark.parametrize(
    "kind",
    ["learned", pytest.param("projected", marks=pytest.mark.long), pytest.param("subspace", marks=pytest.mark.long)],
)
def test_tied_embeddings_are_synchronized_in_one_group(place: Path, reference: References, kind: str) -> None:
    """Through a codec; two replicas of the first stage, one of the last; one of the two is killed on the way."""
    manifest = small(
        "model.tie_embeddings=true", f"boundary.kind={kind}", "wire.forward=quant8", "wire.backward=quant8"
    )
    with Swarm(manifest, place, num_peers=3) as swarm:
        survives(swarm, at_step=3)
        assert_equals_reference(swarm, reference(manifest))
    checkpoint = swarm.checkpoint()
    assert embedding(checkpoint, 0).equal(embedding(checkpoint, 1))  # type: ignore[attr-defined]


def test_all_stages_move_the_subspace_at_one_apply(place: Path, reference: References) -> None:
    """Messages of another epoch are refused: of one that has not come yet, and of one that is over."""
    manifest = small("boundary.track_every=2", "boundary.track_rate=0.5", "checkpoint.every=7")
    encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.FORWARD)
    boundary = encoder.encode(torch.zeros(2, 32, 8), MessageContext(0, Direction.FORWARD)).payload
    tokens = np.zeros((2, 33), "<u2").tobytes()

    async def attack(one: Intruder) -> list[str]:
        """The run has not begun; then it moves on while this asks."""
        target = swarm.living(1)[0]

        async def refusal(step: int, epoch: int) -> str:
            work = Work(status["run"], status["term"], 1, step, 0, epoch, False, (), tokens, boundary)
            return await one.refused(target, work)

        found = [await refusal(0, epoch) for epoch in (1, 7)]
        await asyncio.to_thread(swarm.start_peer, 0)
        event = await asyncio.to_thread(swarm.wait_step, 3)
        late = Code.AHEAD.value
        while late == Code.AHEAD:  # the step went by while the message was on its way
            late = await refusal(event["step"] + 1, 0)
            event = swarm.events("step_applied")[-1]
        return [*found, late]

    with Swarm(manifest, place, num_peers=2, min_peers=3) as swarm:
        swarm.wait_serving()
        status = swarm.coordinator.status()
        assert break_in(swarm, place / "intruder", attack) == [Code.STALE_BASIS] * 3
        survives(swarm, at_step=4)
        late = swarm.checkpoint()
    assert_equals_reference(swarm, reference(manifest))
    assert late.basis_epoch == 12
    bases = [late.load_stage(stage)["subspace/basis"] for stage in (0, 1)]
    assert bases[0].equal(bases[1])
    assert swarm.manifest.basis_epoch(24) == 12


@pytest.mark.parametrize(
    "codec", ["powersgd2", pytest.param("topk64", marks=pytest.mark.long), pytest.param("int8", marks=pytest.mark.long)]
)
def test_one_peer_per_stage_reduces_as_the_reference_does(place: Path, reference: References, codec: str) -> None:
    """With checkpoints on the way: what is left out is forgotten there, by peers and reference alike."""
    manifest = small(f"reduce.codec={codec}", "checkpoint.every=5")
    with Swarm(manifest, place, num_peers=2) as swarm:
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(codec, marks=pytest.mark.long) for codec in ("bf16", "powersgd2", "topk64"))]
)
def test_replicas_agree_on_compressed_gradients_and_survive_a_death(
    place: Path, reference: References, codec: str
) -> None:
    """What a share is rounded to depends on who has which microbatches: the loss agrees, the bits need not."""
    manifest = small(f"reduce.codec={codec}")
    with Swarm(manifest, place, num_peers=3) as swarm:
        survives(swarm, at_step=3)
    assert_books_balance(swarm)  # replicas had equal digests after every step
    alone = reference(manifest)
    assert abs(swarm.losses()[-1] - alone.losses[-1]) < 0.3
    assert all(event["compressed"] for event in swarm.events("stage_prepared"))
    assert swarm.losses() != alone.losses  # not in one piece


def refusals(swarm: Swarm, code: str) -> int:
    """How often peers that still run have refused something with this code."""
    return sum(peer.status()["refused"].get(code, 0) for peer in swarm.living())


@pytest.mark.parametrize(
    "wires", [("ef21-topk50", "ef21-topk50"), pytest.param(("aqsgd-quant4", "quant8"), marks=pytest.mark.long)]
)
def test_sticky_codecs_train_in_a_swarm_and_survive_a_death(
    place: Path, reference: References, wires: tuple[str, str]
) -> None:
    """Two peers of each stage: partners are kept, and when one dies its partner finds another."""
    manifest = small(f"wire.forward={wires[0]}", f"wire.backward={wires[1]}", "boundary.kind=dense")
    with Swarm(manifest, place, num_peers=4) as swarm:
        swarm.wait_step(4)
        swarm.living(1)[-1].kill()
        swarm.wait_step(12)
        keyframes_asked = refusals(swarm, "need-keyframe")
        swarm.wait_end()
    assert swarm.events("peer_lost")
    assert_books_balance(swarm)
    assert keyframes_asked < 12 * 6 * 2  # differences were understood: not every message was refused
    assert abs(swarm.losses()[-1] - reference(manifest).losses[-1]) < 0.3


def test_aqsgd_sends_differences_when_samples_come_again(place: Path, reference: References) -> None:
    """A corpus of one step's samples, and one peer per stage: key-frames at first, then differences only."""
    num_samples, window = 12, 33
    text, corpus = place / "text.txt", place / "corpus"
    text.write_bytes(bytes(33 + index * index % 90 for index in range(num_samples * window)))
    prepare(PrepareOptions((text,), corpus))
    wires = ("wire.forward=aqsgd-quant4", "wire.backward=quant8", "boundary.kind=dense")
    manifest = small(*wires, f"data.source={corpus}", "data.validation_fraction=0")
    with Swarm(manifest, place, num_peers=2) as swarm:
        swarm.wait_step(12)
        made = swarm.living(0)[0].status()["sticky"]["forward"]
        refused = refusals(swarm, "need-keyframe")
        swarm.wait_end()
    assert_books_balance(swarm)
    assert made["key-frame"] <= 2 * num_samples  # the very first messages may have no partner yet
    assert made["difference"] >= 10 * num_samples
    assert refused == 0
    assert abs(swarm.losses()[-1] - reference(manifest).losses[-1]) < 0.05


@pytest.mark.long
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("topk50", "topk50"),
        ("ef-topk50", "topk50-separate"),
        ("minmax8", "bf16"),
        ("fp16", "lowrank2-lep"),
        ("quant8", "quant4:critical"),
    ],
)
def test_codecs_of_free_routes_train_in_a_swarm_and_survive_a_death(
    place: Path, reference: References, forward: str, backward: str
) -> None:
    """With lazy error propagation it is a peer with a residual that dies."""
    manifest = small(f"wire.forward={forward}", f"wire.backward={backward}")
    has_residual = "lep" in backward
    with Swarm(manifest, place, num_peers=4 if has_residual else 3) as swarm:
        victim = survives(swarm, at_step=3, stage=1 if has_residual else 0, has_residual=has_residual)
    assert (victim["residual_cosine"] is not None) is has_residual
    assert_books_balance(swarm)
    assert abs(swarm.losses()[-1] - reference(manifest).losses[-1]) < 0.3
    if (forward, backward) in (("topk50", "topk50"), ("minmax8", "bf16")):  # nothing is remembered: the same bits
        assert swarm.losses() == reference(manifest).losses
