"""`swarmtrain generate`: text from a checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from swarmtrain.cli.numbers import MAX_SEED, number
from swarmtrain.cli.options import (
    CheckpointArgument,
    DataOption,
    JsonOption,
    ThreadsOption,
    print_json,
    use_threads,
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("generate")(generate)


def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue; default: the start of a line.")] = "",
    tokens: Annotated[int, number(1, 10**6, help="How many tokens to sample.")] = 200,
    temperature: Annotated[float, number(0, 100, help="0 always takes the most likely token.")] = 0.8,
    top_p: Annotated[float, number(0, 1, help="Sample from the smallest set of tokens with this probability.")] = 0.95,
    seed: Annotated[int, number(-MAX_SEED, MAX_SEED, help="The same seed gives the same text.")] = 0,
    data: DataOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Sample text from a checkpoint and stream it."""
    use_threads(threads)
    from swarmtrain.checkpoint import open_checkpoint
    from swarmtrain.generate import Sampling, generate_text
    from swarmtrain.inference import TrainedModel, open_checkpoint_source

    sampling = Sampling(temperature, top_p, seed)
    opened = open_checkpoint(checkpoint)
    tokenizer = open_checkpoint_source(opened.manifest, data).open_tokenizer()
    pieces = generate_text(TrainedModel(opened), tokenizer, prompt=prompt, num_tokens=tokens, sampling=sampling)
    if as_json:
        print_json({"checkpoint": str(opened.path), "prompt": prompt, "seed": seed, "text": "".join(pieces)})
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may write characters that the terminal's encoding lacks
    _show(prompt)
    for piece in pieces:
        _show(piece)
    _show("\n")


def _show(text: str) -> None:
    """Write without delay. A terminal gets no control characters: a model may learn to write escape sequences."""
    if sys.stdout.isatty():
        text = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    sys.stdout.write(text)
    sys.stdout.flush()
