"""The transformer block, LLaMA style: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no biases.

Legend of shape comments: t = sequences x positions (tokens of the microbatch, flattened), s = sequences,
n = positions, d = hidden size, k = boundary width, w = width of the stream (k inside the subspace, else d),
q / g = query / key-value heads, e = head width, f = MLP width, v = vocabulary.

A block reads the stream through `read` (the hidden state h in R^d) and writes by adding (., w) to it. In the subspace
kind the writers have k output columns, so the sum stays in coordinates: no norm, gain, bias or dropout may follow them.

The type of a weight is that of its product. With weights in bf16 (`model.precision`), factors are rounded to it; the
stream, norms and rotations stay in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmtrain.model.cache import LayerCache
from swarmtrain.run.manifest import ModelSection

Read = Callable[[Tensor], Tensor]
Rotary = tuple[Tensor, Tensor]


class Matrix(nn.Module):
    """A bias-free linear map whose weight (out, in) is filled in by the stage."""

    def __init__(self, out_size: int, in_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T, in the weight's type."""
        return F.linear(x.to(self.weight.dtype), self.weight)

    def added_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """stream + x @ weight.T, in the stream's type; in one pass if the weight has that type too."""
        if self.weight.dtype == stream.dtype:
            return torch.addmm(stream, x, self.weight.t())
        found: Tensor = stream + self(x)
        return found


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x scaled to unit mean square, times the gain: computed in the type of x, rounded to that of the gain."""
        normed = F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.epsilon)
        return normed.to(self.weight.dtype)


def rotary_table(model: ModelSection, num_positions: int, device: torch.device, dtype: torch.dtype) -> Rotary:
    """cos and sin of the rotary angles, (n, e); computed in fp64, rounded once."""
    width = model.hidden_size // model.num_heads
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), model.rope_theta**-exponents)  # (n, e/2)
    angles = torch.cat([angles, angles], dim=-1)  # (n, e)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn (s, heads, n, e) by its position; the two halves of e are the pairs, as in LLaMA checkpoints."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; `output` writes into the stream."""

    def __init__(self, model: ModelSection, stream_width: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = model.num_heads, model.num_kv_heads
        self.width = model.hidden_size // model.num_heads
        kv_size = self.num_kv_heads * self.width
        self.query = Matrix(model.hidden_size, model.hidden_size)
        self.key = Matrix(kv_size, model.hidden_size)
        self.value = Matrix(kv_size, model.hidden_size)
        self.output = Matrix(stream_width, model.hidden_size)

    def forward(
        self, stream: Tensor, x: Tensor, rotary: Rotary, num_sequences: int, cache: LayerCache | None = None
    ) -> Tensor:
        """stream + attention(x); x is (t, d), with a cache only the new positions."""
        q = rotate(self._heads(self.query(x), self.num_heads, num_sequences), rotary)  # (s, q, n, e)
        k = rotate(self._heads(self.key(x), self.num_kv_heads, num_sequences), rotary)  # (s, g, n, e)
        v = self._heads(self.value(x), self.num_kv_heads, num_sequences)  # (s, g, n, e)
        if cache is not None:
            k, v = cache.extend(k, v)
        if self.num_kv_heads != self.num_heads:
            k, v = self._repeat(k), self._repeat(v)  # (s, q, n, e)
        # A single new position sees all of the cached ones.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])
        return self.output.added_to(stream, y.transpose(1, 2).reshape(x.shape))

    def _heads(self, x: Tensor, num_heads: int, num_sequences: int) -> Tensor:
        return x.view(num_sequences, -1, num_heads, self.width).transpose(1, 2)

    def _repeat(self, x: Tensor) -> Tensor:
        s, g, n, e = x.shape
        return x[:, :, None].expand(s, g, self.num_heads // g, n, e).reshape(s, self.num_heads, n, e)


class MLP(nn.Module):
    """SwiGLU; `down` writes into the stream."""

    def __init__(self, model: ModelSection, stream_width: int) -> None:
        super().__init__()
        self.gate = Matrix(model.ffn_size, model.hidden_size)
        self.up = Matrix(model.ffn_size, model.hidden_size)
        self.down = Matrix(stream_width, model.ffn_size)

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        """stream + mlp(x); x is (t, d)."""
        return self.down.added_to(stream, F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and MLP on a stream of width w."""

    def __init__(self, model: ModelSection, stream_width: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_epsilon)
        self.attention = Attention(model, stream_width)
        self.mlp_norm = RMSNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = MLP(model, stream_width)

    def forward(
        self, stream: Tensor, read: Read, rotary: Rotary, num_sequences: int, cache: LayerCache | None = None
    ) -> Tensor:
        """The stream (t, w) after this block."""
        stream = self.attention(stream, self.attention_norm(read(stream)), rotary, num_sequences, cache)
        result: Tensor = self.mlp(stream, self.mlp_norm(read(stream)))
        return result
