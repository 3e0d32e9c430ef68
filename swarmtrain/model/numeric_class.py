"""The numeric class of a machine: machines with the same one compute the same bits.

Matrix products, exponentials and square roots round differently on other processors, with other libraries or another
number of threads. A machine computes a known answer with the run's own shapes and in its own precision, forward and
backward; its digest, with the library's version, is the class. Bits are compared within a class only.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from swarmtrain.model.buffers import as_bytes
from swarmtrain.run.manifest import Manifest

MAX_TOKENS = 256  # enough for a kernel to choose its blocks as it does for a microbatch


def numeric_class(manifest: Manifest, device: torch.device | str = "cpu") -> str:
    """Of this process as it is set up now. Costs about one layer's pass."""
    model, dtype = manifest.model, torch.bfloat16 if manifest.is_rounded else torch.float32  # of products
    num_tokens = min(MAX_TOKENS, model.sequence_length * manifest.batch.sequences_per_microbatch)
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_(True)

    hidden = drawn(num_tokens, model.hidden_size)
    up, down = drawn(model.hidden_size, manifest.ffn_size), drawn(manifest.ffn_size, model.hidden_size)
    normed = hidden * torch.rsqrt(hidden.square().mean(dim=1, keepdim=True) + 1e-5)  # (t, d)
    factor = normed.to(dtype)
    inner = (torch.nn.functional.silu(factor @ up.to(dtype)) @ down.to(dtype)).float()  # (t, d)
    heads = factor.view(num_tokens, model.num_heads, -1).transpose(0, 1)[None]  # (1, q, t, e)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    inner = inner + attended[0].transpose(0, 1).reshape(inner.shape)  # (t, d)
    scores = torch.softmax(inner @ hidden.t() / model.hidden_size, dim=1)  # (t, t)
    targets = torch.arange(num_tokens, device=device) % model.hidden_size
    answer = torch.nn.functional.cross_entropy(scores @ inner, targets)
    found = [answer, inner, *torch.autograd.grad(answer, [hidden, up, down])]
    digest = hashlib.sha256(f"{torch.__version__} {torch.device(device).type}".encode())
    for tensor in found:
        digest.update(as_bytes(tensor.detach().to("cpu").reshape(-1)))
    return digest.hexdigest()[:16]
