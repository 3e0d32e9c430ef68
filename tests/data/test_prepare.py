from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from swarmtrain.data import documents
from swarmtrain.data import prepare as prepare_module
from swarmtrain.data.journal import JOURNAL_FILE, exclusive
from swarmtrain.data.prepare import PrepareOptions, PrepareProgress, prepare
from swarmtrain.data.shards import open_shards
from swarmtrain.data.tokenizer import JsonTokenizer
from swarmtrain.errors import DataError, StorageError, SwarmtrainError, UsageError

Contents = Callable[[Path], dict[str, bytes]]
TEXTS = ["First document.", "Zweites, mit Umlaut: ü.", "", "Third\nhas two lines."]


def tokens_of(directory: Path) -> list[int]:
    shards = open_shards(directory, verify=True)
    return shards.read(0, shards.num_tokens).tolist()


def expected_bytes(texts: list[str]) -> list[int]:
    return [token for text in texts if text for token in [*text.encode(), 0]]


def inputs_of_every_kind(directory: Path) -> tuple[Path, ...]:
    lines = "".join(json.dumps({"text": text, "id": 7}) + "\n" for text in TEXTS)
    (directory / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    (directory / "b.jsonl").write_text(lines, encoding="utf-8")
    (directory / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(pa.table({"text": TEXTS}), directory / "d.parquet", row_group_size=2)
    (directory / "e.md").write_text(TEXTS[3], encoding="utf-8")
    return tuple(directory / name for name in ("a.txt", "b.jsonl", "c.jsonl.gz", "d.parquet", "e.md"))


def test_every_kind_of_input_becomes_documents_that_end_in_end_of_text(tmp_path: Path) -> None:
    inputs = inputs_of_every_kind(tmp_path)
    result = prepare(PrepareOptions(inputs, tmp_path / "out", shard_tokens=50))
    assert tokens_of(tmp_path / "out") == expected_bytes([TEXTS[0], *TEXTS * 3, TEXTS[3]])
    assert result.index.documents == 11
    assert all(shard.tokens == 50 for shard in result.index.shards[:-1])
    assert not list((tmp_path / "out").glob(".*"))


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')
    parquet.write_table(pa.table({"body": ["z"], "text": ["y"]}), tmp_path / "b.parquet")
    prepare(PrepareOptions((tmp_path / "a.jsonl", tmp_path / "b.parquet"), tmp_path / "out", text_field="body"))
    assert tokens_of(tmp_path / "out") == expected_bytes(["x", "z"])


def test_a_tokenizer_file_is_used_and_kept_beside_the_shards(tmp_path: Path, bpe_file: Path, english: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(english)
    (tmp_path / "b.txt").write_text("short")
    inputs = (tmp_path / "a.txt", tmp_path / "b.txt")
    prepare(PrepareOptions(inputs, tmp_path / "out", tokenizer=str(bpe_file)))
    shards = open_shards(tmp_path / "out", verify=True)
    tokenizer = shards.open_tokenizer()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == bpe_file.read_bytes()
    documents_found = tokenizer.decode(shards.read(0, shards.num_tokens)).split("<|endoftext|>")
    assert documents_found == [english.decode(), "short", ""]


GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt4": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT4_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "metaspace": pre_tokenizers.Metaspace(),
}


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
@pytest.mark.parametrize("line_end", [". ", ".\n", ".\n\n", ".  ", " 1999. "])
def test_cutting_a_long_text_into_pieces_changes_no_token(
    tmp_path: Path, english: bytes, kind: str, line_end: str
) -> None:
    text = english[:60_000].decode().replace(". ", line_end)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = PRE_TOKENIZERS[kind]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text(text)
    expected = JsonTokenizer.open(tmp_path / "t.json").encode(text).tolist()
    with patch.object(documents, "PIECE_BYTES", 1024):
        prepare(PrepareOptions((tmp_path / "a.txt",), tmp_path / "out", tokenizer=str(tmp_path / "t.json")))
        with patch.object(documents, "cut_point", len):  # the control: cuts in the middle of words do change tokens
            prepare(PrepareOptions((tmp_path / "a.txt",), tmp_path / "torn", tokenizer=str(tmp_path / "t.json")))
    assert tokens_of(tmp_path / "out") == expected
    assert tokens_of(tmp_path / "torn") != expected


def test_a_bpe_can_be_trained_on_the_way(tmp_path: Path, english: bytes) -> None:
    parquet.write_table(
        pa.table({"text": [english[:50_000].decode(), english[50_000:90_000].decode()]}), tmp_path / "a.parquet"
    )
    result = prepare(PrepareOptions((tmp_path / "a.parquet",), tmp_path / "out", train_bpe=600))
    assert result.index.tokenizer.vocab_size == 600
    shards = open_shards(tmp_path / "out", verify=True)
    text = shards.open_tokenizer().decode(shards.read(0, shards.num_tokens))
    assert text.replace("<|endoftext|>", "") == english[:90_000].decode()


def test_a_tokenizer_without_end_of_text_joins_documents_and_says_so(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "END": 70_000}, "unk_token": "a"}
    whitespace = {"type": "Whitespace"}
    content = {"version": "1.0", "model": model, "pre_tokenizer": whitespace}
    (tmp_path / "t.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("a b")
    options = PrepareOptions((tmp_path / "a.txt",) * 2, tmp_path / "out", tokenizer=str(tmp_path / "t.json"))
    result = prepare(options)
    assert tokens_of(tmp_path / "out") == [0, 1, 0, 1]
    assert "no end-of-text token" in result.as_sentence()
    assert result.index.dtype == "uint32"
    chosen = PrepareOptions(options.inputs, tmp_path / "out2", tokenizer=options.tokenizer, end_of_text="END")
    assert "no end-of-text" not in prepare(chosen).as_sentence()
    assert tokens_of(tmp_path / "out2") == [0, 1, 70_000, 0, 1, 70_000]
    open_shards(tmp_path / "out2").open_tokenizer()


@given(
    texts=st.lists(st.text(st.sampled_from("ab \né"), max_size=40), min_size=1, max_size=6).filter(any),
    shard_tokens=st.integers(1, 40),
    stops=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=20)
def test_interrupted_anywhere_it_ends_with_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, contents: Contents, texts: list[str], shard_tokens: int, stops: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("p")
    (directory / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (directory / "b.txt").write_text("".join(texts), encoding="utf-8")
    inputs = (directory / "a.jsonl", directory / "b.txt")

    class StopError(Exception):
        pass

    def stop_after(calls: int) -> Callable[[int], None]:
        left = [calls]
        real = os.fsync

        def fsync(descriptor: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise StopError
            real(descriptor)

        return fsync

    with patch.object(documents, "PIECE_BYTES", 8), patch.object(prepare_module, "BATCH_BYTES", 20):
        prepare(PrepareOptions(inputs, directory / "whole", shard_tokens=shard_tokens))
        for stop in stops:
            with patch.object(os, "fsync", stop_after(stop)):
                try:
                    prepare(PrepareOptions(inputs, directory / "pieces", shard_tokens=shard_tokens))
                except StopError:
                    continue
        prepare(PrepareOptions(inputs, directory / "pieces", shard_tokens=shard_tokens))
    assert contents(directory / "pieces") == contents(directory / "whole")


def test_a_finished_directory_is_left_alone(tmp_path: Path, contents: Contents) -> None:
    inputs = inputs_of_every_kind(tmp_path)
    options = PrepareOptions(inputs, tmp_path / "out", shard_tokens=50)
    first = prepare(options)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / ".tokens-000009.bin.tmp").write_bytes(b"left by a crash")
    second = prepare(options)
    assert second.index == first.index
    assert second.resumed_tokens == first.index.num_tokens
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def interrupt(options: PrepareOptions, after_shards: int) -> None:
    """Stop a run like Ctrl-C does, once it has finished some shards."""

    def stop(progress: PrepareProgress) -> None:
        if len(list(options.out.glob("tokens-*.bin"))) >= after_shards:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options, on_progress=stop)


def test_a_directory_made_with_other_options_is_refused_and_unchanged(
    tmp_path: Path, bpe_file: Path, contents: Contents, english: bytes
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(english)
    other = tmp_path / "b.txt"
    other.write_bytes(english[:1000])
    base = PrepareOptions((path,), tmp_path / "out", shard_tokens=100_000)
    changes = [
        (PrepareOptions((path,), base.out, shard_tokens=50_000), "shard_tokens: 100000 there, 50000 now"),
        (PrepareOptions((path,), base.out, shard_tokens=100_000, text_field="x"), "text_field"),
        (PrepareOptions((path,), base.out, shard_tokens=100_000, tokenizer=str(bpe_file)), "tokenizer"),
        (PrepareOptions((path,), base.out, shard_tokens=100_000, train_bpe=300), "tokenizer"),
        (PrepareOptions((path, other), base.out, shard_tokens=100_000), "sources"),
        (PrepareOptions((other,), base.out, shard_tokens=100_000), "sources"),
    ]
    interrupt(base, after_shards=1)
    for complete in (False, True):
        before = contents(base.out)
        assert ("index.json" in before) == complete
        for changed, what in changes:
            with pytest.raises(UsageError, match=what):
                prepare(changed)
        assert contents(base.out) == before
        assert prepare(base).resumed_tokens == (len(english) + 1 if complete else 200_000)


def test_inputs_that_changed_in_between_are_refused(tmp_path: Path, english: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(english)
    options = PrepareOptions((path,), tmp_path / "out", shard_tokens=100_000)
    interrupt(options, after_shards=1)
    path.write_bytes(english[::-1])
    os.utime(path, ns=(1, 1))
    with pytest.raises(UsageError, match="sources"):
        prepare(options)


def test_inputs_that_change_while_they_are_read_give_no_index(tmp_path: Path, english: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(english)
    options = PrepareOptions((path,), tmp_path / "out")

    def change(progress: PrepareProgress) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(DataError, match="changed while"):
        prepare(options, on_progress=change)
    assert not (tmp_path / "out" / "index.json").exists()
    prepare(options)
    assert bytes(tokens_of(tmp_path / "out")).startswith(english + b"more")


def test_a_failed_first_attempt_does_not_block_a_corrected_one(tmp_path: Path, contents: Contents) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no field 'text'"):
        prepare(PrepareOptions((tmp_path / "a.jsonl",), out, train_bpe=300))
    with pytest.raises(DataError, match="no field 'text'"):
        prepare(PrepareOptions((tmp_path / "a.jsonl",), out))
    prepare(PrepareOptions((tmp_path / "a.jsonl",), out, text_field="body"))
    assert sorted(contents(out)) == ["index.json", "tokens-000000.bin"]


def test_foreign_directories_are_refused_and_nothing_in_them_is_touched(tmp_path: Path, contents: Contents) -> None:
    (tmp_path / "a.txt").write_text("x")
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty and holds no token shards"):
        prepare(PrepareOptions((tmp_path / "a.txt",), out))
    assert contents(out) == {"precious.txt": b"mine"}
    with pytest.raises(UsageError, match="lies in the output directory"):
        prepare(PrepareOptions((tmp_path / "a.txt",), tmp_path))
    with pytest.raises(StorageError, match="cannot write"):
        prepare(PrepareOptions((tmp_path / "a.txt",), tmp_path / "a.txt"))


def test_a_shard_that_vanished_after_an_interruption_is_named(tmp_path: Path, english: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(english)
    options = PrepareOptions((tmp_path / "a.txt",), tmp_path / "out", shard_tokens=100_000)
    interrupt(options, after_shards=2)
    (tmp_path / "out" / "tokens-000001.bin").unlink()
    with pytest.raises(DataError, match=r"tokens-000001\.bin: missing"):
        prepare(options)


@pytest.mark.parametrize("content", [b"", b"{}", b"garbage", b'{"plan": {}, "cursor": {"input": -5}, "shards": []}'])
def test_a_damaged_journal_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / JOURNAL_FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"\.prepare\.json"):
        prepare(PrepareOptions((tmp_path / "a.txt",), tmp_path / "out"))


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "out").mkdir()
    with exclusive(tmp_path / "out"), pytest.raises(UsageError, match="another data prepare"):
        prepare(PrepareOptions((tmp_path / "a.txt",), tmp_path / "out"))
    prepare(PrepareOptions((tmp_path / "a.txt",), tmp_path / "out"))


def test_bad_text_is_named_and_leaves_no_index(tmp_path: Path, bpe_file: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    inputs = (tmp_path / "good.txt", tmp_path / "bad.txt")
    with pytest.raises(DataError, match=r"bad\.txt: byte 3: not UTF-8"):
        prepare(PrepareOptions(inputs, tmp_path / "out", tokenizer=str(bpe_file)))
    assert not (tmp_path / "out" / "index.json").exists()
    prepare(PrepareOptions(inputs, tmp_path / "bytes"))  # any bytes are fine for the byte tokenizer
    model = {"type": "WordLevel", "vocab": {"good": 0}, "unk_token": "<unk>"}
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (tmp_path / "bad.txt").write_text("evil")
    with pytest.raises(DataError, match=r"bad\.txt: .*cannot encode"):
        prepare(PrepareOptions(inputs, tmp_path / "out", tokenizer=str(tmp_path / "t.json")))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"inputs": ()}, "no input files"),
        ({"shard_tokens": 0}, "--shard-tokens is 0"),
        ({"train_bpe": 300, "tokenizer": "x.json"}, "--train-bpe"),
        ({"train_bpe": 300, "end_of_text": "x"}, "--train-bpe"),
        ({"train_bpe": 5}, "257"),
        ({"end_of_text": "x"}, "--end-of-text"),
        ({"tokenizer": "missing.json"}, "missing.json: the tokenizer cannot be read"),
        ({"inputs": (Path("missing.txt"),)}, "missing.txt: No such file"),
        ({"inputs": (Path("/"),)}, "not a regular file"),
        ({"inputs": (Path("/dev/zero"),)}, "not a regular file"),
    ],
)
def test_impossible_options_are_clear_errors(tmp_path: Path, options: dict[str, object], problem: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    arguments = {"inputs": (tmp_path / "a.txt",), "out": tmp_path / "out", **options}
    with pytest.raises(SwarmtrainError, match=problem):
        prepare(PrepareOptions(**arguments))  # type: ignore[arg-type]
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_inputs_without_text_are_a_clear_error(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match="no text"):
        prepare(PrepareOptions((tmp_path / name,), tmp_path / "out"))


@pytest.mark.parametrize("failing_call", range(20))
def test_a_full_disk_at_any_write_is_reported_and_resumable(
    tmp_path: Path, contents: Contents, failing_call: int, english: bytes
) -> None:
    (tmp_path / "a.txt").write_bytes(english[:1000])
    inputs = (tmp_path / "a.txt",)
    calls = [0]
    real = os.fsync

    def fsync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == failing_call + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with patch.object(os, "fsync", fsync), pytest.raises(StorageError, match="No space left on device") as caught:
        prepare(PrepareOptions(inputs, tmp_path / "out", shard_tokens=300))
    assert caught.value.exit_code == 8
    assert not list((tmp_path / "out").glob(".*.tmp"))
    for shard in (tmp_path / "out").glob("tokens-*.bin"):
        assert np.fromfile(shard, dtype="<u2").size in (300, 101)  # whatever has a final name is whole
    prepare(PrepareOptions(inputs, tmp_path / "out", shard_tokens=300))
    prepare(PrepareOptions(inputs, tmp_path / "whole", shard_tokens=300))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_progress_goes_from_nothing_to_everything(tmp_path: Path, english: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(english)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x" * 1000}))
    seen: list[PrepareProgress] = []
    options = PrepareOptions((tmp_path / "a.txt", tmp_path / "b.jsonl"), tmp_path / "out", train_bpe=300)
    result = prepare(options, on_progress=seen.append)
    for phase in ("training the tokenizer", "tokenizing"):
        shares = [progress.read_bytes for progress in seen if progress.phase == phase]
        assert shares == sorted(shares)
        assert shares[-1] == seen[0].total_bytes
    assert seen[-1].tokens == result.index.num_tokens
