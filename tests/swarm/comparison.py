"""What a swarm made, next to what one process makes of the same manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from swarmtrain.checkpoint import Checkpoint, open_checkpoint, same_tensors
from swarmtrain.coordinator.journal import Journal
from swarmtrain.reference import ReferenceTrainer, StepReport
from swarmtrain.run.manifest import Manifest

from .harness import Swarm


@dataclass(frozen=True)
class ReferenceRun:
    """What the reference trainer made of a manifest."""

    checkpoint: Checkpoint
    losses: list[float]
    grad_norms: list[float]


class References:
    """Reference runs, each manifest trained once per session, as far as it is needed (fixture `reference`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._trainings: dict[str, _Training] = {}

    def __call__(self, manifest: Manifest) -> ReferenceRun:
        """The same manifest in one process with one thread and no network."""
        return self.until(manifest, manifest.schedule.steps)

    def until(self, manifest: Manifest, step: int) -> ReferenceRun:
        """The same, until a step with a checkpoint."""
        digest = manifest.digest()
        if digest not in self._trainings:
            out = self._directory / digest[:16]
            self._trainings[digest] = _Training(ReferenceTrainer(manifest, out=out).run())
        return self._trainings[digest].until(step)


class _Training:
    """A reference run under way."""

    def __init__(self, reports: Iterator[StepReport]) -> None:
        self._to_come, self._reports = reports, list[StepReport]()

    def until(self, step: int) -> ReferenceRun:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._reports += islice(self._to_come, max(0, step - len(self._reports)))
        finally:
            torch.set_num_threads(before)
        done = self._reports[:step]
        assert done[-1].checkpoint is not None, f"the reference has no checkpoint of step {step}"
        checkpoint = open_checkpoint(Path(done[-1].checkpoint))
        return ReferenceRun(checkpoint, [report.loss for report in done], [report.grad_norm for report in done])


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


def end_at_checkpoint(swarm: Swarm, references: References) -> tuple[Checkpoint, ReferenceRun]:
    """End the run at its next checkpoint; that, and the reference until there.

    A checkpoint that failed because somebody died is made up for in between, at a step where the reference has none.
    """
    under_way, every = max(swarm.reported(), default=0) + 1, swarm.manifest.checkpoint.every

    def is_written() -> bool:
        steps = [event["step"] for event in swarm.events("checkpoint_written")]
        return any(step > under_way and step % every == 0 for step in steps)

    swarm.wait_until(is_written, f"a checkpoint after step {under_way}")
    assert swarm.coordinator.end() == 0
    checkpoint = swarm.checkpoint()
    return checkpoint, references.until(swarm.manifest, checkpoint.step)


def end_and_compare(swarm: Swarm, references: References) -> None:
    """End the run at its next checkpoint: until there it has the reference's bits, and the books balance."""
    checkpoint, reference = end_at_checkpoint(swarm, references)
    assert_same_weights(checkpoint, reference.checkpoint)
    assert_same_losses(swarm, reference)
    assert_books_balance(swarm)


def assert_equals_reference(swarm: Swarm, reference: ReferenceRun) -> None:
    """The swarm's last state and every loss, decided and reported, have the reference's bits, and the books balance."""
    assert_same_weights(swarm.checkpoint(), reference.checkpoint)
    assert len(reference.losses) == swarm.manifest.schedule.steps
    assert_same_losses(swarm, reference)
    assert_books_balance(swarm)


def assert_same_losses(swarm: Swarm, reference: ReferenceRun) -> None:
    """Every loss was decided and reported as the reference has it, as far as that went."""
    with Journal(swarm.coordinator_dir / "journal.sqlite", read_only=True) as journal:
        decided = [decision.loss for decision, _ in journal.decisions()]
    assert decided[: len(reference.losses)] == reference.losses, "other losses than the reference's"
    for step, loss in swarm.reported().items():
        assert loss == decided[step - 1], f"another loss was reported of step {step} than was decided"
    assert len(decided) <= swarm.manifest.schedule.steps
