"""`swarmtrain data`: turning one's own text into token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.numbers import MAX_COUNT, number
from swarmtrain.cli.options import JsonOption, print_json

MAX_SHARD_TOKENS = 1 << 40

app = typer.Typer(help="Prepare training data.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare training data."""


@app.command()
def prepare(
    inputs: Annotated[
        list[Path], typer.Argument(help="Text, .jsonl or .parquet files; text and .jsonl may be compressed (.gz).")
    ],
    out: Annotated[Path, typer.Option(help="Directory to make. Run the same command again to resume.")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or a Hugging Face tokenizers JSON file.")] = "bytes",
    train_bpe: Annotated[
        int | None, number(1, MAX_COUNT, help="Learn a byte-level BPE with this many tokens from the inputs first.")
    ] = None,
    end_of_text: Annotated[
        str | None, typer.Option(help="Token that ends a document; by default one with a usual name is looked for.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="JSONL field or Parquet column that holds the text.")] = "text",
    shard_tokens: Annotated[
        int, number(1, MAX_SHARD_TOKENS, help="Tokens per shard file; an interruption costs at most one shard of work.")
    ] = 1 << 26,
    as_json: JsonOption = False,
) -> None:
    """Turn text into hashed, memory-mapped token shards. Interrupted runs resume."""
    import sys

    from swarmtrain.data.prepare import PrepareOptions
    from swarmtrain.data.prepare import prepare as run_prepare
    from swarmtrain.data.progress import ProgressBar

    options = PrepareOptions(tuple(inputs), out, tokenizer, train_bpe, end_of_text, text_field, shard_tokens)
    bar = ProgressBar(sys.stderr)
    try:
        result = run_prepare(options, on_progress=bar)
    finally:
        bar.close()
    if as_json:
        print_json(result.as_json())
    else:
        print(result.as_sentence())
