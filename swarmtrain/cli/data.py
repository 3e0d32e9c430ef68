"""`swarmtrain data`: turn text into token shards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.help import App
from swarmtrain.cli.numbers import MAX_COUNT, number
from swarmtrain.cli.options import JsonOption, print_json
from swarmtrain.terminal import ProgressBar
from swarmtrain.units import show_count, show_size

if TYPE_CHECKING:
    from swarmtrain.data.prepare import PrepareProgress

MAX_SHARD_TOKENS = 1 << 40

app = App(help="Prepare training data.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare training data."""


@app.command()
def prepare(
    inputs: Annotated[
        list[Path], typer.Argument(help="Text, .jsonl or .parquet files; text and .jsonl may be compressed (.gz).")
    ],
    out: Annotated[Path, typer.Option(help="Directory to create. The same command again resumes.")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or a Hugging Face tokenizers JSON file.")] = "bytes",
    train_bpe: Annotated[
        int | None, number(1, MAX_COUNT, help="First train a byte-level BPE of this vocabulary size on the inputs.")
    ] = None,
    end_of_text: Annotated[
        str | None, typer.Option(help="Token that ends a document; default: the tokenizer's token with a usual name.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="JSONL field or Parquet column that holds the text.")] = "text",
    shard_tokens: Annotated[
        int, number(1, MAX_SHARD_TOKENS, help="Tokens per shard file; an interruption costs at most one shard of work.")
    ] = 1 << 26,
    as_json: JsonOption = False,
) -> None:
    """Turn text into hashed, memory-mapped token shards. Interrupted runs resume."""
    from swarmtrain.data.prepare import PrepareOptions
    from swarmtrain.data.prepare import prepare as run_prepare

    options = PrepareOptions(tuple(inputs), out, tokenizer, train_bpe, end_of_text, text_field, shard_tokens)
    with ProgressBar() as bar:
        result = run_prepare(options, on_progress=PrepareDisplay(bar))
    if as_json:
        print_json(result.as_json())
    else:
        print(result.as_sentence())


class PrepareDisplay:
    """Shows a running `prepare` in a bar. Rates count from the first call of a phase."""

    def __init__(self, bar: ProgressBar, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bar, self._clock = bar, clock
        self._first: tuple[float, PrepareProgress] | None = None

    def __call__(self, progress: PrepareProgress) -> None:
        """Update the bar."""
        now = self._clock()
        if self._first is None or self._first[1].phase != progress.phase:
            self._first = now, progress
        started, first = self._first
        text = figures(progress, first, now - started)
        self._bar.update(progress.read_bytes, progress.total_bytes, text, phase=progress.phase)


def figures(progress: PrepareProgress, first: PrepareProgress, elapsed_s: float) -> str:
    """What to show beside the bar, `elapsed_s` seconds after `first`."""
    seconds = max(elapsed_s, 1e-9)
    bytes_per_s = (progress.read_bytes - first.read_bytes) / seconds
    tokens_per_s = (progress.tokens - first.tokens) / seconds
    return (
        f"{progress.phase}  {show_size(bytes_per_s)}/s  "
        f"{show_count(progress.tokens)} tokens  {show_count(tokens_per_s)} tokens/s"
    )
