"""A LLaMA written a second time, from its definition, sharing no code with swarmtrain: the oracle of the model.

Slow and explicit on purpose: one sequence and one head at a time, rotary positions as complex numbers, attention as a
softmax over a list of earlier positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmtrain.run.manifest import ModelSection


def plain_logits(weights: dict[str, Tensor], ids: Tensor, shape: ModelSection) -> Tensor:
    """Scores (s, n, v) of a dense LLaMA with these weights: `embedding.weight` (v, d), all writers (d, in)."""
    return torch.stack([_one_sequence(weights, row, shape) for row in ids])


def plain_loss(weights: dict[str, Tensor], tokens: Tensor, shape: ModelSection) -> Tensor:
    """Mean of -log p(next token)."""
    logits = plain_logits(weights, tokens[:, :-1], shape)
    chosen = logits.gather(-1, tokens[:, 1:, None])[..., 0]  # (s, n)
    return (logits.exp().sum(-1).log() - chosen).mean()


def _one_sequence(weights: dict[str, Tensor], ids: Tensor, shape: ModelSection) -> Tensor:
    h = weights["embedding.weight"][ids]  # (n, d)
    for layer in range(shape.num_layers):
        own = {name.split(f"layers.{layer}.")[1]: w for name, w in weights.items() if f"layers.{layer}." in name}
        h = h + _attention(own, _norm(h, own["attention_norm.weight"], shape), shape) @ own["attention.output.weight"].T
        x = _norm(h, own["mlp_norm.weight"], shape)
        gate = x @ own["mlp.gate.weight"].T
        h = h + (gate / (1.0 + torch.exp(-gate)) * (x @ own["mlp.up.weight"].T)) @ own["mlp.down.weight"].T
    head = weights.get("head.weight", weights["embedding.weight"])
    return _norm(h, weights["final_norm.weight"], shape) @ head.T


def _norm(x: Tensor, gain: Tensor, shape: ModelSection) -> Tensor:
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + shape.norm_epsilon)


def _attention(own: dict[str, Tensor], x: Tensor, shape: ModelSection) -> Tensor:
    width = shape.hidden_size // shape.num_heads
    sharing = shape.num_heads // shape.num_kv_heads
    heads = []
    for head in range(shape.num_heads):
        query_rows = slice(head * width, (head + 1) * width)
        shared_rows = slice(head // sharing * width, (head // sharing + 1) * width)
        q = _turned(x @ own["attention.query.weight"][query_rows].T, shape)  # (n, e)
        k = _turned(x @ own["attention.key.weight"][shared_rows].T, shape)
        v = x @ own["attention.value.weight"][shared_rows].T
        rows = []
        for position in range(len(x)):
            scores = torch.exp(k[: position + 1] @ q[position] / width**0.5)
            rows.append((scores / scores.sum()) @ v[: position + 1])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1)  # (n, d)


def _turned(x: Tensor, shape: ModelSection) -> Tensor:
    half = x.shape[-1] // 2
    speeds = torch.tensor([shape.rope_theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * speeds  # (n, e/2)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)
