"""The arithmetic of one stage, used by the reference trainer and by every peer alike.

Forward of a microbatch, backward that adds its gradient to its step's sum, and the step: finish (project, norm), apply
and enter. A step's weights do not change while it is open, so backward always sees the weights of the forward, kept
graph or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarmtrain.errors import DivergedError
from swarmtrain.model.adamw import apply_adamw, project_gradient
from swarmtrain.model.exact import Accumulator, Addition, Removal, squared_norm
from swarmtrain.model.layout import EMBEDDING
from swarmtrain.model.muon import apply_muon
from swarmtrain.model.room import Room
from swarmtrain.model.state import StageState, Weights
from swarmtrain.model.subspace import carried, moved_basis


@dataclass
class Pass:
    """One microbatch on one stage between forward and backward: what autograd needs."""

    tokens: Tensor  # (s, n + 1) int64
    boundary: Tensor | None  # (s, n, w), a leaf, on every stage but the first
    output: Tensor  # the boundary tensor (s, n, w), or the loss ()
    parameters: list[Tensor]  # that it was computed with, in slot order
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
    """Computes with a `StageState`, without threads of its own. `step` of a method: the state's, where it is left out.

    What belongs to the step that is applied (from `take_sum` on) may be done by another thread than what belongs to
    the microbatches of later steps: they share nothing that changes.
    """

    def __init__(self, state: StageState) -> None:
        self.state = state
        self._sums: dict[int, Accumulator] = {}  # by open step
        self._lent: set[int] = set()  # steps whose sum others read: it must not change any more
        self._spare: list[Accumulator] = [state.new_accumulator()]
        self._spoilt: set[int] = set()  # steps whose sum holds a part of a microbatch

    @property
    def sum(self) -> Accumulator:
        """Of this step's gradients."""
        return self.sum_of(self.state.step)

    def sum_of(self, step: int) -> Accumulator:
        """Of a step's gradients."""
        if step not in self._sums:
            self._sums[step] = self._spare.pop() if self._spare else self.state.new_accumulator()
        return self._sums[step]

    def lend_sum(self, step: int) -> Tensor:
        """A step's sum on the CPU, as it is now: a copy only from elsewhere. To be read until the step is applied."""
        total = self.sum_of(step).total.detach()
        if total.device.type != "cpu":
            return total.to("cpu")
        self._lent.add(step)
        return total

    def take_sum(self, step: int) -> Accumulator:
        """This step's sum is needed no longer: nothing more is added to it. To be given back."""
        found = self.sum_of(step)
        del self._sums[step]
        self._lent.discard(step)
        self._spoilt.discard(step)
        return found

    def begin_anew_if_spoilt(self, step: int) -> bool:
        """Empty a sum that says nothing of what was added to it; whether it was one."""
        if step not in self._spoilt:
            return False
        self._own_sum(step).clear()
        self._spoilt.discard(step)
        return True

    def give_back(self, total: Accumulator) -> None:
        """It is cleared, for a later step."""
        total.clear()
        self._spare.append(total)

    def drop_sums(self) -> None:
        """Whatever was added counts no longer."""
        for step in list(self._sums):
            self.give_back(self.take_sum(step))

    def forward(self, tokens: Tensor, boundary: Tensor | None, step: int | None = None) -> Pass:
        """Run the stage on a microbatch, keeping the graph. The last stage's output is the mean loss."""
        weights = self.state.weights(self.state.step if step is None else step)
        if boundary is not None:
            boundary = boundary.detach().requires_grad_(True)
        with torch.enable_grad():
            output = self._output(weights, tokens, boundary)
        exit_state = weights.module.exit_state if self.state.tracks else None
        return Pass(tokens, boundary, output, weights.parameters, exit_state)

    def evaluate(self, tokens: Tensor, boundary: Tensor | None) -> Tensor:
        """Without a graph, with the newest parameters."""
        with torch.no_grad():
            return self._output(self.state.newest, tokens, boundary)

    def backward(self, done: Pass, gradient: Tensor | None) -> Gradients:
        """Gradients of a microbatch. `gradient` is that of the output; None on the last stage. Changes nothing."""
        upstream, own = self._gradients(done, gradient)
        _check_upstream(upstream)
        return Gradients(upstream, own)

    def _gradients(self, done: Pass, gradient: Tensor | None) -> tuple[Tensor | None, list[Tensor | None]]:
        """Of what came in, and of the stage's own tensors."""
        if not self.state.plan.is_last:
            assert gradient is not None
        gram: list[Tensor | None] = []
        inputs = ([done.boundary] if done.boundary is not None else []) + done.parameters
        if done.exit_state is not None:
            inputs = [*inputs, done.exit_state]
        found = list(torch.autograd.grad(done.output, inputs, gradient, allow_unused=True))
        if done.exit_state is not None:
            gram = [self._gram(found.pop())]
        upstream = found.pop(0) if done.boundary is not None else None
        return upstream, [*found, *gram]

    def accumulate(self, gradients: Gradients, step: int | None = None, *, sign: int = 1) -> None:
        """Add a microbatch's gradients to its step's sum, or with sign -1 subtract them again, exactly."""
        own = [None if item is None else self.state.room.for_sum(item) for item in gradients.own]
        self._own_sum(self.state.step if step is None else step).add(self.state.gradient_offsets, own, sign=sign)

    def backward_into_sum(
        self, done: Pass, gradient: Tensor | None, step: int | None = None, *, sign: int = 1
    ) -> Tensor | None:
        """`backward` and `accumulate` in one: each gradient goes as soon as it is added. The same bits.

        Returns the gradient for the upstream stage. When it fails, the sum is as it was before; if that fails, too (of
        a device without memory), the sum is spoilt: see `begin_anew_if_spoilt`.
        """
        step = self.state.step if step is None else step
        addition = self._addition(step, sign)
        try:
            upstream = self._add_as_they_come(done, gradient, addition)
            _check_upstream(upstream)
        except BaseException:
            self._cancel(addition, done, gradient, step)
            raise
        return upstream

    def take_back(self, done: Pass, gradient: Tensor | None, step: int) -> None:
        """Take a microbatch's gradients out of its step's sum again; they are computed again from what came in."""
        addition = self._addition(step, 1)
        addition.added = list(self.state.gradient_offsets)
        self._cancel(addition, done, gradient, step)

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
        """One optimizer step from a finished sum. To be followed by `enter_step`."""
        if self.state.gram is not None:
            self.state.gram += gradient_sum[self.state.parameters.numel() :].to(self.state.gram.device)
        self.state.before_update()
        update = apply_muon if self.state.manifest.optimizer.kind == "muon" else apply_adamw
        update(self.state, gradient_sum, scale, learning_rate)

    def enter_step(self) -> None:
        """The step is applied, and the subspace has moved if it had to: drops its sum, makes the weights of the next
        steps."""
        self.state.make_versions()
        if (applied := self.state.step - 1) in self._sums:
            self.give_back(self.take_sum(applied))

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
        return basis.to(self.state.room.home, self.state.dtype)

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

    def _own_sum(self, step: int) -> Accumulator:
        """A step's sum, to be changed: a copy, if others read it."""
        if step in self._lent:
            self._lent.discard(step)
            self._sums[step] = self._sums[step].copied()
        return self.sum_of(step)

    def _addition(self, step: int, sign: int) -> Addition:
        return Addition(self._own_sum(step), sign)

    def _add_as_they_come(self, done: Pass, gradient: Tensor | None, addition: Addition | Removal) -> Tensor | None:
        """Backward; returns the gradient of what came in. Hooks see a parameter's gradient when it is complete."""
        if not self.state.plan.is_last:
            assert gradient is not None
        offsets = self.state.gradient_offsets
        exits: list[Tensor] = []
        handles = []
        for parameter, offset in zip(done.parameters, offsets, strict=False):  # the Gram matrix is none of them
            add = partial(_add_and_free, self.state.room, addition, offset)
            handles.append(parameter.register_post_accumulate_grad_hook(add))  # type: ignore[no-untyped-call]
        if done.exit_state is not None:
            handles.append(done.exit_state.register_hook(exits.append))  # type: ignore[no-untyped-call]
        inputs = ([done.boundary] if done.boundary is not None else []) + done.parameters
        try:
            torch.autograd.backward(done.output, gradient, inputs=inputs)
        finally:
            for handle in handles:
                handle.remove()
            for parameter in done.parameters:
                parameter.grad = None
        if exits:
            gram = self._gram(exits.pop())
            assert gram is not None
            addition.add(offsets[-1], self.state.room.for_sum(gram))
        return done.boundary.grad if done.boundary is not None else None

    def _cancel(self, addition: Addition, done: Pass, gradient: Tensor | None, step: int) -> None:
        """Take out what was added. Its graph is gone, so all is computed again: on the weights of an open step that
        gives the same bits."""
        if not addition.added:
            return
        before = set(self._spoilt)
        self._spoilt.add(step)
        self._add_as_they_come(self.forward(done.tokens, done.boundary, step), gradient, Removal(addition))
        self._spoilt &= before

    def _output(self, weights: Weights, tokens: Tensor, boundary: Tensor | None) -> Tensor:
        ids, module = tokens[:, :-1], weights.module
        self.state.room.ready()
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


def _add_and_free(room: Room, addition: Addition | Removal, offset: int, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    addition.add(offset, room.for_sum(gradient))


def _check_upstream(gradient: Tensor | None) -> None:
    if gradient is not None and not bool(torch.isfinite(gradient).all()):
        raise DivergedError("the gradient for the upstream stage is not finite: training diverged")
