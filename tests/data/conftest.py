"""What the data tests share: small real texts, a small BPE, and ways to compare directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swarmtrain.data.source import embedded_text
from swarmtrain.data.tokenizer import train_bpe


@pytest.fixture(scope="session")
def english() -> bytes:
    """Some hundred kilobytes of prose, several lines of it."""
    return embedded_text()[:300_000]


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory, english: bytes) -> Path:
    """A trained tokenizer of 512 tokens."""
    directory = tmp_path_factory.mktemp("bpe")
    text = directory / "text.txt"
    text.write_bytes(english[:100_000])
    train_bpe([text], 512, directory / "bpe.json")
    return directory / "bpe.json"


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a directory with its bytes."""
    return lambda directory: {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
