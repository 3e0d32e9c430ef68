"""EF21: both ends of a link hold the same estimate h, and messages are compressed differences to it.

    y = C(x - h),   h <- h + y on both sides,   the receiver uses h

Every message names the estimate it builds on and the one it leads to, by digest. A receiver that does not hold the
first (another peer, a lost or reordered message, a restart) refuses with NeedKeyframe; one that holds the second has
seen the message already and answers the same. So a wrong tensor is never returned. A key-frame builds on h = 0.

Body: digest before (8 bytes), digest after (8), then a complete payload of the inner codec.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmtrain.codec.api import (
    DEFAULT_LIMITS,
    MAX_AGE,
    Aux,
    Direction,
    Encoded,
    Encoder,
    Limits,
    MessageContext,
    Reconstruct,
    Scope,
    Ticket,
)
from swarmtrain.codec.errors import CorruptPayload, NeedKeyframe, NonFiniteTensor
from swarmtrain.codec.payload import Header, header_bytes, seal
from swarmtrain.codec.spec import EF21Spec
from swarmtrain.codec.tensors import as_bytes, check_finite

CODEC_ID = 6
KEYFRAME = 1  # flag: builds on zero
_STATES = struct.Struct("<8s8s")  # digest before, digest after
_NO_ESTIMATE = bytes(8)
MAX_LINKS = 16  # estimates kept by one encoder or decoder; the least recently used goes first


@dataclass(frozen=True, slots=True)
class Estimate:
    """One side's h. Its digest covers shape and numbers."""

    numbers: torch.Tensor
    digest: bytes

    @staticmethod
    def of(numbers: torch.Tensor) -> Estimate:
        described = struct.pack(f"<{numbers.dim()}Q", *numbers.shape)
        return Estimate(numbers, hashlib.blake2b(as_bytes(numbers).data, digest_size=8, key=described).digest())


class EF21Encoder(Encoder):
    """State: one estimate for each of the last MAX_LINKS receivers."""

    scope = Scope.LINK

    def __init__(
        self, spec: EF21Spec, inner: Encoder, reconstruct: Reconstruct, *, boundary: int, direction: Direction
    ) -> None:
        super().__init__(spec, boundary=boundary, direction=direction)
        self._inner = inner
        self._reconstruct = reconstruct
        self._links: OrderedDict[str, Estimate] = OrderedDict()
        self._open: dict[Ticket, str] = {}

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder. A difference, if the receiver's last message has not been aborted; else a key-frame."""
        check_finite(numbers)
        held = self._links.get(context.receiver)
        if held is not None and held.numbers.shape != numbers.shape:
            held = None
        wanted = numbers if held is None else numbers - held.numbers
        inner = self._inner.encode_plain(wanted, source_dtype, context, None)
        change = self._reconstruct(inner.payload, DEFAULT_LIMITS)
        after = Estimate.of(change if held is None else held.numbers + change)
        check_finite(after.numbers, NonFiniteTensor)
        before, flags = (_NO_ESTIMATE, KEYFRAME) if held is None else (held.digest, 0)
        body = _STATES.pack(before, after.digest) + inner.payload
        payload = seal(Header(CODEC_ID, source_dtype, tuple(numbers.shape), len(body), flags), body)
        self.made["key-frame" if held is None else "difference"] += 1
        ticket = self._new_ticket(context)
        self._open[ticket] = context.receiver
        _remember(self._links, context.receiver, after)
        return Encoded(payload, None, ticket, after.numbers.clone())

    def max_bytes(self, shape: Sequence[int]) -> int:
        """Exact."""
        return header_bytes(len(shape)) + _STATES.size + self._inner.max_bytes(shape)

    def commit(self, ticket: Ticket) -> None:
        """See Encoder."""
        self._open.pop(ticket, None)

    def abort(self, ticket: Ticket) -> None:
        """See Encoder. The receiver's estimate is now unknown: its next message is a key-frame."""
        receiver = self._open.pop(ticket, None)
        if receiver is not None:
            self._links.pop(receiver, None)

    def on_step(self, step: int) -> None:
        """See Encoder. Estimates do not age; tickets that were never closed are forgotten."""
        self._open = {ticket: receiver for ticket, receiver in self._open.items() if step - ticket.step <= MAX_AGE}

    def reset(self, reason: str) -> None:
        """See Encoder."""
        self._links.clear()
        self._open.clear()


class EF21State:
    """The receiver's side: one estimate for each of the last MAX_LINKS senders."""

    def __init__(self, reconstruct: Reconstruct) -> None:
        self._reconstruct = reconstruct
        self._links: OrderedDict[str, Estimate] = OrderedDict()

    def decode(self, header: Header, body: memoryview, sender: str) -> torch.Tensor:
        """The new estimate. Raises NeedKeyframe, state unchanged, if the message builds on another one."""
        if len(body) < _STATES.size:
            raise CorruptPayload(f"{len(body)} bytes are too few for an EF21 message")
        before, after = _STATES.unpack_from(body)
        held = self._links.get(sender)
        if held is not None and held.digest == after and tuple(held.numbers.shape) == header.shape:
            return held.numbers.clone()
        keyframe = bool(header.flags & KEYFRAME)
        if not keyframe and (held is None or held.digest != before or tuple(held.numbers.shape) != header.shape):
            raise NeedKeyframe(before)
        change = self._reconstruct(body[_STATES.size :], Limits.exactly(header.shape))
        estimate = Estimate.of(change if keyframe or held is None else held.numbers + change)
        if estimate.digest != after:  # the sender's arithmetic rounds differently, or it is lying
            self._links.pop(sender, None)
            raise NeedKeyframe(before, "this message does not lead to the state that its sender says")
        check_finite(estimate.numbers, CorruptPayload)
        _remember(self._links, sender, estimate)
        return estimate.numbers.clone()

    def reset(self) -> None:
        """Forget all estimates: every sender will be asked for a key-frame."""
        self._links.clear()


def _remember(links: OrderedDict[str, Estimate], peer: str, estimate: Estimate) -> None:
    links[peer] = estimate
    links.move_to_end(peer)
    while len(links) > MAX_LINKS:
        links.popitem(last=False)
