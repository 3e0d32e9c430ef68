"""Where a model is cut changes nothing: same initial bits, same loss, same gradients."""

from __future__ import annotations

import pytest
import torch

from swarmtrain.model.initial import draw_normal
from swarmtrain.model.layout import Role, boundary_width, plan_stages

from .chains import Chain, boundary_errors, exactness, relative, some_tokens, tiny

KINDS = ("subspace", "projected", "dense")
TIES = ("true", "false")
TABLES = ("normal", "signs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_split_model_is_the_whole_model(kind: str, tie: str, table: str, stages: int) -> None:
    overrides = (f"boundary.kind={kind}", f"model.tie_embeddings={tie}", f"boundary.table={table}")
    split, whole = Chain(tiny(*overrides, f"stages.count={stages}")), Chain(tiny(*overrides, "stages.count=1"))
    found = exactness(split, whole, some_tokens(split.manifest))
    assert found.holds(), found
    assert whole.loss(some_tokens(split.manifest)) > 1.0  # the comparison is not one of zeros


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("table", TABLES)
def test_split_model_is_the_whole_model_after_training_steps(kind: str, tie: str, table: str) -> None:
    overrides = (f"boundary.kind={kind}", f"model.tie_embeddings={tie}", f"boundary.table={table}")
    split, whole = Chain(tiny(*overrides)), Chain(tiny(*overrides, "stages.count=1"))
    for step in range(3):
        split.step(some_tokens(split.manifest, 2 * step), some_tokens(split.manifest, 2 * step + 1))
    tokens = some_tokens(split.manifest, 99)
    assert not exactness(split, whole, tokens).holds()  # training moved it
    for name, value in split.parameters().items():
        whole.workers[0].state.view(name).copy_(value)
    found = exactness(split, whole, tokens)
    assert found.holds(), found


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_uneven_splits_change_nothing(kind: str) -> None:
    whole = Chain(tiny(f"boundary.kind={kind}", "stages.count=1"))
    split = Chain(tiny(f"boundary.kind={kind}", "stages.count=3", "stages.layers=[1, 5, 2]", "boundary.tail_layers=1"))
    assert exactness(split, whole, some_tokens(split.manifest)).holds()


@pytest.mark.parametrize("tail", [0, 1, 2])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_any_number_of_tail_layers_is_exact(kind: str, table: str, tail: int) -> None:
    overrides = (f"boundary.kind={kind}", f"boundary.tail_layers={tail}", f"boundary.table={table}")
    split, whole = Chain(tiny(*overrides)), Chain(tiny(*overrides, "stages.count=1"))
    assert exactness(split, whole, some_tokens(split.manifest)).holds()
    free_writers = [
        name for name, role in whole.roles().items() if role is Role.FREE and ("output" in name or "down" in name)
    ]
    assert len(free_writers) == 2 * tail


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", TIES)
def test_initial_parameters_have_the_same_bits_in_every_split(kind: str, tie: str) -> None:
    overrides = (f"boundary.kind={kind}", f"model.tie_embeddings={tie}")
    tokens = some_tokens(tiny())
    whole = Chain(tiny(*overrides, "stages.count=1"), torch.float32)
    for stages in (2, 4, 8):
        split = Chain(tiny(*overrides, f"stages.count={stages}"), torch.float32)
        ours, theirs = split.parameters(), whole.parameters()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert abs(split.loss(tokens) - whole.loss(tokens)) < 1e-5


def test_another_seed_is_another_model() -> None:
    """So that equal bits above cannot come from constants."""
    ours, theirs = Chain(tiny()).parameters(), Chain(tiny("run.seed=4")).parameters()
    assert all(not torch.equal(ours[name], theirs[name]) for name in ours if "norm" not in name)


def test_only_the_boundary_width_crosses() -> None:
    for kind, width in (("subspace", 4), ("projected", 4), ("dense", 16)):
        chain = Chain(tiny(f"boundary.kind={kind}"))
        tokens = some_tokens(chain.manifest)
        passes = chain.forward(tokens)
        gradients = chain.backward(passes)
        assert boundary_width(chain.manifest) == width
        for done, gradient in zip(passes[1:], gradients[1:], strict=True):
            assert done.boundary is not None
            assert gradient.boundary is not None
            assert done.boundary.shape == gradient.boundary.shape == (3, 6, width)
        assert gradients[0].boundary is None


@pytest.mark.parametrize("table", TABLES)
def test_projected_boundary_loses_nothing_of_real_activations(table: str) -> None:
    chain = Chain(tiny("boundary.kind=projected", "stages.count=8", f"boundary.table={table}"))
    chain.step(some_tokens(chain.manifest, 1))
    errors = boundary_errors(chain, some_tokens(chain.manifest, 2))
    assert len(errors) == 7
    assert max(errors) < 1e-12


def test_projected_boundary_in_fp32_loses_only_rounding() -> None:
    chain = Chain(tiny("boundary.kind=projected", "stages.count=8"), torch.float32)
    assert max(boundary_errors(chain, some_tokens(chain.manifest))) < 1e-5


@pytest.mark.parametrize("table_kind", TABLES)
def test_every_token_id_finds_its_own_row_on_every_stage(table_kind: str) -> None:
    """Ids beyond 65,535 and beyond what half-precision floats can tell apart."""
    wide = ("model.hidden_size=48", "model.num_heads=4")  # 2**48 rows of signs
    manifest = tiny(
        "model.vocab_size=70001", "stages.count=2", "model.num_layers=2", f"boundary.table={table_kind}", *wide
    )
    chain = Chain(manifest, torch.float32)
    ids = torch.arange(70001).view(-1, 1)  # (s, 1)
    boundary = torch.zeros(70001, 1, 4)
    module = chain.workers[1].state.module
    stream, read = module._enter(ids, boundary)
    table = module.table
    assert table is not None
    assert torch.equal(read(stream), table.whole())
    assert len(torch.unique(table.whole(), dim=0)) == 70001


@pytest.mark.parametrize("kind", TABLES)
def test_token_table_has_full_rank(kind: str) -> None:
    table = Chain(tiny(f"boundary.table={kind}")).workers[0].state.module.table
    assert table is not None
    assert int(torch.linalg.matrix_rank(table.whole())) == 16


def test_draws_depend_on_seed_and_name_and_look_normal() -> None:
    values = draw_normal(1, "a", (400, 500))
    assert torch.equal(values, draw_normal(1, "a", (400, 500)))
    assert not torch.equal(values, draw_normal(1, "b", (400, 500)))
    assert not torch.equal(values, draw_normal(2, "a", (400, 500)))
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1.0) < 0.01
    assert abs(float((values**4).mean()) - 2.9) < 0.05
    # No trace of the chunks in which it is drawn, and neighbours are independent.
    flat = values.flatten()
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 0.01
    assert abs(float((flat[: 1 << 16] * flat[1 << 16 : 2 << 16]).mean())) < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_writers_start_with_the_spread_of_a_dense_init(kind: str) -> None:
    """Z is scaled by sqrt(d/k), so that U Z has the variance that a dense matrix would have."""
    manifest = tiny(f"boundary.kind={kind}", "model.hidden_size=64", "model.ffn_size=512", "boundary.k=8")
    chain = Chain(manifest)
    for name, fan_in in (("layers.1.attention.output.weight", 64), ("layers.1.mlp.down.weight", 512)):
        weight = chain.parameters()[name]
        basis = chain.workers[0].state.basis
        dense = basis @ weight if kind == "subspace" and basis is not None else weight
        expected = (fan_in * 2 * 8) ** -0.5
        assert float(dense.square().mean().sqrt()) == pytest.approx(expected, rel=0.15)


def test_plans_cover_every_layer_once() -> None:
    manifest = tiny("stages.count=3")
    plans = plan_stages(manifest)
    assert [layer for plan in plans for layer in plan.layers] == list(range(8))
    assert [plan.is_first for plan in plans] == [True, False, False]
    assert [plan.is_last for plan in plans] == [False, False, True]
    assert [sum(plan.is_tail(layer) for layer in plan.layers) for plan in plans] == [0, 0, 1]
    assert sum(plan.num_parameters for plan in plans) == plan_stages(tiny("stages.count=1"))[0].num_parameters


def test_first_and_last_stage_share_one_tied_tensor() -> None:
    for kind in KINDS:
        chain = Chain(tiny(f"boundary.kind={kind}", "model.tie_embeddings=true"))
        first, last = chain.workers[0].state, chain.workers[-1].state
        assert torch.equal(first.view("embedding.weight"), last.view("embedding.weight"))
        assert "head.weight" not in chain.parameters()


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_a_tied_embedding_are_needed(kind: str) -> None:
    """The sum of both sides is the whole model's gradient (above); either side alone is not."""
    overrides = (f"boundary.kind={kind}", "model.tie_embeddings=true")
    split, whole = Chain(tiny(*overrides)), Chain(tiny(*overrides, "stages.count=1"))
    tokens = some_tokens(split.manifest)
    name = "embedding.weight"
    assert relative(split.gradients(tokens, project=True)[name], whole.gradients(tokens, project=True)[name]) < 1e-10
    found = split.backward(split.forward(tokens))
    for worker, gradients in ((split.workers[0], found[0]), (split.workers[-1], found[-1])):
        index = [slot.spec.name for slot in worker.state.slots].index(name)
        side = gradients.own[index]
        assert side is not None
        assert relative(side, whole.gradients(tokens)[name]) > 1e-2


def test_tied_copies_stay_equal_through_steps() -> None:
    chain = Chain(tiny("model.tie_embeddings=true"), torch.float32)
    before = chain.workers[0].state.view("embedding.weight").clone()
    for step in range(3):
        chain.step(some_tokens(chain.manifest, step))
    chain.parameters()  # asserts that the copies are equal
    assert not torch.equal(before, chain.workers[0].state.view("embedding.weight"))
