"""The loss in chunks of tokens is the plain cross-entropy, and holds the scores of one chunk at most."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmtrain.model import loss as module
from swarmtrain.model.loss import CHUNK_BYTES, chunk_rows, head_loss
from swarmtrain.model.tracing import peak_bytes
from swarmtrain.run.presets import preset

from .chains import Chain, relative, some_tokens, tiny

T, D, V = 37, 12, 50


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(T, D, generator=generator).to(dtype).requires_grad_(True)
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_(True)
    return h, weight, torch.randint(0, V, (T,), generator=generator)


def plain(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(h @ weight.t(), targets)


@pytest.mark.parametrize("rows", [1, 5, 36, 37, 100])
def test_chunks_change_neither_loss_nor_gradient(rows: int) -> None:
    h, weight, targets = example(torch.float64)
    ours, theirs = head_loss(h, weight, targets, rows), plain(h, weight, targets)
    assert abs((ours - theirs).item()) < 1e-12
    outer = torch.tensor(0.7, dtype=torch.float64)  # as if something were computed from the loss
    found = torch.autograd.grad(ours, (h, weight), outer)
    for mine, other in zip(found, torch.autograd.grad(theirs, (h, weight), outer), strict=True):
        assert relative(mine, other) < 1e-10


def test_one_chunk_has_the_bits_of_the_plain_loss() -> None:
    h, weight, targets = example(torch.float32)
    assert torch.equal(head_loss(h, weight, targets, T), plain(h, weight, targets))


def test_with_and_without_gradients_the_loss_has_the_same_bits() -> None:
    h, weight, targets = example(torch.float32)
    with torch.no_grad():
        without = head_loss(h, weight, targets, 5)
    assert torch.equal(head_loss(h, weight, targets, 5).detach(), without)


def test_the_scores_of_one_chunk_are_there_at_most() -> None:
    tokens, vocab_size, d, rows = 2048, 4096, 16, 64
    h, weight = torch.randn(tokens, d, requires_grad=True), torch.randn(vocab_size, d, requires_grad=True)
    targets = torch.randint(0, vocab_size, (tokens,))
    held = peak_bytes(lambda: torch.autograd.grad(head_loss(h, weight, targets, rows), (h, weight)))
    of_a_chunk, of_gradients = 4 * rows * vocab_size, 4 * (h.numel() + weight.numel())
    assert held < 1.1 * (2 * of_a_chunk + of_gradients)
    # A control: the plain loss holds the scores of all tokens, several times.
    assert peak_bytes(lambda: torch.autograd.grad(plain(h, weight, targets), (h, weight))) > 8 * tokens * vocab_size


def test_chunks_of_the_presets_are_bounded() -> None:
    for name in ("nano", "llama-1b", "llama-8b"):
        vocab_size = preset(name).model.vocab_size
        assert CHUNK_BYTES - 4 * vocab_size < chunk_rows(vocab_size) * 4 * vocab_size <= CHUNK_BYTES
    assert chunk_rows(CHUNK_BYTES) == 1


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense", "learned"])
@pytest.mark.parametrize("tie", ["true", "false"])
def test_a_stage_in_chunks_has_the_gradients_of_one_in_a_piece(
    monkeypatch: pytest.MonkeyPatch, kind: str, tie: str
) -> None:
    chain = Chain(tiny(f"boundary.kind={kind}", f"model.tie_embeddings={tie}"))
    tokens = some_tokens(chain.manifest)
    whole_loss, whole = chain.loss(tokens), chain.gradients(tokens)
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * chain.manifest.model.vocab_size * 5)
    assert abs(chain.loss(tokens) - whole_loss) < 1e-12
    for name, gradient in chain.gradients(tokens).items():
        assert relative(gradient, whole[name]) < 1e-10
