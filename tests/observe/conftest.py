"""Short directories for swarms: unix sockets have at most 107 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm.conftest import short_directory


@pytest.fixture(scope="module")
def shared_place() -> Iterator[Path]:
    """A directory for a swarm that the tests of one file share."""
    yield from short_directory()
