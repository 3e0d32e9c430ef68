from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.data import shards as shards_module
from swarmtrain.data.index import DTYPES, INDEX_FILE, ShardIndex, read_index
from swarmtrain.data.shards import open_shards
from swarmtrain.data.tokenizer import ByteTokenizer, JsonTokenizer, TokenizerDescription, describe
from swarmtrain.data.writer import ShardWriter
from swarmtrain.errors import DataError


def write_shards(
    directory: Path, tokens: np.ndarray, shard_tokens: int, tokenizer: TokenizerDescription | None = None
) -> ShardIndex:
    """A complete directory that holds `tokens`."""
    description = tokenizer or describe(ByteTokenizer())
    dtype = "uint16" if description.vocab_size <= 65536 else "uint32"
    with ShardWriter(directory, DTYPES[dtype], shard_tokens) as writer:
        written = 0
        while written < len(tokens):
            written += writer.write(tokens[written:])
            if writer.full:
                writer.finish_shard()
        writer.finish_shard()
    index = ShardIndex(dtype, description, tuple(writer.shards), documents=1, prepared={})
    (directory / INDEX_FILE).write_bytes(index.to_json())
    return index


@given(
    values=st.lists(st.integers(0, 255), min_size=1, max_size=200),
    shard_tokens=st.integers(1, 60),
    ends=st.tuples(st.integers(0, 200), st.integers(0, 200)),
)
@settings(deadline=None, max_examples=60)
def test_reading_any_stretch_equals_the_flat_array(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], shard_tokens: int, ends: tuple[int, int]
) -> None:
    directory = tmp_path_factory.mktemp("s")
    index = write_shards(directory, np.array(values, dtype=np.int64), shard_tokens)
    shards = open_shards(directory, verify=True)
    assert shards.num_tokens == len(values)
    assert read_index(directory) == index
    start, end = sorted(min(number, len(values)) for number in ends)
    assert shards.read(start, end - start).tolist() == values[start:end]


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path: Path) -> None:
    big = TokenizerDescription("json", "0" * 64, 100_000, None)
    write_shards(tmp_path, np.array([99_999, 65_536, 1]), 2, big)
    assert (tmp_path / "tokens-000000.bin").read_bytes() == (99_999).to_bytes(4, "little") + (65_536).to_bytes(
        4, "little"
    )
    assert open_shards(tmp_path, verify=True).read(0, 3).tolist() == [99_999, 65_536, 1]


def test_stretches_outside_the_corpus_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, np.arange(10), 4)
    shards = open_shards(tmp_path)
    for start, count in ((-1, 2), (8, 3), (0, -1), (11, 0)):
        with pytest.raises(ValueError, match="tokens"):
            shards.read(start, count)


def test_open_files_stay_few_for_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "MAX_OPEN_SHARDS", 4)
    write_shards(tmp_path, np.arange(100), 2)
    shards = open_shards(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert shards.read(0, 100).tolist() == list(range(100))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_threads_read_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "MAX_OPEN_SHARDS", 2)
    write_shards(tmp_path, np.arange(250), 10)
    shards = open_shards(tmp_path)
    wrong: list[int] = []

    def read_all(offset: int) -> None:
        for number in range(0, 200):
            start = (number * 37 + offset) % 200
            if shards.read(start, 50).tolist() != list(range(start, start + 50)):
                wrong.append(start)

    threads = [threading.Thread(target=read_all, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_sizes_are_always_checked(tmp_path: Path) -> None:
    write_shards(tmp_path, np.arange(100), 40)
    path = tmp_path / "tokens-000001.bin"
    content = path.read_bytes()
    for changed, problem in (
        (content[:-1], "truncated: 79 bytes instead of 80"),
        (content + b"x", "too long"),
        (b"", "trunc"),
    ):
        path.write_bytes(changed)
        with pytest.raises(DataError, match=rf"tokens-000001\.bin: {problem}"):
            open_shards(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"tokens-000001\.bin: missing"):
        open_shards(tmp_path)
    path.write_bytes(content)
    open_shards(tmp_path, verify=True)


def test_a_shard_that_is_cut_short_later_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    write_shards(tmp_path, np.arange(100), 40)
    shards = open_shards(tmp_path)
    (tmp_path / "tokens-000002.bin").write_bytes(b"")
    assert shards.read(0, 80).tolist() == list(range(80))
    with pytest.raises(DataError, match="truncated"):
        shards.read(60, 30)


def test_changed_bytes_are_noticed_by_verify_only(tmp_path: Path) -> None:
    write_shards(tmp_path, np.arange(100), 40)
    path = tmp_path / "tokens-000002.bin"
    content = bytearray(path.read_bytes())
    content[6] ^= 1
    path.write_bytes(content)
    open_shards(tmp_path)
    with pytest.raises(DataError, match=r"tokens-000002\.bin: damaged: its sha256"):
        open_shards(tmp_path, verify=True)


def test_ids_outside_the_vocabulary_never_reach_a_model(tmp_path: Path) -> None:
    write_shards(tmp_path, np.array([1, 2, 300, 4]), 10)
    with pytest.raises(DataError, match=r"tokens-000000\.bin: holds token id 300, the vocabulary ends at 255"):
        open_shards(tmp_path, verify=True)
    shards = open_shards(tmp_path)
    assert shards.read(0, 2).tolist() == [1, 2]
    with pytest.raises(DataError, match="token id 300"):
        shards.read(1, 2)


Change = Callable[[dict[str, Any]], object]
BAD_INDEXES: list[tuple[Change, str]] = [
    (lambda index: index.update(format="other"), "not an index of token shards"),
    (lambda index: index.update(version=2), "version 2 of the format; this program reads 1"),
    (lambda index: index.update(version=[[1]] * 1000), "version"),
    (lambda index: index.update(dtype="float32"), "dtype: expected one of uint16, uint32, found 'float32'"),
    (lambda index: index.update(dtype=["uint16"]), "dtype"),
    (lambda index: index.update(tokens=99), "tokens is 99, but the shards add up to 100"),
    (lambda index: index.update(tokens=True), "tokens: expected an integer"),
    (lambda index: index.update(tokens=10**30), "tokens: expected an integer"),
    (lambda index: index.update(documents=-1), "documents"),
    (lambda index: index.update(shards={}), "shards: expected a list"),
    (lambda index: index.update(shards=[]), "tokens is 100, but"),
    (lambda index: index["shards"].reverse(), "expected 'tokens-000000.bin'"),
    (lambda index: index["shards"][1].update(file="../../etc/passwd"), "expected 'tokens-000001.bin'"),
    (lambda index: index["shards"][1].update(tokens=0), "tokens: expected an integer from 1"),
    (lambda index: index["shards"][1].update(tokens=1.5), "tokens: expected an integer"),
    (lambda index: index["shards"][1].update(sha256="abc"), "sha256: expected 64"),
    (lambda index: index["shards"].__setitem__(0, None), r"shards\[0\]: expected an object"),
    (lambda index: index.pop("tokenizer"), "tokenizer: expected an object"),
    (lambda index: index.pop("prepared"), "prepared: expected an object"),
    (lambda index: index["tokenizer"].update(kind="magic"), "kind: expected one of bytes, json"),
    (lambda index: index["tokenizer"].update(digest=5), "tokenizer.digest"),
    (lambda index: index["tokenizer"].update(vocab_size=0), "vocab_size"),
    (lambda index: index["tokenizer"].update(vocab_size=70_000), "uint16 cannot hold"),
    (lambda index: index["tokenizer"].update(end_of_text=256), "end_of_text"),
]


@pytest.mark.parametrize(("change", "problem"), BAD_INDEXES)
def test_a_malformed_index_is_named_with_what_is_wrong(tmp_path: Path, change: Change, problem: str) -> None:
    write_shards(tmp_path, np.arange(100), 40)
    index = json.loads((tmp_path / INDEX_FILE).read_bytes())
    change(index)
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(DataError, match=problem) as caught:
        open_shards(tmp_path)
    assert str(tmp_path / INDEX_FILE) in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null", b'{"version": ' + b"9" * 9999]
)
def test_an_index_that_is_no_json_object_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX_FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"index\.json: malformed"):
        open_shards(tmp_path)


def test_missing_directories_and_huge_indexes_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/index\.json: No such file"):
        open_shards(tmp_path / "nowhere")
    with (tmp_path / INDEX_FILE).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="larger than"):
        open_shards(tmp_path)


def test_the_digest_follows_the_tokens_and_not_the_history(tmp_path: Path) -> None:
    first = write_shards(tmp_path, np.arange(100), 40)
    assert first.digest == ShardIndex(first.dtype, first.tokenizer, first.shards, 7, {"other": 1}).digest
    assert first.digest != write_shards(tmp_path, np.arange(100)[::-1], 40).digest


def test_the_tokenizer_beside_the_shards_must_be_the_right_one(tmp_path: Path, bpe_file: Path) -> None:
    tokenizer = JsonTokenizer.open(bpe_file)
    write_shards(tmp_path, np.arange(100), 40, describe(tokenizer))
    with pytest.raises(DataError, match="tokenizer cannot be read"):
        open_shards(tmp_path).open_tokenizer()
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    assert open_shards(tmp_path).open_tokenizer().digest == tokenizer.digest
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes() + b"\n")
    with pytest.raises(DataError, match="not the one"):
        open_shards(tmp_path).open_tokenizer()
