from __future__ import annotations

from pathlib import Path

import pytest
from counting import Counting
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.data.prepare import PrepareOptions, prepare
from swarmtrain.data.source import EMBEDDED_BYTES, TokenSource, embedded_text, open_source
from swarmtrain.errors import DataError, UsageError


@given(num_tokens=st.integers(1, 500), fraction=st.floats(0, 1, exclude_max=True), length=st.integers(1, 60))
@settings(deadline=None, max_examples=200)
def test_windows_tile_both_parts_and_never_cross_the_border(num_tokens: int, fraction: float, length: int) -> None:
    source = TokenSource(Counting(num_tokens), validation_fraction=fraction)
    seen: dict[str, list[int]] = {"train": [], "validation": []}
    for split in ("train", "validation"):
        first, end = source.token_range(split)
        for index in range(source.num_windows(split, length)):
            window = source.window(split, index, length)
            assert len(window) == length
            assert first <= window[0]
            assert window[-1] < end
            seen[split] += window.tolist()
        assert seen[split] == list(range(first, first + len(seen[split])))  # in order, without gap or overlap
        assert end - first - len(seen[split]) < length
    assert source.token_range("train")[0] == 0
    assert source.token_range("validation")[1] == num_tokens
    assert source.token_range("train")[1] == source.token_range("validation")[0]
    assert not set(seen["train"]) & set(seen["validation"])


def test_validation_is_the_last_fraction_whatever_the_window() -> None:
    source = TokenSource(Counting(1000), validation_fraction=0.1)
    assert source.token_range("validation") == (900, 1000)
    assert source.window("validation", 0, 7)[0] == source.window("validation", 0, 33)[0] == 900


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 5.0, float("nan"), float("inf")])
def test_impossible_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(UsageError, match="validation fraction"):
        open_source("embedded", validation_fraction=fraction)


def test_windows_outside_a_part_are_refused() -> None:
    source = TokenSource(Counting(100), validation_fraction=0.5)
    for index in (-1, 5):
        with pytest.raises(ValueError, match="window"):
            source.window("train", index, 10)


def test_the_embedded_source_needs_nothing_from_outside() -> None:
    source = open_source("embedded", validation_fraction=0.05)
    assert source.vocab_size == 256
    assert source.num_tokens == EMBEDDED_BYTES + 1
    assert source.open_tokenizer().decode(source.window("train", 0, 50)).encode() == embedded_text()[:50]
    assert len(source.digest) == 64
    assert source.digest == open_source("embedded", validation_fraction=0.2).digest


def test_a_directory_is_a_source_and_windows_cross_its_shards(tmp_path: Path, english: bytes) -> None:
    (tmp_path / "text.txt").write_bytes(english)
    prepare(PrepareOptions((tmp_path / "text.txt",), tmp_path / "out", shard_tokens=7000))
    source = open_source(str(tmp_path / "out"), validation_fraction=0.1, verify=True)
    assert source.num_tokens == len(english) + 1
    for index in range(0, source.num_windows("train", 333), 3):
        assert bytes(source.window("train", index, 333).tolist()) == english[index * 333 : (index + 1) * 333]
    assert source.digest != open_source("embedded", validation_fraction=0.1).digest


def test_an_unknown_source_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no-such-dir/index\.json"):
        open_source(str(tmp_path / "no-such-dir"), validation_fraction=0.1)
