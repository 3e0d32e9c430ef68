"""Reading documents out of text, JSONL and Parquet files as a stream of pieces, from any place in the middle.

A `Piece` is a stretch of UTF-8 text of at most `PIECE_BYTES`, small enough to be tokenized on its own. Where a document
is cut into pieces depends on its bytes alone, never on where reading began: a reader that starts at a piece's `Cursor`
yields the same pieces as one that came from the beginning. So `prepare` can resume, with identical output.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from swarmtrain.errors import DataError, MissingExtraError

PIECE_BYTES = 1 << 18  # tokenizers need some hundred bytes of memory per byte of text
MAX_DOCUMENT_BYTES = 1 << 28  # a JSON line or Parquet value has to fit into memory; a text file may have any size
PARQUET_BATCH_ROWS = 256
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Places between two pieces, the best first. At a single space before a word the tokenizers in use (GPT-2's and later
# regular expressions, metaspace) split anyway and see nothing of what came before; so the cut changes no token there.
_CUTS = (
    re.compile(rb"(?<=\S)(?= \S)"),
    re.compile(rb"(?<=\S\n)(?=\S)"),
    re.compile(rb"(?<=\s)(?=\S)"),
)
_NEAR_END = 512  # looking at the end first is only for speed: most texts have a space there


@dataclass(frozen=True)
class Cursor:
    """The place of a piece: which input, which document in it, and at which byte of that document's text.

    For text files `position` and `line` are 0; for JSONL they are the (uncompressed) offset and the number of the line,
    for Parquet the row group and the row in it.
    """

    input: int = 0
    position: int = 0
    line: int = 0
    part: int = 0


@dataclass(frozen=True)
class Piece:
    """Text that is tokenized in one go. `read_bytes`: how much of the file on disk was read, for progress only."""

    text: bytes
    cursor: Cursor
    ends_document: bool
    read_bytes: int


def kind_of(path: Path) -> str:
    """`jsonl`, `parquet` or `text`, by the name alone (a final `.gz` is set aside)."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def read_pieces(path: Path, start: Cursor, text_field: str) -> Iterator[Piece]:
    """The pieces of `path` from `start` on. Raises `DataError` that names the file and the line or row at fault."""
    kind = kind_of(path)
    try:
        if kind == "parquet":
            yield from _parquet_pieces(path, start, text_field)
        else:
            with _open_binary(path) as file:
                read = _jsonl_pieces(path, file, start, text_field) if kind == "jsonl" else _text_pieces(file, start)
                yield from read
    except (OSError, EOFError, zlib.error) as error:  # gzip reports damage as any of the three
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path}: cannot be read: {reason}") from error


def decode_piece(path: Path, piece: Piece) -> str:
    """The piece as a string, or a `DataError` that says where in `path` the text is not UTF-8."""
    try:
        return piece.text.decode("utf-8")
    except UnicodeDecodeError as error:
        # JSONL and Parquet texts were strings once, so this is a text file, where `part` is the offset in the file.
        fix = "convert the file to UTF-8, or use --tokenizer bytes, which takes any bytes"
        raise DataError(f"{path}: byte {piece.cursor.part + error.start}: not UTF-8", fix=fix) from error


def cut_point(text: bytes) -> int:
    """Where to end a piece that begins with `text` and goes on after it: 0 < result <= len(text).

    Before the last single space; failing that at the start of a line, then of a word; failing all, at least no UTF-8
    character is torn. A piece is never less than half full, or a strange text would make tiny ones.
    """
    for pattern in _CUTS:
        for start in (max(len(text) - _NEAR_END, len(text) // 2), len(text) // 2):
            matches = [match.start() for match in pattern.finditer(text, max(start, 1))]
            if matches:
                return matches[-1]
    for end in range(len(text) - 1, max(len(text) - 4, 0), -1):
        if text[end] & 0xC0 != 0x80:  # not a continuation byte: a character starts here
            return end
    return len(text)


def _open_binary(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _disk_position(file: IO[bytes]) -> int:
    """How far the file on disk was read, which for a compressed one is not the position in its content."""
    return cast(Any, file).fileobj.tell() if isinstance(file, gzip.GzipFile) else file.tell()


def _text_pieces(file: IO[bytes], start: Cursor) -> Iterator[Piece]:
    """One document per file, streamed."""
    offset = start.part
    file.seek(offset)
    buffer = file.read(PIECE_BYTES)
    if offset == 0 and buffer.startswith(BYTE_ORDER_MARK):
        offset, buffer = len(BYTE_ORDER_MARK), buffer[len(BYTE_ORDER_MARK) :]
    while buffer:
        buffer += file.read(PIECE_BYTES + 1 - len(buffer))  # one more byte tells whether this is the end
        last = len(buffer) <= PIECE_BYTES
        end = len(buffer) if last else cut_point(buffer[:PIECE_BYTES])
        yield Piece(buffer[:end], Cursor(start.input, 0, 0, offset), last, _disk_position(file))
        offset, buffer = offset + end, buffer[end:]


def _document_pieces(text: bytes, document: Cursor, start_part: int, read_bytes: int) -> Iterator[Piece]:
    """The pieces of a document that is in memory. An empty one has none."""
    offset = start_part
    while offset < len(text):
        last = len(text) - offset <= PIECE_BYTES
        end = len(text) if last else offset + cut_point(text[offset : offset + PIECE_BYTES])
        cursor = Cursor(document.input, document.position, document.line, offset)
        yield Piece(text[offset:end], cursor, last, read_bytes)
        offset = end


def _jsonl_pieces(path: Path, file: IO[bytes], start: Cursor, text_field: str) -> Iterator[Piece]:
    """One document per line: the string under `text_field` of the line's object. Blank lines are passed over."""
    position, line_number, part = start.position, max(start.line, 1), start.part
    file.seek(position)
    while line := cast(BufferedReader, file).readline(MAX_DOCUMENT_BYTES + 1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise DataError(f"{path}: line {line_number}: longer than {MAX_DOCUMENT_BYTES} bytes")
        content = line.removeprefix(BYTE_ORDER_MARK) if position == 0 else line
        if content.strip():
            text = _json_text(content, text_field, where=f"{path}: line {line_number}")
            document = Cursor(start.input, position, line_number)
            yield from _document_pieces(text, document, part, _disk_position(file))
        position, line_number, part = position + len(line), line_number + 1, 0


def _json_text(line: bytes, text_field: str, *, where: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: malformed, not UTF-8, or a number of absurd length
        raise DataError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if text_field not in record:
        raise DataError(f"{where}: no field {text_field!r}; {_name_fields(list(record))}", fix=FIELD_FIX)
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {text_field!r} holds {type(text).__name__}, not a string", fix=FIELD_FIX)
    return utf8(text, where=where)


FIELD_FIX = "name the field or column that holds the text with --text-field"


def _name_fields(names: list[str]) -> str:
    shown = ", ".join(repr(name[:40]) for name in names[:10]) + (", ..." if len(names) > 10 else "")
    return f"it has {shown}" if names else "it is empty"


def utf8(text: str, *, where: str) -> bytes:
    """`text` as UTF-8, or a `DataError` that begins with `where`."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(f"{where}: the text is not valid Unicode at character {error.start}") from error


def _parquet_pieces(path: Path, start: Cursor, text_field: str) -> Iterator[Piece]:
    """One document per row of the column `text_field`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "data") from error
    size = path.stat().st_size  # first of all: its error for a missing file is the clearer one
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            _check_column(path, file.schema_arrow, text_field)
            for group in range(start.position, file.num_row_groups):
                done = size * (group + 1) // file.num_row_groups
                row = start.line if group == start.position else 0
                for number, text in _parquet_rows(path, file, group, text_field, first_row=row):
                    document = Cursor(start.input, group, number)
                    at_start = (group, number) == (start.position, start.line)
                    yield from _document_pieces(text, document, start.part if at_start else 0, done)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _check_column(path: Path, schema: Any, text_field: str) -> None:
    import pyarrow.types as types

    if text_field not in schema.names:
        raise DataError(f"{path}: no column {text_field!r}; {_name_fields(schema.names)}", fix=FIELD_FIX)
    column = schema.field(text_field).type
    value = column.value_type if types.is_dictionary(column) else column
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise DataError(f"{path}: column {text_field!r} holds {column}, not strings", fix=FIELD_FIX)


def _parquet_rows(path: Path, file: Any, group: int, text_field: str, *, first_row: int) -> Iterator[tuple[int, bytes]]:
    """(row in the group, its text) from `first_row` on, a few rows in memory at a time."""
    row = 0
    batches = file.iter_batches(PARQUET_BATCH_ROWS, row_groups=[group], columns=[text_field], use_threads=False)
    for batch in batches:
        for value in batch.column(0):
            if row >= first_row:
                yield row, _parquet_text(value, where=f"{path}: row group {group}, row {row}")
            row += 1


def _parquet_text(value: Any, *, where: str) -> bytes:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}") from error
    if text is None:
        raise DataError(f"{where}: the text is null")
    content = utf8(text, where=where)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DataError(f"{where}: longer than {MAX_DOCUMENT_BYTES} bytes")
    return content
