"""Error feedback at the sender: what a message left out goes into the next one.

    z = x + e,   y = C(z),   e <- z - y,   y is sent

The receiver sees plain messages of the inner codec. A gradient whose activation crossed through a mask is used within
that mask only: nothing else is sent, and the residual outside waits for a mask that lets it through. The residual
belongs to the sender's boundary and direction, never to a link, so routes are free. Over a gradient it telescopes:
whichever replica gets which message, their weight gradients are added up. It is dropped when it was last used more than
MAX_AGE optimizer steps ago (unless `carry`), when the shape changes, and on `reset`. Over low rank this is Optimus-CC's
lazy error propagation.

With messages in flight the invariant is e = sum of (x_k - y_k) over all messages that were not aborted, where x_k is
what the receiver of an exact message would have used: zero outside the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmtrain.codec.api import (
    DEFAULT_LIMITS,
    MAX_AGE,
    MAX_EARLIER,
    Aux,
    Direction,
    Encoded,
    Encoder,
    MessageContext,
    Reconstruct,
    Scope,
    Ticket,
)
from swarmtrain.codec.mask import apply_mask
from swarmtrain.codec.spec import FeedbackSpec
from swarmtrain.codec.tensors import check_finite


@dataclass(frozen=True, slots=True)
class _Open:
    """What abort needs of a message in flight."""

    inner: Ticket
    epoch: int
    before: torch.Tensor | None  # what it added, x - y, is after - before: a step's messages cost a residual each
    after: torch.Tensor


class FeedbackEncoder(Encoder):
    """State: one residual, the inner encoder's state, and a residual's worth for each message not yet closed."""

    scope = Scope.SENDER

    def __init__(
        self,
        spec: FeedbackSpec,
        inner: Encoder,
        reconstruct: Reconstruct,
        *,
        boundary: int,
        direction: Direction,
    ) -> None:
        """`reconstruct` gives what a receiver decodes from a payload of `inner`."""
        super().__init__(spec, boundary=boundary, direction=direction)
        self._inner = inner
        self._reconstruct = reconstruct
        self._carry = spec.carry
        self._residual: torch.Tensor | None = None  # never changed in place: tickets remember older ones
        self._used_at = 0
        self._epoch = 0  # counts dropped residuals: their tickets have nothing to give back
        self._open: dict[Ticket, _Open] = {}

    @property
    def residual(self) -> torch.Tensor | None:
        """What the next message will make up for; None if nothing. Not to be changed."""
        return self._residual

    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """See Encoder."""
        check_finite(numbers)
        self._drop_if_unusable(tuple(numbers.shape), context.step)
        mask = aux if context.direction is Direction.BACKWARD else None
        before = self._residual
        exact = _within(numbers, mask)
        wanted = exact if before is None else exact + before
        encoded = self._inner.encode_plain(_within(wanted, mask), source_dtype, context, aux)
        after = wanted - _within(self._reconstruct(encoded.payload, DEFAULT_LIMITS), mask)
        ticket = self._new_ticket(context)
        self._residual, self._used_at = after, max(self._used_at, context.step)
        self._open[ticket] = _Open(encoded.ticket, self._epoch, before, after)
        return Encoded(encoded.payload, encoded.aux, ticket)

    def max_bytes(self, shape: Sequence[int]) -> int:
        """As the inner codec."""
        return self._inner.max_bytes(shape)

    def commit(self, ticket: Ticket) -> None:
        """See Encoder."""
        opened = self._open.pop(ticket, None)
        if opened is not None:
            self._inner.commit(opened.inner)

    def abort(self, ticket: Ticket) -> None:
        """See Encoder. Without later messages the residual is what it was before, to the bit."""
        opened = self._open.pop(ticket, None)
        if opened is None:
            return
        self._inner.abort(opened.inner)
        if opened.epoch != self._epoch:
            return
        if self._residual is opened.after:
            self._residual = opened.before
        elif self._residual is not None:
            added = opened.after if opened.before is None else opened.after - opened.before
            self._residual = self._residual - added

    def on_step(self, step: int) -> None:
        """See Encoder."""
        self._inner.on_step(step)
        self._open = {ticket: opened for ticket, opened in self._open.items() if step - ticket.step <= MAX_AGE}
        if self._residual is not None:
            self._drop_if_unusable(tuple(self._residual.shape), step)

    def reset(self, reason: str) -> None:
        """See Encoder."""
        self._inner.reset(reason)
        self._open.clear()
        self._drop()

    def _drop_if_unusable(self, shape: tuple[int, ...], step: int) -> None:
        if self._residual is None:
            return
        age = step - self._used_at
        aged = age < -MAX_EARLIER or (age > MAX_AGE and not self._carry)  # going back in time means a roll-back
        if aged or tuple(self._residual.shape) != shape:
            self._drop()

    def _drop(self) -> None:
        self._residual = None
        self._epoch += 1


def _within(numbers: torch.Tensor, mask: Aux | None) -> torch.Tensor:
    """What a receiver with this mask makes of `numbers`."""
    return numbers if mask is None else apply_mask(numbers.clone(), mask)
