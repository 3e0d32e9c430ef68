"""Two processes run the suite: files beside each other, in one piece each, and some of them alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
COMMON = """
import pathlib, pytest, threading, time

HERE = pathlib.Path(__file__)

def within(seconds, condition):
    ends_at = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends_at:
        threading.Event().wait(0.01)
    return condition()
"""
# Its tests end only if those of another such file run beside them.
TOGETHER = """
@pytest.mark.swarm
@pytest.mark.parametrize("number", [0, 1])
def test_together(number):
    HERE.with_suffix(f".{number}").touch()
    assert within(30, lambda: len(list(HERE.parent.glob(f"*.{number}"))) == 2)
"""
# Whichever of these comes first waits for the other one, which must not come.
ALONE = """
@pytest.fixture(scope="module", autouse=True)
def place():
    others = set(HERE.parent.glob("*.ended"))
    HERE.with_suffix(".begun").touch()
    yield others
    HERE.with_suffix(".ended").touch()

@pytest.mark.alone
def test_alone(place):
    assert len(list(HERE.parent.glob("*.1"))) == 2  # all else is over
    assert place or not within(1, lambda: len(list(HERE.parent.glob("*.begun"))) == 2)

def test_of_the_same_file():
    test_alone(set(HERE.parent.glob("*.ended")))
"""


def suite(place: Path, *files: str) -> subprocess.CompletedProcess[str]:
    """Run these test files as scripts/test does."""
    for number, text in enumerate(files):
        (place / f"test_{number}.py").write_text(COMMON + text)
    (place / "conftest.py").write_text('pytest_plugins = ("side_by_side",)')
    markers = "".join(f"  {name}: x\n" for name in ("swarm", "alone"))
    (place / "pytest.ini").write_text(f'[pytest]\npythonpath = "{TESTS}"\nmarkers =\n{markers}')
    flags = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *flags, str(place)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120, check=False)


def test_files_run_beside_each_other_and_some_alone_in_the_end(tmp_path: Path) -> None:
    found = suite(tmp_path, ALONE, TOGETHER, ALONE, TOGETHER)
    assert found.returncode == 0, found.stdout
    assert "8 passed" in found.stdout.splitlines()[-1]
