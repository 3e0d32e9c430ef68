"""Learned boundaries: trained encoders and decoders between the stages, and the parameter-matched subspace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarmtrain.errors import ManifestError
from swarmtrain.model.layout import boundary_width, plan_stages
from swarmtrain.model.subspace import first_basis
from swarmtrain.run.manifest import parse_manifest

from .chains import TINY, Chain, exactness, relative, some_tokens, tiny

LEARNED = "boundary.kind=learned"


def in_one_graph(chain: Chain, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients with autograd running through the boundaries: nothing is cut, nothing is sent."""
    ids, boundary = tokens[:, :-1], None
    for worker in chain.workers[:-1]:
        boundary = worker.state.module(ids, boundary)
    loss = chain.workers[-1].state.module.loss(ids, tokens[:, 1:], boundary)
    named = [(name, value) for worker in chain.workers for name, value in worker.state.module.named_parameters()]
    found = torch.autograd.grad(loss, [value for _, value in named])
    total: dict[str, Tensor] = {}
    for (name, _), gradient in zip(named, found, strict=True):
        total[name] = total[name] + gradient if name in total else gradient
    return float(loss.detach()), total


@pytest.mark.parametrize("tie", ["true", "false"])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_chain_computes_what_one_graph_computes(tie: str, stages: int) -> None:
    chain = Chain(tiny(LEARNED, f"model.tie_embeddings={tie}", f"stages.count={stages}"))
    chain.step(some_tokens(chain.manifest, 1))  # so that the anchors are not zero any more
    tokens = some_tokens(chain.manifest, 2)
    loss, expected = in_one_graph(chain, tokens)
    assert abs(chain.loss(tokens) - loss) < 1e-12
    found = chain.gradients(tokens)
    assert found.keys() == expected.keys()
    assert max(relative(found[name], expected[name]) for name in found) < 1e-10


def test_every_part_of_a_boundary_is_trained() -> None:
    chain = Chain(tiny(LEARNED))
    before = {name: value.clone() for name, value in chain.parameters().items() if name.startswith("boundaries.")}
    assert len(before) == 3 * 4
    for step in range(2):
        chain.step(some_tokens(chain.manifest, step))
    after = chain.parameters()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_boundaries_start_as_the_run_s_subspace() -> None:
    chain = Chain(tiny(LEARNED), torch.float32)
    basis, parameters = first_basis(chain.manifest).float(), chain.parameters()
    for boundary in range(3):
        assert torch.equal(parameters[f"boundaries.{boundary}.decoder.weight"], basis)
        assert torch.equal(parameters[f"boundaries.{boundary}.encoder.weight"], basis.T)


def test_encoders_and_decoders_and_nothing_else_learn_at_a_tenth_of_the_rate() -> None:
    rates = {spec.name: spec.rate for plan in plan_stages(tiny(LEARNED)) for spec in plan.tensors}
    slow = {f"boundaries.{boundary}.{side}.weight" for boundary in range(3) for side in ("encoder", "decoder")}
    assert {name for name, rate in rates.items() if rate == 0.1} == slow
    assert {rate for name, rate in rates.items() if name not in slow} == {1.0}


def test_only_k_numbers_per_token_cross() -> None:
    chain = Chain(tiny(LEARNED))
    passes = chain.forward(some_tokens(chain.manifest))
    gradients = chain.backward(passes)
    assert boundary_width(chain.manifest) == 4
    for done, gradient in zip(passes[1:], gradients[1:], strict=True):
        assert done.boundary is not None
        assert gradient.boundary is not None
        assert done.boundary.shape == gradient.boundary.shape == (3, 6, 4)


def test_one_stage_has_no_boundary_and_nothing_to_learn_for_it() -> None:
    names = [spec.name for spec in plan_stages(tiny(LEARNED, "stages.count=1"))[0].tensors]
    assert not [name for name in names if name.startswith("boundaries.")]


@pytest.mark.parametrize("key", ["boundary.track_every=5", "boundary.match_parameters=true", "boundary.k=17"])
def test_what_a_learned_boundary_cannot_have_is_refused(key: str) -> None:
    with pytest.raises(ManifestError, match=key.split("=")[0]):
        tiny(LEARNED, key)


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("tail", [0, 1, 2])
def test_matched_parameters_are_those_of_the_dense_model_and_not_one_column_more(k: int, tail: int) -> None:
    def count(*overrides: str) -> int:
        plans = plan_stages(parse_manifest(TINY, [*overrides, f"boundary.k={k}", f"boundary.tail_layers={tail}"]))
        return sum(plan.num_parameters for plan in plans)

    manifest = tiny("boundary.match_parameters=true", f"boundary.k={k}", f"boundary.tail_layers={tail}")
    matched, dense = count("boundary.match_parameters=true"), count("boundary.kind=dense")
    one_column = count(f"model.ffn_size={manifest.ffn_size + 1}") - count(f"model.ffn_size={manifest.ffn_size}")
    assert matched <= dense < matched + one_column
    assert (manifest.ffn_size == manifest.model.ffn_size) == (k == 16)  # nothing is saved where k = d


def test_a_matched_model_is_exact_in_every_split() -> None:
    overrides = ("boundary.match_parameters=true",)
    split, whole = Chain(tiny(*overrides)), Chain(tiny(*overrides, "stages.count=1"))
    assert exactness(split, whole, some_tokens(split.manifest)).holds()
