"""`schedule.delay` in the reference trainer: which weights each step sees, against a trainer that keeps every state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import KINDS, small
from torch import Tensor

from swarmtrain.checkpoint import latest, same_tensors
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest, parse_manifest

STEPS = 9
DELAYED = ("schedule.delay=1", f"schedule.steps={STEPS}")
CHANGES = {
    "plain": (),
    "predicted": ("schedule.predict=true",),
    "checkpoints": ("checkpoint.every=3",),
    "checkpoints, predicted": ("checkpoint.every=4", "schedule.predict=true"),
    "from a step on": ("schedule.delay_from=4", "schedule.predict=true"),
    "muon": ("optimizer.kind=muon", "optimizer.learning_rate=0.02", "schedule.predict=true"),
    "powersgd": ("reduce.codec=powersgd2",),
}


class Naive(ReferenceTrainer):
    """Without a delay of its own: it keeps the parameters of all steps, and puts those in place that a step sees."""

    def __init__(self, manifest: Manifest) -> None:
        self.delayed = manifest
        super().__init__(parse_manifest(manifest.canonical(), ["schedule.delay=0", "schedule.predict=false"]))
        self.kept: list[list[Tensor]] = []
        self.seen: list[int] = []

    def _begin_step(self, t: int) -> None:
        super()._begin_step(t)
        self.kept.append([worker.state.parameters.clone() for worker in self.workers])
        self.seen.append(self._seen(t))

    def _barriers(self) -> set[int]:
        found = {0}
        for every in (self.delayed.checkpoint.every, self.delayed.boundary.track_every):
            found |= set(range(0, STEPS, every)) if every else set()
        return found

    def _seen(self, t: int) -> int:
        """The number of steps that the weights of step t have had."""
        return t if t < self.delayed.schedule.delay_from or t in self._barriers() else t - 1

    def _weights(self, t: int, stage: int) -> Tensor:
        seen = self._seen(t)
        weights = self.kept[seen][stage]
        if self.delayed.schedule.predict and seen < t and seen not in self._barriers():
            return weights + (weights - self.kept[seen - 1][stage])
        return weights

    def _microbatch(self, t: int, i: int) -> float:
        for stage, worker in enumerate(self.workers):
            worker.state.parameters.copy_(self._weights(t, stage))
        loss = super()._microbatch(t, i)
        for stage, worker in enumerate(self.workers):
            worker.state.parameters.copy_(self.kept[t][stage])
        return loss


def trained(trainer: ReferenceTrainer) -> tuple[list[float], list[dict[str, Tensor]]]:
    losses = [report.loss for report in trainer.run()]
    return losses, [dict(worker.state.named_tensors()) for worker in trainer.workers]


def check(manifest: Manifest) -> Naive:
    """The trainer does what the naive one does, to the bit."""
    naive = Naive(manifest)
    wanted, found = trained(naive), trained(ReferenceTrainer(manifest))
    assert found[0] == wanted[0]
    assert all(same_tensors(one, other) for one, other in zip(found[1], wanted[1], strict=True))
    return naive


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_every_step_sees_the_weights_that_the_manifest_says(changes: tuple[str, ...]) -> None:
    manifest = small(*DELAYED, *changes)
    naive = check(manifest)
    assert naive.seen == [manifest.weights_step(t) for t in range(STEPS)]
    assert any(seen < t for t, seen in enumerate(naive.seen))
    prompt = trained(ReferenceTrainer(small(*changes, f"schedule.steps={STEPS}", "schedule.predict=false")))
    assert prompt[0] != [report.loss for report in ReferenceTrainer(manifest).run()]  # the delay does something


@pytest.mark.parametrize("kind", KINDS)
def test_all_boundary_kinds(kind: str) -> None:
    tied = ("model.tie_embeddings=true",) if kind == "dense" else ()
    check(small(*DELAYED, f"boundary.kind={kind}", "schedule.predict=true", "checkpoint.every=5", *tied))


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_a_move_of_the_subspace_is_a_barrier(kind: str) -> None:
    changes = (f"boundary.kind={kind}", "boundary.track_every=4", "schedule.predict=true")
    manifest = small(*DELAYED, *changes)
    naive = check(manifest)
    assert [t for t, seen in enumerate(naive.seen) if seen == t] == [0, 4, 8]
    assert naive.workers[0].state.basis_epoch == 2


@pytest.mark.parametrize("changes", [("checkpoint.every=3",), ("checkpoint.every=3", "schedule.predict=true")])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, changes: tuple[str, ...]) -> None:
    manifest = small(*DELAYED, *changes)
    straight = ReferenceTrainer(manifest)
    trained(straight)
    first = ReferenceTrainer(manifest, out=tmp_path)
    for report in first.run():
        if report.step == 7:
            break
    again = ReferenceTrainer(manifest, out=tmp_path)
    assert again.steps_done == 6
    at_checkpoint = [worker.state.digest() for worker in again.workers]
    newest = latest(tmp_path)
    assert newest is not None
    assert [stage.state_digest for stage in newest.stages] == at_checkpoint
    trained(again)
    assert [w.state.digest() for w in again.workers] == [w.state.digest() for w in straight.workers]


@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("step", [0, 1, 2, 4, 5, 6])
def test_whoever_has_the_state_has_the_weights_of_the_open_steps(predict: bool, step: int) -> None:
    """A newcomer that downloaded a state computes with what the others compute with."""
    manifest = small(*DELAYED, f"schedule.predict={str(predict).lower()}", "checkpoint.every=4")
    there, here = ReferenceTrainer(manifest), ReferenceTrainer(manifest)
    for _ in range(step):
        there.step()
    for one, other in zip(there.workers, here.workers, strict=True):
        copies = [buffer.clone() for buffer in one.state.buffers]
        other.state.load_buffers(copies, step=step, basis_epoch=0)
        assert other.state.digest() == one.state.digest()
        for later in (step, step + 1):
            if manifest.weights_step(later) <= step:
                assert torch.equal(other.state.weights(later).flat, one.state.weights(later).flat)
    assert there.step() == here.step()
    assert [w.state.digest() for w in there.workers] == [w.state.digest() for w in here.workers]


def test_the_last_state_is_a_barrier_and_can_be_restored(tmp_path: Path) -> None:
    manifest = small(*DELAYED, "schedule.predict=true")
    trainer = ReferenceTrainer(manifest, out=tmp_path)
    trained(trainer)
    again = ReferenceTrainer(manifest, out=tmp_path)
    assert again.steps_done == STEPS
    assert [w.state.digest() for w in again.workers] == [w.state.digest() for w in trainer.workers]
