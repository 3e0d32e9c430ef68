"""Which tensors a stage has: names, shapes, initial spread. Pure data, so that sizes are known before torch is loaded.

A tensor's full name is the same in every split, and its initial value depends on (seed, full name) alone. Matrices are
stored as (out, in). In the subspace kind the two matrices that write into the residual stream are stored as factors
of shape (k, in); the dense matrix they stand for is U @ factor, of shape (d, in). In the learned kind every boundary
has tensors of its own, and so the model depends on the split: boundary s lies between the stages s and s + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from swarmtrain.run.manifest import Manifest, split_layers

EMBEDDING = "embedding.weight"
HEAD = "head.weight"
GRAM = "tracking.gram"
MAPS_RATE = 0.1  # of encoders and decoders: everything that crosses passes through them, and so does their steps' noise


class Role(Enum):
    """How a tensor relates to the subspace S = span(U)."""

    FREE = "free"  # unconstrained
    FACTOR = "factor"  # (k, in): stands for U @ factor
    FACTOR_ROWS = "factor_rows"  # (V, k): stands for factor @ U.T
    COLUMNS_IN_S = "columns_in_s"  # (d, in), every column in S
    ROWS_IN_S = "rows_in_s"  # (V, d), every row in S
    DECODER = "decoder"  # (d, k), starts as U and stays free
    ENCODER = "encoder"  # (k, d), starts as the transpose of U and stays free


@dataclass(frozen=True)
class TensorSpec:
    """One trainable tensor."""

    name: str
    shape: tuple[int, ...]
    spread: float  # standard deviation at init; 0 means filled with ones (norm gains)
    role: Role = Role.FREE
    decays: bool = True
    rate: float = 1.0  # times the run's learning rate
    by_muon: bool = False  # updated by Muon, from one moment; else by AdamW, from two

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def second_moment_size(self) -> int:
        """One number per element; for a tensor kept in S one per column or row, since the update must not leave S."""
        if self.by_muon:
            return 0
        if self.role is Role.COLUMNS_IN_S:
            return self.shape[1]
        if self.role is Role.ROWS_IN_S:
            return self.shape[0]
        return self.num_elements


@dataclass(frozen=True)
class StagePlan:
    """Everything that defines one stage of a run."""

    index: int
    count: int
    layers: range
    num_tail_layers: int
    tensors: tuple[TensorSpec, ...]

    @property
    def is_first(self) -> bool:
        """Takes token ids only."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Ends in the loss."""
        return self.index == self.count - 1

    @property
    def num_parameters(self) -> int:
        """Trainable parameters of the stage."""
        return sum(spec.num_elements for spec in self.tensors)

    @property
    def state_elements(self) -> int:
        """Parameters and their moments."""
        return sum(2 * spec.num_elements + spec.second_moment_size for spec in self.tensors)

    def is_tail(self, layer: int) -> bool:
        """Whether `layer` has left the subspace."""
        return self.is_last and layer >= self.layers.stop - self.num_tail_layers


def plan_stages(manifest: Manifest) -> list[StagePlan]:
    """The stages of a run, first to last."""
    return [_plan_stage(manifest, index, layers) for index, layers in enumerate(split_layers(manifest))]


def boundary_width(manifest: Manifest) -> int:
    """Numbers per token that cross a boundary in each direction."""
    return manifest.model.hidden_size if manifest.boundary.kind == "dense" else manifest.boundary.k


def table_bytes(manifest: Manifest) -> int:
    """Of the frozen token table on every stage: fp32 numbers or bits; none with a dense boundary."""
    if manifest.boundary.kind == "dense":
        return 0
    entries = manifest.model.vocab_size * manifest.model.hidden_size
    return entries // 8 if manifest.boundary.table == "signs" else 4 * entries


def embedding_spread(manifest: Manifest) -> float:
    """Standard deviation of the token vectors: unit size, or that of a head when the head is tied to them."""
    return manifest.model.hidden_size**-0.5 if manifest.model.tie_embeddings else 1.0


def _plan_stage(manifest: Manifest, index: int, layers: range) -> StagePlan:
    count = manifest.stages.count
    is_last = index == count - 1
    num_tail = manifest.boundary.tail_layers if is_last and manifest.has_subspace else 0
    tensors: list[TensorSpec] = []
    if index == 0 or (is_last and manifest.model.tie_embeddings):
        tensors.append(_embedding(manifest))
    if index > 0 and manifest.boundary.kind == "learned":
        tensors += _decoder(manifest, index - 1)
    for layer in layers:
        in_tail = layer >= layers.stop - num_tail
        tensors += _block(manifest, layer, constrained=not in_tail and manifest.has_subspace)
    if not is_last and manifest.boundary.kind == "learned":
        shape, name = (manifest.boundary.k, manifest.model.hidden_size), f"boundaries.{index}.encoder.weight"
        tensors.append(TensorSpec(name, shape, 1.0, Role.ENCODER, decays=False, rate=MAPS_RATE))
    if is_last:
        tensors.append(_gain("final_norm.weight", manifest.model.hidden_size))
        if not manifest.model.tie_embeddings:
            d = manifest.model.hidden_size
            tensors.append(TensorSpec(HEAD, (manifest.model.vocab_size, d), d**-0.5))
    return StagePlan(index, count, layers, num_tail, tuple(tensors))


def _embedding(manifest: Manifest) -> TensorSpec:
    """The trainable part of the token vectors. Beside a frozen table it starts small: the table tells tokens apart."""
    model, boundary = manifest.model, manifest.boundary
    shape = (model.vocab_size, model.hidden_size)
    spread = embedding_spread(manifest)
    if boundary.kind == "dense":
        return TensorSpec(EMBEDDING, shape, spread, decays=False)
    if boundary.kind == "learned":  # it is added to the frozen table
        return TensorSpec(EMBEDDING, shape, 0.1 * spread, decays=False)
    if boundary.kind == "projected":
        return TensorSpec(EMBEDDING, shape, 0.1 * spread, Role.ROWS_IN_S, decays=False)
    return TensorSpec(EMBEDDING, (model.vocab_size, boundary.k), 0.1 * spread, Role.FACTOR_ROWS, decays=False)


def _decoder(manifest: Manifest, boundary: int) -> list[TensorSpec]:
    """What turns k numbers and a token id back into h. The factored anchor starts at zero: its token side does."""
    d, k, rank = manifest.model.hidden_size, manifest.boundary.k, manifest.boundary.anchor_rank
    prefix = f"boundaries.{boundary}."
    return [
        TensorSpec(prefix + "decoder.weight", (d, k), 1.0, Role.DECODER, decays=False, rate=MAPS_RATE),
        TensorSpec(prefix + "anchor_tokens.weight", (manifest.model.vocab_size, rank), 0.01, decays=False),
        TensorSpec(prefix + "anchor_directions.weight", (d, rank), rank**-0.5, decays=False),
    ]


def _block(manifest: Manifest, layer: int, *, constrained: bool) -> list[TensorSpec]:
    model, prefix = manifest.model, f"layers.{layer}."
    d, ffn = model.hidden_size, manifest.ffn_size
    kv = d // model.num_heads * model.num_kv_heads
    return [
        _gain(prefix + "attention_norm.weight", d),
        _matrix(manifest, prefix + "attention.query.weight", (d, d), d**-0.5),
        _matrix(manifest, prefix + "attention.key.weight", (kv, d), d**-0.5),
        _matrix(manifest, prefix + "attention.value.weight", (kv, d), d**-0.5),
        _writer(manifest, prefix + "attention.output.weight", d, constrained=constrained),
        _gain(prefix + "mlp_norm.weight", d),
        _matrix(manifest, prefix + "mlp.gate.weight", (ffn, d), d**-0.5),
        _matrix(manifest, prefix + "mlp.up.weight", (ffn, d), d**-0.5),
        _writer(manifest, prefix + "mlp.down.weight", ffn, constrained=constrained),
    ]


def _writer(manifest: Manifest, name: str, fan_in: int, *, constrained: bool) -> TensorSpec:
    """A matrix that writes into the residual stream, with the spread of a dense init seen through U: sqrt(d/k)."""
    d, k = manifest.model.hidden_size, manifest.boundary.k
    spread = (fan_in * 2 * manifest.model.num_layers) ** -0.5
    if not constrained:
        return _matrix(manifest, name, (d, fan_in), spread)
    if manifest.boundary.kind == "projected":
        return _matrix(manifest, name, (d, fan_in), spread, Role.COLUMNS_IN_S)
    return _matrix(manifest, name, (k, fan_in), spread * math.sqrt(d / k), Role.FACTOR)


def _matrix(manifest: Manifest, name: str, shape: tuple[int, int], spread: float, role: Role = Role.FREE) -> TensorSpec:
    """A matrix of a block."""
    return TensorSpec(name, shape, spread, role, by_muon=manifest.optimizer.kind == "muon")


def _gain(name: str, size: int) -> TensorSpec:
    return TensorSpec(name, (size,), 0.0, decays=False)
