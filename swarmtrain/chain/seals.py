"""Seals: what a peer has received and sent for one microbatch, as four digests. Pure.

A peer seals its microbatches when a step's answers are in, before it can know which of them are computed again by
another peer. What one stage has sent is what the next has received, so the seals of a route are a chain: where two of
them do not meet, one of two neighbours lies about what passed between them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16
SEAL_BYTES = 4 * DIGEST_BYTES
_LOSS = struct.Struct("<d")
_LENGTH = struct.Struct("<Q")

Raw = bytes | bytearray | memoryview


def digest_of(*parts: Raw) -> bytes:
    """Of several byte strings: what belongs to which of them matters."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(_LENGTH.pack(len(part)))
        found.update(part)
    return found.digest()


@dataclass(frozen=True, slots=True)
class Seal:
    """One microbatch on one stage. Forward tensors are sealed with the token ids that travel beside them."""

    received: bytes  # the tokens and the boundary tensor
    sent: bytes  # the tokens and the output; on the last stage, the loss
    received_gradient: bytes
    sent_gradient: bytes

    @property
    def made(self) -> bytes:
        """What follows from the weights and from what was received."""
        return self.sent + self.sent_gradient


ABSENT = Seal(*[bytes(DIGEST_BYTES)] * 4)  # of a microbatch that the peer does not have


def seal(tokens: Raw, boundary: Raw, output: Raw, loss: float | None, gradient: Raw, sent_gradient: Raw) -> Seal:
    """`loss`: None but on the last stage, which has no output and receives no gradient."""
    sent = digest_of(tokens, output) if loss is None else sealed_loss(loss)
    return Seal(digest_of(tokens, boundary), sent, digest_of(gradient), digest_of(sent_gradient))


def sealed_loss(loss: float) -> bytes:
    """The digest of a loss: it is in no tensor."""
    return digest_of(_LOSS.pack(loss))


def packed(seals: Sequence[Seal]) -> bytes:
    """As they travel."""
    return b"".join(item.received + item.sent + item.received_gradient + item.sent_gradient for item in seals)


def unpacked(raw: Raw, count: int) -> list[Seal]:
    """The inverse of `packed`. ValueError unless these are `count` seals."""
    if len(raw) != count * SEAL_BYTES:
        raise ValueError(f"{len(raw)} bytes are not {count} seals")
    data = bytes(raw)
    digests = [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
    return [Seal(*digests[start : start + 4]) for start in range(0, len(digests), 4)]
