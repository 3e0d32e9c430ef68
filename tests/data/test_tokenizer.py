from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmtrain.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    describe,
    open_tokenizer,
    train_bpe,
)
from swarmtrain.errors import DataError, MissingExtraError, UsageError

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(text=ANY_TEXT)
@settings(deadline=None, max_examples=100)
def test_bytes_survive_the_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert len(ids) == len(text.encode())
    assert np.array_equal(ids, tokenizer.encode(text.encode()))
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_is_pinned() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (256, 0)
    assert tokenizer.digest == "1846eb4ffcc85a476939679cd011023b12a029f5dbdd97ab0c85336e6e37f2b7"
    assert tokenizer.encode("aß").tolist() == [97, 195, 159]
    assert tokenizer.decode([0xFF, 97]) == "�a"


@given(text=ANY_TEXT)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_survives_a_bpe_trained_on_english(bpe_file: Path, text: str) -> None:
    tokenizer = JsonTokenizer.open(bpe_file)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_trained_bpe_compresses_and_knows_its_size_and_end(bpe_file: Path, english: bytes) -> None:
    tokenizer = JsonTokenizer.open(bpe_file)
    assert tokenizer.vocab_size == 512
    assert tokenizer.end_of_text == 0
    ids = tokenizer.encode(english)
    assert len(ids) < len(english) / 1.8
    assert ids.min() >= 0
    assert ids.max() < 512
    assert describe(tokenizer).kind == "json"
    assert describe(ByteTokenizer()).kind == "bytes"


def test_batches_equal_single_texts(bpe_file: Path, english: bytes) -> None:
    tokenizer = JsonTokenizer.open(bpe_file)
    texts = [english[:1000], b"", english[1000:1100], "naïve 🙂".encode()]
    for batched, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert np.array_equal(batched, tokenizer.encode(text))


def test_special_tokens_spelled_in_a_text_stay_text(bpe_file: Path) -> None:
    tokenizer = JsonTokenizer.open(bpe_file)
    assert 0 not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_truncation_and_padding_of_a_file_are_ignored(bpe_file: Path, tmp_path: Path, english: bytes) -> None:
    content = json.loads(bpe_file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 4000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "cut.json").write_text(json.dumps(content))
    plain, cut = JsonTokenizer.open(bpe_file), JsonTokenizer.open(tmp_path / "cut.json")
    assert np.array_equal(cut.encode(english[:300]), plain.encode(english[:300]))
    assert cut.digest != plain.digest


def test_training_gives_the_same_bytes_in_any_process(bpe_file: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from swarmtrain.data.tokenizer import train_bpe;"
        "train_bpe([Path(sys.argv[1])], 512, Path(sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false"}
    text = bpe_file.with_name("text.txt")
    command = [sys.executable, "-c", program, str(text), str(tmp_path / "again.json")]
    subprocess.run(command, check=True, timeout=60, env=environment)
    assert (tmp_path / "again.json").read_bytes() == bpe_file.read_bytes()


def test_training_can_be_limited_to_the_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaaa bbbb " * 100)
    (tmp_path / "b.txt").write_text("zqzq " * 500)
    both = [tmp_path / "a.txt", tmp_path / "b.txt"]
    limited = train_bpe(both, 300, tmp_path / "limited.json", max_bytes=500)
    first = train_bpe(both[:1], 300, tmp_path / "first.json")
    assert limited.digest == first.digest != train_bpe(both, 300, tmp_path / "all.json").digest


def test_a_tiny_text_gives_a_smaller_vocabulary_that_still_works(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    tokenizer = train_bpe([tmp_path / "a.txt"], 5000, tmp_path / "t.json")
    assert 257 <= tokenizer.vocab_size < 5000
    assert tokenizer.decode(tokenizer.encode("Ünseen\n")) == "Ünseen\n"


@pytest.mark.parametrize("vocab_size", [-1, 0, 256, 1 << 30])
def test_impossible_vocabularies_are_refused(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        train_bpe([], vocab_size, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_training_on_text_that_is_not_utf8_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\xfebad")
    with pytest.raises(DataError, match=r"bad\.txt: byte 5: not UTF-8"):
        train_bpe([tmp_path / "bad.txt"], 300, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":99999999999},"merges":[]}}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["zz yy"]}}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":4000000000},"merges":[]}}',
    ],
)
def test_files_that_are_no_tokenizers_are_clear_errors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"t\.json"):
        JsonTokenizer.open(path)


def test_missing_and_oversized_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        open_tokenizer(str(tmp_path / "none.json"))
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse: were it read, the test would not survive
    with pytest.raises(DataError, match="larger than"):
        open_tokenizer(str(tmp_path / "huge.json"))


def test_a_character_the_tokenizer_has_no_token_for_is_a_clear_error(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(DataError, match="cannot encode"):
        JsonTokenizer.open(tmp_path / "t.json").encode("b")


def test_the_end_of_text_token_is_found_or_chosen(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1, "stop": 5}, "unk_token": "a"}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"version": "1.0", "model": model}))
    assert JsonTokenizer.open(path).end_of_text == 1
    assert JsonTokenizer.open(path).vocab_size == 6  # ids have a gap
    assert JsonTokenizer.open(path, end_of_text="stop").end_of_text == 5
    assert JsonTokenizer.open(path, end_of_text=5).end_of_text == 5
    with pytest.raises(UsageError, match="no token 'halt'"):
        JsonTokenizer.open(path, end_of_text="halt")
    with pytest.raises(DataError, match="id 4"):
        JsonTokenizer.open(path, end_of_text=4)
    model["vocab"] = {"a": 0}
    path.write_text(json.dumps({"version": "1.0", "model": model}))
    assert JsonTokenizer.open(path).end_of_text is None
    with pytest.raises(UsageError, match="byte 0"):
        open_tokenizer("bytes", end_of_text="</s>")


@pytest.mark.parametrize("ids", [[256], [-1], [0, 1 << 40]])
def test_ids_out_of_range_are_refused(bpe_file: Path, ids: list[int]) -> None:
    with pytest.raises(DataError, match="token id"):
        ByteTokenizer().decode(ids)
    with pytest.raises(DataError, match="token id"):
        JsonTokenizer.open(bpe_file).decode([number * 10 for number in ids])


def test_text_that_is_not_unicode_is_a_clear_error(bpe_file: Path) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer.open(bpe_file)):
        with pytest.raises(DataError, match="Unicode"):
            tokenizer.encode("half \ud800")
    with pytest.raises(DataError, match="not UTF-8 at byte 2"):
        JsonTokenizer.open(bpe_file).encode(b"ab\xff")


def test_without_the_optional_package_the_error_says_what_to_install(
    bpe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError) as caught:
        JsonTokenizer.open(bpe_file)
    assert "tokenizers" in str(caught.value)
    assert "pip install '.[data]'" in caught.value.fix
    with pytest.raises(MissingExtraError):
        train_bpe([], 300, tmp_path / "t.json")
    assert ByteTokenizer().decode([97]) == "a"
