"""`swarmtrain eval`: validation loss of a checkpoint."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from swarmtrain.cli.numbers import MAX_COUNT, number
from swarmtrain.cli.options import (
    CheckpointArgument,
    DataOption,
    JsonOption,
    ThreadsOption,
    print_json,
    use_threads,
)
from swarmtrain.terminal import ProgressBar, counter


class Switch(StrEnum):
    """`on` or `off`."""

    on = "on"
    off = "off"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("eval")(evaluate)


def evaluate(
    checkpoint: CheckpointArgument,
    microbatches: Annotated[
        int | None, number(1, MAX_COUNT, help="Validation microbatches; default: as many as in training.")
    ] = None,
    codec: Annotated[Switch, typer.Option(help="Whether activations pass through the codec of training.")] = Switch.on,
    data: DataOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Validation loss and perplexity of a checkpoint; bits per byte where a token is a byte."""
    use_threads(threads)
    from swarmtrain.checkpoint import open_checkpoint
    from swarmtrain.evaluate import evaluate as run_evaluate
    from swarmtrain.inference import open_checkpoint_source

    opened = open_checkpoint(checkpoint)
    source = open_checkpoint_source(opened.manifest, data)
    with ProgressBar() as bar:
        result = run_evaluate(
            opened,
            source,
            num_microbatches=microbatches,
            use_codec=codec is Switch.on,
            on_progress=counter("microbatches", bar),
        )
    if as_json:
        print_json(result.as_json())
        return
    print(f"checkpoint     {result.checkpoint}")
    print(f"step           {result.step} of {opened.manifest.schedule.steps}, codec {result.codec}")
    print(f"validation     {result.microbatches} microbatches, {result.tokens:,} tokens")
    print(f"loss           {result.loss:.4f}")
    print(f"perplexity     {result.perplexity:.4g}")
    if result.bits_per_byte is not None:
        print(f"bits per byte  {result.bits_per_byte:.4f}")
