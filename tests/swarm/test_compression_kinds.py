"""Every kind of codec in a swarm whose middle stage loses a peer in the middle of a step.

A middle peer receives and sends in both directions: masks, residuals and partners of both sides die with it. It dies
with a microbatch in its sum whose answer nobody has, so another peer encodes that one with what it remembers itself,
and the last stage has finished it for the one that died.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from swarmtrain.checkpoint import Checkpoint
from swarmtrain.run.manifest import Manifest

from .comparison import References, assert_books_balance, end_and_compare, end_at_checkpoint
from .faults import NUM_STAGES, open_ended, start_armed, wait_killed
from .harness import Daemon, Swarm, until

pytestmark = pytest.mark.swarm

POINT, NTH = "before-answer", 8  # by then it has sent much, in both directions
# Of the loss in any step: three times the largest distance that was measured (0.063), a tenth of what is learned.
TOLERANCE = 0.2

# forward, backward, boundary.kind
FORGETFUL = [("topk20:values=int8", "topk20:values=int8", "dense")]
FORGETFUL_LONG = [
    ("quant2", "quant3", "subspace"),
    ("quant3", "quant2", "dense"),
    ("quant4", "quant6", "subspace"),
    ("quant6:group=64", "quant4:group=64", "dense"),
    ("quant4", "quant8", "learned"),
    ("minmax4", "minmax6", "subspace"),
    ("minmax2", "minmax3", "dense"),
    ("minmax6", "minmax8", "dense"),
    ("bf16", "fp32", "subspace"),
    ("fp32", "fp16", "subspace"),
    ("raw", "raw", "projected"),
    ("topk20-separate", "topk20-separate", "dense"),
    ("topk50:values=bf16", "topk50:values=fp32", "subspace"),
    ("topk10", "quant8", "dense"),
    ("quant8", "topk5-separate:values=int8", "learned"),
]
# What remembers: what was left out (ef, lep), a warm start (lowrank), what a partner has (ef21, aqsgd).
REMEMBERING = [("ef-topk50", "topk50", "dense")]
REMEMBERING_LONG = [
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
    ("bf16", "lowrank8-lep:critical", "dense"),
]


def long(kinds: list[tuple[str, str, str]]) -> list[object]:
    return [pytest.param(*kind, marks=pytest.mark.long) for kind in kinds]


def manifest_of(forward: str, backward: str, kind: str, *overrides: str) -> Manifest:
    wires = (f"wire.forward={forward}", f"wire.backward={backward}", f"boundary.kind={kind}")
    return open_ended(*wires, *overrides)


@contextmanager
def swarm_that_lost_a_middle_peer(manifest: Manifest, place: Path) -> Iterator[Swarm]:
    """One peer of the first and of the last stage, two of the middle one until one of them died with work."""
    is_sticky = manifest.wire.forward.startswith(("ef21", "aqsgd"))
    with closing(Swarm(manifest, place, num_peers=NUM_STAGES + 1)) as swarm:
        swarm.start_coordinator()
        first, last = swarm.start_peer(0), swarm.start_peer(2)
        if is_sticky:
            kill_the_partner(swarm)
        else:
            start_slow(swarm)  # so that the other one is asked
            wait_killed(swarm, start_armed(swarm, 1, f"{POINT}:{NTH}:kill"), POINT)
            until(lambda: last.status()["from_ledger"] >= 1, "the last stage had it finished for the one that died")
        swarm.wait(first, "calls_rerouted")  # work went elsewhere
        swarm.wait(None, "peer_lost", stage=1)
        yield swarm
        assert not swarm.events("run_rolled_back")


def start_slow(swarm: Swarm) -> Daemon:
    return swarm.start_peer(1, "--enable-test-faults", environment={"SWARMTRAIN_PACE": "0.04:0.04"})


def kill_the_partner(swarm: Swarm) -> None:
    """Who that is only its sender decides. It dies with microbatches that it has not answered."""
    middle = [start_slow(swarm) for _ in range(2)]
    swarm.wait_step(3)
    partner = max(middle, key=lambda peer: int(peer.status()["microbatches"]))
    until(lambda: partner.status()["open_microbatches"] >= 2, f"{partner.name} has work")
    partner.kill()


@pytest.mark.parametrize(("forward", "backward", "kind"), [*FORGETFUL, *long(FORGETFUL_LONG)])
def test_what_remembers_nothing_ends_in_the_references_bits(
    place: Path, reference: References, forward: str, backward: str, kind: str
) -> None:
    with swarm_that_lost_a_middle_peer(manifest_of(forward, backward, kind), place) as swarm:
        end_and_compare(swarm, reference)


@pytest.mark.parametrize(("forward", "backward", "kind"), [*REMEMBERING, *long(REMEMBERING_LONG)])
def test_what_remembers_goes_on_without_the_dead_peers_memory(
    place: Path, reference: References, forward: str, backward: str, kind: str
) -> None:
    """Who had which microbatch changes what is left out, so bits differ from the reference's."""
    with swarm_that_lost_a_middle_peer(manifest_of(forward, backward, kind), place) as swarm:
        end_as_good_as(swarm, reference)


@pytest.mark.long
@pytest.mark.parametrize(
    ("forward", "backward", "overrides"),
    [
        ("ef21-topk50", "ef21-quant4", ("boundary.track_every=4", "boundary.track_rate=0.5")),
        ("ef-quant4", "lowrank2-lep:carry", ("boundary.track_every=4", "reduce.codec=powersgd2")),
        ("topk50", "topk50", ("reduce.codec=bf16", "model.tie_embeddings=true")),
        ("aqsgd-quant4", "quant8", ("reduce.codec=topk64",)),
        ("quant4", "quant8:critical", ("reduce.codec=int8", "reduce.selective=true")),
    ],
)
def test_methods_compose_with_a_subspace_and_with_each_other(
    place: Path, reference: References, forward: str, backward: str, overrides: tuple[str, ...]
) -> None:
    """A subspace that moves, boundary codecs and compressed reductions, all in one run."""
    manifest = manifest_of(forward, backward, "subspace", *overrides)
    with swarm_that_lost_a_middle_peer(manifest, place) as swarm:
        checkpoint = end_as_good_as(swarm, reference)
    assert checkpoint.basis_epoch == manifest.basis_epoch(checkpoint.step)


def end_as_good_as(swarm: Swarm, references: References) -> Checkpoint:
    """End the run: its loss was the reference's all the way, but for what is left out, and replicas agreed."""
    checkpoint, alone = end_at_checkpoint(swarm, references)
    ours = [swarm.reported()[step] for step in range(1, checkpoint.step + 1)]
    distance = max(abs(one - other) for one, other in zip(ours, alone.losses, strict=True))
    assert distance < TOLERANCE
    assert_books_balance(swarm)
    return checkpoint
