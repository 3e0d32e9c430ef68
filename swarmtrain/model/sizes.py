"""How large a run is: parameters, and bytes on the wire. Arithmetic on the layout, nothing is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.model.layout import StagePlan, plan_stages
from swarmtrain.run.manifest import Manifest

_FP32, _FP64 = 4, 8
MUON_BLOCK_ELEMENTS = 1 << 21  # of a matrix that Muon multiplies at once
MUON_MIN_COLUMNS = 256
_BYTES_IN_PRODUCTS = 56  # per element: factors and results in fp64, slices in int8, sums in int32, packed copies
_TENSOR_BYTES_IN_PRODUCTS = 40


@dataclass(frozen=True)
class Sizes:
    """A manifest in numbers."""

    name: str
    num_parameters: int  # of the LLaMA that it exports to
    num_trained: int  # after the factors of the subspace
    num_stages: int
    k: int
    d: int
    dense_bytes_per_token: int
    wire_bytes_per_token: int

    @property
    def ratio(self) -> float:
        """How many times fewer bytes cross a boundary than with dense fp32 tensors."""
        return self.dense_bytes_per_token / self.wire_bytes_per_token

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "ratio": self.ratio}


def describe(manifest: Manifest) -> Sizes:
    """Sizes of a run. Wire bytes: one boundary, both directions, fp32 numbers and the token id once."""
    plans = plan_stages(manifest)
    d = manifest.model.hidden_size
    is_dense = manifest.boundary.kind == "dense"
    k = d if is_dense else manifest.boundary.k
    copies = plans[-1].tensors[0].num_elements if manifest.model.tie_embeddings and len(plans) > 1 else 0
    return Sizes(
        name=manifest.run.name,
        num_parameters=_dense_parameters(manifest),
        num_trained=sum(plan.num_parameters for plan in plans) - copies,
        num_stages=len(plans),
        k=k,
        d=d,
        dense_bytes_per_token=2 * d * _FP32,
        wire_bytes_per_token=2 * k * _FP32 + int(id_type(manifest.model.vocab_size)[2:]),
    )


def _dense_parameters(manifest: Manifest) -> int:
    model, d = manifest.model, manifest.model.hidden_size
    kv = d // model.num_heads * model.num_kv_heads
    block = 2 * d * d + 2 * kv * d + 3 * d * manifest.ffn_size + 2 * d
    tables = model.vocab_size * d * (1 if model.tie_embeddings else 2)
    return model.num_layers * block + tables + d


def id_type(vocab_size: int) -> str:
    """How a token id travels: the smallest unsigned integer that holds it, little endian."""
    return "<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4"


def accumulator_bytes(manifest: Manifest) -> int:
    """Per number of a step's sum of gradients."""
    return _FP64 if manifest.batch.accumulate == "exact" else _FP32


def muon_working_bytes(plan: StagePlan, *, in_tensors: bool = False) -> int:
    """What Muon needs for the largest matrix of a stage while it works on it; 0 with AdamW.

    With `in_tensors` without what the library of products takes for itself.
    """
    found = 0
    for rows, columns in (spec.shape for spec in plan.tensors if spec.by_muon):
        small = min(rows, columns)
        block = max(MUON_BLOCK_ELEMENTS, MUON_MIN_COLUMNS * small)
        in_products = small * small + min(block, rows * columns)
        if in_tensors:
            found = max(found, rows * columns * 2 * _FP32 + in_products * _TENSOR_BYTES_IN_PRODUCTS)
        else:
            found = max(found, rows * columns * 3 * _FP32 + in_products * _BYTES_IN_PRODUCTS)
    return found
