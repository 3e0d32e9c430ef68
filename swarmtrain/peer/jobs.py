"""What a peer's threads do with one stage: decode, compute, add, encode; and the step. No network, no asyncio.

The arithmetic is `StageWorker`'s, the same as the reference trainer's; this adds the bytes on both sides (codecs.py)
and decides whether a microbatch's autograd graph is kept until its gradient comes or the stage is computed again from
its input. Where the budget does not hold a whole graph, it keeps the inputs of layers, and each is computed again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmtrain.chain.seals import digest_of
from swarmtrain.chain.state_transfer import StateSource
from swarmtrain.codec import Aux, Direction, Ticket
from swarmtrain.codec.samples import SampleStore
from swarmtrain.errors import DivergedError
from swarmtrain.model.activations import activations
from swarmtrain.model.buffers import as_bytes
from swarmtrain.model.exact import Accumulator
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import Pass, StageWorker
from swarmtrain.peer.codecs import StageCodecs
from swarmtrain.peer.ledger import Entry, Raw, Slot, StickyAnswer
from swarmtrain.reduce.coding import Reduced, StageCoder
from swarmtrain.run.manifest import Manifest


class StaleWork(Exception):
    """The state has changed since this microbatch was taken."""


@dataclass(frozen=True)
class Outcome:
    """What a job produced: bytes for the next stage or for the caller, and on the last stage the loss."""

    payload: bytes
    loss: float = 0.0
    sticky: bytes = b""  # the same for the entry's partner, as a difference to what it holds
    ticket: Ticket | None = None  # to settle, once it is known whether the partner took it


@dataclass(frozen=True)
class Made:
    """What a peer sends for a microbatch: to the next stage, to the stage before, and on the last stage the loss."""

    output: bytes
    loss: float
    gradient: bytes


def share_digest(total: Tensor) -> str:
    """Names a peer's own part of a step's sum: exact sums of the same microbatches have the same bits."""
    return hashlib.sha256(as_bytes(total.to("cpu"))).hexdigest()


def range_digests(reduced: Tensor, sizes: Sequence[int]) -> bytes:
    """Of ranges of a reduced sum, one after the other."""
    parts = torch.split(reduced.detach(), list(sizes))
    return b"".join(digest_of(as_bytes(part)) for part in parts)


class StageJobs:
    """The jobs of one stage.

    They run on the compute thread; those of the step on the step thread, which is the same one unless there is a delay.
    What a job of the step thread changes is read by no job of the compute thread meanwhile: the step is closed there
    first, and the weights of later steps are others.
    """

    def __init__(
        self,
        manifest: Manifest,
        worker: StageWorker,
        *,
        graph_budget_bytes: int,
        make_store: Callable[[], SampleStore] = SampleStore,
    ) -> None:
        self.manifest, self.worker = manifest, worker
        self.plan = worker.state.plan
        self.codecs = StageCodecs(manifest, worker.state, make_store)
        recomputes = activations(manifest, self.plan, recomputes=False).kept_bytes > graph_budget_bytes
        for module in worker.state.modules:
            module.recomputes = recomputes
        kept = activations(manifest, self.plan, recomputes=recomputes).kept_bytes
        self.max_graphs = max(1, graph_budget_bytes // kept)
        self.coder = StageCoder(worker.state)
        self._passes: dict[Slot, Pass] = {}
        self._masks_in: dict[Slot, Aux | None] = {}
        self._masks_out: dict[Slot, Aux | None] = {}
        self._checked: dict[Slot, tuple[Raw, Tensor]] = {}  # gradients that were decoded to check them, and their bytes
        self._given_up: deque[Entry] = deque()  # noted by the event loop
        self.num_forwards = 0  # microbatches whose forward was computed, recomputations not counted
        self.num_backwards = 0
        self.num_recomputed = 0
        self.generation = 0  # counts how often everything was dropped
        self._first_open = 0  # steps before it are closed
        self._num_updates = 0  # of the newest parameters, begun and ended

    def check_gradient(self, entry: Entry, step: int, gradient: Raw, *, keep: bool = False) -> None:
        """Raise BadTensor unless `gradient` can be the answer to a microbatch; StaleWork if its step is over.

        With `keep` the tensor is kept for `backward`, which gets the same object.
        """
        self._begin(entry)
        if self.codecs.has_sticky_answers and self.codecs.is_sticky(gradient):
            return  # seen when it is made whole
        tensor = self._decode_gradient(entry, step, gradient)
        if keep:
            self._checked[entry.slot] = (gradient, tensor)

    def forward(self, entry: Entry, step: int, partner: str = "") -> Outcome:
        """Forward of a microbatch. On the last stage also its backward: the outcome is the gradient for upstream."""
        self._begin(entry)
        self.num_forwards += 1
        done = self._pass(entry, step)
        if self.plan.is_last:
            loss = float(done.result)
            if not np.isfinite(loss):
                raise DivergedError(f"the loss of microbatch ({step}, {entry.microbatch}) is {loss}")
            return Outcome(self._finish(entry, step, done, None), loss)
        if len(self._passes) < self.max_graphs:
            self._passes[entry.slot] = done
        encoded = self.codecs.encode_output(entry, step, done.result, partner)
        self._masks_out[entry.slot] = encoded.aux
        if encoded.received is not None:
            entry.output = self.codecs.whole(encoded.received)
            return Outcome(entry.output, sticky=encoded.payload, ticket=encoded.ticket)
        entry.output = encoded.payload
        return Outcome(encoded.payload)

    def backward(self, entry: Entry, step: int, gradient: Raw) -> Outcome:
        """Backward of a microbatch from the next stage's answer: added to the sum, and encoded for upstream."""
        self._begin(entry)
        raw, decoded = self._checked.pop(entry.slot, (b"", None))
        if decoded is None or raw is not gradient:
            decoded = self._decode_gradient(entry, step, gradient)
        done = self._passes.pop(entry.slot, None)
        if done is None:
            self.num_recomputed += 1
            done = self._pass(entry, step)
        entry.gradient = gradient
        return Outcome(self._finish(entry, step, done, decoded))

    def evaluate(self, tokens: Raw, boundary: Raw, step: int, microbatch: int) -> Outcome:
        """Forward only, with the newest parameters; touches nothing. StaleWork if they have changed meanwhile."""
        received, _ = self.codecs.decode_boundary(boundary, step, microbatch)
        before = self._num_updates
        result = self.worker.evaluate(self.codecs.tokens(tokens), received)
        if self._num_updates != before:
            raise StaleWork("the parameters have changed meanwhile")
        if self.plan.is_last:
            if not np.isfinite(loss := float(result)):
                raise DivergedError(f"the loss of validation microbatch {microbatch} is {loss}")
            return Outcome(b"", loss)
        return Outcome(self.codecs.encode_untraced(result, step, microbatch, tokens))

    def reconciled_share(
        self, entries: list[Entry], wanted: set[int], step: int, discarded: Sequence[Entry] = ()
    ) -> Tensor:
        """Make a step's sum hold exactly the microbatches `wanted`, and lend it to an all-reduce.

        Extra microbatches, and `discarded` ones, are computed again and taken out, exactly. One job: nothing is added
        in between. Raises StaleWork if what these entries say of the sum is about a former one.
        """
        everything = (*entries, *discarded)
        if any(entry.generation != self.generation for entry in everything) or step < self._first_open:
            raise StaleWork("the state has changed since these microbatches were taken")
        if self.worker.begin_anew_if_spoilt(step):
            for entry in everything:
                entry.accumulated = False
        for entry in discarded:
            if entry.accumulated:
                self._add_again(entry, step, sign=-1)
        for entry in entries:
            if entry.accumulated != (entry.microbatch in wanted):
                self._add_again(entry, step, sign=-1 if entry.accumulated else 1)
        return self.worker.lend_sum(step)

    def checked(
        self, tokens: Raw, boundary: Raw, gradient: Raw, step: int, microbatch: int, total: Accumulator | None
    ) -> Made:
        """What a microbatch comes to on this stage, from what another peer of it has received; leaves no trace here.

        Its gradient is added to `total`, if there is one.
        """
        if step < self._first_open:
            raise StaleWork("the step of this microbatch is over")
        codecs, worker = self.codecs, self.worker
        received, mask_in = codecs.decode_boundary(boundary, step, microbatch)
        done = worker.forward(codecs.tokens(tokens), received, step)
        output, loss, upstream = b"", 0.0, None
        if self.plan.is_last:
            loss = float(done.result)
        else:
            encoded = codecs.encode_once(Direction.FORWARD, done.result, step, microbatch, tokens)
            output = encoded.payload
            if self.plan.is_first and total is None:
                return Made(output, loss, b"")  # nothing that it sends follows from the gradient
            upstream = codecs.decode_gradient(gradient, step, microbatch, encoded.aux)
        gradients = worker.backward(done, upstream)
        if total is not None:
            total.add(worker.state.gradient_offsets, gradients.own)
        if gradients.boundary is None:
            return Made(output, loss, b"")
        sent = codecs.encode_once(Direction.BACKWARD, gradients.boundary, step, microbatch, b"", mask_in)
        return Made(output, loss, sent.payload)

    def finish(self, reduced: Tensor) -> tuple[float, str]:
        """(squared norm, digest) of a reduced sum, which is made ready for `apply` in place."""
        digest = hashlib.sha256(as_bytes(reduced)).hexdigest()
        is_counted_here = self.plan.is_first or not self.manifest.model.tie_embeddings
        return self.worker.finish(reduced, count_embedding=is_counted_here), digest

    def close_step(self, step: int, counted: Collection[int]) -> Accumulator:
        """A step's microbatches are over: what its messages left out is settled, what was kept for them goes.

        `counted` are the microbatches of this peer that are in the sum: what their messages left out is still owed,
        what the others left out is not. Returns the sum, to be given to `apply`.
        """
        self._first_open = step + 1
        self.codecs.settle_step(step, counted)
        for memory in self._memories():
            for key in [key for key in memory if key[0] <= step]:
                del memory[key]
        self.codecs.enter_step(step + 1)
        return self.worker.take_sum(step)

    def apply(
        self, total: Accumulator, reduced: Reduced, scale: float, learning_rate: float, basis: Tensor | None = None
    ) -> str:
        """One optimizer step, and with `basis` a move of the subspace; returns the digest of the new state.

        Where a checkpoint lies codecs forget everything, as in the reference trainer: a run that is restored there
        knows no more. See `forget_if_due` for those of the boundaries.
        """
        self._num_updates += 1
        self.worker.apply(reduced.gradient, scale, learning_rate)
        reduced.commit()
        if basis is not None:
            self.worker.move_basis(basis.to(self.worker.state.room.home))
        self.worker.enter_step()
        self.worker.give_back(total)
        self._num_updates += 1
        if self.manifest.is_checkpoint(self.worker.state.step):
            self.coder.reset()
        return self.worker.state.digest()

    def forget_if_due(self, step: int, *, has_moved: bool) -> None:
        """The codecs of the boundaries forget what they remember, where the state after `step` steps is a barrier."""
        if has_moved:
            self.codecs.forget("the subspace has moved")
        if self.manifest.is_checkpoint(step):
            self.codecs.forget("a checkpoint")

    def copy_state(self) -> StateSource:
        """A copy of the state on the CPU, to hand out."""
        state = self.worker.state
        copies = [buffer.detach().to("cpu", copy=True) for buffer in state.buffers]
        return StateSource(state.layout, state.step, state.basis_epoch, copies)

    def load_state(self, source: StateSource) -> None:
        """Replace the state. What was computed with the old one must have been dropped."""
        self._num_updates += 1
        self.worker.state.load_buffers(source.buffers, step=source.step, basis_epoch=source.basis_epoch)
        self.coder.reset()

    def begin_anew(self) -> None:
        """Another state was loaded: work begins with its step."""
        self.codecs.forget("another state was loaded")
        self.drop_work()
        self._first_open = self.worker.state.step

    def first_state(self) -> StateSource:
        """The state before the first step, which follows from the seed alone."""
        state = self.worker.state
        fresh = StageState(self.manifest, self.plan.index)
        return StateSource(state.layout, 0, 0, [buffer.detach() for buffer in fresh.buffers])

    def drop_work(self) -> None:
        """Nothing of open steps counts any more: not in sums, not in kept graphs, not in residuals."""
        self.generation += 1
        self.worker.drop_sums()
        self.codecs.settle_all()
        for memory in self._memories():
            memory.clear()

    def state_digest(self) -> str:
        """The digest of the current state."""
        return self.worker.state.digest()

    def damage_state(self) -> None:
        """Another weight than the other replicas have, as from bad memory. For tests of what follows."""
        weights = self.worker.state.buffers[0]
        with torch.no_grad():
            weights[len(weights) // 2] += 1.0

    def forget(self, entry: Entry) -> None:
        """A microbatch came to nothing. For the event loop: what is kept for it goes with the next job."""
        self._given_up.append(entry)

    def _begin(self, entry: Entry) -> None:
        """What was given up is dropped first: this may be the same microbatch, on its second way. Raises StaleWork."""
        while self._given_up:
            given_up = self._given_up.popleft()
            if given_up.generation == self.generation:  # of an older one nothing is left
                for memory in self._memories():
                    memory.pop(given_up.slot, None)
                self.codecs.give_up(given_up.key)
        if entry.generation != self.generation or entry.step < self._first_open:
            raise StaleWork("the step of this microbatch is over")

    def _memories(self) -> list[dict[Slot, Any]]:
        """What is kept by microbatch."""
        return [self._passes, self._masks_in, self._masks_out, self._checked]

    def _pass(self, entry: Entry, step: int) -> Pass:
        boundary, mask = self.codecs.decode_boundary(entry.boundary, step, entry.microbatch)
        self._masks_in[entry.slot] = mask
        return self.worker.forward(self.codecs.tokens(entry.tokens), boundary, step)

    def _finish(self, entry: Entry, step: int, done: Pass, gradient: Tensor | None) -> bytes:
        """Backward into the step's sum; the bytes for upstream. When it fails, nothing was added."""
        upstream = self.worker.backward_into_sum(done, gradient, step)
        self.num_backwards += 1
        payload = b""
        if upstream is not None:
            assert done.boundary is not None
            mask = self._masks_in.get(entry.slot)
            try:
                encoded = self.codecs.encode_gradient(entry, step, upstream, done.boundary, mask)
            except Exception:
                self.worker.take_back(done, gradient, step)
                raise
            payload = encoded.payload
            if encoded.received is not None:
                entry.sticky = StickyAnswer(payload, encoded.ticket)
                payload = self.codecs.whole(encoded.received)
        entry.accumulated = True
        return payload

    def _add_again(self, entry: Entry, step: int, *, sign: int) -> None:
        done = self._pass(entry, step)
        gradient = None if self.plan.is_last else self._decode_gradient(entry, step, entry.gradient)
        self.worker.backward_into_sum(done, gradient, step, sign=sign)
        entry.accumulated = sign > 0

    def _decode_gradient(self, entry: Entry, step: int, raw: Raw) -> Tensor:
        return self.codecs.decode_gradient(raw, step, entry.microbatch, self._masks_out.get(entry.slot))
