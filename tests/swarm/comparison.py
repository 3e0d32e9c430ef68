"""What a swarm made, next to what one process makes of the same manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from swarmtrain.checkpoint import Checkpoint, latest, same_tensors
from swarmtrain.coordinator.journal import Journal
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest

from .harness import Swarm


@dataclass(frozen=True)
class ReferenceRun:
    """What the reference trainer made of a manifest."""

    checkpoint: Checkpoint
    losses: list[float]
    grad_norms: list[float]


class References:
    """Reference runs, each manifest trained once per session (fixture `reference`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, ReferenceRun] = {}

    def __call__(self, manifest: Manifest) -> ReferenceRun:
        """The same manifest in one process with one thread and no network."""
        digest = manifest.digest()
        if digest not in self._known:
            out = self._directory / digest[:16]
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                reports = list(ReferenceTrainer(manifest, out=out).run())
            finally:
                torch.set_num_threads(before)
            checkpoint = latest(out)
            assert checkpoint is not None
            self._known[digest] = ReferenceRun(checkpoint, [r.loss for r in reports], [r.grad_norm for r in reports])
        return self._known[digest]


def assert_same_weights(one: Checkpoint, other: Checkpoint) -> None:
    """Equal bit for bit: parameters, moments and state digests of every stage, and the step."""
    assert one.step == other.step
    assert len(one.stages) == len(other.stages)
    for stage in range(len(one.stages)):
        assert same_tensors(one.load_stage(stage), other.load_stage(stage)), f"stage {stage} differs"
        assert one.stages[stage].state_digest == other.stages[stage].state_digest


def assert_books_balance(swarm: Swarm) -> None:
    """Every microbatch was counted once on every stage, and replicas agreed."""
    found = swarm.audit()
    assert found.passed, found.faults


def assert_equals_reference(swarm: Swarm, reference: ReferenceRun) -> None:
    """The swarm's last state and every loss, decided and reported, have the reference's bits, and the books balance."""
    assert_same_weights(swarm.checkpoint(), reference.checkpoint)
    with Journal(swarm.coordinator_dir / "journal.sqlite", read_only=True) as journal:
        decided = [decision.loss for decision, _ in journal.decisions()]
    assert decided == reference.losses, "other losses than the reference's"
    for step, loss in swarm.reported().items():
        assert loss == decided[step - 1], f"another loss was reported of step {step} than was decided"
    assert len(decided) == swarm.manifest.schedule.steps
    assert_books_balance(swarm)
