"""`swarmtrain export`: a checkpoint as a Hugging Face LLaMA."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import CheckpointArgument, DataOption, JsonOption, print_json
from swarmtrain.terminal import ProgressBar, counter


class Dtype(StrEnum):
    """Number formats of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("export")(export)


def export(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Option(help="Directory to create; nothing is overwritten.")],
    dtype: Annotated[Dtype, typer.Option(help="Number format; only float32 keeps every bit.")] = Dtype.float32,
    ignore_codec: Annotated[
        bool, typer.Option("--ignore-codec", help="Export a checkpoint although it was trained with a lossy codec.")
    ] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face LLaMA directory: config, safetensors, tokenizer, model card."""
    from swarmtrain.checkpoint import open_checkpoint
    from swarmtrain.export import export_checkpoint
    from swarmtrain.inference import open_checkpoint_source

    opened = open_checkpoint(checkpoint)
    tokenizer = open_checkpoint_source(opened.manifest, data).open_tokenizer()
    with ProgressBar() as bar:
        path = export_checkpoint(
            opened, tokenizer, out, dtype=dtype.value, ignore_codec=ignore_codec, on_progress=counter("tensors", bar)
        )
    if as_json:
        print_json({"done": True, "checkpoint": str(opened.path), "out": str(path)})
    else:
        print(f"exported {opened.path}\nto {path}")
