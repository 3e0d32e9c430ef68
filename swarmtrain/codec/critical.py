"""Compression of those messages only that their receiver would wait for; the others are sent exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarmtrain.codec.api import MAX_AGE, Aux, Direction, Encoded, Encoder, MessageContext, Ticket
from swarmtrain.codec.spec import CriticalSpec


class CriticalEncoder(Encoder):
    """`inner` if the context says that the message is critical (see policy.py), else `exact`, which has no state.

    A residual of `inner` waits for the next critical message.
    """

    def __init__(
        self, spec: CriticalSpec, inner: Encoder, exact: Encoder, *, boundary: int, direction: Direction
    ) -> None:
        super().__init__(spec, boundary=boundary, direction=direction)
        self._inner = inner
        self._exact = exact
        self._open: dict[Ticket, Ticket] = {}
        self.scope = inner.scope

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder."""
        chosen = self._inner if context.critical else self._exact
        encoded = chosen.encode_plain(numbers, source_dtype, context, aux)
        ticket = self._new_ticket(context)
        if context.critical:
            self._open[ticket] = encoded.ticket
        return Encoded(encoded.payload, encoded.aux, ticket)

    def max_bytes(self, shape: Sequence[int]) -> int:
        """The larger of both."""
        return max(self._inner.max_bytes(shape), self._exact.max_bytes(shape))

    @property
    def residual(self) -> torch.Tensor | None:
        """That of `inner`."""
        return self._inner.residual

    def commit(self, ticket: Ticket) -> None:
        """See Encoder."""
        if (inner := self._open.pop(ticket, None)) is not None:
            self._inner.commit(inner)

    def abort(self, ticket: Ticket) -> None:
        """See Encoder."""
        if (inner := self._open.pop(ticket, None)) is not None:
            self._inner.abort(inner)

    def on_step(self, step: int) -> None:
        """See Encoder."""
        self._inner.on_step(step)
        self._open = {ticket: inner for ticket, inner in self._open.items() if step - ticket.step <= MAX_AGE}

    def reset(self, reason: str) -> None:
        """See Encoder."""
        self._inner.reset(reason)
        self._open.clear()
