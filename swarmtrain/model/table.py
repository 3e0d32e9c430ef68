"""T, the frozen token table (V, d): every stage adds its rows to what it received, so tokens are told apart at no cost.

It is a function of the seed (`boundary.table`): normal numbers, or signs times their spread, of which one bit each is
kept. Either way it has full rank, and the same bits on every machine.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmtrain.model.initial import draw_bytes, draw_normal, normal_chunks
from swarmtrain.model.layout import embedding_spread
from swarmtrain.run.manifest import Manifest

_NORMAL, _SIGNS = "token_table", "token_table.signs"  # names of the draws
_BITS = 8


class TokenTable(nn.Module):
    """The interface. No parameters: it never trains."""

    def rows(self, ids: Tensor) -> Tensor:
        """T[ids] of ids (t,): (t, d)."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """All of it, (V, d): as large as it is. For a tied head, and for exports."""
        raise NotImplementedError


class NormalTable(TokenTable):
    """Numbers, kept as they are."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """See `TokenTable`."""
        return F.embedding(ids, self.values)

    def whole(self) -> Tensor:
        """See `TokenTable`."""
        return self.values


class SignTable(TokenTable):
    """Entries +spread and -spread. Bit b of a row's byte i (the lowest first) is entry 8 i + b; a 1 is positive."""

    packed: Tensor
    patterns: Tensor

    def __init__(self, packed: Tensor, spread: float, dtype: torch.dtype) -> None:
        """`packed` is (V, d / 8), uint8."""
        super().__init__()
        bits = torch.arange(1 << _BITS)[:, None] >> torch.arange(_BITS) & 1
        patterns = (2 * bits - 1).to(dtype).mul_(spread)  # (256, 8): a byte's entries
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("patterns", patterns.to(packed.device), persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """See `TokenTable`."""
        return self._entries(self.packed[ids])

    def whole(self) -> Tensor:
        """See `TokenTable`."""
        return self._entries(self.packed)

    def _entries(self, packed: Tensor) -> Tensor:
        return F.embedding(packed.int(), self.patterns).flatten(1)


def token_table(
    manifest: Manifest, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TokenTable | None:
    """The run's table; None where boundaries are dense."""
    shape, seed = (manifest.model.vocab_size, manifest.model.hidden_size), manifest.run.seed
    if manifest.boundary.kind == "dense":
        return None
    if manifest.boundary.table == "signs":
        return SignTable(_packed(manifest).to(device), embedding_spread(manifest), dtype)
    return NormalTable((draw_normal(seed, _NORMAL, shape) * embedding_spread(manifest)).to(device, dtype))


def table_digest(manifest: Manifest) -> str:
    """SHA-256 of the run's table; empty where boundaries are dense. The numbers are never there all at once."""
    if manifest.boundary.kind == "dense":
        return ""
    shape = (manifest.model.vocab_size, manifest.model.hidden_size)
    found = hashlib.sha256(repr(shape).encode())
    if manifest.boundary.table == "signs":
        found.update(f"signs:{embedding_spread(manifest)!r}:".encode())
        found.update(_packed(manifest).numpy().data)
        return found.hexdigest()
    for chunk in normal_chunks(manifest.run.seed, _NORMAL, shape[0] * shape[1]):
        found.update((chunk * embedding_spread(manifest)).numpy().data)
    return found.hexdigest()


def _packed(manifest: Manifest) -> Tensor:
    """(V, d / 8)"""
    return draw_bytes(manifest.run.seed, _SIGNS, (manifest.model.vocab_size, manifest.model.hidden_size // _BITS))
