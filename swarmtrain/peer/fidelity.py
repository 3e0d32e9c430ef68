"""What boundary codecs lose and cost: a few of the sent tensors, decoded once more as their receivers will."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from swarmtrain import world
from swarmtrain.codec import Aux, Direction, Encoded, Limits, MessageContext, decode
from swarmtrain.codec.tensors import plain

SAMPLE_EVERY = 64  # messages of a direction; the first is one. Decoding all of them would cost what the receiver pays


class Fidelity:
    """Relative errors by direction. `look` is the compute thread's; `errors` may be read by anybody."""

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
    """Seconds that a message costs both ends, exact (False) and compressed (True). Reading is for anybody."""

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
