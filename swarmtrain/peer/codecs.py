"""The bytes on both sides of a stage: tensors into messages and back, and messages whose fate is still open.

A codec with memory must know whether its message was used. So every message that went out leaves a ticket, which is
settled when the step ends, when the microbatch is given up, or (sticky codecs) when the partner has answered.

`Fidelity` and `CodecTimes` know what codecs lose and cost, from a few of the sent tensors that are decoded once more as
their receivers will.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from torch import Tensor

from swarmtrain import world
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
from swarmtrain.codec.tensors import plain
from swarmtrain.codec.watch import ResidualWatch
from swarmtrain.model.layout import boundary_width
from swarmtrain.model.sizes import id_type
from swarmtrain.model.state import StageState
from swarmtrain.peer.compute import Key
from swarmtrain.peer.ledger import Entry, Raw
from swarmtrain.run.manifest import Manifest

SAMPLE_EVERY = 64  # messages of a direction; the first is one. Decoding all of them would cost what the receiver pays


class BadTensor(ValueError):
    """Received bytes that are not the tensor they should be."""


class WrongPartner(Exception):
    """A difference to a state that is not held here: the sender has to send the tensor whole."""


class StageCodecs:
    """The codecs of one stage. Every method runs on the compute thread, unless it says otherwise."""

    def __init__(self, manifest: Manifest, state: StageState, make_store: Callable[[], SampleStore]) -> None:
        """`make_store` makes a store for each side on which AQ-SGD remembers samples."""
        self._manifest, self._state, self._make_store = manifest, state, make_store
        self._plan = state.plan
        self._id_type = np.dtype(id_type(manifest.model.vocab_size))
        self._token_shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length + 1)
        width = boundary_width(manifest)
        shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length, width)
        self._limits = Limits(max_elements=shape[0] * shape[1] * shape[2], expected_shape=shape)
        self.boundary_bytes = 4 * shape[0] * shape[1] * shape[2]  # of one boundary tensor as fp32 numbers
        self._forward_encoder = self._encoder(Direction.FORWARD, self._plan.index)
        self._backward_encoder = self._encoder(Direction.BACKWARD, self._plan.index - 1)
        self._critical_bytes = self._sizes_if_critical(shape)
        self._forward_decoder, self._backward_decoder = Decoder(store=make_store()), Decoder(store=make_store())
        self.fidelity, self.residuals, self.times = Fidelity(self._limits), ResidualWatch(), CodecTimes()
        self._tickets: dict[tuple[Direction, Key], Ticket] = {}  # of open steps' messages, by microbatch

    def check_tokens(self, tokens: Raw) -> None:
        """Raise BadTensor unless these are the token ids of one microbatch. Cheap: for the event loop, too."""
        rows, columns = self._token_shape
        if len(tokens) != rows * columns * self._id_type.itemsize:
            raise BadTensor(f"{len(tokens)} bytes of token ids, a microbatch has {rows} x {columns}")
        if int(np.frombuffer(tokens, self._id_type).max()) >= self._manifest.model.vocab_size:
            raise BadTensor("a token id beyond the vocabulary")

    def tokens(self, raw: Raw) -> Tensor:
        """Token ids as the model takes them."""
        array = np.frombuffer(raw, self._id_type).astype(np.int64).reshape(self._token_shape)
        return torch.from_numpy(array).to(self._state.device)  # (s, n + 1)

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
        return exact / bytes_per_s + self.times.seconds(False), compressed / bytes_per_s + self.times.seconds(True)

    def encode_output(self, entry: Entry, step: int, output: Tensor, partner: str) -> Encoded:
        """What goes to the next stage."""
        context = self._context(Direction.FORWARD, step, entry.microbatch, receiver=partner, tokens=entry.tokens)
        encoded = self._encode(self._forward_encoder, entry, output, context)
        self.fidelity.look(output, encoded, context)
        return encoded

    def encode_gradient(self, entry: Entry, step: int, gradient: Tensor, boundary: Tensor, mask: Aux | None) -> Encoded:
        """What goes back to the caller; `boundary` is what it sent, `mask` what that had left out."""
        context = self._context(Direction.BACKWARD, step, entry.microbatch, receiver=entry.caller)
        context = replace(context, critical=entry.is_critical)
        started = world.monotonic()
        encoded = self._encode(self._backward_encoder, entry, gradient, context, mask)
        encode_s = world.monotonic() - started
        self.fidelity.look(gradient, encoded, context, mask)
        if self.compresses_if_critical:
            self.times.add(entry.is_critical, encode_s, partial(self._decode, encoded.payload, context, mask))
        if entry.is_critical:
            self.residuals.look(boundary.detach(), self._backward_encoder.residual)
        return encoded

    def encode_untraced(self, output: Tensor, step: int, microbatch: int, tokens: Raw) -> bytes:
        """For validation, which leaves no trace in codecs: a new encoder each time."""
        encoder = self._encoder(Direction.FORWARD, self._plan.index)
        return encoder.encode(output, self._context(Direction.FORWARD, step, microbatch, tokens=tokens)).payload

    def encode_once(
        self,
        direction: Direction,
        tensor: Tensor,
        step: int,
        microbatch: int,
        tokens: Raw,
        mask: Aux | None = None,
    ) -> Encoded:
        """What a codec without memory makes of a tensor that another peer has sent: a new encoder each time."""
        index = self._plan.index if direction is Direction.FORWARD else self._plan.index - 1
        context = self._context(direction, step, microbatch, tokens=tokens)
        return self._encoder(direction, index).encode(tensor, context, mask)

    def decode_boundary(self, raw: Raw, step: int, microbatch: int) -> tuple[Tensor | None, Aux | None]:
        """What the stage before sent, and what it left out. Raises BadTensor."""
        if self._plan.is_first:
            return None, None
        return self._decode(raw, self._context(Direction.FORWARD, step, microbatch), None)

    def decode_gradient(self, raw: Raw, step: int, microbatch: int, mask: Aux | None) -> Tensor:
        """What the next stage answered. Raises BadTensor."""
        return self._decode(raw, self._context(Direction.BACKWARD, step, microbatch), mask)[0]

    def take_boundary(self, entry: Entry, step: int, sender: str) -> None:
        """Make a received difference whole, in the order in which they come. Raises WrongPartner."""
        if not self._plan.is_first and self.is_sticky(entry.boundary):
            context = self._context(Direction.FORWARD, step, entry.microbatch, sender=sender, tokens=entry.tokens)
            entry.boundary = self._made_whole(self._forward_decoder, entry.boundary, context)

    def take_gradient(self, entry: Entry, step: int, gradient: Raw, sender: str) -> Raw:
        """The gradient of an answer, made whole if it is a difference. Raises WrongPartner."""
        if not self.is_sticky(gradient):
            return gradient
        context = self._context(Direction.BACKWARD, step, entry.microbatch, sender=sender)
        return self._made_whole(self._backward_decoder, gradient, context)

    def with_mask(self, entry: Entry, step: int, gradient: Raw) -> Raw:
        """The same gradient for a caller that has sent other bytes than those it belongs to: it has another mask."""
        _, mask = self.decode_boundary(entry.boundary, step, entry.microbatch)
        if mask is None:
            return gradient
        context = self._context(Direction.BACKWARD, step, entry.microbatch)
        within, _ = self._decode(gradient, context, mask)
        encoder = make_encoder(TopKSpec(Fraction(100), values="fp32"), boundary=0, direction=Direction.BACKWARD)
        try:
            return inline_aux(encoder.encode(within, context, mask).payload, mask)
        except CodecError as error:
            raise BadTensor(str(error)) from error

    def is_sticky(self, raw: Raw) -> bool:
        """Whether a message is a difference to something. Raises BadTensor."""
        try:
            return needs_state(raw, limits=self._limits)
        except CodecError as error:
            raise BadTensor(str(error)) from error

    def whole(self, tensor: Tensor) -> bytes:
        """A payload that every peer decodes to exactly this tensor: for the ledger, and for other partners."""
        encoder = make_encoder(CastSpec("fp32"), boundary=0, direction=Direction.FORWARD)
        return encoder.encode(tensor, MessageContext(0, Direction.FORWARD)).payload

    def settle(self, direction: Direction, ticket: Ticket, *, delivered: bool) -> None:
        """Whether the partner has taken a difference: if not, the next one goes whole."""
        encoder = self._forward_encoder if direction is Direction.FORWARD else self._backward_encoder
        if delivered:
            encoder.commit(ticket)
        else:
            encoder.abort(ticket)

    def give_up(self, of: Key) -> None:
        """What was sent for this microbatch was in vain."""
        for direction in Direction:
            self._abort(direction, of)

    def settle_step(self, step: int, counted: Collection[int]) -> None:
        """A step is over: the messages of `counted` were used, all others were in vain."""
        for direction, of in [key for key in self._tickets if key[1][0] == step]:
            self.settle(direction, self._tickets.pop((direction, of)), delivered=of[1] in counted)

    def settle_all(self) -> None:
        """Nothing of any open step counts."""
        for (direction, _), ticket in self._tickets.items():
            self.settle(direction, ticket, delivered=False)
        self._tickets.clear()

    def enter_step(self, step: int) -> None:
        """A step was applied."""
        for encoder in (self._forward_encoder, self._backward_encoder):
            encoder.on_step(step)

    def forget(self, reason: str) -> None:
        """Residuals, estimates, samples: all that codecs remember of former messages."""
        for encoder in (self._forward_encoder, self._backward_encoder):
            encoder.reset(reason)
        for decoder in (self._forward_decoder, self._backward_decoder):
            decoder.reset(reason)

    def _encode(
        self, encoder: Encoder, entry: Entry, tensor: Tensor, context: MessageContext, aux: Aux | None = None
    ) -> Encoded:
        """Encode, and remember the ticket until the message's fate is known: the step's end, or that it was given up.

        A microbatch that comes a second time is encoded with the residual as it was without the first message. Sticky
        codecs' tickets are settled when the partner has answered.
        """
        self._abort(context.direction, entry.key)
        encoded = encoder.encode(tensor, context, aux)
        if encoded.received is None:
            self._tickets[context.direction, entry.key] = encoded.ticket
            entry.residual_bytes += 0 if encoder.residual is None else self.boundary_bytes
        return encoded

    def _abort(self, direction: Direction, of: Key) -> None:
        ticket = self._tickets.pop((direction, of), None)
        if ticket is not None:
            self.settle(direction, ticket, delivered=False)

    def _decode(self, raw: Raw, context: MessageContext, aux: Aux | None) -> tuple[Tensor, Aux | None]:
        try:
            decoded = decode(raw, context, aux, limits=self._limits)
        except CodecError as error:
            raise BadTensor(str(error)) from error
        if not bool(torch.isfinite(decoded.tensor).all()):
            raise BadTensor("a tensor with numbers that are not finite")
        return decoded.tensor.to(self._state.device, self._state.dtype), decoded.aux

    def _made_whole(self, decoder: Decoder, raw: Raw, context: MessageContext) -> bytes:
        try:
            decoded = decoder.decode(raw, context, limits=self._limits)
        except NeedKeyframe as error:
            raise WrongPartner(str(error)) from error
        except CodecError as error:
            raise BadTensor(str(error)) from error
        return self.whole(decoded.tensor)

    def _encoder(self, direction: Direction, boundary: int) -> Encoder:
        text = self._manifest.wire.forward if direction is Direction.FORWARD else self._manifest.wire.backward
        store = self._make_store()
        return make_encoder(parse_spec(text), boundary=max(0, boundary), direction=direction, store=store)

    def _sizes_if_critical(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        spec = parse_spec(self._manifest.wire.backward)
        if not isinstance(spec, CriticalSpec):
            return None
        encoders = [
            make_encoder(item, boundary=0, direction=Direction.BACKWARD) for item in (CastSpec("fp32"), spec.inner)
        ]
        exact, compressed = [encoder.max_bytes(shape) for encoder in encoders]
        return exact, compressed

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
        boundary = self._plan.index if direction is Direction.FORWARD else self._plan.index - 1
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


class Fidelity:
    """Relative errors by direction. `look` is the compute thread's; `errors` may be read anywhere."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_sent: Counter[Direction] = Counter()
        self.errors: dict[str, float] = {}

    def look(self, tensor: Tensor, encoded: Encoded, context: MessageContext, aux: Aux | None = None) -> None:
        """Note `tensor`'s relative error, the norm of what is lost over its own, if it is this message's turn."""
        number = self._num_sent[context.direction]
        self._num_sent[context.direction] += 1
        if number % SAMPLE_EVERY:
            return
        sent = plain(tensor)
        received = encoded.received
        if received is None:
            received = decode(encoded.payload, context, aux, limits=self._limits).tensor
        norm = _norm(sent)
        self.errors[context.direction.name.lower()] = _norm(plain(received) - sent) / norm if norm else 0.0


class CodecTimes:
    """Seconds that a message costs both ends, exact (False) and compressed (True). It may be read anywhere."""

    def __init__(self) -> None:
        self._num_sent: Counter[bool] = Counter()
        self._encode_s: dict[bool, float] = {}
        self._decode_s: dict[bool, float] = {}

    def add(self, compressed: bool, encode_s: float, decode: Callable[[], object]) -> None:
        """A message took `encode_s`; `decode` does what its receiver does, and is timed now and then."""
        if self._num_sent[compressed] % SAMPLE_EVERY == 0:
            started = world.monotonic()
            decode()
            self._decode_s[compressed] = world.monotonic() - started
        self._num_sent[compressed] += 1
        known = self._encode_s.get(compressed, encode_s)
        self._encode_s[compressed] = 0.8 * known + 0.2 * encode_s

    def seconds(self, compressed: bool) -> float:
        """Encoding and decoding; 0 before the first message of this kind."""
        return self._encode_s.get(compressed, 0.0) + self._decode_s.get(compressed, 0.0)


def _norm(numbers: Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64))
