"""The run manifest: one TOML file that describes a run completely.

Reading is strict (unknown keys are errors), the canonical form is the TOML with every key in a fixed order, and the
digest of the canonical form names the run's definition everywhere: in checkpoints, in messages, in the journal.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from swarmtrain.errors import ManifestError
from swarmtrain.run.fields import key, one_line, read_section, rule_of, toml_value

BOUNDARY_KINDS = ("subspace", "projected", "dense", "learned")
OPTIMIZER_KINDS = ("adamw", "muon")
PRECISIONS = ("fp32", "bf16")
TABLES = ("normal", "signs")
MAX_MANIFEST_BYTES = 1 << 20
_ADDRESS = r"(https?://[A-Za-z0-9._~/:@%+\-]{1,200})?"  # nothing that a shell reads: people paste it into one
_CODEC = r"[a-z0-9][a-z0-9+:=,.\-]{0,63}"


@dataclass(frozen=True)
class RunSection:
    """The identity of the run."""

    name: str = key("the run's name, part of its identity", pattern=r"[a-z0-9][a-z0-9._-]{0,47}")
    seed: int = key("every initial tensor and every batch follows from it", default=0, low=0, high=2**63 - 1)
    homepage: str = key(
        "where volunteers get the program: the address of a git repository", default="", pattern=_ADDRESS
    )


@dataclass(frozen=True)
class ModelSection:
    """The LLaMA-style decoder."""

    vocab_size: int = key("number of token ids", low=2, high=2**20)
    hidden_size: int = key("d, the width of the residual stream", low=4, high=2**16)
    num_layers: int = key("transformer blocks", low=1, high=1024)
    num_heads: int = key("query heads; must divide hidden_size", low=1, high=1024)
    num_kv_heads: int = key("key/value heads; must divide num_heads", low=1, high=1024)
    ffn_size: int = key("inner width of the SwiGLU MLP", low=4, high=2**18)
    sequence_length: int = key("n, tokens per sequence", low=2, high=2**20)
    rope_theta: float = key("base of the rotary positions", default=10000.0, low=1.0, high=1e9)
    norm_epsilon: float = key("added to the mean square in RMSNorm", default=1e-5, low=1e-12, high=1e-1)
    tie_embeddings: bool = key("the head is the embedding's transpose", default=False)
    precision: str = key(
        "bf16: products and attention; all sums and the state are fp32", default="fp32", choices=PRECISIONS
    )


@dataclass(frozen=True)
class StagesSection:
    """How the layers are split. The split changes where work happens, never the model."""

    count: int = key("number of pipeline stages", low=1, high=1024)
    layers: tuple[int, ...] = key(
        "layers of each stage, first to last; empty = as even as possible", default=(), low=1, high=1024, max_items=1024
    )


@dataclass(frozen=True)
class BoundarySection:
    """What crosses from stage to stage."""

    kind: str = key("what the residual stream is between stages", choices=BOUNDARY_KINDS)
    k: int = key("numbers per token on the wire (all kinds but dense)", default=8, low=1, high=2**16)
    tail_layers: int = key("last layers that leave the subspace; all in the last stage", default=1, low=0, high=1024)
    track_every: int = key("steps between moves of the subspace; 0 = fixed", default=0, low=0, high=10**9)
    track_rate: float = key("size of a move on the Grassmann manifold", default=0.1, low=0.0, high=1e6)
    reproject_every: int = key("projected: steps between re-projections", default=50, low=1, high=10**9)
    anchor_rank: int = key("learned: rank of each boundary's trained token vectors", default=8, low=1, high=2**16)
    table: str = key("the frozen token table: numbers, or one bit per entry", default="normal", choices=TABLES)
    match_parameters: bool = key("subspace: parameters saved by the factors go into MLP width", default=False)


@dataclass(frozen=True)
class WireSection:
    """How a boundary tensor becomes bytes, in each direction."""

    forward: str = key("codec of activations", default="fp32", pattern=_CODEC)
    backward: str = key("codec of gradients", default="fp32", pattern=_CODEC)


@dataclass(frozen=True)
class ReduceSection:
    """How the replicas of a stage add up their gradients."""

    codec: str = key("none, bf16, int8, topk64, powersgd32 or lowrank100", default="none", pattern=r"[a-z0-9]{1,16}")
    selective: bool = key("compress only in stages whose all-reduce would end last", default=False)


@dataclass(frozen=True)
class DataSection:
    """Where the tokens come from."""

    source: str = key('"embedded" or a directory made by `swarmtrain data prepare`', default="embedded")
    validation_fraction: float = key("last part of the corpus, never trained on", default=0.05, low=0.0, high=0.5)


@dataclass(frozen=True)
class BatchSection:
    """One optimizer step's work."""

    sequences_per_microbatch: int = key("sequences that travel together", low=1, high=2**16)
    microbatches_per_step: int = key("B, microbatches per optimizer step", low=1, high=2**20)
    accumulate: str = key(
        "exact = order-independent sums; float = faster, rounds by order", default="exact", choices=("exact", "float")
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """How weights move: the same bits on every machine."""

    kind: str = key("adamw, or muon for the blocks' matrices", default="adamw", choices=OPTIMIZER_KINDS)
    learning_rate: float = key("peak learning rate", low=0.0, high=1e3)
    momentum: float = key("muon: decay of the momentum", default=0.95, low=0.0, high=0.999999)
    adamw_rate: float = key(
        "muon: embedding, head and norms learn by AdamW, at learning_rate times this", default=0.1, low=0.0, high=1e3
    )
    beta1: float = key("decay of the first moment", default=0.9, low=0.0, high=0.999999)
    beta2: float = key("decay of the second moment", default=0.95, low=0.0, high=0.9999999)
    epsilon: float = key("added to the root of the second moment", default=1e-8, low=1e-16, high=1.0)
    weight_decay: float = key("decoupled decay of matrices", default=0.1, low=0.0, high=10.0)
    clip_norm: float = key("bound on the global gradient norm; 0 = none", default=1.0, low=0.0, high=1e9)


@dataclass(frozen=True)
class ScheduleSection:
    """How long, and how the learning rate moves."""

    steps: int = key("optimizer steps of the whole run", low=1, high=10**9)
    warmup_steps: int = key("linear rise to the peak", default=0, low=0, high=10**9)
    decay: str = key("shape after the warm-up", default="cosine", choices=("cosine", "linear", "constant"))
    final_fraction: float = key("of the peak, at the last step", default=0.1, low=0.0, high=1.0)
    delay: int = key(
        "steps by which microbatches' weights lag: 0 = none, 1 = all-reduce in the background", default=0, low=0, high=1
    )
    delay_from: int = key(
        "first step whose weights lag; early steps suffer most from a delay", default=0, low=0, high=10**9
    )
    predict: bool = key("delay: compute with the weights plus their last change", default=False)


@dataclass(frozen=True)
class ChecksSection:
    """What peers compute is computed again by others: docs/checks.md."""

    share: float = key(
        "share of the work that is computed a second time, by another peer; 0 = none", default=0.0, low=0.0, high=1.0
    )


@dataclass(frozen=True)
class ValidationSection:
    """Loss on tokens that are never trained on."""

    every: int = key("steps between validations; 0 = only at the end", default=0, low=0, high=10**9)
    microbatches: int = key("microbatches of one validation", default=8, low=1, high=10**6)


@dataclass(frozen=True)
class CheckpointSection:
    """When the state is written."""

    every: int = key("steps between checkpoints; 0 = only at the end", default=0, low=0, high=10**9)
    keep: int = key("how many are kept", default=3, low=1, high=10**6)


@dataclass(frozen=True)
class Manifest:
    """A validated run. Build with `parse_manifest` or `load_manifest`."""

    run: RunSection
    model: ModelSection
    stages: StagesSection
    boundary: BoundarySection
    wire: WireSection
    reduce: ReduceSection
    data: DataSection
    batch: BatchSection
    optimizer: OptimizerSection
    schedule: ScheduleSection
    checks: ChecksSection
    validation: ValidationSection
    checkpoint: CheckpointSection

    def canonical(self) -> str:
        """The manifest as TOML with every key, in a fixed order. Equal manifests have equal text."""
        return _render(self, with_help=False)

    def commented(self) -> str:
        """The canonical form with a line of help beside each key: a file to start from."""
        return _render(self, with_help=True)

    def digest(self) -> str:
        """SHA-256 of the canonical form, in hex."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    @property
    def is_rounded(self) -> bool:
        """Whether microbatches compute with copies of the parameters in bf16."""
        return self.model.precision == "bf16"

    @property
    def has_subspace(self) -> bool:
        """Whether the residual stream lives in S = span(U), in one form or the other."""
        return self.boundary.kind in ("subspace", "projected")

    @property
    def ffn_size(self) -> int:
        """The MLP width that the model has: model.ffn_size, or what boundary.match_parameters makes of it."""
        return matched_ffn_size(self) if self.boundary.match_parameters else self.model.ffn_size

    @property
    def powersgd_rank(self) -> int:
        """Of reduce.codec = powersgdR; 0 for every other codec. Its right factors are part of the stages' state."""
        found = re.fullmatch(r"powersgd([1-9]\d{0,3})", self.reduce.codec, re.ASCII)
        return int(found[1]) if found else 0

    @property
    def lowrank_budget(self) -> int:
        """Of reduce.codec = lowrankB: thousandths of a byte per number of a matrix; 0 for every other codec."""
        found = re.fullmatch(r"lowrank([1-9]\d{0,3})", self.reduce.codec, re.ASCII)
        return int(found[1]) if found else 0

    def is_checkpoint(self, step: int) -> bool:
        """Whether checkpoint.every asks for a checkpoint of the state after `step` steps."""
        return self.checkpoint.every > 0 and step % self.checkpoint.every == 0

    def weights_step(self, step: int) -> int:
        """How many steps have been applied to the weights that every microbatch of step `step` (0-based) sees.

        Without a delay all before it. A barrier's step sees the barrier's state.
        """
        if step < self.schedule.delay_from:
            return step
        return max(self.last_barrier(step), step - self.schedule.delay)

    def last_barrier(self, step: int) -> int:
        """The newest barrier at or before `step`: there a step's weights are the state itself, whatever the delay.

        Barriers are the first and the last state, checkpoints, and states to which the subspace has moved: a checkpoint
        need not hold older weights, and no step's weights belong to another subspace than its state.
        """
        if step >= self.schedule.steps:
            return step
        return max(self.last_checkpoint(step), step - step % (self.boundary.track_every or step + 1))

    def last_checkpoint(self, step: int) -> int:
        """The newest step at or before `step` of whose state checkpoint.every asks for a checkpoint; 0 at first."""
        return step - step % self.checkpoint.every if self.checkpoint.every else 0

    def is_predicted(self, step: int) -> bool:
        """Whether microbatches of step `step` see its weights plus their last change: where there was one since the
        last barrier."""
        return self.schedule.predict and self.last_barrier(step) < self.weights_step(step) < step

    def basis_epoch(self, step: int) -> int:
        """How often the subspace has moved when `step` steps are applied."""
        return step // self.boundary.track_every if self.boundary.track_every else 0

    def moves_basis(self, step: int) -> bool:
        """Whether the subspace moves when step `step` (0-based) is applied."""
        return self.basis_epoch(step + 1) != self.basis_epoch(step)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step learns from."""
        batch = self.batch
        return batch.sequences_per_microbatch * batch.microbatches_per_step * self.model.sequence_length

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of one microbatch."""
        return self.batch.sequences_per_microbatch * self.model.sequence_length


_SECTIONS: dict[str, type[Any]] = {
    "run": RunSection,
    "model": ModelSection,
    "stages": StagesSection,
    "boundary": BoundarySection,
    "wire": WireSection,
    "reduce": ReduceSection,
    "data": DataSection,
    "batch": BatchSection,
    "optimizer": OptimizerSection,
    "schedule": ScheduleSection,
    "checks": ChecksSection,
    "validation": ValidationSection,
    "checkpoint": CheckpointSection,
}


def parse_manifest(text: str, overrides: Iterable[str] = ()) -> Manifest:
    """Read a manifest from TOML text; `overrides` are `section.key=value` items as given to --set."""
    raw = _read_toml(text)
    for section in raw:
        if section not in _SECTIONS:
            raise ManifestError(one_line(section), f"unknown section; a manifest has {', '.join(_SECTIONS)}")
    for item in overrides:
        _override(raw, item)
    built = {name: read_section(cls, name, raw.get(name, {})) for name, cls in _SECTIONS.items()}
    manifest = Manifest(**built)
    _check_shapes(manifest)
    _check_data(manifest)
    return manifest


def load_manifest(path: Path, overrides: Iterable[str] = ()) -> Manifest:
    """Read a manifest file."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES + 1).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ManifestError("", f"cannot read {one_line(str(path))}: {error}") from error
    return parse_manifest(text, overrides)


def _read_toml(text: str) -> dict[str, Any]:
    if len(text) > MAX_MANIFEST_BYTES:
        raise ManifestError("", f"a manifest has at most {MAX_MANIFEST_BYTES} bytes")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ManifestError("", "not valid TOML: nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise ManifestError("", f"not valid TOML: {error}") from error


def _override(raw: dict[str, Any], item: str) -> None:
    """Apply one `key=value`: the value in TOML syntax, or bare text; a key without its section must be unambiguous."""
    name, separator, text = item.partition("=")
    shown = one_line(name.strip())
    if not separator:
        raise ManifestError(shown, "an override is written section.key=value, as in boundary.k=8")
    section, dot, leaf = name.strip().partition(".")
    if not dot:
        owners = [owner for owner, cls in _SECTIONS.items() if section in {field.name for field in fields(cls)}]
        if len(owners) > 1:
            raise ManifestError(shown, f"could be in {' or '.join(owners)}: name it")
        if not owners:
            raise ManifestError(shown, "unknown key; an override is written section.key=value, as in boundary.k=8")
        section, leaf = owners[0], section
    if section not in _SECTIONS:
        raise ManifestError(shown, f"unknown section; a manifest has {', '.join(_SECTIONS)}")
    table = raw.setdefault(section, {})
    if isinstance(table, dict):
        table[leaf] = _override_value(text.strip())


def _override_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text  # text that goes on with more keys is no value


def _check_shapes(manifest: Manifest) -> None:
    """Everything that must fit together in the model and its split."""
    model, boundary = manifest.model, manifest.boundary
    if model.hidden_size % model.num_heads:
        raise ManifestError(
            "model.num_heads", f"is {model.num_heads}; must divide model.hidden_size = {model.hidden_size}"
        )
    if (model.hidden_size // model.num_heads) % 2:
        width = model.hidden_size // model.num_heads
        raise ManifestError("model.num_heads", f"gives heads of width {width}; rotary positions need an even width")
    if model.num_heads % model.num_kv_heads:
        raise ManifestError(
            "model.num_kv_heads", f"is {model.num_kv_heads}; must divide model.num_heads = {model.num_heads}"
        )
    split = split_layers(manifest)
    if boundary.match_parameters and boundary.kind != "subspace":
        raise ManifestError("boundary.match_parameters", f"only subspace saves parameters; kind is {boundary.kind}")
    if not manifest.has_subspace and boundary.track_every:
        raise ManifestError("boundary.track_every", f"only a subspace can be tracked; boundary.kind is {boundary.kind}")
    if boundary.kind == "projected" and manifest.is_rounded:
        raise ManifestError("model.precision", "is bf16; with boundary.kind = projected, rounded weights would leave S")
    if boundary.kind == "dense":
        return
    if boundary.table == "signs" and model.hidden_size % 8:
        raise ManifestError("boundary.table", f"signs fill whole bytes; model.hidden_size is {model.hidden_size}")
    if boundary.k > model.hidden_size:
        raise ManifestError("boundary.k", f"is {boundary.k}; must be at most model.hidden_size = {model.hidden_size}")
    if boundary.kind == "learned":
        return
    if boundary.tail_layers > len(split[-1]):
        raise ManifestError(
            "boundary.tail_layers",
            f"is {boundary.tail_layers}, but the last stage has {len(split[-1])} layers; all tail layers must be in it",
        )


def _check_data(manifest: Manifest) -> None:
    """Everything that must fit together in data and model."""
    if manifest.data.source == "":
        raise ManifestError("data.source", 'is empty; needs "embedded" or a directory of token shards')
    if manifest.data.source == "embedded" and manifest.model.vocab_size < 256:
        raise ManifestError(
            "model.vocab_size", f"is {manifest.model.vocab_size}; the embedded corpus has byte tokens: at least 256"
        )


def split_layers(manifest: Manifest) -> list[range]:
    """The layers of each stage: as listed in stages.layers, else as even as possible, longer stages first."""
    count, total = manifest.stages.count, manifest.model.num_layers
    if count > total:
        raise ManifestError("stages.count", f"is {count}; must be at most model.num_layers = {total}")
    sizes = list(manifest.stages.layers) or [total // count + (stage < total % count) for stage in range(count)]
    if len(sizes) != count:
        raise ManifestError("stages.layers", f"has {len(sizes)} entries; needs stages.count = {count}")
    if sum(sizes) != total:
        raise ManifestError("stages.layers", f"adds up to {sum(sizes)}; must be model.num_layers = {total}")
    starts = [sum(sizes[:stage]) for stage in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def matched_ffn_size(manifest: Manifest) -> int:
    """The widest MLP with which a factored model has no more trained parameters than the dense one.

    One width for all layers, so that the exported model is still a plain LLaMA.
    """
    model, boundary = manifest.model, manifest.boundary
    d, k, ffn = model.hidden_size, boundary.k, model.ffn_size
    num_factored = model.num_layers - boundary.tail_layers
    saved = (d - k) * (num_factored * (d + ffn) + model.vocab_size)
    per_column = num_factored * (2 * d + k) + boundary.tail_layers * 3 * d
    return ffn + saved // per_column


def _render(manifest: Manifest, *, with_help: bool) -> str:
    lines: list[str] = []
    for section_field in fields(manifest):
        section = getattr(manifest, section_field.name)
        lines.append(f"[{section_field.name}]")
        for item in fields(section):
            line = f"{item.name} = {toml_value(getattr(section, item.name))}"
            lines.append(f"{line:<40}  # {rule_of(item).help}" if with_help else line)
        lines.append("")
    return "\n".join(lines)
