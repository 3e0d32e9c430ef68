"""Computing layers again in backward: the same bits, and the memory that is told in advance."""

from __future__ import annotations

import pytest
import torch
from needs import needs_bf16

from swarmtrain.model.activations import activations
from swarmtrain.model.layout import plan_stages
from swarmtrain.run.presets import preset

from .chains import Chain, some_tokens, tiny
from .fakes import counted

KINDS = ("subspace", "projected", "dense", "learned")
IN_BF16 = [pytest.param(kind, "bf16", marks=needs_bf16()) for kind in KINDS if kind != "projected"]


@pytest.mark.parametrize(("kind", "precision"), [*((kind, "fp32") for kind in KINDS), *IN_BF16])
@pytest.mark.parametrize("extra", [(), ("model.tie_embeddings=true",), ("boundary.tail_layers=2", "stages.count=2")])
def test_layers_that_are_computed_again_give_the_same_bits(kind: str, precision: str, extra: tuple[str, ...]) -> None:
    chain = Chain(tiny(f"boundary.kind={kind}", f"model.precision={precision}", *extra), torch.float32)
    tokens = some_tokens(chain.manifest)
    loss, gradients = chain.loss(tokens), chain.gradients(tokens)
    computed = []
    for worker in chain.workers:
        worker.state.module.recomputes = True
        for block in worker.state.module.layers.values():
            block.register_forward_pre_hook(lambda *_: computed.append(1))
    assert chain.loss(tokens) == loss
    computed.clear()
    again = chain.gradients(tokens)
    assert len(computed) == 2 * chain.manifest.model.num_layers
    assert gradients.keys() == again.keys()
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


def test_the_gradient_that_moves_the_subspace_is_the_same() -> None:
    chain = Chain(tiny("boundary.track_every=2"), torch.float32)
    worker, tokens = chain.workers[-1], some_tokens(chain.manifest)
    received = chain.forward(tokens)[-2].result
    found = []
    for recomputes in (False, True):
        worker.state.module.recomputes = recomputes
        found.append(worker.backward(worker.forward(tokens, received), None).own[-1])
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ["nano", "micro", "llama-125m", "llama-1b", "llama-8b"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_microbatch_holds_what_is_told_in_advance(name: str, kind: str, recomputes: bool) -> None:
    """At true size, within a tenth."""
    in_fp32 = ["model.precision=fp32"] if kind == "projected" else []
    manifest = preset(name, [f"boundary.kind={kind}", *in_fp32])
    plans = plan_stages(manifest)
    for plan in (plans[0], plans[1], plans[-1]):
        kept, peak = counted(manifest, plan.index, recomputes=recomputes)
        told = activations(manifest, plan, recomputes=recomputes)
        assert 0.9 * peak < told.peak_bytes < 1.1 * peak
        if not plan.is_last:  # there backward follows at once
            assert 0.9 * kept < told.kept_bytes < 1.1 * kept


def test_a_tied_head_is_counted() -> None:
    manifest = preset("llama-1b", ["model.tie_embeddings=true"])
    plan = plan_stages(manifest)[-1]
    _, peak = counted(manifest, plan.index, recomputes=False)
    assert 0.9 * peak < activations(manifest, plan, recomputes=False).peak_bytes < 1.1 * peak


def test_a_stage_of_many_layers_keeps_little_when_it_computes_again() -> None:
    manifest = preset("llama-1b", ["stages.count=2"])
    plan = plan_stages(manifest)[0]
    whole, layered = (activations(manifest, plan, recomputes=recomputes) for recomputes in (False, True))
    assert layered.kept_bytes < whole.kept_bytes / 100
    assert layered.peak_bytes < whole.peak_bytes / 2
