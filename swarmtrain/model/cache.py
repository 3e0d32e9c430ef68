"""Keys and values of positions that were already computed, so that decoding token by token costs one token each."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Of one block. The first call may bring many positions, every later one exactly one."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions; returns all so far, each (s, g, n, e)."""
        if self._keys is not None and self._values is not None:
            assert keys.shape[2] == 1, "attention without a mask: one new position at a time"
            keys = torch.cat([self._keys, keys], dim=2)
            values = torch.cat([self._values, values], dim=2)
        self._keys, self._values = keys, values
        return keys, values


class StageCache:
    """Of one stage, for one batch of sequences that grow together. `num_positions` have been computed."""

    def __init__(self) -> None:
        self.num_positions = 0
        self._layers: dict[int, LayerCache] = {}

    def layer(self, index: int) -> LayerCache:
        """The cache of layer `index`."""
        return self._layers.setdefault(index, LayerCache())
