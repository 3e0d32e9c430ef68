"""Sizes that are told before anything is allocated are those of what is allocated."""

from __future__ import annotations

import pytest

from swarmtrain.model.layout import boundary_width, plan_stages
from swarmtrain.model.sizes import describe, id_type, stage_memory
from swarmtrain.model.state import StageState
from swarmtrain.run.presets import PRESETS, preset

from .chains import Chain, tiny


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
@pytest.mark.parametrize("tie", ["true", "false"])
def test_parameters_are_counted_once_each(kind: str, tie: str) -> None:
    chain = Chain(tiny(f"boundary.kind={kind}", f"model.tie_embeddings={tie}"))
    sizes = describe(chain.manifest)
    assert sizes.num_trained == sum(value.numel() for value in chain.parameters().values())
    dense = Chain(tiny("boundary.kind=dense", f"model.tie_embeddings={tie}"))
    assert sizes.num_parameters == sum(value.numel() for value in dense.parameters().values())


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
def test_wire_bytes_are_both_directions_and_the_id(kind: str) -> None:
    manifest = tiny(f"boundary.kind={kind}")
    sizes = describe(manifest)
    assert sizes.wire_bytes_per_token == 2 * 4 * boundary_width(manifest) + 1
    assert sizes.dense_bytes_per_token == 2 * 4 * 16
    assert sizes.ratio == pytest.approx(128 / sizes.wire_bytes_per_token)


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
def test_memory_covers_what_a_stage_allocates(kind: str) -> None:
    """Up to the padding of tensors to 64 bytes, and U."""
    manifest = preset("nano", [f"boundary.kind={kind}"])
    for plan in plan_stages(manifest):
        state = StageState(manifest, plan.index)
        table = state.module.table
        held = 4 * (
            2 * state.parameters.numel() + state.second_moment.numel() + (table.numel() if table is not None else 0)
        )
        held += 8 * state.gradient_size + 4 * state.parameters.numel()  # the exact sum, one microbatch's gradient
        assert held <= stage_memory(manifest, plan) * 1.01
        if kind != "projected":  # which keeps shorter second moments than it is counted for
            assert held >= stage_memory(manifest, plan) * 0.99


@pytest.mark.parametrize(
    ("vocab_size", "kind"),
    [(2, "<u1"), (256, "<u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4"), (2**20, "<u4")],
)
def test_ids_travel_in_the_smallest_type_that_holds_the_largest(vocab_size: int, kind: str) -> None:
    assert id_type(vocab_size) == kind
    assert vocab_size - 1 < 2 ** (8 * int(kind[2:]))


def test_presets_have_the_sizes_in_their_names() -> None:
    millions = {name: describe(preset(name)).num_parameters / 1e6 for name in PRESETS}
    assert 8 < millions["micro"] < 16
    assert 110 < millions["llama-125m"] < 150
    assert 900 < millions["llama-1b"] < 1500
    assert 7000 < millions["llama-8b"] < 9000
    assert describe(preset("llama-8b")).ratio > 90
