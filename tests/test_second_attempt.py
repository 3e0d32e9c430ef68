"""The suite's second attempt: for missed deadlines of daemons, for nothing else. Shown on suites of its own."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest
from second_attempt import was_too_slow

TESTS = Path(__file__).parent
SLOW_ONCE = """
import pathlib, pytest

MARK = pathlib.Path(__file__).with_suffix(".seen")

@pytest.mark.swarm
def test_daemons():
    first = not MARK.exists()
    MARK.touch()
    if first:
        raise {error}
"""
BROKEN = "import pytest\n@pytest.mark.swarm\ndef test_daemons():\n    raise TimeoutError\n"
DIES = "import os, pytest\n@pytest.mark.swarm\ndef test_daemons():\n    os._exit(1)\n"
UNMARKED = SLOW_ONCE.replace("@pytest.mark.swarm", "")
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadfile", "--max-worker-restart", "0")  # as scripts/test has it


def suite(
    place: Path, *files: str, second_attempt: bool = True, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run these test files with the project's plugin."""
    for number, text in enumerate(files):
        (place / f"test_{number}.py").write_text(text)
    (place / "conftest.py").write_text('pytest_plugins = ("second_attempt",)')
    settings = f'[pytest]\npythonpath = "{TESTS}"\nmarkers =\n  swarm: x\n  long: x\n'
    (place / "pytest.ini").write_text(settings)
    flags = (*flags, "--second-attempt") if second_attempt else flags
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, str(place)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("flags", [(), SIDE_BY_SIDE], ids=["one process", "side by side"])
def test_what_was_too_slow_once_is_run_again_and_shown(tmp_path: Path, flags: tuple[str, ...]) -> None:
    more = "def test_more():\n    pass\n"
    found = suite(tmp_path, SLOW_ONCE.format(error="TimeoutError('too slow')"), more, flags=flags)
    assert found.returncode == 0
    assert "TimeoutError: too slow" in found.stdout
    assert "second attempt, alone:" in found.stdout
    assert "test_0.py::test_daemons" in found.stdout
    assert "passed at the second attempt" in found.stdout


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([SLOW_ONCE.format(error="AssertionError('other bits')")], id="a wrong result"),
        pytest.param([UNMARKED.format(error="TimeoutError")], id="a test without daemons"),
        pytest.param([SLOW_ONCE.format(error="TimeoutError")] * 3, id="three failures"),
        pytest.param([BROKEN], id="a failure that stays"),
    ],
)
def test_everything_else_fails_the_suite(tmp_path: Path, files: list[str]) -> None:
    found = suite(tmp_path, *files)
    assert found.returncode == 1
    assert "passed at the second attempt" not in found.stdout


@pytest.mark.parametrize(
    "error", [SLOW_ONCE.format(error="AssertionError('other bits')"), DIES], ids=["a wrong result", "a dead process"]
)
def test_side_by_side_a_wrong_result_and_a_dead_process_are_final(tmp_path: Path, error: str) -> None:
    found = suite(tmp_path, error, flags=SIDE_BY_SIDE)
    assert found.returncode == 1
    assert "1 failed" in found.stdout
    assert "second attempt" not in found.stdout


@pytest.mark.parametrize(
    ("error", "is_slow"),
    [
        (TimeoutError("this never became true"), True),
        (subprocess.TimeoutExpired("swarmtrain", 1.0), True),
        (urllib.error.URLError(TimeoutError("timed out")), True),
        (pytest.fail.Exception("Timeout (>300.0s) from pytest-timeout."), True),
        (pytest.fail.Exception("axe-core is not installed here"), False),
        (urllib.error.URLError(ConnectionRefusedError()), False),
        (AssertionError("serious color-contrast"), False),
        (KeyError("swarmtrain_run_step"), False),
    ],
)
def test_only_a_missed_deadline_is_too_slow(error: BaseException, is_slow: bool) -> None:
    assert was_too_slow(error) == is_slow


def test_only_the_whole_suite_has_second_attempts(tmp_path: Path) -> None:
    found = suite(tmp_path, SLOW_ONCE.format(error="TimeoutError"), second_attempt=False)
    assert found.returncode == 1
    assert "second attempt" not in found.stdout


def test_a_long_test_is_not_forgiven_by_a_run_without_it(tmp_path: Path) -> None:
    found = suite(tmp_path, BROKEN.replace("@pytest.mark.swarm", "@pytest.mark.swarm\n@pytest.mark.long"))
    assert found.returncode == 1
    assert "second attempt, alone" not in found.stdout
