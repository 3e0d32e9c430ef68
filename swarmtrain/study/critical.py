"""Gradients that are critical in some steps only, as for a sender whose line is rarely the bottleneck.

A trainer in one process has no lines, so its messages are all critical. Here they are so in one of N steps, all
boundaries alike. In the other steps a `…:critical` codec sends exactly, and what it remembers grows old: the one case
in which a residual that is dropped and one that is carried differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from swarmtrain.boundary import Boundary
from swarmtrain.codec import Aux, CodecPair, Direction, MessageContext
from swarmtrain.codec.api import Encoded, Encoder, Ticket


class SeldomCriticalBoundary(Boundary):
    """A boundary whose messages are critical in the steps that `every` divides."""

    def __init__(self, pair: CodecPair, index: int, every: int) -> None:
        super().__init__(pair, index)
        for way in Direction:
            self._encoders[way] = _Told(self._encoders[way], every)


class _Told(Encoder):
    """An encoder that is told whether its message is critical."""

    def __init__(self, inner: Encoder, every: int) -> None:
        super().__init__(inner.spec, boundary=inner.boundary, direction=inner.direction)
        self._inner, self._every, self.scope = inner, every, inner.scope

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder."""
        told = replace(context, critical=context.step % self._every == 0)
        return self._inner.encode_plain(numbers, source_dtype, told, aux)

    def max_bytes(self, shape: Sequence[int]) -> int:
        """See Encoder."""
        return self._inner.max_bytes(shape)

    @property
    def residual(self) -> torch.Tensor | None:
        """See Encoder."""
        return self._inner.residual

    def commit(self, ticket: Ticket) -> None:
        """See Encoder."""
        self._inner.commit(ticket)

    def abort(self, ticket: Ticket) -> None:
        """See Encoder."""
        self._inner.abort(ticket)

    def on_step(self, step: int) -> None:
        """See Encoder."""
        self._inner.on_step(step)

    def reset(self, reason: str) -> None:
        """See Encoder."""
        self._inner.reset(reason)
