from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from swarmtrain.data import documents
from swarmtrain.data.documents import Cursor, Piece, cut_point, kind_of, read_pieces
from swarmtrain.errors import DataError, MissingExtraError

TEXTS = st.lists(st.text(st.sampled_from("ab \n\té🙂"), max_size=60), min_size=1, max_size=8)


def write_text(directory: Path, texts: list[str]) -> Path:
    (directory / "d.txt").write_bytes("\n".join(texts).encode())
    return directory / "d.txt"


def write_jsonl(directory: Path, texts: list[str]) -> Path:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    (directory / "d.jsonl").write_text("\n\n".join(lines), encoding="utf-8")  # with blank lines, without a last newline
    return directory / "d.jsonl"


def write_gzip(directory: Path, texts: list[str]) -> Path:
    path = write_jsonl(directory, texts)
    (directory / "d.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    return directory / "d.jsonl.gz"


def write_parquet(directory: Path, texts: list[str]) -> Path:
    table = pa.table({"n": list(range(len(texts))), "text": texts})
    parquet.write_table(table, directory / "d.parquet", row_group_size=3)
    return directory / "d.parquet"


WRITERS = [write_text, write_jsonl, write_gzip, write_parquet]


def joined(pieces: list[Piece]) -> list[bytes]:
    """The documents that the pieces make up."""
    found, current = [], b""
    for piece in pieces:
        current += piece.text
        if piece.ends_document:
            found.append(current)
            current = b""
    assert current == b""
    return found


@pytest.mark.parametrize("write", WRITERS)
@given(texts=TEXTS)
@settings(deadline=None, max_examples=25)
def test_reading_from_any_piece_yields_the_same_rest(
    tmp_path_factory: pytest.TempPathFactory, write: Callable[[Path, list[str]], Path], texts: list[str]
) -> None:
    path = write(tmp_path_factory.mktemp("d"), texts)
    with patch.object(documents, "PIECE_BYTES", 16):
        pieces = list(read_pieces(path, Cursor(3), "text"))
        for number, piece in enumerate(pieces):
            assert 0 < len(piece.text) <= 16
            assert list(read_pieces(path, piece.cursor, "text")) == pieces[number:]
    expected = ["\n".join(texts)] if write is write_text else texts
    assert joined(pieces) == [text.encode() for text in expected if text]
    assert all(piece.cursor.input == 3 for piece in pieces)
    for piece in pieces:
        piece.text.decode("utf-8")  # no character is torn, even in pieces of 16 bytes


@given(text=st.text(st.sampled_from("ab \né🙂"), min_size=4, max_size=100))
@settings(deadline=None, max_examples=200)
def test_a_cut_is_inside_and_tears_no_character(text: str) -> None:
    content = text.encode()
    for length in range(4, len(content) + 1):
        cut = cut_point(content[:length])
        assert 0 < cut <= length
        content[:cut].decode("utf-8")


def test_cuts_prefer_a_single_space_then_line_starts_then_words() -> None:
    assert cut_point(b"aaaaaaaa\nbb cc\ndd") == len(b"aaaaaaaa\nbb")
    assert cut_point(b"aaaaaaaa\nbb\n\ncc") == len(b"aaaaaaaa\n")
    assert cut_point(b"aaaaaaaa\n\nbb  cc") == len(b"aaaaaaaa\n\nbb  ")
    assert cut_point(b"a b" + b"c" * 20) == 22  # nothing in the second half: a full piece rather than a tiny one
    assert cut_point(b"aa bb" + b"c" * 2000 + b" d" + b"c" * 1000) == 2005  # not near the end, but in the second half
    assert cut_point(b"\xff" * 9) == 8  # not UTF-8 at all
    assert cut_point(b"\x80" * 9) == 9


def test_kinds_go_by_the_name() -> None:
    names = ["a.txt", "b.md", "c.jsonl", "d.JSONL.gz", "e.ndjson", "f.parquet", "g", "h.txt.gz"]
    kinds = ["text", "text", "jsonl", "jsonl", "jsonl", "parquet", "text", "text"]
    assert [kind_of(Path(name)) for name in names] == kinds


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_not_text(tmp_path: Path, name: str) -> None:
    content = b'{"text": "hi"}' if name.endswith("jsonl") else b"hi"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert joined(list(read_pieces(tmp_path / name, Cursor(), "text"))) == [b"hi"]


def test_compressed_text_reads_like_plain(tmp_path: Path, english: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(english)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(english))
    plain = list(read_pieces(tmp_path / "a.txt", Cursor(), "text"))
    packed = list(read_pieces(tmp_path / "a.txt.gz", Cursor(), "text"))
    assert [piece.text for piece in plain] == [piece.text for piece in packed]
    assert len(plain) > 1
    assert plain[-1].read_bytes == len(english)
    assert packed[-1].read_bytes == (tmp_path / "a.txt.gz").stat().st_size


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'["a"]', "expected a JSON object, found list"),
        (b'{"body": "a", "id": 1}', "no field 'text'; it has 'body', 'id'"),
        (b"{}", "no field 'text'; it is empty"),
        (b'{"text": null}', "holds NoneType, not a string"),
        (b'{"text": ["a"]}', "holds list, not a string"),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        list(read_pieces(path, Cursor(), "text"))
    assert str(caught.value).startswith(f"{path}: line 3: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_line_numbers_are_right_after_resuming(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\nnonsense\n')
    reader = read_pieces(path, Cursor(), "text")
    next(reader)
    second = next(reader)
    with pytest.raises(DataError, match="line 3"):
        list(read_pieces(path, second.cursor, "text"))


def test_an_endless_line_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonl"
    path.write_bytes(b'{"text": "' + b"a" * 5000)
    with patch.object(documents, "MAX_DOCUMENT_BYTES", 1000), pytest.raises(DataError, match="line 1: longer than"):
        list(read_pieces(path, Cursor(), "text"))


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"no gzip" + raw])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], english: bytes) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage(gzip.compress(english)))
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read"):
        list(read_pieces(path, Cursor(), "text"))


def test_flipped_bits_in_a_gzip_file_are_noticed(tmp_path: Path, english: bytes) -> None:
    raw = bytearray(gzip.compress(english))
    raw[len(raw) // 2] ^= 0x55
    (tmp_path / "a.txt.gz").write_bytes(raw)
    with pytest.raises(DataError, match="cannot be read"):
        list(read_pieces(tmp_path / "a.txt.gz", Cursor(), "text"))


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl", "none.jsonl.gz", "none.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"{name}: cannot be read: No such file"):
        list(read_pieces(tmp_path / name, Cursor(), "text"))


def test_string_kinds_of_parquet_are_all_read(tmp_path: Path) -> None:
    for number, kind in enumerate([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pa.table({"text": pa.array(["a", "", "bé"]).cast(kind)}), path)
        assert joined(list(read_pieces(path, Cursor(), "text"))) == [b"a", "bé".encode()]


def test_bad_parquet_is_a_clear_error(tmp_path: Path) -> None:
    good = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), good)
    with pytest.raises(DataError, match="row group 0, row 1: the text is null"):
        list(read_pieces(good, Cursor(), "text"))
    with pytest.raises(DataError, match="no column 'body'; it has 'text', 'n'"):
        list(read_pieces(good, Cursor(), "body"))
    with pytest.raises(DataError, match="column 'n' holds int64"):
        list(read_pieces(good, Cursor(), "n"))
    raw = good.read_bytes()
    for damaged in (b"", b"PAR1", b"garbage" * 100, raw[: len(raw) // 2], raw[:-20] + b"\xff" * 12 + raw[-8:]):
        good.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.parquet"):
            list(read_pieces(good, Cursor(), "text"))


def test_parquet_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column = pa.array([b"fine", b"\xff\xfe"], type=pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": column}), path)
    with pytest.raises(DataError, match="row 1"):
        list(read_pieces(path, Cursor(), "text"))


def test_a_parquet_value_above_the_limit_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path, ["a" * 2000])
    with patch.object(documents, "MAX_DOCUMENT_BYTES", 1000), pytest.raises(DataError, match="longer than 1000"):
        list(read_pieces(tmp_path / "d.parquet", Cursor(), "text"))


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow"):
        list(read_pieces(tmp_path / "a.parquet", Cursor(), "text"))
