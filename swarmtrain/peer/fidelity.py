"""What boundary codecs lose: a few of the sent tensors, decoded once more as their receivers will decode them."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

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


def _norm(numbers: Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64))
