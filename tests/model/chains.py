"""Tiny models cut into stages, run in one process with nothing but autograd between them: what every proof starts from.

Tensor names: d = hidden size, k = boundary width, t = tokens of the microbatch (see swarmtrain/model/blocks.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarmtrain.model.layout import EMBEDDING, Role
from swarmtrain.model.state import StageState
from swarmtrain.model.subspace import projected
from swarmtrain.model.worker import Gradients, Pass, StageWorker
from swarmtrain.run.manifest import Manifest, parse_manifest

TINY = """
[run]
name = "tiny"
seed = 3
[model]
vocab_size = 40
hidden_size = 16
num_layers = 8
num_heads = 4
num_kv_heads = 2
ffn_size = 24
sequence_length = 6
[stages]
count = 4
[boundary]
kind = "subspace"
k = 4
[data]
source = "not-read"
[batch]
sequences_per_microbatch = 3
microbatches_per_step = 4
[optimizer]
learning_rate = 1e-2
[schedule]
steps = 10
"""


def tiny(*overrides: str) -> Manifest:
    """The tiny run: eight layers, grouped-query attention, four stages, k = 4 of d = 16."""
    return parse_manifest(TINY, overrides)


def some_tokens(manifest: Manifest, seed: int = 0) -> Tensor:
    """One microbatch, (s, n + 1)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length + 1)
    return torch.randint(0, manifest.model.vocab_size, shape, generator=generator)


def relative(a: Tensor, b: Tensor) -> float:
    """Size of a - b against that of b (or absolute, where b is zero)."""
    scale = float(b.norm())
    return float((a - b).norm()) / (scale if scale > 0.0 else 1.0)


class Chain:
    """All stages of a run in one process."""

    def __init__(self, manifest: Manifest, dtype: torch.dtype = torch.float64) -> None:
        self.manifest = manifest
        self.workers = [StageWorker(StageState(manifest, i, dtype=dtype)) for i in range(manifest.stages.count)]

    def forward(self, tokens: Tensor) -> list[Pass]:
        """Every stage's pass, first to last."""
        passes: list[Pass] = []
        for worker in self.workers:
            passes.append(worker.forward(tokens, passes[-1].result if passes else None))
        return passes

    def loss(self, tokens: Tensor) -> float:
        """The microbatch's mean loss."""
        return float(self.forward(tokens)[-1].result)

    def backward(self, passes: list[Pass]) -> list[Gradients]:
        """Every stage's gradients, first to last."""
        found: list[Gradients] = []
        gradient: Tensor | None = None
        for worker, done in zip(reversed(self.workers), reversed(passes), strict=True):
            found.append(worker.backward(done, gradient))
            gradient = found[-1].boundary
        return found[::-1]

    def gradients(self, tokens: Tensor, *, project: bool = False) -> dict[str, Tensor]:
        """The gradient of every parameter by full name; a tensor that two stages hold gets the sum of both sides.

        With `project`, gradients of dense constrained tensors are projected onto S: what the optimizer uses of them.
        """
        total: dict[str, Tensor] = {}
        for worker, gradients in zip(self.workers, self.backward(self.forward(tokens)), strict=True):
            state = worker.state
            for slot, own in zip(state.slots, gradients.own[: len(state.slots)], strict=True):
                assert own is not None
                if project and slot.spec.role in (Role.COLUMNS_IN_S, Role.ROWS_IN_S):
                    assert state.basis is not None
                    own = projected(slot.spec.role, own, state.basis)
                total[slot.spec.name] = total[slot.spec.name] + own if slot.spec.name in total else own
        return total

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by full name. Copies that two stages hold must be equal."""
        found: dict[str, Tensor] = {}
        for worker in self.workers:
            for slot in worker.state.slots:
                view = worker.state.view(slot.spec.name)
                assert slot.spec.name not in found or torch.equal(found[slot.spec.name], view)
                found[slot.spec.name] = view
        return found

    def roles(self) -> dict[str, Role]:
        """How every parameter relates to S."""
        return {slot.spec.name: slot.spec.role for worker in self.workers for slot in worker.state.slots}

    def step(self, *microbatches: Tensor, learning_rate: float = 1e-2) -> None:
        """One optimizer step on all stages, without clipping; both copies of a tied embedding get the sum."""
        for tokens in microbatches:
            for worker, gradients in zip(self.workers, self.backward(self.forward(tokens)), strict=True):
                worker.accumulate(gradients)
        if self.manifest.model.tie_embeddings and len(self.workers) > 1:
            sides = [_embedding_sum(self.workers[0]), _embedding_sum(self.workers[-1])]
            both = sides[0] + sides[1]
            for side in sides:
                side.copy_(both)
        for worker in self.workers:
            worker.finish(worker.sum.total)
            worker.apply(worker.sum.total, 1.0 / len(microbatches), learning_rate)
            worker.enter_step()


def _embedding_sum(worker: StageWorker) -> Tensor:
    slot = next(slot for slot in worker.state.slots if slot.spec.name == EMBEDDING)
    return worker.sum.total[slot.span]


@dataclass(frozen=True)
class Exactness:
    """How far a split model is from the whole one. All zero up to rounding, if the rules hold."""

    reconstruction: float  # the worst relative error of h over the boundaries: the receiver's against the sender's
    loss: float  # absolute
    gradient: float  # the worst relative error over the parameters, in S where they are constrained

    def holds(self) -> bool:
        """The bounds that the design promises in fp64."""
        return self.reconstruction < 1e-12 and self.loss < 1e-12 and self.gradient < 1e-10


def exactness(split: Chain, whole: Chain, tokens: Tensor) -> Exactness:
    """Compare a chain with the same model in one stage."""
    ours, theirs = split.gradients(tokens, project=True), whole.gradients(tokens, project=True)
    assert ours.keys() == theirs.keys()
    return Exactness(
        reconstruction=max(boundary_errors(split, tokens), default=0.0),
        loss=abs(split.loss(tokens) - whole.loss(tokens)),
        gradient=max(relative(ours[name], theirs[name]) for name in ours),
    )


def boundary_errors(chain: Chain, tokens: Tensor) -> list[float]:
    """At each boundary: the hidden state that the receiver forms, against the one that the sender had."""
    errors: list[float] = []
    ids, boundary, sent = tokens[:, :-1], None, None
    with torch.no_grad():
        for worker in chain.workers:
            module = worker.state.module
            stream, read = module._enter(ids, boundary)
            if sent is not None:
                errors.append(relative(read(stream), sent))
            if not worker.state.plan.is_last:
                stream = module._run(stream, read, module.plan.layers, ids.shape)
                sent = read(stream)  # (t, d)
                boundary = module._leave(ids, stream).view(*ids.shape, -1)
    return errors
