"""A swarm trains to the same bits as one process: weights, moments, every loss. And its books can be checked."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import torch
from runs import train

from swarmtrain.audit import audit
from swarmtrain.checkpoint import latest
from swarmtrain.coordinator.journal import Journal
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import SimulatedSwarm

from .conftest import Make
from .scenes import assert_as_good_as_reference, assert_reference, said, tiny

NUM_STEPS = 10
FOUR_STAGES = ("stages.count=4", "model.num_layers=4")
NUM_PEERS = 7  # of four stages: the first three have a replica


@pytest.mark.parametrize("kind", ["subspace", "dense"])
def test_a_swarm_ends_in_the_references_bits(simulated: Make, references: References, kind: str) -> None:
    often = ("checkpoint.every=4", "validation.every=5")
    swarm = simulated(tiny(*FOUR_STAGES, f"boundary.kind={kind}", f"schedule.steps={NUM_STEPS}", *often))
    swarm.start(num_peers=NUM_PEERS)
    assert_reference(swarm, references)
    (ended,) = said(swarm, "run_ended")
    assert Path(ended.checkpoint).name == f"step-{NUM_STEPS:08d}"
    assert_replicas_agreed(swarm)
    assert_work_was_shared(swarm)
    assert_alterations_are_found(swarm)


def assert_replicas_agreed(swarm: SimulatedSwarm) -> None:
    """Every stage has a digest after every step, replicas have the same one, and there were replicas."""
    with Journal(swarm.coordinator.state_dir / "journal.sqlite", read_only=True) as journal:
        rows = journal.replicas()
    by_place: dict[tuple[int, int], list[str]] = {}
    for step, stage, _, digest in rows:
        by_place.setdefault((step, stage), []).append(digest)
    assert set(by_place) == {(step, stage) for step in range(1, NUM_STEPS + 1) for stage in range(4)}
    assert all(len(set(digests)) == 1 for digests in by_place.values())
    assert sum(len(digests) == 2 for digests in by_place.values()) > NUM_STEPS  # of 30 places with two peers
    assert len({digests[0] for digests in by_place.values()}) == len(by_place)  # a step changes every stage


def assert_work_was_shared(swarm: SimulatedSwarm) -> None:
    """Otherwise the equality would say little about reductions: more than one route was used."""
    with Journal(swarm.coordinator.state_dir / "journal.sqlite", read_only=True) as journal:
        shares = Counter(
            (stage, peer)
            for decision, _ in journal.decisions()
            for stage, members in decision.entries.items()
            for (peer, _), microbatches in members.items()
            for _ in microbatches
        )
    assert len(shares) > 4
    assert sum(shares.values()) == NUM_STEPS * 4 * swarm.manifest.batch.microbatches_per_step


def assert_alterations_are_found(swarm: SimulatedSwarm) -> None:
    """On the books of a real run; test_audit.py tries every cell of made ones."""
    for table, column in (("steps", "loss"), ("losses", "loss"), ("entries", "peer"), ("replicas", "state_digest")):
        copy = Path(shutil.copytree(swarm.coordinator.state_dir, swarm.root / f"altered-{table}"))
        with sqlite3.connect(copy / "journal.sqlite") as db:
            value = "'somebody'" if column != "loss" else "loss + 1e-9"
            where = f"rowid = (SELECT max(rowid) FROM {table})"
            assert db.execute(f"UPDATE {table} SET {column} = {value} WHERE {where}").rowcount == 1
        assert not audit(copy).passed


def test_float_sums_agree_with_the_reference_closely(simulated: Make, references: References, tmp_path: Path) -> None:
    swarm = simulated(tiny(*FOUR_STAGES, "batch.accumulate=float", f"schedule.steps={NUM_STEPS}"))
    swarm.start(num_peers=6)
    assert_as_good_as_reference(swarm, references)
    ours, theirs = latest(swarm.coordinator.state_dir / "checkpoints"), train(swarm.manifest, tmp_path)
    assert ours is not None
    for stage in range(4):
        expected = theirs.load_stage(stage)
        for name, tensor in ours.load_stage(stage).items():
            if not name.startswith("parameter/"):
                continue
            distance = torch.linalg.vector_norm(tensor.double() - expected[name].double())
            assert distance <= 1e-5 * torch.linalg.vector_norm(expected[name].double()), name
