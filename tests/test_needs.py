"""What is not on this machine skips a test, or fails it where it must be there. Shown on a suite of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import REQUIRE

TESTS = Path(__file__).parent
SUITE = """
import pytest
from needs import missing, needs

@pytest.fixture
def costly():
    raise AssertionError("started for nothing")

@needs(False, "there is no oracle here")
def test_marked(costly):
    pass

def test_calling():
    missing("there is no oracle here")

@needs(True, "never said")
def test_with_all_it_needs():
    pass
"""


@pytest.mark.parametrize(("value", "outcome"), [("", "1 passed, 2 skipped"), ("1", "1 failed, 1 passed, 1 error")])
def test_what_is_missing_is_a_skip_or_where_it_must_be_there_a_failure(
    tmp_path: Path, value: str, outcome: str
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "needs", "-p", "no:cacheprovider", "-c", os.devnull, "-rsf"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), REQUIRE: value}
    found = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert outcome in found.stdout, found.stdout
    assert found.stdout.count("there is no oracle here") >= 1
    assert "started for nothing" not in found.stdout
    assert "never said" not in found.stdout


def test_ci_requires_everything() -> None:
    script = (TESTS.parent / ".ci" / "run").read_text()
    assert re.search(rf"^export {REQUIRE}=1$", script, re.MULTILINE)
