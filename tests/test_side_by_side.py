"""Several processes run the suite: files beside each other in one piece, simulated swarms in pieces after them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
COMMON = """
import os, pathlib, pytest, threading, time

HERE = pathlib.Path(__file__)

def within(seconds, condition):
    ends_at = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends_at:
        threading.Event().wait(0.01)
    return condition()
"""
# Its tests end only if those of another such file run beside them, and run in one process.
TOGETHER = """
PROCESS = []

@pytest.mark.swarm
@pytest.mark.parametrize("number", [0, 1])
def test_together(number):
    PROCESS.append(number)
    assert PROCESS == list(range(number + 1))
    HERE.with_suffix(f".{number}").touch()
    assert within(60, lambda: len(list(HERE.parent.glob(f"*.{number}"))) == 2)
"""
# Its tests end only if they run beside each other, when all else is over or the last of it is under way.
APART = """
@pytest.mark.parametrize("number", [0, 1])
def test_apart(number):
    assert len(list(HERE.parent.parent.glob("*.0"))) == 2
    (HERE.parent / f"{number}.begun").touch()
    assert within(60, lambda: len(list(HERE.parent.glob("*.begun"))) == 2)
"""


def suite(place: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run these test files as scripts/test does."""
    for name, text in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(COMMON + text)
    (place / "conftest.py").write_text('pytest_plugins = ("side_by_side",)')
    (place / "pytest.ini").write_text(f'[pytest]\npythonpath = "{TESTS}"\nmarkers =\n  swarm: x\n')
    flags = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *flags, str(place)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, check=False)


def test_files_run_beside_each_other_and_simulated_tests_wherever_there_is_room(tmp_path: Path) -> None:
    files = {"simulated/test_a.py": APART, "test_b.py": TOGETHER, "test_c.py": TOGETHER}
    found = suite(tmp_path, files)
    assert found.returncode == 0, found.stdout
    assert "6 passed" in found.stdout.splitlines()[-1]
