"""What the compute thread does with one stage: decode, compute, add, encode. No network, no asyncio.

The arithmetic is `StageWorker`'s, the same as the reference trainer's; this adds the bytes on both sides and decides
whether a microbatch's autograd graph is kept until its gradient comes or the stage is computed again from its input.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmtrain.chain.state_transfer import StateSource
from swarmtrain.codec import (
    Aux,
    Decoder,
    Direction,
    Encoded,
    Encoder,
    Limits,
    MessageContext,
    Ticket,
    decode,
    inline_aux,
    make_encoder,
    needs_state,
    parse_spec,
)
from swarmtrain.codec.errors import CodecError, NeedKeyframe
from swarmtrain.codec.samples import SampleStore
from swarmtrain.codec.spec import CastSpec, CriticalSpec, TopKSpec, sends_mask
from swarmtrain.codec.watch import ResidualWatch
from swarmtrain.errors import DivergedError
from swarmtrain.model.buffers import as_bytes
from swarmtrain.model.layout import boundary_width
from swarmtrain.model.sizes import activation_bytes, id_type
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import Gradients, Pass, StageWorker
from swarmtrain.peer.fidelity import CodecTimes, Fidelity
from swarmtrain.peer.ledger import Entry, Raw, StickyAnswer
from swarmtrain.reduce.coding import Reduced, StageCoder
from swarmtrain.run.manifest import Manifest


class BadTensor(ValueError):
    """Received bytes that are not the tensor they should be."""


class StaleWork(Exception):
    """The state has changed since this microbatch was taken."""


@dataclass(frozen=True)
class Outcome:
    """What a job produced: bytes for the next stage or for the caller, and on the last stage the loss."""

    payload: bytes
    loss: float = 0.0
    sticky: bytes = b""  # the same for the entry's partner, as a difference to what it holds
    ticket: Ticket | None = None  # to settle, once it is known whether the partner took it


class WrongPartner(Exception):
    """A difference to a state that is not held here: the sender has to send the tensor whole."""


class StageJobs:
    """The jobs of one stage. Every method runs on the compute thread."""

    def __init__(
        self,
        manifest: Manifest,
        worker: StageWorker,
        *,
        graph_budget_bytes: int,
        make_store: Callable[[], SampleStore] = SampleStore,
    ) -> None:
        """`make_store` makes a store for each side on which AQ-SGD remembers samples."""
        self.manifest, self.worker, self._make_store = manifest, worker, make_store
        self.plan = worker.state.plan
        self._id_type = np.dtype(id_type(manifest.model.vocab_size))
        self._token_shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length + 1)
        width = boundary_width(manifest)
        shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length, width)
        self._limits = Limits(max_elements=shape[0] * shape[1] * shape[2], expected_shape=shape)
        self.boundary_bytes = 4 * shape[0] * shape[1] * shape[2]  # of one boundary tensor as fp32 numbers
        self._forward_encoder = self._encoder(Direction.FORWARD, self.plan.index)
        self._backward_encoder = self._encoder(Direction.BACKWARD, self.plan.index - 1)
        self._critical_bytes = self._sizes_if_critical(shape)
        self.max_graphs = max(1, graph_budget_bytes // max(1, activation_bytes(manifest, self.plan)))
        self.coder = StageCoder(worker.state)
        self._forward_decoder, self._backward_decoder = Decoder(store=make_store()), Decoder(store=make_store())
        self.fidelity, self.residuals, self.codec_times = Fidelity(self._limits), ResidualWatch(), CodecTimes()
        self._passes: dict[int, Pass] = {}
        self._masks_in: dict[int, Aux | None] = {}
        self._masks_out: dict[int, Aux | None] = {}
        self._checked: dict[int, tuple[Raw, Tensor]] = {}  # gradients that were decoded to check them, and their bytes
        self._tickets: dict[tuple[Direction, int], Ticket] = {}  # of this step's messages, by microbatch
        self._given_up: deque[tuple[int, int]] = deque()  # generation, microbatch: noted by the event loop
        self.num_forwards = 0  # microbatches whose forward was computed, recomputations not counted
        self.num_recomputed = 0
        self.generation = 0  # counts changes of the state

    def check_tokens(self, tokens: Raw) -> None:
        """Raise BadTensor unless these are the token ids of one microbatch. Cheap: for the event loop, too."""
        rows, columns = self._token_shape
        if len(tokens) != rows * columns * self._id_type.itemsize:
            raise BadTensor(f"{len(tokens)} bytes of token ids, a microbatch has {rows} x {columns}")
        if int(np.frombuffer(tokens, self._id_type).max()) >= self.manifest.model.vocab_size:
            raise BadTensor("a token id beyond the vocabulary")

    def check_gradient(self, gradient: Raw, step: int, microbatch: int, *, keep: bool = False) -> None:
        """Raise BadTensor unless `gradient` can be the answer to a microbatch.

        With `keep` the tensor is kept for `backward`, which gets the same object.
        """
        if self.has_sticky_answers and self._is_sticky(gradient):
            return  # seen when it is made whole
        context = self._context(Direction.BACKWARD, step, microbatch)
        tensor, _ = self._decode(gradient, context, self._masks_out.get(microbatch))
        if keep:
            self._checked[microbatch] = (gradient, tensor)

    @property
    def has_sticky_routes(self) -> bool:
        """Whether activations are sent as differences to what one peer of the next stage holds."""
        return not self._forward_encoder.scope.free_routes

    @property
    def has_sticky_answers(self) -> bool:
        """The same for gradients on their way back."""
        return not self._backward_encoder.scope.free_routes

    @property
    def sends_masks(self) -> bool:
        """Whether activations come with a mask that their gradients belong to."""
        return sends_mask(self._forward_encoder.spec)

    @property
    def sticky_messages(self) -> dict[str, dict[str, int]]:
        """Key-frames and differences made by sticky codecs, by direction. (AQ-SGD makes one of each sample.)"""
        return {"forward": dict(self._forward_encoder.made), "backward": dict(self._backward_encoder.made)}

    @property
    def compresses_if_critical(self) -> bool:
        """Whether a gradient is compressed only where its receiver would wait."""
        return self._critical_bytes is not None

    def critical_times(self, bytes_per_s: float) -> tuple[float, float]:
        """How long a gradient takes on such a line, exact and compressed: codecs at both ends included."""
        assert self._critical_bytes is not None
        exact, compressed = self._critical_bytes
        times = self.codec_times
        return exact / bytes_per_s + times.seconds(False), compressed / bytes_per_s + times.seconds(True)

    def take_boundary(self, entry: Entry, step: int, sender: str) -> None:
        """Make a received difference whole, in the order in which they come. Raises WrongPartner."""
        if not self.plan.is_first and self._is_sticky(entry.boundary):
            context = self._context(Direction.FORWARD, step, entry.microbatch, sender=sender, tokens=entry.tokens)
            entry.boundary = self._made_whole(self._forward_decoder, entry.boundary, context)

    def take_gradient(self, entry: Entry, step: int, gradient: Raw, sender: str) -> Raw:
        """The gradient of an answer, made whole if it is a difference. Raises WrongPartner."""
        if not self._is_sticky(gradient):
            return gradient
        context = self._context(Direction.BACKWARD, step, entry.microbatch, sender=sender)
        return self._made_whole(self._backward_decoder, gradient, context)

    def with_mask(self, entry: Entry, step: int, gradient: Raw) -> Raw:
        """The same gradient for a caller that has sent other bytes than those it belongs to: it has another mask."""
        _, mask = self._decode_boundary(entry.boundary, step, entry.microbatch)
        if mask is None:
            return gradient
        context = self._context(Direction.BACKWARD, step, entry.microbatch)
        within, _ = self._decode(gradient, context, mask)
        encoder = make_encoder(TopKSpec(Fraction(100), values="fp32"), boundary=0, direction=Direction.BACKWARD)
        return inline_aux(encoder.encode(within, context, mask).payload, mask)

    def settle(self, direction: Direction, ticket: Ticket, *, delivered: bool) -> None:
        """Whether the partner has taken a difference: if not, the next one goes whole."""
        encoder = self._forward_encoder if direction is Direction.FORWARD else self._backward_encoder
        if delivered:
            encoder.commit(ticket)
        else:
            encoder.abort(ticket)

    def forward(self, entry: Entry, step: int, partner: str = "") -> Outcome:
        """Forward of a microbatch. On the last stage also its backward: the outcome is the gradient for below."""
        self._begin(entry)
        self.num_forwards += 1
        done = self._pass(entry, step)
        if self.plan.is_last:
            loss = float(done.result)
            if not np.isfinite(loss):
                raise DivergedError(f"the loss of microbatch ({step}, {entry.microbatch}) is {loss}")
            return Outcome(self._finish(entry, step, done, self.worker.backward(done, None)), loss)
        if len(self._passes) < self.max_graphs:
            self._passes[entry.microbatch] = done
        context = self._context(Direction.FORWARD, step, entry.microbatch, receiver=partner, tokens=entry.tokens)
        encoded = self._encode(self._forward_encoder, entry, done.result, context)
        self.fidelity.look(done.result, encoded, context)
        self._masks_out[entry.microbatch] = encoded.aux
        if encoded.received is not None:
            entry.output = self._whole(encoded.received)
            return Outcome(entry.output, sticky=encoded.payload, ticket=encoded.ticket)
        entry.output = encoded.payload
        return Outcome(encoded.payload)

    def backward(self, entry: Entry, step: int, gradient: Raw) -> Outcome:
        """Backward of a microbatch from the next stage's answer: added to the sum, and encoded for the stage below."""
        self._begin(entry)
        raw, decoded = self._checked.pop(entry.microbatch, (b"", None))
        if decoded is None or raw is not gradient:
            decoded = self._decode_gradient(entry, step, gradient)
        done = self._passes.pop(entry.microbatch, None)
        if done is None:
            self.num_recomputed += 1
            done = self._pass(entry, step)
        entry.gradient = gradient
        return Outcome(self._finish(entry, step, done, self.worker.backward(done, decoded)))

    def evaluate(self, tokens: Raw, boundary: Raw, step: int, microbatch: int) -> Outcome:
        """Forward only; touches nothing."""
        received, _ = self._decode_boundary(boundary, step, microbatch)
        result = self.worker.evaluate(self._tokens(tokens), received)
        if self.plan.is_last:
            return Outcome(b"", float(result))
        encoder = self._encoder(Direction.FORWARD, self.plan.index)  # a new one: validation leaves no trace in codecs
        context = self._context(Direction.FORWARD, step, microbatch, tokens=tokens)
        return Outcome(encoder.encode(result, context).payload)

    def reconciled_share(self, entries: list[Entry], wanted: set[int], step: int) -> Tensor:
        """Make the sum hold exactly the microbatches `wanted`, and copy it for a reduction.

        Extra microbatches are computed again and taken out, exactly. One job: nothing is added in between.
        """
        for entry in entries:
            if entry.accumulated != (entry.microbatch in wanted):
                self._add_again(entry, step, sign=-1 if entry.accumulated else 1)
        return self.worker.sum.total.detach().to("cpu", copy=True)

    def finish(self, reduced: Tensor) -> tuple[float, str]:
        """(squared norm, digest) of a reduced sum, which is made ready for `apply` in place."""
        digest = hashlib.sha256(as_bytes(reduced)).hexdigest()
        is_counted_here = self.plan.is_first or not self.manifest.model.tie_embeddings
        return self.worker.finish(reduced, count_embedding=is_counted_here), digest

    def apply(
        self,
        reduced: Reduced,
        scale: float,
        learning_rate: float,
        basis: Tensor | None = None,
        *,
        counted: Collection[int],
    ) -> str:
        """One optimizer step, and with `basis` a move of the subspace; returns the digest of the new state.

        `counted` are the microbatches of this peer that are in the sum: what their messages left out is still owed,
        what the others left out is not. Where a checkpoint lies codecs forget everything, as in the reference trainer:
        a run that is restored there knows no more.
        """
        self.worker.apply(reduced.gradient, scale, learning_rate)
        reduced.commit()
        self._settle_step(counted)
        self._clear()
        step = self.worker.state.step
        for encoder in (self._forward_encoder, self._backward_encoder):
            encoder.on_step(step)
        if basis is not None:
            self.worker.move_basis(basis.to(self.worker.state.device))
            self._forget_codecs("the subspace has moved")
        if self.manifest.is_checkpoint(step):
            self._forget_codecs("a checkpoint")
            self.coder.reset()
        return self.worker.state.digest()

    def copy_state(self) -> StateSource:
        """A copy of the state on the CPU, to hand out."""
        state = self.worker.state
        copies = [buffer.detach().to("cpu", copy=True) for buffer in state.buffers]
        return StateSource(state.layout, state.step, state.basis_epoch, copies)

    def load_state(self, source: StateSource) -> None:
        """Replace the state; whatever was computed with the old one is dropped."""
        self.worker.state.load_buffers(source.buffers, step=source.step, basis_epoch=source.basis_epoch)
        self.coder.reset()
        self._forget_codecs("another state was loaded")
        self.drop_work()

    def first_state(self) -> StateSource:
        """The state before the first step, which follows from the seed alone."""
        state = self.worker.state
        fresh = StageState(self.manifest, self.plan.index)
        return StateSource(state.layout, 0, 0, [buffer.detach() for buffer in fresh.buffers])

    def drop_work(self) -> None:
        """Nothing of the current step counts any more: not in the sum, not in kept graphs, not in residuals."""
        self.worker.sum.clear()
        self._settle_step(())
        self._clear()

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
        self._given_up.append((entry.generation, entry.microbatch))

    def _encode(
        self, encoder: Encoder, entry: Entry, tensor: Tensor, context: MessageContext, aux: Aux | None = None
    ) -> Encoded:
        """Encode, and remember the ticket until the message's fate is known: the step's end, or that it was given up.

        A microbatch that comes a second time is encoded with the residual as it was without the first message. Sticky
        codecs' tickets are settled when the partner has answered.
        """
        self._abort(context.direction, entry.microbatch)
        encoded = encoder.encode(tensor, context, aux)
        if encoded.received is None:
            self._tickets[context.direction, entry.microbatch] = encoded.ticket
            entry.residual_bytes += 0 if encoder.residual is None else self.boundary_bytes
        return encoded

    def _abort(self, direction: Direction, microbatch: int) -> None:
        ticket = self._tickets.pop((direction, microbatch), None)
        if ticket is not None:
            self.settle(direction, ticket, delivered=False)

    def _settle_step(self, counted: Collection[int]) -> None:
        """The step is over: the messages of `counted` were used, all others were in vain."""
        for (direction, microbatch), ticket in self._tickets.items():
            self.settle(direction, ticket, delivered=microbatch in counted)
        self._tickets.clear()

    def _forget_codecs(self, reason: str) -> None:
        for encoder in (self._forward_encoder, self._backward_encoder):
            encoder.reset(reason)
        for decoder in (self._forward_decoder, self._backward_decoder):
            decoder.reset(reason)

    def _begin(self, entry: Entry) -> None:
        """What was given up is dropped first: this may be the same microbatch, on its second way. Raises StaleWork."""
        while self._given_up:
            generation, microbatch = self._given_up.popleft()
            if generation == self.generation:  # of an older one nothing is left
                for memory in self._memories():
                    memory.pop(microbatch, None)
                for direction in Direction:
                    self._abort(direction, microbatch)
        if entry.generation != self.generation:
            raise StaleWork("the step of this microbatch is over")

    def _clear(self) -> None:
        self.generation += 1
        for memory in self._memories():
            memory.clear()

    def _memories(self) -> list[dict[int, Any]]:
        """What is kept by microbatch."""
        return [self._passes, self._masks_in, self._masks_out, self._checked]

    def _pass(self, entry: Entry, step: int) -> Pass:
        boundary, mask = self._decode_boundary(entry.boundary, step, entry.microbatch)
        self._masks_in[entry.microbatch] = mask
        return self.worker.forward(self._tokens(entry.tokens), boundary)

    def _finish(self, entry: Entry, step: int, done: Pass, gradients: Gradients) -> bytes:
        payload = b""
        if gradients.boundary is not None:
            assert done.boundary is not None
            context = self._context(Direction.BACKWARD, step, entry.microbatch, receiver=entry.caller)
            context = replace(context, critical=entry.is_critical)
            mask = self._masks_in.get(entry.microbatch)
            started = time.perf_counter()
            encoded = self._encode(self._backward_encoder, entry, gradients.boundary, context, mask)
            encode_s, payload = time.perf_counter() - started, encoded.payload
            self.fidelity.look(gradients.boundary, encoded, context, mask)
            if self.compresses_if_critical:
                self.codec_times.add(entry.is_critical, encode_s, partial(self._decode, payload, context, mask))
            if entry.is_critical:
                self.residuals.look(done.boundary.detach(), self._backward_encoder.residual)
            if encoded.received is not None:
                entry.sticky = StickyAnswer(payload, encoded.ticket)
                payload = self._whole(encoded.received)
        self.worker.accumulate(gradients)
        entry.accumulated = True
        return payload

    def _add_again(self, entry: Entry, step: int, *, sign: int) -> None:
        done = self._pass(entry, step)
        gradient = None if self.plan.is_last else self._decode_gradient(entry, step, entry.gradient)
        self.worker.accumulate(self.worker.backward(done, gradient), sign=sign)
        entry.accumulated = sign > 0

    def _decode_boundary(self, raw: Raw, step: int, microbatch: int) -> tuple[Tensor | None, Aux | None]:
        if self.plan.is_first:
            return None, None
        return self._decode(raw, self._context(Direction.FORWARD, step, microbatch), None)

    def _decode_gradient(self, entry: Entry, step: int, raw: Raw) -> Tensor:
        context = self._context(Direction.BACKWARD, step, entry.microbatch)
        return self._decode(raw, context, self._masks_out.get(entry.microbatch))[0]

    def _decode(self, raw: Raw, context: MessageContext, aux: Aux | None) -> tuple[Tensor, Aux | None]:
        try:
            decoded = decode(raw, context, aux, limits=self._limits)
        except CodecError as error:
            raise BadTensor(str(error)) from error
        if not bool(torch.isfinite(decoded.tensor).all()):
            raise BadTensor("a tensor with numbers that are not finite")
        return decoded.tensor.to(self.worker.state.device, self.worker.state.dtype), decoded.aux

    def _tokens(self, raw: Raw) -> Tensor:
        array = np.frombuffer(raw, self._id_type).astype(np.int64).reshape(self._token_shape)
        return torch.from_numpy(array).to(self.worker.state.device)  # (s, n + 1)

    def _sizes_if_critical(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        spec = parse_spec(self.manifest.wire.backward)
        if not isinstance(spec, CriticalSpec):
            return None
        encoders = [
            make_encoder(item, boundary=0, direction=Direction.BACKWARD) for item in (CastSpec("fp32"), spec.inner)
        ]
        exact, compressed = [encoder.max_bytes(shape) for encoder in encoders]
        return exact, compressed

    def _encoder(self, direction: Direction, boundary: int) -> Encoder:
        text = self.manifest.wire.forward if direction is Direction.FORWARD else self.manifest.wire.backward
        store = self._make_store()
        return make_encoder(parse_spec(text), boundary=max(0, boundary), direction=direction, store=store)

    def _context(
        self,
        direction: Direction,
        step: int,
        microbatch: int,
        *,
        sender: str = "",
        receiver: str = "",
        tokens: Raw = b"",
    ) -> MessageContext:
        boundary = self.plan.index if direction is Direction.FORWARD else self.plan.index - 1
        return MessageContext(
            max(0, boundary),
            direction,
            step=step,
            microbatch=microbatch,
            sender=sender,
            receiver=receiver,
            samples=self._samples(tokens) if tokens else (),
        )

    def _samples(self, tokens: Raw) -> tuple[int, ...]:
        """Names of the training samples of a microbatch: both ends know their tokens. Equal ones are counted."""
        row_bytes = self._token_shape[1] * self._id_type.itemsize
        rows = [bytes(tokens[start : start + row_bytes]) for start in range(0, len(tokens), row_bytes)]
        names = []
        for number, row in enumerate(rows):
            again = rows[:number].count(row).to_bytes(4, "little")
            names.append(int.from_bytes(hashlib.blake2b(row + again, digest_size=8).digest(), "little"))
        return tuple(names)

    def _is_sticky(self, raw: Raw) -> bool:
        try:
            return needs_state(raw, limits=self._limits)
        except CodecError as error:
            raise BadTensor(str(error)) from error

    def _made_whole(self, decoder: Decoder, raw: Raw, context: MessageContext) -> bytes:
        try:
            decoded = decoder.decode(raw, context, limits=self._limits)
        except NeedKeyframe as error:
            raise WrongPartner(str(error)) from error
        except CodecError as error:
            raise BadTensor(str(error)) from error
        return self._whole(decoded.tensor)

    def _whole(self, tensor: Tensor) -> bytes:
        """A payload that anybody decodes to exactly this tensor: for the ledger, and for other partners."""
        encoder = make_encoder(CastSpec("fp32"), boundary=0, direction=Direction.FORWARD)
        return encoder.encode(tensor, MessageContext(0, Direction.FORWARD)).payload
