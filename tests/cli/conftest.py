"""The one long run of these tests: `swarmtrain train nano --steps 200`, trained while others run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from side_by_side import is_worker

from .programs import PROGRAM, environment

NANO_DEADLINE_S = 1500  # one to two minutes on a quiet core


@dataclass(frozen=True)
class NanoRun:
    """A finished run: its --out directory and what it printed."""

    out: Path
    printed: str


@pytest.fixture(scope="session")
def _nano_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    directory = tmp_path_factory.mktemp("nano")
    arguments = [PROGRAM, "train", "nano", "--steps", "200", "--threads", "1", "--out", directory / "run", "--json"]
    with (directory / "printed").open("wb") as printed:
        process = subprocess.Popen(arguments, stdout=printed, env=environment())
    yield process, directory
    process.kill()
    process.wait()


@pytest.fixture(scope="session", autouse=True)
def _started_early(request: pytest.FixtureRequest) -> None:
    """Started with the first of these tests, if any wants the run: training takes a core, the other tests another.

    Not where another process runs tests on that core.
    """
    is_wanted = any("nano_run" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if is_wanted and not is_worker(request.config):
        request.getfixturevalue("_nano_process")


@pytest.fixture(scope="session")
def nano_run(_nano_process: tuple[subprocess.Popen[bytes], Path]) -> NanoRun:
    """The finished run."""
    process, directory = _nano_process
    assert process.wait(NANO_DEADLINE_S) == 0
    return NanoRun(directory / "run", (directory / "printed").read_text())
