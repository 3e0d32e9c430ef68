"""A second attempt for what only was too slow.

Some hundred tests run real daemons against deadlines, on two cores, two at a time. `--second-attempt` (scripts/test
gives it) runs the files of at most two that missed one again, alone, when everything else is over, and says so.
Whatever failed otherwise is final: a result that differs, a wrong number, a fault of the page, books that do not
balance. So are long tests and tests without daemons.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest
from side_by_side import is_worker

MOST_REPEATED = 2


def was_too_slow(error: BaseException) -> bool:
    """Whether a deadline passed: a test's own, that of a program or an answer, or that of the whole test."""
    if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
        return True
    if isinstance(error, pytest.fail.Exception):
        return str(error).startswith("Timeout (>")  # pytest-timeout's words
    return isinstance(getattr(error, "reason", None), TimeoutError)  # urllib's


class SecondAttempt:
    """Remembers what failed; runs it again in the end."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._is_final = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
        """Where the test runs, maybe in a process of its own: the report takes along what the end must know."""
        report = yield
        if report.failed:
            assert call.excinfo is not None
            is_short = item.get_closest_marker("swarm") is not None and item.get_closest_marker("long") is None
            report.missed_deadline = is_short and was_too_slow(call.excinfo.value)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Where all reports arrive."""
        if report.failed:
            self._failed.add(report.nodeid)
            self._is_final |= not getattr(report, "missed_deadline", False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
        yield
        if is_worker(session.config) or exitstatus != pytest.ExitCode.TESTS_FAILED or self._is_final:
            return
        if not 0 < len(self._failed) <= MOST_REPEATED:
            return
        print("\nsecond attempt, alone:", *sorted(self._failed), sep="\n  ", flush=True)
        files = sorted({name.split("::")[0] for name in self._failed})
        again = [sys.executable, "-m", "pytest", "-m", "not long", *files]
        if subprocess.run(again, cwd=session.config.rootpath, env=dict(os.environ), check=False).returncode == 0:
            print("passed at the second attempt; look at the failures above", flush=True)
            session.exitstatus = pytest.ExitCode.OK


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-attempt", action="store_true", help="run the files of failed tests of daemons again")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--second-attempt"):
        config.pluginmanager.register(SecondAttempt(), "second-attempt")
