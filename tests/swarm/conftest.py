"""Short directories for sockets, and reference runs that the whole session shares."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .comparison import References


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Reference runs by manifest, each trained once."""
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for one swarm."""
    yield from short_directory()


@pytest.fixture(scope="module")
def shared_place() -> Iterator[Path]:
    """A directory for a swarm that the tests of one file share."""
    yield from short_directory()


def short_directory() -> Iterator[Path]:
    """A new directory with a short path, removed at the end: unix sockets have at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="st-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
