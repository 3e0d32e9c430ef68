"""Text, JSONL and Parquet files -> a directory of token shards.

The output is a function of the inputs and options alone: a run that is killed at any moment and started again ends
with the same bytes in every file as one that was left in peace. Memory use does not depend on the size of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.data.documents import Cursor, Piece, decode_piece, read_pieces
from swarmtrain.data.files import atomic_write, writing
from swarmtrain.data.index import DTYPES, INDEX_FILE, TOKENIZER_FILE, ShardIndex, dtype_for
from swarmtrain.data.journal import (
    Plan,
    PreparationJournal,
    clean_up,
    exclusive,
    open_journal,
    require_same_plan,
    save_journal,
    without_times,
)
from swarmtrain.data.shards import check_size, open_shards
from swarmtrain.data.tokenizer import BYTES, ByteTokenizer, JsonTokenizer, Tokens, describe, open_tokenizer, train_bpe
from swarmtrain.data.writer import ShardWriter
from swarmtrain.errors import DataError, UsageError

DEFAULT_SHARD_TOKENS = 1 << 26
BATCH_BYTES = 1 << 21  # text that is tokenized at once, on all cores
RULES = 1  # of cutting documents into pieces and of ending them; another number would give other tokens


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `data prepare`. `train_bpe`: learn a vocabulary of this size from the inputs first."""

    inputs: tuple[Path, ...]
    out: Path
    tokenizer: str = BYTES
    train_bpe: int | None = None
    end_of_text: str | None = None
    text_field: str = "text"
    shard_tokens: int = DEFAULT_SHARD_TOKENS


@dataclass(frozen=True)
class PrepareProgress:
    """Where a running `prepare` is; bytes are those of the input files on disk, counted anew in each phase."""

    phase: str
    read_bytes: int
    total_bytes: int
    tokens: int


@dataclass(frozen=True)
class PrepareResult:
    """A complete directory. `resumed_tokens`: how many of the tokens an earlier run had finished."""

    out: Path
    index: ShardIndex
    resumed_tokens: int

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        index = self.index
        return {
            "done": True,
            "out": str(self.out),
            "tokens": index.num_tokens,
            "documents": index.documents,
            "shards": len(index.shards),
            "vocab_size": index.tokenizer.vocab_size,
            "end_of_text": index.tokenizer.end_of_text,
            "digest": index.digest,
            "resumed_tokens": self.resumed_tokens,
        }

    def as_sentence(self) -> str:
        """The same for a person."""
        index = self.index
        resumed = f" ({self.resumed_tokens:,} of them from an earlier run)" if self.resumed_tokens else ""
        ends = "" if index.tokenizer.end_of_text is not None else "; no end-of-text token separates the documents"
        return (
            f"{self.out}: {index.num_tokens:,} tokens{resumed} of {_count(index.documents, 'document')} "
            f"in {_count(len(index.shards), 'shard')}, vocabulary {index.tokenizer.vocab_size:,}{ends}\n"
            f'In the manifest: data.source = "{self.out}" and model.vocab_size = {index.tokenizer.vocab_size} or more'
        )


def prepare(options: PrepareOptions, *, on_progress: Callable[[PrepareProgress], None] | None = None) -> PrepareResult:
    """Make `options.out`, or finish what an interrupted run with the same options and inputs began.

    Raises `UsageError` for options that contradict each other or the directory, `DataError` for inputs at fault,
    `StorageError` if writing fails; in each case no file in the directory will be taken for finished that is not.
    """
    _check_options(options)
    plan = make_plan(options)
    with writing(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    with exclusive(options.out):
        if (options.out / INDEX_FILE).exists():
            return _already_complete(options.out, plan)
        journal = open_journal(options.out, plan)
        report = _Reporter(plan, on_progress)
        tokenizer = _make_tokenizer(options, report)
        index = _Preparation(options, plan, journal, tokenizer, report).run()
        clean_up(options.out)
    return PrepareResult(options.out, index, sum(shard.tokens for shard in journal.shards))


def make_plan(options: PrepareOptions) -> Plan:
    """Everything that shapes the output. Sources count as unchanged while name, size and modification time are."""
    tokenizer: dict[str, Any] = {"kind": BYTES}
    if options.train_bpe is not None:
        tokenizer = {"kind": "train-bpe", "vocab_size": options.train_bpe}
    elif options.tokenizer != BYTES:
        opened = open_tokenizer(options.tokenizer, end_of_text=options.end_of_text)
        tokenizer = {"kind": "json", "digest": opened.digest, "end_of_text": opened.end_of_text}
    return {
        "rules": RULES,
        "tokenizer": tokenizer,
        "text_field": options.text_field,
        "shard_tokens": options.shard_tokens,
        "sources": [_describe_source(path) for path in options.inputs],
    }


class _Reporter:
    """Turns places in the inputs into `PrepareProgress`."""

    def __init__(self, plan: Plan, on_progress: Callable[[PrepareProgress], None] | None) -> None:
        self._on_progress = on_progress
        self._bytes_before = [0, *accumulate(source["bytes"] for source in plan["sources"])]

    def __call__(self, phase: str, piece: Piece, tokens: int) -> None:
        if self._on_progress is not None:
            read_bytes = self._bytes_before[piece.cursor.input] + piece.read_bytes
            self._on_progress(PrepareProgress(phase, read_bytes, self._bytes_before[-1], tokens))


class _Preparation:
    """One run over the inputs, from where `journal` ends."""

    def __init__(
        self,
        options: PrepareOptions,
        plan: Plan,
        journal: PreparationJournal,
        tokenizer: ByteTokenizer | JsonTokenizer,
        report: _Reporter,
    ) -> None:
        self._options = options
        self._plan = plan
        self._journal = journal
        self._tokenizer = tokenizer
        self._report = report
        self._documents = journal.documents

    def run(self) -> ShardIndex:
        """Write all remaining shards, then the index."""
        directory = self._options.out
        dtype = dtype_for(self._tokenizer.vocab_size)
        for shard in self._journal.shards:
            check_size(directory / shard.file, shard, DTYPES[dtype])
        with ShardWriter(directory, DTYPES[dtype], self._options.shard_tokens, self._journal.shards) as writer:
            skip = self._journal.skip
            for piece, tokens in self._encoded_pieces():
                self._write_piece(writer, piece, tokens, skip)
                skip = 0
            writer.finish_shard()
        if not writer.shards:
            raise DataError("the inputs hold no text")
        if make_plan(self._options) != self._plan:
            raise DataError("an input or the tokenizer changed while it was read", fix="run the same command again")
        prepared = without_times(self._plan)
        index = ShardIndex(dtype, describe(self._tokenizer), tuple(writer.shards), self._documents, prepared)
        atomic_write(directory / INDEX_FILE, index.to_json())
        return index

    def _write_piece(self, writer: ShardWriter, piece: Piece, tokens: Tokens, skip: int) -> None:
        written = skip
        while written < len(tokens):
            written += writer.write(tokens[written:])
            if writer.full:
                writer.finish_shard()
                journal = self._journal.after(writer.shards, piece.cursor, written, self._documents)
                save_journal(self._options.out, journal)
        self._documents += piece.ends_document
        self._report("tokenizing", piece, writer.num_tokens)

    def _encoded_pieces(self) -> Iterator[tuple[Piece, Tokens]]:
        """Each piece with its tokens; that which ends a document also has the end-of-text token."""
        end = self._tokenizer.end_of_text
        end_of_text = np.array([] if end is None else [end], dtype=np.int64)  # (0 or 1,)
        for batch in _batches(self._pieces()):
            for piece, tokens in zip(batch, self._encode(batch), strict=True):
                yield piece, np.concatenate([tokens, end_of_text]) if piece.ends_document else tokens

    def _encode(self, batch: list[Piece]) -> list[Tokens]:
        try:
            return self._tokenizer.encode_batch([piece.text for piece in batch])
        except DataError:
            for piece in batch:  # find out which piece it was, for a message that names the place
                path = self._options.inputs[piece.cursor.input]
                decode_piece(path, piece)
                _encode_one(self._tokenizer, path, piece)
            raise

    def _pieces(self) -> Iterator[Piece]:
        first = self._journal.cursor
        for number in range(first.input, len(self._options.inputs)):
            start = first if number == first.input else Cursor(number)
            yield from read_pieces(self._options.inputs[number], start, self._options.text_field)


def _encode_one(tokenizer: ByteTokenizer | JsonTokenizer, path: Path, piece: Piece) -> None:
    try:
        tokenizer.encode(piece.text)
    except DataError as error:
        place = f"{path}: document {piece.cursor.position}:{piece.cursor.line}, byte {piece.cursor.part}"
        raise DataError(f"{place}: {error}", fix=error.fix) from error


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_options(options: PrepareOptions) -> None:
    if not options.inputs:
        raise UsageError("no input files")
    files = [*options.inputs, *([] if options.tokenizer == BYTES else [Path(options.tokenizer)])]
    for path in files:
        if path.resolve().parent == options.out.resolve():  # an abandoned attempt is cleared away, its files with it
            raise UsageError(f"{path} lies in the output directory", fix="choose another --out")
    if options.shard_tokens < 1:
        raise UsageError(f"--shard-tokens is {options.shard_tokens}; it must be at least 1")
    if options.train_bpe is not None and (options.tokenizer != BYTES or options.end_of_text is not None):
        raise UsageError("--train-bpe makes a tokenizer of its own: it goes with neither --tokenizer nor --end-of-text")
    if options.tokenizer == BYTES and options.end_of_text is not None:
        raise UsageError("--end-of-text needs --tokenizer FILE.json: with bytes, byte 0 ends a document")


def _describe_source(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not path.is_file():
        raise DataError(f"{path}: not a regular file", fix="name the files of a directory one by one, e.g. DIR/*.txt")
    return {"name": path.name, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def _make_tokenizer(options: PrepareOptions, report: _Reporter) -> ByteTokenizer | JsonTokenizer:
    """The tokenizer of this run; one that is not `bytes` is stored beside the shards, which are useless without it."""
    copy = options.out / TOKENIZER_FILE
    if options.train_bpe is not None:
        if copy.exists():  # of an interrupted run with the same plan, and complete, for it was written atomically
            return JsonTokenizer.open(copy)
        on_piece = partial(report, "training the tokenizer", tokens=0)
        return train_bpe(options.inputs, options.train_bpe, copy, text_field=options.text_field, on_piece=on_piece)
    tokenizer = open_tokenizer(options.tokenizer, end_of_text=options.end_of_text)
    if isinstance(tokenizer, JsonTokenizer):
        atomic_write(copy, tokenizer.content)
    return tokenizer


def _already_complete(directory: Path, plan: Plan) -> PrepareResult:
    index = open_shards(directory).index
    require_same_plan(directory, index.prepared, without_times(plan))
    clean_up(directory)
    return PrepareResult(directory, index, index.num_tokens)
