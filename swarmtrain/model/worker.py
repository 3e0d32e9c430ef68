"""The arithmetic of one stage, used by the reference trainer and by every peer alike.

Forward of a microbatch, backward that adds its gradient to the stage's sum, and the step: finish (project, norm) and
apply. Weights change only in `apply`, so backward always sees the weights of the forward, kept graph or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmtrain.errors import DivergedError
from swarmtrain.model.adamw import apply_adamw, project_gradient
from swarmtrain.model.exact import Accumulator, squared_norm
from swarmtrain.model.layout import EMBEDDING
from swarmtrain.model.muon import apply_muon
from swarmtrain.model.state import StageState
from swarmtrain.model.subspace import carried, moved_basis


@dataclass
class Pass:
    """One microbatch on one stage between forward and backward: what autograd needs."""

    tokens: Tensor  # (s, n + 1) int64
    boundary: Tensor | None  # (s, n, w), a leaf, on every stage but the first
    output: Tensor  # the boundary tensor (s, n, w), or the loss ()
    exit_state: Tensor | None = None  # (t, d) where the stream leaves S, when its gradient is wanted

    @property
    def result(self) -> Tensor:
        """The output without its graph."""
        return self.output.detach()


@dataclass(frozen=True)
class Gradients:
    """The results of a backward: the gradient for the upstream stage, and this stage's own, not yet accumulated."""

    boundary: Tensor | None
    own: list[Tensor | None]


class StageWorker:
    """Computes with a `StageState`. Not thread-safe: one thread owns it."""

    def __init__(self, state: StageState) -> None:
        self.state = state
        self.sum: Accumulator = state.new_accumulator()
        self._parameters = [parameter for _, parameter in self._in_slot_order()]

    def forward(self, tokens: Tensor, boundary: Tensor | None) -> Pass:
        """Run the stage on a microbatch, keeping the graph. The last stage's output is the mean loss."""
        if boundary is not None:
            boundary = boundary.detach().requires_grad_(True)
        with torch.enable_grad():
            output = self._output(tokens, boundary)
        return Pass(tokens, boundary, output, self.state.module.exit_state if self.state.tracks else None)

    def evaluate(self, tokens: Tensor, boundary: Tensor | None) -> Tensor:
        """The same without a graph."""
        with torch.no_grad():
            return self._output(tokens, boundary)

    def backward(self, done: Pass, gradient: Tensor | None) -> Gradients:
        """Gradients of a microbatch. `gradient` is that of the output; None on the last stage. Changes nothing."""
        if not self.state.plan.is_last:
            assert gradient is not None
        gram: list[Tensor | None] = []
        inputs = ([done.boundary] if done.boundary is not None else []) + self._parameters
        if done.exit_state is not None:
            inputs = [*inputs, done.exit_state]
        found = list(torch.autograd.grad(done.output, inputs, gradient, allow_unused=True))
        if done.exit_state is not None:
            gram = [self._gram(found.pop())]
        upstream = found.pop(0) if done.boundary is not None else None
        if upstream is not None and not bool(torch.isfinite(upstream).all()):
            raise DivergedError("the gradient for the upstream stage is not finite: training diverged")
        return Gradients(upstream, [*found, *gram])

    def accumulate(self, gradients: Gradients, *, sign: int = 1) -> None:
        """Add a microbatch's gradients to the stage's sum, or with sign -1 subtract them again, exactly."""
        self.sum.add(self.state.gradient_offsets, gradients.own, sign=sign)

    def reduced_sum(self) -> Tensor:
        """The sum of all microbatches, rounded once to the state's precision, as an all-reduce of one peer."""
        return self.sum.total.to(self.state.dtype)

    def finish(self, gradient_sum: Tensor, *, count_embedding: bool = True) -> float:
        """Prepare a reduced sum for `apply` in place; returns its squared norm, the same bits on every replica."""
        project_gradient(self.state, gradient_sum)
        parts = [
            squared_norm(gradient_sum[slot.span])
            for slot in self.state.slots
            if count_embedding or slot.spec.name != EMBEDDING
        ]
        return math.fsum(parts)

    def apply(self, gradient_sum: Tensor, scale: float, learning_rate: float) -> None:
        """One optimizer step from a finished sum; clears the stage's own."""
        if self.state.gram is not None:
            self.state.gram += gradient_sum[self.state.parameters.numel() :]
        update = apply_muon if self.state.manifest.optimizer.kind == "muon" else apply_adamw
        update(self.state, gradient_sum, scale, learning_rate)
        self.sum.clear()

    def proposed_basis(self, gradient_sum: Tensor | None = None) -> Tensor:
        """Where subspace tracking moves U next. Last stage only; changes nothing.

        To be called after `apply`, or before it with the sum that will be applied.
        """
        assert self.state.gram is not None
        assert self.state.basis is not None
        d = self.state.manifest.model.hidden_size
        gram = self.state.gram
        if gradient_sum is not None:
            gram = gram + gradient_sum[self.state.parameters.numel() :].to(gram.device)
        basis = moved_basis(self.state.basis, gram.view(d, d), self.state.manifest.boundary.track_rate)
        return basis.to(self.state.device, self.state.dtype)

    def move_basis(self, basis: Tensor) -> None:
        """Switch to a new U: parameters and moments are carried over, a new tracking window starts.

        All stages do this at the same apply. Replicas that were given U, not only the one that proposed it, must end
        with the same digest: so it is here that the Gram matrix is cleared.
        """
        state = self.state
        assert state.basis is not None
        old = state.basis.clone()
        for slot in state.slots:
            role, shape = slot.spec.role, slot.spec.shape
            for buffer in (state.parameters, state.first_moment):
                view = buffer[slot.span].view(shape)
                view.copy_(carried(role, view, old, basis))
            if slot.moment_size == slot.spec.num_elements:
                view = state.second_moment[slot.moment_span].view(shape)
                view.copy_(carried(role, view, old, basis, squared=True))
        state.basis.copy_(basis)
        state.basis_epoch += 1
        if state.gram is not None:
            state.gram.zero_()

    def _output(self, tokens: Tensor, boundary: Tensor | None) -> Tensor:
        ids, module = tokens[:, :-1], self.state.module
        output: Tensor
        if self.state.plan.is_last:
            output = module.loss(ids, tokens[:, 1:], boundary)
        else:
            output = module(ids, boundary)
        return output

    def _gram(self, gradient: Tensor | None) -> Tensor | None:
        """GᵀG of the gradients of the summed loss, per token: (d*d,)."""
        if gradient is None:
            return None
        return (gradient.t() @ gradient).mul_(gradient.shape[0]).reshape(-1)

    def _in_slot_order(self) -> list[tuple[str, Tensor]]:
        named = dict(self.state.module.named_parameters())
        return [(slot.spec.name, named[slot.spec.name]) for slot in self.state.slots]
