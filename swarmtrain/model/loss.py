"""Mean cross-entropy of the head in chunks of tokens: the scores of all tokens are never there at once.

With gradients wanted, a chunk's are made while its scores are there. So what waits for the backward is the gradient of
the hidden states and that of the head's weight, and nothing of size tokens x vocabulary.

With factors in bf16, scores are widened to fp32 before the softmax. Their gradient is rounded to bf16 for its two
products, and the products of chunks are added in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 1 << 27  # of fp32 scores; a chunk holds them twice
_PRODUCT_ROWS = 1 << 13  # of the head's gradient


def chunk_rows(vocab_size: int) -> int:
    """Tokens of one chunk. The vocabulary alone decides: the order of sums is the same in every precision."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


def wide(tensor: Tensor) -> Tensor:
    """In fp32, if it is narrower."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def head_loss(h: Tensor, weight: Tensor, targets: Tensor, rows: int | None = None) -> Tensor:
    """Mean cross-entropy of h @ weight.T against targets: h is (t, d), weight (v, d), targets (t,)."""
    rows = chunk_rows(weight.shape[0]) if rows is None else rows
    if torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad):
        found: Tensor = _HeadLoss.apply(h, weight, targets, rows)  # type: ignore[no-untyped-call]
        return found
    return _run(h, weight, targets, rows, None)


class _Found:
    """The gradients of the mean loss."""

    def __init__(self, h: Tensor, weight: Tensor) -> None:
        self.h = torch.empty_like(h)  # (t, d)
        self.weight = torch.zeros_like(weight, dtype=wide(weight[:0]).dtype)  # (v, d)


class _HeadLoss(torch.autograd.Function):
    """Forward computes the gradients too; backward hands them out, once."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        ctx.found = _Found(h, weight)
        return _run(h, weight, targets, rows, ctx.found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        found, ctx.found = ctx.found, None
        assert found is not None, "the gradients of a loss can be had once"
        return found.h.mul_(gradient), found.weight.mul_(gradient).to(found.h.dtype), None, None


def _run(h: Tensor, weight: Tensor, targets: Tensor, rows: int, found: _Found | None) -> Tensor:
    total = torch.zeros((), dtype=wide(h[:0]).dtype, device=h.device)
    for start in range(0, h.shape[0], rows):
        total += _chunk(h, weight, targets, slice(start, start + rows), found)
    return total / h.shape[0]


def _chunk(h: Tensor, weight: Tensor, targets: Tensor, span: slice, found: _Found | None) -> Tensor:
    """The summed loss of a chunk's tokens. Its scores are gone when it returns."""
    chunk, target = h[span], targets[span]
    scores = F.log_softmax(wide(F.linear(chunk, weight)), dim=-1)  # (rows, v)
    loss = F.nll_loss(scores, target, reduction="sum")
    if found is not None:
        scores.exp_().mul_(1.0 / h.shape[0])
        scores.scatter_add_(1, target[:, None], scores.new_full((len(target), 1), -1.0 / h.shape[0]))
        gradient = scores.to(weight.dtype)
        torch.mm(gradient, weight, out=found.h[span])
        _add_product(found.weight, gradient, chunk)
    return loss


def _add_product(total: Tensor, gradient: Tensor, chunk: Tensor) -> None:
    """total (v, d) += gradient.T @ chunk."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), chunk)
        return
    for start in range(0, len(total), _PRODUCT_ROWS):  # a narrow product has to be there before it is added
        span = slice(start, start + _PRODUCT_ROWS)
        total[span] += gradient[:, span].t() @ chunk
