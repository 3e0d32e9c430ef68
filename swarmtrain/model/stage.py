"""One pipeline stage as a module.

Contract: tokens (s, n) and, except on the first stage, the boundary tensor (s, n, w) come in; the boundary tensor for
the next stage, or on the last stage the loss, goes out. What crosses is (see blocks.py for the legend):

    subspace    c, the residual stream's coordinates: h = c Uᵀ + T[ids] is formed wherever a block reads
    projected   (h - T[ids]) U, computed at the boundary; lossless because every writer's columns lie in S
    dense       h itself
    learned     z = (h - T[ids]) Aᵀ, with the boundary's own encoder A; its decoder forms z Dᵀ + T[ids] + anchor[ids].
                This is where information is lost, so the model is the one that was trained with these boundaries
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from swarmtrain.model.blocks import Block, Matrix, Read, RMSNorm, rotary_table
from swarmtrain.model.cache import StageCache
from swarmtrain.model.layout import StagePlan
from swarmtrain.model.loss import head_loss, wide
from swarmtrain.model.table import TokenTable
from swarmtrain.run.manifest import Manifest


class Embedding(nn.Module):
    """Trainable token vectors (v, w), read in fp32 or wider."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width, device="meta"))

    def forward(self, ids: Tensor) -> Tensor:
        """(t, w)"""
        if self.weight.dtype == torch.bfloat16:
            found: Tensor = _WideRows.apply(self.weight, ids)  # type: ignore[no-untyped-call]
            return found
        return F.embedding(ids, self.weight)


class _WideRows(torch.autograd.Function):
    """Rows of a bf16 table in fp32. The gradients of a row's tokens are added in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows = len(weight)
        return F.embedding(ids, weight).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        found = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.num_rows, -1, False)  # (v, w)
        return found.bfloat16(), None


class LearnedBoundary(nn.Module):
    """This stage's side of a learned boundary: the encoder (upstream), or decoder and anchor (downstream)."""

    def __init__(self, manifest: Manifest, *, is_sender: bool) -> None:
        super().__init__()
        d, k = manifest.model.hidden_size, manifest.boundary.k
        if is_sender:
            self.encoder = Matrix(k, d)
            return
        self.decoder = Matrix(d, k)
        self.anchor_tokens = Embedding(manifest.model.vocab_size, manifest.boundary.anchor_rank)
        self.anchor_directions = Matrix(d, manifest.boundary.anchor_rank)

    def decoded(self, ids: Tensor, received: Tensor, table_rows: Tensor) -> Tensor:
        """h as the receiver forms it, (t, d)."""
        anchored = self.anchor_directions.added_to(table_rows, self.anchor_tokens(ids))
        return self.decoder.added_to(anchored, received)


class Stage(nn.Module):
    """The layers of one stage. Its parameters are bound by `StageState`; `basis` and `table` are frozen."""

    basis: Tensor | None
    table: TokenTable | None

    def __init__(self, manifest: Manifest, plan: StagePlan, basis: Tensor | None, table: TokenTable | None) -> None:
        super().__init__()
        model, kind = replace(manifest.model, ffn_size=manifest.ffn_size), manifest.boundary.kind
        self.model, self.kind, self.plan = model, kind, plan
        stream_width = manifest.boundary.k if kind == "subspace" else model.hidden_size
        if plan.is_first or (plan.is_last and model.tie_embeddings):
            self.embedding = Embedding(model.vocab_size, stream_width)
        self.layers = nn.ModuleDict(
            {
                str(layer): Block(model, model.hidden_size if plan.is_tail(layer) else stream_width)
                for layer in plan.layers
            }
        )
        if kind == "learned":
            receives = {} if plan.is_first else {str(plan.index - 1): LearnedBoundary(manifest, is_sender=False)}
            sends = {} if plan.is_last else {str(plan.index): LearnedBoundary(manifest, is_sender=True)}
            self.boundaries = nn.ModuleDict(receives | sends)
        if plan.is_last:
            self.final_norm = RMSNorm(model.hidden_size, model.norm_epsilon)
            if not model.tie_embeddings:
                self.head = Matrix(model.vocab_size, model.hidden_size)
        self.register_buffer("basis", basis, persistent=False)
        self.table = table
        self._rotary = {0: rotary_table(model, 0, torch.device("cpu"), torch.float32)}
        self.recomputes = False  # keep layers' inputs only, and compute a layer again when its backward comes
        self.exit_state: Tensor | None = None  # h where the stream leaves S, of the last forward; for tracking

    def forward(self, ids: Tensor, boundary: Tensor | None, cache: StageCache | None = None) -> Tensor:
        """The boundary tensor (s, n, w) for the next stage. Not for the last stage.

        With a cache, ids and boundary are the new positions only; the caller advances `cache.num_positions`.
        """
        stream, read = self._enter(ids, boundary)
        stream = self._run(stream, read, self.plan.layers, ids.shape, cache)
        return self._leave(ids, stream).view(*ids.shape, -1)

    def logits(self, ids: Tensor, boundary: Tensor | None, cache: StageCache | None = None) -> Tensor:
        """The last stage's scores (t, v); with a cache as in `forward`."""
        return wide(F.linear(self._final(ids, boundary, cache), self._head_weight()))

    def loss(self, ids: Tensor, targets: Tensor, boundary: Tensor | None) -> Tensor:
        """Mean cross-entropy over the microbatch's tokens; targets is (s, n)."""
        return head_loss(self._final(ids, boundary), self._head_weight(), targets.reshape(-1))

    def _final(self, ids: Tensor, boundary: Tensor | None, cache: StageCache | None = None) -> Tensor:
        """What the head multiplies, (t, d)."""
        stream, read = self._enter(ids, boundary)
        constrained = [layer for layer in self.plan.layers if not self.plan.is_tail(layer)]
        stream = self._run(stream, read, constrained, ids.shape, cache)
        h = read(stream)  # (t, d): out of the subspace
        self.exit_state = h if torch.is_grad_enabled() else None
        tail = [layer for layer in self.plan.layers if self.plan.is_tail(layer)]
        h = self._run(h, _as_it_is, tail, ids.shape, cache)
        normed: Tensor = self.final_norm(h)
        return normed

    def _run(
        self, stream: Tensor, read: Read, layers: list[int] | range, shape: torch.Size, cache: StageCache | None = None
    ) -> Tensor:
        rotary = self._rotary_for(shape[1], stream, cache)
        for layer in layers:
            block = self.layers[str(layer)]
            if self.recomputes and torch.is_grad_enabled():
                assert cache is None, "decoding needs no gradients"
                stream = checkpoint(
                    block, stream, read, rotary, shape[0], use_reentrant=False, preserve_rng_state=False
                )
            else:
                stream = block(stream, read, rotary, shape[0], cache.layer(layer) if cache is not None else None)
        return stream

    def _enter(self, ids: Tensor, boundary: Tensor | None) -> tuple[Tensor, Read]:
        """The stream (t, w) at the stage's first layer, and how blocks read it."""
        if self.kind == "dense":
            return (self.embedding(ids.reshape(-1)) if boundary is None else boundary.flatten(0, 1)), _as_it_is
        assert self.table is not None
        anchor = self.table.rows(ids.reshape(-1))  # (t, d)
        if self.kind == "learned":
            if boundary is None:
                return self.embedding(ids.reshape(-1)) + anchor, _as_it_is
            decode = self._learned(self.plan.index - 1).decoded
            return decode(ids.reshape(-1), boundary.flatten(0, 1), anchor), _as_it_is
        assert self.basis is not None
        up = self.basis.t()  # (k, d)
        if self.kind == "subspace":
            stream = self.embedding(ids.reshape(-1)) if boundary is None else boundary.flatten(0, 1)  # (t, k)
            return stream, lambda c: torch.addmm(anchor, c, up)
        if boundary is None:
            return self.embedding(ids.reshape(-1)) + anchor, _as_it_is
        return torch.addmm(anchor, boundary.flatten(0, 1), up), _as_it_is  # (t, d)

    def _leave(self, ids: Tensor, stream: Tensor) -> Tensor:
        if self.kind in ("dense", "subspace"):
            return stream
        assert self.table is not None
        if self.kind == "learned":
            above_table = stream - self.table.rows(ids.reshape(-1))
            coordinates: Tensor = self._learned(self.plan.index).encoder(above_table)  # (t, k)
            return coordinates.to(stream.dtype)
        assert self.basis is not None
        return (stream - self.table.rows(ids.reshape(-1))) @ self.basis  # (t, k)

    def _head_weight(self) -> Tensor:
        """(v, d); of a tied head, made of the embedding."""
        if not self.model.tie_embeddings:
            weight: Tensor = self.head.weight
            return weight
        if self.kind == "dense":
            return self.embedding.weight
        assert self.table is not None
        table, trained = self.table.whole(), self.embedding.weight
        if self.kind == "subspace":
            assert self.basis is not None
            return torch.addmm(table, trained.to(table.dtype), self.basis.t()).to(trained.dtype)
        return (trained + table).to(trained.dtype)

    def _learned(self, boundary: int) -> LearnedBoundary:
        found = self.boundaries[str(boundary)]
        assert isinstance(found, LearnedBoundary)
        return found

    def _rotary_for(self, num_positions: int, like: Tensor, cache: StageCache | None) -> tuple[Tensor, Tensor]:
        first = cache.num_positions if cache is not None else 0
        length = num_positions if cache is None else max(first + num_positions, self.model.sequence_length)
        if length not in self._rotary:
            self._rotary = {length: rotary_table(self.model, length, like.device, like.dtype)}
        cos, sin = self._rotary[length]
        return cos[first : first + num_positions], sin[first : first + num_positions]


def _as_it_is(stream: Tensor) -> Tensor:
    return stream
