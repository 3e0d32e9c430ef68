"""Runs that take a moment: small manifests, and checkpoints of a few steps."""

from __future__ import annotations

from pathlib import Path

from swarmtrain.checkpoint import Checkpoint, open_checkpoint
from swarmtrain.data.prepare import PrepareOptions, prepare
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset

# Grouped-query attention, four stages of one layer, everything else as small as it gets.
SMALL = (
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=48",
    "model.sequence_length=16",
    "batch.sequences_per_microbatch=2",
    "batch.microbatches_per_step=2",
    "validation.every=0",
    "validation.microbatches=3",
    "checkpoint.every=0",
    "schedule.steps=4",
)
PLAIN_KINDS = ("subspace", "projected", "dense")  # that are a plain LLaMA in the end
KINDS = (*PLAIN_KINDS, "learned")


def small(*overrides: str) -> Manifest:
    """A manifest that trains a step in milliseconds."""
    return preset("nano", [*SMALL, *overrides])


def train(manifest: Manifest, out: Path) -> Checkpoint:
    """Train `manifest` to its end in this process."""
    for _ in ReferenceTrainer(manifest, out=out).run():
        pass
    return open_checkpoint(out)


def shards(directory: Path, *, vocab_size: int | None = None) -> Path:
    """Token shards of a short text, of bytes or of a BPE that is learned from it."""
    text = directory / "text.txt"
    text.write_text("".join(f"The {n}th of many lines, wörter ünd Zeichen {n * n % 97}.\n" for n in range(1500)))
    out = directory / "shards"
    prepare(PrepareOptions((text,), out, train_bpe=vocab_size, shard_tokens=20_000))
    return out
