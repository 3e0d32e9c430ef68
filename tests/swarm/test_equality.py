"""A swarm trains to the same bits as one process: weights, moments, every loss. And its books can be checked."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import torch

from swarmtrain.audit import audit
from swarmtrain.coordinator.journal import Journal

from .comparison import References, assert_books_balance, assert_equals_reference
from .harness import Swarm, tiny

pytestmark = pytest.mark.swarm

NUM_STEPS = 20
NUM_PEERS = 7  # of four stages: the first three have a replica


@pytest.mark.parametrize("kind", ["subspace", "dense"])
def test_a_swarm_ends_in_the_references_bits(place: Path, reference: References, kind: str) -> None:
    manifest = tiny(f"boundary.kind={kind}", f"schedule.steps={NUM_STEPS}", "checkpoint.every=7", "validation.every=10")
    with Swarm(manifest, place, num_peers=NUM_PEERS) as swarm:
        ended = swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
        assert Path(ended["checkpoint"]).name == f"step-{NUM_STEPS:08d}"
    assert_replicas_agreed(swarm)
    assert_work_was_shared(swarm)
    assert_alterations_are_found(swarm)


def assert_replicas_agreed(swarm: Swarm) -> None:
    """Every stage has a digest after every step, replicas have the same one, and there were replicas."""
    with Journal(swarm.coordinator_dir / "journal.sqlite", read_only=True) as journal:
        rows = journal.replicas()
    by_place: dict[tuple[int, int], list[str]] = {}
    for step, stage, _, digest in rows:
        by_place.setdefault((step, stage), []).append(digest)
    assert set(by_place) == {(step, stage) for step in range(1, NUM_STEPS + 1) for stage in range(4)}
    assert all(len(set(digests)) == 1 for digests in by_place.values())
    assert sum(len(digests) == 2 for digests in by_place.values()) > NUM_STEPS  # of 60 places with two peers
    assert len({digests[0] for digests in by_place.values()}) == len(by_place)  # a step changes every stage


def assert_work_was_shared(swarm: Swarm) -> None:
    """Otherwise the equality would say little about reductions: more than one route was used."""
    with Journal(swarm.coordinator_dir / "journal.sqlite", read_only=True) as journal:
        shares = Counter(
            (stage, peer)
            for decision, _ in journal.decisions()
            for stage, members in decision.entries.items()
            for (peer, _), microbatches in members.items()
            for _ in microbatches
        )
    assert len(shares) > 4
    assert sum(shares.values()) == NUM_STEPS * 4 * swarm.manifest.batch.microbatches_per_step


def assert_alterations_are_found(swarm: Swarm) -> None:
    """On the books of a real run; test_audit.py tries every cell of made ones."""
    for table, column in (("steps", "loss"), ("losses", "loss"), ("entries", "peer"), ("replicas", "state_digest")):
        copy = Path(shutil.copytree(swarm.coordinator_dir, swarm.directory / f"altered-{table}"))
        with sqlite3.connect(copy / "journal.sqlite") as db:
            value = "'somebody'" if column != "loss" else "loss + 1e-9"
            where = f"rowid = (SELECT max(rowid) FROM {table})"
            assert db.execute(f"UPDATE {table} SET {column} = {value} WHERE {where}").rowcount == 1
        assert not audit(copy).passed


def test_float_sums_agree_with_the_reference_closely(place: Path, reference: References) -> None:
    manifest = tiny("batch.accumulate=float", f"schedule.steps={NUM_STEPS}")
    with Swarm(manifest, place, num_peers=6) as swarm:
        swarm.wait_end()
    ours, theirs = swarm.checkpoint(), reference(manifest).checkpoint
    for stage in range(4):
        expected = theirs.load_stage(stage)
        for name, tensor in ours.load_stage(stage).items():
            if not name.startswith("parameter/"):
                continue
            distance = torch.linalg.vector_norm(tensor.double() - expected[name].double())
            assert distance <= 1e-5 * torch.linalg.vector_norm(expected[name].double()), name
    assert_books_balance(swarm)
