"""The rules that keep a boundary lossless. Each is broken on purpose, and the check that the right model passes fails.

The breaks are done to the projected form, whose stream is the d-wide hidden state: there a broken rule is possible at
all. In the subspace form the stream *is* k coordinates, so only a stage with another U or T can break it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmtrain.model.blocks import Matrix
from swarmtrain.model.initial import draw_normal
from swarmtrain.model.stage import Stage
from swarmtrain.model.subspace import first_basis
from swarmtrain.model.table import NormalTable

from .chains import Chain, boundary_errors, exactness, relative, some_tokens, tiny

D, K = 16, 4
INNER = 2  # a layer in the middle of the pipeline that is not the last of its stage


def noise(name: str, *shape: int) -> Tensor:
    return draw_normal(5, name, shape).double()


def writers(chain: Chain, layer: int) -> list[Matrix]:
    """The two matrices of a layer that write into the stream."""
    for worker in chain.workers:
        if layer in worker.state.plan.layers:
            block = worker.state.module.layers[str(layer)]
            return [block.get_submodule("attention.output"), block.get_submodule("mlp.down")]  # type: ignore[list-item]
    raise AssertionError(layer)


def after_writer(chain: Chain, change: Callable[[Tensor], Tensor]) -> None:
    """Let both writers of an inner layer add change(x Wᵀ) instead of x Wᵀ."""
    for writer in writers(chain, INNER):
        weight = writer.weight

        def added_to(stream: Tensor, x: Tensor, weight: nn.Parameter = weight) -> Tensor:
            return stream + change(F.linear(x, weight))

        writer.added_to = added_to  # type: ignore[method-assign]


def after_embedding(chain: Chain, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let the first stage start from change(h, ids) instead of h."""
    module = chain.workers[0].state.module
    original = module._enter

    def enter(ids: Tensor, boundary: Tensor | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        stream, read = original(ids, boundary)
        return change(stream, ids), read

    module._enter = enter  # type: ignore[method-assign]


def gain_after_writer(chain: Chain) -> None:
    gain = 1.0 + 0.3 * noise("gain", D)
    after_writer(chain, lambda y: y * gain)


def bias_after_writer(chain: Chain) -> None:
    bias = 0.1 * noise("bias", D)
    after_writer(chain, lambda y: y + bias)


def dropout_after_writer(chain: Chain) -> None:
    kept = (noise("mask", D) > -0.5).double()
    after_writer(chain, lambda y: y * kept)


def mean_taken_out_after_writer(chain: Chain) -> None:
    """The half of a LayerNorm that an RMSNorm lacks."""
    after_writer(chain, lambda y: y - y.mean(-1, keepdim=True))


def norm_after_embedding(chain: Chain) -> None:
    after_embedding(chain, lambda h, ids: F.rms_norm(h, (D,)))


def learned_positions(chain: Chain) -> None:
    positions = 0.1 * noise("positions", 6, D)
    after_embedding(chain, lambda h, ids: h + positions.repeat(ids.shape[0], 1))


def unconstrained_inner_layer(chain: Chain) -> None:
    with torch.no_grad():
        writers(chain, INNER)[1].weight.copy_(0.1 * noise("free", D, 24))


BROKEN_MODELS = [
    gain_after_writer,
    bias_after_writer,
    dropout_after_writer,
    mean_taken_out_after_writer,
    norm_after_embedding,
    learned_positions,
    unconstrained_inner_layer,
]


def pair() -> tuple[Chain, Chain]:
    manifest = "boundary.kind=projected"
    return Chain(tiny(manifest)), Chain(tiny(manifest, "stages.count=1"))


@pytest.mark.parametrize("break_rule", BROKEN_MODELS, ids=lambda rule: rule.__name__)
def test_a_model_that_breaks_a_rule_is_not_exact(break_rule: Callable[[Chain], None]) -> None:
    """The same broken model, split and whole: what was lost at the boundaries makes them two models."""
    split, whole = pair()
    tokens = some_tokens(split.manifest)
    assert exactness(split, whole, tokens).holds()
    break_rule(split)
    break_rule(whole)
    found = exactness(split, whole, tokens)
    assert found.reconstruction > 1e-3, found
    assert found.loss > 1e-6, found
    assert found.gradient > 1e-3, found


@pytest.mark.parametrize("break_rule", BROKEN_MODELS, ids=lambda rule: rule.__name__)
def test_a_broken_rule_matters_only_where_something_crosses(break_rule: Callable[[Chain], None]) -> None:
    """The control of the control: one stage and one stage, equally broken, are equal."""
    first, second = (Chain(tiny("boundary.kind=projected", "stages.count=1")) for _ in range(2))
    break_rule(first)
    break_rule(second)
    assert exactness(first, second, some_tokens(first.manifest)).holds()


def gain_free_norm(chain: Chain) -> None:
    """A scalar per token keeps S."""
    after_writer(chain, lambda y: F.rms_norm(y, (D,)))


def bias_in_subspace(chain: Chain) -> None:
    basis = chain.workers[0].state.basis
    assert basis is not None
    bias = basis @ (0.1 * noise("bias", K))
    after_writer(chain, lambda y: y + bias)


@pytest.mark.parametrize("change", [gain_free_norm, bias_in_subspace], ids=lambda rule: rule.__name__)
def test_changes_that_keep_the_subspace_are_exact(change: Callable[[Chain], None]) -> None:
    """The rules are no stricter than they need to be."""
    split, whole = pair()
    change(split)
    change(whole)
    assert exactness(split, whole, some_tokens(split.manifest)).holds()


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_another_token_table_on_one_stage_is_not_exact(kind: str) -> None:
    split, whole = (Chain(tiny(f"boundary.kind={kind}", f"stages.count={count}")) for count in (4, 1))
    tokens = some_tokens(split.manifest)
    table = split.workers[2].state.module.table
    assert isinstance(table, NormalTable)
    table.values[int(tokens[0, 0])] += 0.01
    found = exactness(split, whole, tokens)
    assert found.reconstruction > 1e-4, found
    assert found.loss > 1e-7, found
    assert found.gradient > 1e-4, found


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_another_basis_on_one_stage_is_not_exact(kind: str) -> None:
    split, whole = (Chain(tiny(f"boundary.kind={kind}", f"stages.count={count}")) for count in (4, 1))
    tokens = some_tokens(split.manifest)
    basis = split.workers[2].state.basis
    assert basis is not None
    basis.copy_(first_basis(tiny("run.seed=4")))
    found = exactness(split, whole, tokens)
    assert found.reconstruction > 1e-2, found
    assert found.loss > 1e-4, found
    assert found.gradient > 1e-2, found


class KnownPositions:
    """Learned positions as the rule would have them fixed: taken off before and put on after every boundary.

    The forward pass is then exact. What a boundary sends back is not: the part of their gradient outside S is lost.
    """

    def __init__(self, chain: Chain) -> None:
        self.values = (0.1 * noise("positions", 6, D)).requires_grad_(True)
        after_embedding(chain, lambda h, ids: h + self._rows(ids, self.values))
        for worker in chain.workers:
            if not worker.state.plan.is_last:
                self._take_off(worker.state.module)
            if not worker.state.plan.is_first:
                self._put_on(worker.state.module)

    def _rows(self, ids: Tensor, values: Tensor) -> Tensor:
        return values.repeat(ids.shape[0], 1)  # (t, d)

    def _take_off(self, module: Stage) -> None:
        leave = module._leave
        module._leave = lambda ids, stream: leave(ids, stream - self._rows(ids, self.values.detach()))  # type: ignore[method-assign]

    def _put_on(self, module: Stage) -> None:
        enter = module._enter

        def with_positions(ids: Tensor, boundary: Tensor | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            stream, read = enter(ids, boundary)
            return stream + self._rows(ids, self.values.detach()), read

        module._enter = with_positions  # type: ignore[method-assign]

    def gradient(self, chain: Chain, tokens: Tensor) -> Tensor:
        passes = chain.forward(tokens)
        received = chain.backward(passes)[1].boundary if len(passes) > 1 else None
        fresh = chain.workers[0].forward(tokens, None)
        return torch.autograd.grad(fresh.output, self.values, received)[0]  # (n, d)


def test_learned_positions_lose_their_gradient_outside_the_subspace() -> None:
    split, whole = pair()
    tokens = some_tokens(split.manifest)
    in_split, in_whole = KnownPositions(split), KnownPositions(whole)
    assert max(boundary_errors(split, tokens)) < 1e-12
    assert abs(split.loss(tokens) - whole.loss(tokens)) < 1e-12
    ours, theirs = in_split.gradient(split, tokens), in_whole.gradient(whole, tokens)
    basis = split.workers[0].state.basis
    assert basis is not None
    assert relative(ours @ basis, theirs @ basis) < 1e-10
    assert relative(ours, theirs) > 0.1
