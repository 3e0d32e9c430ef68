"""The constrained model is a plain LLaMA with W_o = U Z, W_down = U Z, embedding = E Uᵀ + T; its two forms agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarmtrain.model.layout import Role
from swarmtrain.model.subspace import projected

from .chains import Chain, relative, some_tokens, tiny
from .plain_llama import plain_logits, plain_loss

SMALL = ("model.num_layers=4",)


def plain_weights(chain: Chain) -> dict[str, Tensor]:
    """The dense LLaMA that a chain stands for, as leaves that collect gradients."""
    state = chain.workers[0].state
    weights: dict[str, Tensor] = {}
    for name, value in chain.parameters().items():
        role = chain.roles()[name]
        if role is Role.FACTOR:
            assert state.basis is not None
            value = state.basis @ value  # (d, in)
        if role is Role.FACTOR_ROWS:
            assert state.basis is not None
            value = value @ state.basis.T  # (v, d)
        if role in (Role.FACTOR_ROWS, Role.ROWS_IN_S):
            assert state.module.table is not None
            value = value + state.module.table.whole()
        weights[name] = value.detach().clone().requires_grad_(True)
    return weights


def seen_through_basis(role: Role, gradient: Tensor, basis: Tensor | None) -> Tensor:
    """The chain rule: what a dense weight's gradient means for the tensor that the chain holds."""
    if role is Role.FACTOR:
        assert basis is not None
        return basis.T @ gradient  # (k, in)
    if role is Role.FACTOR_ROWS:
        assert basis is not None
        return gradient @ basis  # (v, k)
    return gradient if basis is None else projected(role, gradient, basis)


def logits(chain: Chain, tokens: Tensor) -> Tensor:
    boundary = None
    with torch.no_grad():
        for worker in chain.workers[:-1]:
            boundary = worker.evaluate(tokens, boundary)
        return chain.workers[-1].state.module.logits(tokens[:, :-1], boundary)  # (t, v)


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
@pytest.mark.parametrize("tie", ["true", "false"])
@pytest.mark.parametrize(("k", "table"), [(16, "normal"), (4, "normal"), (4, "signs")])
def test_stages_compute_a_plain_llama(kind: str, tie: str, k: int, table: str) -> None:
    """k = d is the dense model itself; k < d the dense model with these weights. Logits and gradients are equal."""
    overrides = (f"boundary.kind={kind}", f"model.tie_embeddings={tie}", f"boundary.k={k}", f"boundary.table={table}")
    chain = Chain(tiny(*SMALL, *overrides))
    chain.step(some_tokens(chain.manifest, 1))  # gains are no longer ones
    tokens, shape = some_tokens(chain.manifest), chain.manifest.model
    weights = plain_weights(chain)
    assert relative(logits(chain, tokens), plain_logits(weights, tokens[:, :-1], shape).detach().flatten(0, 1)) < 1e-12
    loss = plain_loss(weights, tokens, shape)
    assert abs(chain.loss(tokens) - loss.item()) < 1e-12
    expected = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    basis = chain.workers[0].state.basis
    for name, found in chain.gradients(tokens, project=True).items():
        assert relative(found, seen_through_basis(chain.roles()[name], expected[name], basis)) < 1e-10, name


def test_a_full_basis_constrains_nothing() -> None:
    """k = d: the projected form's raw gradient is already its projection, and a dense chain computes the same."""
    chain = Chain(tiny(*SMALL, "boundary.kind=projected", "boundary.k=16", "boundary.tail_layers=0"))
    dense = Chain(tiny(*SMALL, "boundary.kind=dense"))
    weights = plain_weights(chain)
    for worker in dense.workers:
        for slot in worker.state.slots:
            worker.state.view(slot.spec.name).copy_(weights[slot.spec.name].detach())
    tokens = some_tokens(chain.manifest)
    assert abs(chain.loss(tokens) - dense.loss(tokens)) < 1e-12
    ours, theirs = chain.gradients(tokens), dense.gradients(tokens)
    assert max(relative(ours[name], theirs[name]) for name in theirs) < 1e-10


def test_oracle_notices_a_changed_weight() -> None:
    """The comparison above can fail: a thousandth of one weight shows."""
    chain = Chain(tiny(*SMALL))
    tokens, weights = some_tokens(chain.manifest), plain_weights(chain)
    with torch.no_grad():
        weights["layers.1.attention.key.weight"][0, 0] += 1e-3
    assert abs(chain.loss(tokens) - plain_loss(weights, tokens, chain.manifest.model).item()) > 1e-9


@pytest.mark.parametrize("tie", ["true", "false"])
@pytest.mark.parametrize("stages", [1, 4])
def test_the_two_constrained_forms_agree(tie: str, stages: int) -> None:
    overrides = (f"model.tie_embeddings={tie}", f"stages.count={stages}")
    factored = Chain(tiny(*overrides, "boundary.kind=subspace"))
    dense = Chain(tiny(*overrides, "boundary.kind=projected"))
    tokens = some_tokens(factored.manifest)
    assert abs(factored.loss(tokens) - dense.loss(tokens)) < 1e-12
    basis, roles = factored.workers[0].state.basis, factored.roles()
    ours, theirs = factored.gradients(tokens), dense.gradients(tokens)
    for name, gradient in ours.items():
        assert relative(gradient, seen_through_basis(roles[name], theirs[name], basis)) < 1e-10, name


def test_raw_gradients_of_the_projected_form_do_differ() -> None:
    """Outside S they are large and depend on the split: only their part in S is a fact about the model."""
    split, whole = Chain(tiny("boundary.kind=projected")), Chain(tiny("boundary.kind=projected", "stages.count=1"))
    tokens = some_tokens(split.manifest)
    raw, other = split.gradients(tokens), whole.gradients(tokens)
    in_s = whole.gradients(tokens, project=True)
    constrained = [name for name, role in whole.roles().items() if role is Role.COLUMNS_IN_S]
    assert len(constrained) == 14
    for name in constrained:
        assert relative(in_s[name], other[name]) > 0.1, name
    lower_stages = [name for name in constrained if int(name.split(".")[1]) < 6]
    assert min(relative(raw[name], other[name]) for name in lower_stages) > 0.1


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_sharing_key_and_value_heads_is_exact_for_every_group_size(kind: str) -> None:
    for shared in (1, 2, 4):
        chain = Chain(tiny(*SMALL, f"boundary.kind={kind}", f"model.num_kv_heads={shared}"))
        tokens = some_tokens(chain.manifest)
        weights = plain_weights(chain)
        assert abs(chain.loss(tokens) - plain_loss(weights, tokens, chain.manifest.model).item()) < 1e-12
