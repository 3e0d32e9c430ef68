"""The reference trainer: a manifest trained in one process, without a network.

It runs the stages in sequence and encodes and decodes every boundary tensor, so it does the arithmetic of the swarm
without the swarm: it is the oracle of every correctness test. Read `ReferenceTrainer.step` first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarmtrain import checkpoint as checkpoints
from swarmtrain.boundary import Boundary, codec_pair, received, sample_names
from swarmtrain.codec import Aux, Direction
from swarmtrain.data.sampler import Sampler
from swarmtrain.data.source import TokenSource, open_source
from swarmtrain.errors import ManifestError
from swarmtrain.model.footprint import Offload, of_reference
from swarmtrain.model.layout import EMBEDDING
from swarmtrain.model.memory import check_memory
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import Pass, StageWorker
from swarmtrain.native.bf16 import require_bf16
from swarmtrain.reduce.coding import Reduced, StageCoder
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.schedule import check_norm, gradient_scale, learning_rate, mean_loss


@dataclass(frozen=True)
class StepReport:
    """Figures of one applied step. `step` counts from 1."""

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    grad_norm: float
    lr: float
    val_loss: float | None = None
    checkpoint: str | None = None
    residual_cosine: float | None = None  # of the gradients' error feedback, the largest of all boundaries


class ReferenceTrainer:
    """Trains `manifest` on this process. With `out`, checkpoints go to OUT/checkpoints and training resumes there."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        out: Path | None = None,
        device: torch.device | str = "cpu",
        offload: Offload = Offload.NOTHING,
    ) -> None:
        if manifest.is_rounded:
            require_bf16(str(device))
        self.manifest, self.out = manifest, out
        self.codecs = codec_pair(manifest)
        self.boundaries = [Boundary(self.codecs, index) for index in range(manifest.stages.count - 1)]
        self.source = open_run_source(manifest)
        self.sampler = make_sampler(manifest, self.source)
        check_memory(of_reference(manifest), "training this model")
        self.workers = [
            StageWorker(StageState(manifest, i, device=device, offload=offload)) for i in range(manifest.stages.count)
        ]
        self.coders = [StageCoder(worker.state) for worker in self.workers]
        self.resumed_from = self._resume()

    @property
    def steps_done(self) -> int:
        """Applied steps."""
        return self.workers[0].state.step

    def run(self) -> Iterator[StepReport]:
        """Train to the last step; yields after every step, when its checkpoint is on disk."""
        last = self.manifest.schedule.steps
        while self.steps_done < last:
            started = time.perf_counter()
            loss, norm, rate = self.step()
            elapsed = time.perf_counter() - started
            done = self.steps_done
            validate = self.manifest.validation.every and done % self.manifest.validation.every == 0
            save = self.out is not None and (done == last or self.manifest.is_checkpoint(done))
            yield StepReport(
                step=done,
                loss=loss,
                tokens=done * self.manifest.tokens_per_step,
                tokens_per_s=self.manifest.tokens_per_step / elapsed,
                grad_norm=norm,
                lr=rate,
                val_loss=self.validate() if validate or done == last else None,
                checkpoint=str(self.save()) if save else None,
                residual_cosine=self.residual_cosine(),
            )

    def step(self) -> tuple[float, float, float]:
        """One optimizer step: (mean loss, gradient norm, learning rate)."""
        t = self.steps_done
        self._begin_step(t)
        losses = [self._microbatch(t, i) for i in range(self.manifest.batch.microbatches_per_step)]
        self._share_tied_embedding()
        is_tied = self.manifest.model.tie_embeddings
        found = [self._reduced(index) for index in range(len(self.workers))]
        reduced = [item.gradient for item in found]
        squares = [
            worker.finish(reduced[index], count_embedding=not is_tied or index == 0)
            for index, worker in enumerate(self.workers)
        ]
        norm, scale = gradient_scale(self.manifest, squares)
        check_norm(self.manifest, t, norm, scale)
        rate = learning_rate(self.manifest, t)
        for worker, gradient in zip(self.workers, reduced, strict=True):
            worker.apply(gradient, scale, rate)
        for item in found:
            item.commit()
        self._track()
        for worker in self.workers:
            worker.enter_step()
        return mean_loss(losses), norm, rate

    def validate(self, *, use_codec: bool = True) -> float | None:
        """Mean loss over the validation microbatches, through the codecs; None if the corpus has no validation part.

        Without the codecs it is the loss of the model alone, which may have adapted to them.
        """
        count = min(self.manifest.validation.microbatches, self.sampler.num_validation_microbatches)
        if count == 0:
            return None
        batches = [self._tokens(self.sampler.validation(i)) for i in range(count)]
        return mean_loss([self._evaluate(tokens, use_codec=use_codec) for tokens in batches])

    def residual_cosine(self) -> float | None:
        """How far gradients' error feedback is from unbiased: the largest cosine; None without feedback."""
        found = [item.residual_cosine for item in self.boundaries if item.residual_cosine is not None]
        return max(found, key=abs, default=None)

    def save(self) -> Path:
        """Write a checkpoint of the current state."""
        assert self.out is not None
        states = [worker.state for worker in self.workers]
        return checkpoints.save_states(
            self.out / "checkpoints",
            states,
            keep=self.manifest.checkpoint.keep,
            data_digest=self.source.digest,
        )

    def _begin_step(self, t: int) -> None:
        """At a checkpoint codecs drop their state, as in peers, because a run that resumes there has none."""
        for boundary in self.boundaries:
            boundary.begin_step(t)
        if self.manifest.is_checkpoint(t):
            for boundary in self.boundaries:
                boundary.forget("a checkpoint")
            for coder in self.coders:
                coder.reset()

    def _microbatch(self, t: int, i: int) -> float:
        """One microbatch: forward through all stages, then backward through all stages."""
        tokens, samples = self._tokens(self.sampler.microbatch(t, i)), sample_names(self.sampler.samples(t, i))
        boundary: Tensor | None = None
        passes: list[Pass] = []
        masks: list[Aux | None] = []
        for index, worker in enumerate(self.workers):
            done = worker.forward(tokens, boundary)
            passes.append(done)
            if index < len(self.boundaries):
                boundary, mask = self.boundaries[index].cross(done.result, Direction.FORWARD, t, i, None, samples)
                masks.append(mask)
        loss = float(passes[-1].result)
        gradient: Tensor | None = None
        for index in reversed(range(len(self.workers))):
            done = passes.pop()
            upstream = self.workers[index].backward_into_sum(done, gradient)
            if index > 0:
                assert upstream is not None
                gradient, _ = self.boundaries[index - 1].cross(
                    upstream, Direction.BACKWARD, t, i, masks[index - 1], samples
                )
                assert done.boundary is not None
                self.boundaries[index - 1].watch(done.boundary)
        return loss

    def _evaluate(self, tokens: Tensor, *, use_codec: bool = True) -> float:
        boundary: Tensor | None = None
        for index, worker in enumerate(self.workers):
            boundary = worker.evaluate(tokens, boundary)
            if index < len(self.boundaries) and use_codec:
                boundary = received(boundary, self.codecs.forward, index)
        assert boundary is not None
        return float(boundary)

    def _reduced(self, index: int) -> Reduced:
        """A stage's gradient as the all-reduce of a single peer gives it, through the run's gradient codec."""
        worker, coder = self.workers[index], self.coders[index]
        if coder.spec.lossy and not self.manifest.reduce.selective:
            return coder.alone(worker.sum.total.cpu())
        return Reduced(worker.reduced_sum(), lambda: None)

    def _share_tied_embedding(self) -> None:
        """Tied embeddings: both ends of the pipeline get the sum of both gradients, so the copies stay equal."""
        first, last = self.workers[0], self.workers[-1]
        if not self.manifest.model.tie_embeddings or first is last:
            return
        spans = [next(s.span for s in worker.state.slots if s.spec.name == EMBEDDING) for worker in (first, last)]
        total = first.sum.total[spans[0]] + last.sum.total[spans[1]]
        first.sum.total[spans[0]] = total
        last.sum.total[spans[1]] = total

    def _track(self) -> None:
        """Subspace tracking: the last stage proposes the new U, all stages move to it."""
        every = self.manifest.boundary.track_every
        if every and self.steps_done % every == 0:
            basis = self.workers[-1].proposed_basis()
            for worker in self.workers:
                worker.move_basis(basis)
            for boundary in self.boundaries:
                boundary.forget("the subspace has moved")

    def _resume(self) -> Path | None:
        if self.out is None:
            return None
        checkpoints.clear_partial(self.out / "checkpoints")
        newest = checkpoints.latest(self.out)
        if newest is None:
            return None
        newest.check_run(self.manifest)
        newest.check_data(self.source.digest)
        for worker in self.workers:
            newest.restore(worker.state)
        return newest.path

    def _tokens(self, array: object) -> Tensor:
        return torch.as_tensor(array, dtype=torch.int64, device=self.workers[0].state.device)


def open_run_source(manifest: Manifest) -> TokenSource:
    """The run's token source; its vocabulary must fit the model's."""
    source = open_source(manifest.data.source, validation_fraction=manifest.data.validation_fraction)
    if source.vocab_size > manifest.model.vocab_size:
        raise ManifestError(
            "model.vocab_size",
            f"is {manifest.model.vocab_size}, but the tokens of {manifest.data.source} go up to {source.vocab_size}",
        )
    return source


def make_sampler(manifest: Manifest, source: TokenSource) -> Sampler:
    """The run's sampler."""
    return Sampler(
        source,
        seed=manifest.run.seed,
        sequence_length=manifest.model.sequence_length,
        sequences_per_microbatch=manifest.batch.sequences_per_microbatch,
        microbatches_per_step=manifest.batch.microbatches_per_step,
    )
