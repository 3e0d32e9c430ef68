"""Monitors whether lazy error propagation is unbiased: samples a residual and the message that it is added to.

A gradient's error goes into the gradient of another activation. As long as residuals have nothing to do with how
activations change from one microbatch to the next, the errors of weight gradients average out (Optimus-CC, section 5).
"""

from __future__ import annotations

from torch import Tensor

from swarmtrain.codec.lowrank import residual_cosine
from swarmtrain.codec.tensors import plain

SAMPLE_EVERY = 64  # messages; the first is one


class ResidualWatch:
    """The monitor of one sender and boundary. `look` belongs to its thread; any thread may read `cosine`."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._before: tuple[Tensor, Tensor] | None = None  # a residual, and the activation whose gradient left it
        self.cosine: float | None = None

    def look(self, activation: Tensor, residual: Tensor | None) -> None:
        """A gradient was sent: the one for `activation`, and `residual` is left. Without feedback nothing happens."""
        if residual is None:
            return
        if self._before is not None:
            self.cosine = residual_cosine(*self._before, plain(activation))
            self._before = None
        if self._num_seen % SAMPLE_EVERY == 0 and residual.shape == activation.shape:
            self._before = (residual, plain(activation).clone())
        self._num_seen += 1
