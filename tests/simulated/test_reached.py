"""The list of what the simulated swarm never reaches is true to the source; and, as a long test, to what it reaches."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .reached import HERE, PACKAGE, ROOMS, ROOT, Source, listed


def test_what_is_listed_is_there() -> None:
    known = listed()
    sources = {path: Source(PACKAGE / path) for path, _ in known.entries}
    assert [place for place in known.entries if not sources[place[0]].has(place[1])] == []
    assert {path.split("/")[0] for path in sources} <= set(ROOMS)


def test_every_reason_is_explained_and_every_test_that_is_named_is_there() -> None:
    known = listed()
    assert set(known.entries.values()) <= set(known.reasons)
    assert [place for place, test in known.instead.items() if test and not (ROOT / test).is_file()] == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_else_is_unreached() -> None:
    command = [sys.executable, str(HERE / "reached.py")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
