"""Calling the verbs: in this process for what goes wrong before any work, as real processes for the rest."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from swarmtrain.cli.main import main

PROGRAM = str(Path(sys.executable).with_name("swarmtrain"))
DEADLINE_S = 600  # far beyond what anything here takes, even on a crowded machine


@dataclass(frozen=True)
class Outcome:
    """How a verb ended."""

    code: int
    out: str
    err: str


def call(*arguments: object) -> Outcome:
    """Run the console script's own function in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    command = mock.patch.object(sys, "argv", ["swarmtrain", *map(str, arguments)])
    with command, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def run(*arguments: object, prepare: Callable[[], None] | None = None) -> Outcome:
    """Run the console script as a process; `prepare` is called in it before the program starts."""
    done = subprocess.run(
        [PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        preexec_fn=prepare,
        env=environment(),
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def started(*arguments: object, prepare: Callable[[], None] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A running console script; killed at the end if it still runs."""
    process = subprocess.Popen(
        [PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
        env=environment(),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def environment() -> dict[str, str]:
    """One thread, and no settings of the person who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARMTRAIN_")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def until_step(process: subprocess.Popen[str], step: int) -> dict[str, Any]:
    """Read a trainer's --json lines up to that of `step`; returns it."""
    assert process.stdout is not None
    for line in process.stdout:
        report: dict[str, Any] = json.loads(line)
        if report.get("step") == step:
            return report
    raise AssertionError(f"the trainer ended before step {step}")


def json_lines(text: str) -> list[dict[str, Any]]:
    """The objects of --json."""
    return [json.loads(line) for line in text.splitlines()]


def assert_one_line(outcome: Outcome, code: int, error_id: str) -> str:
    """The outcome is this error: one line that begins with the id, and nothing else. Returns the line."""
    assert outcome.code == code, outcome
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith(f"{error_id}: "), lines[0]
    assert "Traceback" not in outcome.err + outcome.out
    return lines[0]
