"""AQ-SGD: both ends remember what they last sent of each training sample, and messages are differences to that.

    y = C(a - m[sample]),   m[sample] <- fp16(m[sample] + y) on both sides,   the receiver uses m[sample]

The first visit of a sample is a key-frame in a milder format. The tensor's first axis are the samples, whose ids come
with the context. A difference is sent only to the receiver that confirmed (`commit`) the state it builds on; every part
names the states before and after by digest, so a receiver that holds another one refuses with NeedKeyframe.
It pays from the second epoch on: a run that sees each sample once only sends key-frames.

Body, for each sample: id (8 bytes), kind (1), digest before (8), digest after (8), length (4), and a complete payload.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmtrain.codec.api import (
    DEFAULT_LIMITS,
    MAX_AGE,
    Aux,
    Buffer,
    Direction,
    Encoded,
    Encoder,
    Limits,
    MessageContext,
    Reconstruct,
    Scope,
    Ticket,
)
from swarmtrain.codec.errors import CodecError, CorruptPayload, NeedKeyframe
from swarmtrain.codec.formats import from_format, to_format
from swarmtrain.codec.payload import Header, header_bytes, seal
from swarmtrain.codec.samples import SampleState, SampleStore
from swarmtrain.codec.spec import AQSGDSpec
from swarmtrain.codec.tensors import as_bytes, check_finite, tensor_from_bytes

CODEC_ID = 7
_PART = struct.Struct("<QB8s8sI")  # sample, kind, digest before, digest after, length of the payload
_KEY, _DIFFERENCE = range(2)
_NO_STATE = bytes(8)
_EXPONENT = struct.Struct("<b")  # before the fp16 numbers of a stored state


@dataclass(frozen=True, slots=True)
class _Part:
    """One sample's share of a message."""

    sample: int
    kind: int
    before: bytes
    after: bytes
    payload: Buffer


class AQSGDEncoder(Encoder):
    """State: the store, and for each sample the receiver that confirmed its state."""

    scope = Scope.SAMPLE

    def __init__(
        self,
        spec: AQSGDSpec,
        inner: Encoder,
        key: Encoder,
        reconstruct: Reconstruct,
        store: SampleStore,
        *,
        boundary: int,
        direction: Direction,
    ) -> None:
        super().__init__(spec, boundary=boundary, direction=direction)
        self._inner, self._key = inner, key
        self._reconstruct = reconstruct
        self._store = store
        self._confirmed: dict[int, tuple[str, bytes]] = {}  # sample -> receiver, digest
        self._open: dict[Ticket, tuple[str, dict[int, bytes]]] = {}  # receiver, sample -> digest after

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder. Raises CodecError unless the context names one distinct sample id for each first-axis entry."""
        check_finite(numbers)
        samples = context.samples
        _check_samples(samples, tuple(numbers.shape))
        parts, states = [], {}
        for row, sample in zip(numbers, samples, strict=True):
            part, state = self._encode_sample(row, sample, source_dtype, context)
            parts.append(_PART.pack(sample, part.kind, part.before, part.after, len(part.payload)))
            parts.append(bytes(part.payload))
            states[sample] = state
        body = b"".join(parts)
        payload = seal(Header(CODEC_ID, source_dtype, tuple(numbers.shape), len(body)), body)
        ticket = self._new_ticket(context)
        for sample, state in states.items():
            self._confirmed.pop(sample, None)
            self._store.put(sample, state)
        self._open[ticket] = (context.receiver, {sample: state.digest for sample, state in states.items()})
        received = torch.empty(numbers.shape)
        for target, sample in zip(received, samples, strict=True):
            row = _numbers(states[sample], tuple(target.shape))
            assert row is not None  # just made in this shape
            target.copy_(row)
        return Encoded(payload, None, ticket, received)

    def max_bytes(self, shape: Sequence[int]) -> int:
        """All samples as key-frames, or all as differences, whichever is longer."""
        row = tuple(shape[1:])
        longest = max(self._inner.max_bytes(row), self._key.max_bytes(row))
        return header_bytes(len(shape)) + (shape[0] if shape else 0) * (_PART.size + longest)

    def commit(self, ticket: Ticket) -> None:
        """See Encoder. From now on differences may build on what this message left at the receiver."""
        receiver, digests = self._open.pop(ticket, ("", {}))
        for sample, digest in digests.items():
            if self._store.digest(sample) == digest:
                self._confirmed[sample] = (receiver, digest)

    def abort(self, ticket: Ticket) -> None:
        """See Encoder. What the receiver holds of these samples is unknown: key-frames next."""
        _, digests = self._open.pop(ticket, ("", {}))
        for sample, digest in digests.items():
            if self._store.digest(sample) == digest:
                self._forget(sample)

    def on_step(self, step: int) -> None:
        """See Encoder. States do not age; tickets that were never closed are forgotten."""
        self._open = {ticket: state for ticket, state in self._open.items() if step - ticket.step <= MAX_AGE}
        self._confirmed = {s: held for s, held in self._confirmed.items() if self._store.digest(s) is not None}

    def reset(self, reason: str) -> None:
        """See Encoder."""
        self._store.clear()
        self._confirmed.clear()
        self._open.clear()

    def _forget(self, sample: int) -> None:
        self._confirmed.pop(sample, None)
        self._store.discard(sample)

    def _encode_sample(
        self, row: torch.Tensor, sample: int, source_dtype: torch.dtype, context: MessageContext
    ) -> tuple[_Part, SampleState]:
        held = self._shared_state(sample, context.receiver)
        base = None if held is None else _numbers(held, tuple(row.shape))
        if held is None or base is None:
            encoded = self._key.encode_plain(row, source_dtype, context, None)
            kind, before, numbers = _KEY, _NO_STATE, self._reconstruct(encoded.payload, DEFAULT_LIMITS)
        else:
            encoded = self._inner.encode_plain(row - base, source_dtype, context, None)
            kind, before, numbers = _DIFFERENCE, held.digest, base + self._reconstruct(encoded.payload, DEFAULT_LIMITS)
        state = _state(numbers)
        self.made["key-frame" if kind == _KEY else "difference"] += 1
        return _Part(sample, kind, before, state.digest, encoded.payload), state

    def _shared_state(self, sample: int, receiver: str) -> SampleState | None:
        """What this side and `receiver` both hold of `sample`, as far as this side knows."""
        if self._confirmed.get(sample) != (receiver, self._store.digest(sample)):
            return None
        return self._store.get(sample)


class AQSGDState:
    """The receiver's side."""

    def __init__(self, reconstruct: Reconstruct, store: SampleStore) -> None:
        self._reconstruct = reconstruct
        self._store = store

    def decode(self, header: Header, body: memoryview, context: MessageContext) -> torch.Tensor:
        """The samples as both ends hold them now.

        Raises NeedKeyframe, with nothing stored, if one of them builds on another state.
        """
        parts = _parts(header, body)
        if context.samples and context.samples != tuple(part.sample for part in parts):
            raise CorruptPayload("a message holds other samples than its envelope says")
        shape = header.shape[1:]
        states = [self._decode_sample(part, shape) for part in parts]
        for part, state in zip(parts, states, strict=True):
            self._store.put(part.sample, state)
        rows = [_numbers(state, shape) for state in states]
        tensor = torch.empty(header.shape)
        for target, row in zip(tensor, rows, strict=True):
            assert row is not None  # just made in this shape
            target.copy_(row)
        return tensor

    def reset(self) -> None:
        """Forget all samples: every sender will be asked for key-frames."""
        self._store.clear()

    def _decode_sample(self, part: _Part, shape: tuple[int, ...]) -> SampleState:
        if self._store.digest(part.sample) == part.after:
            held = self._store.get(part.sample)
            if held is not None and _numbers(held, shape) is not None:
                return held  # the message came before: the same answer
        limits = Limits.exactly(shape)
        if part.kind == _KEY:
            numbers = self._reconstruct(part.payload, limits)
        else:
            held = self._store.get(part.sample)
            base = None if held is None else _numbers(held, shape)
            if held is None or base is None or held.digest != part.before:
                raise NeedKeyframe(part.before)
            numbers = base + self._reconstruct(part.payload, limits)
        check_finite(numbers, CorruptPayload)
        state = _state(numbers)
        if state.digest != part.after:
            raise NeedKeyframe(part.before, "this message does not lead to the state that its sender says")
        return state


def _check_samples(samples: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if not shape or len(samples) != shape[0] or len(set(samples)) != len(samples):
        raise CodecError(f"aqsgd needs one distinct sample id for each entry of the first axis of {shape}: {samples}")
    if any(not 0 <= sample < 1 << 64 for sample in samples):
        raise CodecError("sample ids are whole numbers of 64 bits")


def _parts(header: Header, body: memoryview) -> list[_Part]:
    if not header.shape:
        raise CorruptPayload("a message for samples has no axis for them")
    parts, start = [], 0
    for _ in range(header.shape[0]):
        if len(body) - start < _PART.size:
            raise CorruptPayload("a message ends within a sample's header")
        sample, kind, before, after, length = _PART.unpack_from(body, start)
        start += _PART.size
        if kind > _DIFFERENCE or length > len(body) - start:
            raise CorruptPayload(f"a sample's part claims kind {kind} and {length} bytes")
        parts.append(_Part(sample, kind, before, after, body[start : start + length]))
        start += length
    if start != len(body):
        raise CorruptPayload(f"{len(body) - start} bytes follow the last sample")
    return parts


def _state(numbers: torch.Tensor) -> SampleState:
    """The numbers rounded to fp16 with a common exponent, as both ends store them."""
    halves, exponent = to_format(numbers.contiguous(), "fp16")
    return SampleState.of(_EXPONENT.pack(exponent) + as_bytes(halves).tobytes())


def _numbers(state: SampleState, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The stored numbers as fp32; None if they have another shape."""
    (exponent,) = _EXPONENT.unpack_from(state.data)
    halves = tensor_from_bytes(memoryview(state.data)[_EXPONENT.size :], torch.float16)
    return from_format(halves, exponent).view(shape) if halves.numel() == math.prod(shape) else None
