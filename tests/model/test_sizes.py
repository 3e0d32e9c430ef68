"""Sizes that are told before anything is allocated are those of what is allocated."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swarmtrain.model.layout import StagePlan, TensorSpec, boundary_width, plan_stages
from swarmtrain.model.sizes import describe, id_type, muon_working_bytes
from swarmtrain.model.workload import workload_of
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


def test_with_muon_a_matrix_has_one_moment_less() -> None:
    plain, muon = (preset("llama-1b", [f"optimizer.kind={kind}"]) for kind in ("adamw", "muon"))
    for before, after in zip(plan_stages(plain), plan_stages(muon), strict=True):
        in_blocks = sum(spec.num_elements for spec in after.tensors if spec.by_muon)
        assert in_blocks == sum(
            spec.num_elements for spec in before.tensors if ".a" in spec.name or ".m" in spec.name
        ) - (
            2 * len(before.layers) * plain.model.hidden_size  # gains of norms
        )
        assert before.state_elements - after.state_elements == in_blocks
    assert workload_of(plain).state_bytes - workload_of(muon).state_bytes > 2.5e9


WORK = """
import sys, torch
from swarmtrain.model.muon import orthogonalized
def peak():  # of this program: what getrusage says begins with its parent's
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
torch.set_num_threads(1)
small = torch.randn(300, 300)
orthogonalized(small)
matrix = torch.randn(int(sys.argv[1]), int(sys.argv[2]))
before = peak()
orthogonalized(matrix)
print(peak() - before)
"""


@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1024), (24, 200_000)])
def test_muon_works_in_the_space_that_is_counted(shape: tuple[int, int]) -> None:
    """Measured in a process of its own: what it holds at most while it orthogonalises."""
    answer = subprocess.run(
        [sys.executable, "-c", WORK, *map(str, shape)], capture_output=True, text=True, timeout=600, check=True
    )
    spec = TensorSpec("matrix", shape, 1.0, by_muon=True)
    counted = muon_working_bytes(StagePlan(0, 1, range(1), 0, (spec,)))
    assert 0.3 * counted < int(answer.stdout) < 1.1 * counted


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
