"""Validation of a checkpoint: loss, perplexity, and bits per byte where a token is a byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from swarmtrain.checkpoint import Checkpoint
from swarmtrain.data.source import TokenSource
from swarmtrain.data.tokenizer import ByteTokenizer
from swarmtrain.errors import DataError
from swarmtrain.inference import TrainedModel
from swarmtrain.reference import make_sampler
from swarmtrain.run.schedule import mean_loss

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """The validation of a checkpoint, on tokens that it was not trained on."""

    checkpoint: str
    step: int
    codec: str  # of activations, or "off"
    microbatches: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None  # None unless a token is a byte

    def as_json(self) -> dict[str, Any]:
        """For --json; an infinite perplexity is null."""
        return {**asdict(self), "perplexity": self.perplexity if math.isfinite(self.perplexity) else None}


def evaluate(
    checkpoint: Checkpoint,
    source: TokenSource,
    *,
    num_microbatches: int | None = None,
    use_codec: bool = True,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Mean loss over the first validation microbatches: as many as in training, or `num_microbatches`, or all.

    With the defaults this is the number that the trainer reported at this step, to the last bit. `DataError` if the
    run has no validation tokens.
    """
    manifest = checkpoint.manifest
    sampler = make_sampler(manifest, source)
    count = min(num_microbatches or manifest.validation.microbatches, sampler.num_validation_microbatches)
    if count == 0:
        raise DataError("this run has no validation tokens", fix="data.validation_fraction is 0 in its manifest")
    model = TrainedModel(checkpoint, use_codec=use_codec)
    losses = []
    for index in range(count):
        losses.append(model.loss(torch.as_tensor(sampler.validation(index), dtype=torch.int64)))
        if on_progress is not None:
            on_progress(index + 1, count)
    loss = mean_loss(losses)
    is_bytes = isinstance(source.open_tokenizer(), ByteTokenizer)
    return Evaluation(
        checkpoint=str(checkpoint.path),
        step=checkpoint.step,
        codec=str(model.codec) if model.codec is not None else "off",
        microbatches=count,
        tokens=count * manifest.batch.sequences_per_microbatch * manifest.model.sequence_length,
        loss=loss,
        perplexity=math.exp(loss) if loss < 700.0 else math.inf,
        bits_per_byte=loss / math.log(2.0) if is_bytes else None,
    )
