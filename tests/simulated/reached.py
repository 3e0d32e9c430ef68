"""`scripts/coverage`: which branches of the daemons' rooms the simulated swarm reaches, and which it never does.

Fixed seeds and the scenarios of this directory run under branch coverage, on all cores. Only what daemons do while
virtual time passes counts, and what they answer their owners: not imports, not the judge, not the reference trainer.

What is not reached must be in unreached.toml, with the reason; what is there must not be reached, except what is there
as `rare`: some seeds reach it, and whether the fixed ones do changes with every change of the daemons.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "swarmtrain"
ROOMS = ("peer", "coordinator", "chain", "reduce")
LIST = HERE / "unreached.toml"
RARE = "rare"  # the reason that does not forbid to be reached
FIXED = 60  # seeds, from 0
AT_ONCE = 10  # seeds of one process
NO_SCENARIOS = ("test_seeds.py", "test_planted.py", "test_loop.py", "test_reached.py")


# ---- in a process of its own: run something, and note what the daemons reach -----------------------------------------


def measure(data: Path, arguments: list[str]) -> int:
    """Run seeds (`seeds FIRST NUMBER`) or scenarios (`pytest ...`)."""
    sys.path.insert(0, str(ROOT))
    tracer = coverage.Coverage(
        data_file=str(data), branch=True, config_file=False, include=[f"{PACKAGE / room}/*" for room in ROOMS]
    )
    _trace_daemons_only(tracer)
    if arguments[0] == "seeds":
        from swarmtrain.simulated.command import main as simulate

        code = simulate(["--seed", arguments[1], "--seeds", arguments[2], "--processes", "1", "--no-shrink"])
    else:
        import pytest

        code = int(pytest.main(["-p", "no:cacheprovider", "-m", "not long", *arguments[1:]]))
    tracer.save()
    return code


def _trace_daemons_only(tracer: coverage.Coverage) -> None:
    from swarmtrain.simulated.loop import VirtualLoop
    from swarmtrain.simulated.machine import SimulatedProcess

    is_tracing = False

    @contextlib.contextmanager
    def traced() -> Iterator[None]:
        nonlocal is_tracing
        if is_tracing:
            yield
            return
        is_tracing = True
        tracer.start()
        try:
            yield
        finally:
            tracer.stop()
            is_tracing = False

    def wrap(owner: type, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*arguments: Any, **options: Any) -> Any:
            with traced():
                return inner(*arguments, **options)

        setattr(owner, name, outer)

    wrap(VirtualLoop, "run_until")
    wrap(SimulatedProcess, "answer")


# ---- what was reached ------------------------------------------------------------------------------------------------


@dataclass
class File:
    """One source file: how many branches it has and how many were reached; what was not, by its name in the list."""

    path: str  # within the package
    num_branches: int = 0
    num_reached: int = 0
    num_statements: int = 0
    num_run: int = 0
    unreached: dict[str, list[str]] = field(default_factory=dict)  # name: where


class Source:
    """Names places of a file by their text, so that the list survives other lines."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self._lines = text.splitlines()
        nodes = list(ast.walk(ast.parse(text)))
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self._scopes = sorted(
            (node.lineno, node.end_lineno or node.lineno, node.name) for node in [*functions, *classes]
        )
        self._bodies = [(node.body[0].lineno, node.end_lineno or node.lineno) for node in functions]

    def is_work(self, line: int) -> bool:
        """Whether it is in a function: what is outside runs when the module is imported."""
        return any(first <= line <= last for first, last in self._bodies)

    def where(self, line: int) -> str:
        """The function: `Class.method`."""
        return ".".join(name for first, last, name in self._scopes if first <= line <= last)

    def text(self, line: int) -> str:
        """One line; a negative one is the end of a function."""
        return "the end" if line < 0 else " ".join(self._lines[line - 1].split())

    def branch(self, start: int, end: int) -> str:
        """A branch that was not taken."""
        return f"{self.where(start)}: {self.text(start)} -> {self.text(end)}"

    def line(self, start: int) -> str:
        """A statement that was not run, although no branch leads around it: usually an `except`."""
        return f"{self.where(start)}: {self.text(start)}"

    def has(self, name: str) -> bool:
        """Whether the lines that a name in the list is made of are there."""
        texts = {self.text(line) for line in range(1, len(self._lines) + 1)} | {"the end"}
        starts = (self.line(line) for line in range(1, len(self._lines) + 1))
        return any(name == start or name.removeprefix(f"{start} -> ") in texts for start in starts)


def analyse(tracer: coverage.Coverage, path: Path) -> File:
    """See `File`. Inside of what was not reached only its beginning is told."""
    # The analysis that `coverage json` prints, without its file.
    analysis = tracer._analyze(str(path))
    numbers = analysis.numbers
    found = File(
        str(path.relative_to(PACKAGE)),
        numbers.n_branches,
        numbers.n_executed_branches,
    )
    source, missing = Source(path), set(analysis.missing)
    explained = set()
    for start, ends in sorted(analysis.missing_branch_arcs().items()):
        if start in missing:
            continue
        for end in sorted(ends):
            explained.add(end)
            place = f"{found.path}:{start} -> {'the end' if end < 0 else end}"
            found.unreached.setdefault(source.branch(start, end), []).append(place)
    statements = [line for line in sorted(analysis.statements) if source.is_work(line)]
    found.num_statements, found.num_run = len(statements), len(set(statements) - missing)
    runs_on = False  # whether the statement before was missing as well
    for line in statements:
        if line in missing and line not in explained and not runs_on:
            found.unreached.setdefault(source.line(line), []).append(f"{found.path}:{line}")
        runs_on = line in missing
    return found


# ---- all of it -------------------------------------------------------------------------------------------------------


def run_all(directory: Path, num_seeds: int, scenarios: list[str], num_processes: int) -> list[str]:
    """Run everything; what failed."""
    jobs = [["pytest", name] for name in scenarios]
    jobs += [["seeds", str(first), str(min(AT_ONCE, num_seeds - first))] for first in range(0, num_seeds, AT_ONCE)]

    def run(numbered: tuple[int, list[str]]) -> str:
        number, job = numbered
        command = [
            sys.executable,
            str(HERE / "reached.py"),
            "--measure",
            str(directory / f"data.{os.getpid()}.{number}"),
            *job,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if sys.stderr.isatty() or "SWARMTRAIN_COVERAGE_TIMES" in os.environ:
            print(f"{' '.join(job)}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        return "" if done.returncode == 0 else f"{' '.join(job)} failed:\n{done.stdout}"

    with ThreadPoolExecutor(num_processes) as pool:
        return [text for text in pool.map(run, enumerate(jobs)) if text]


@dataclass(frozen=True)
class Known:
    """The list: what the keys of reasons say; by file and name of a place, the key, and the test that reaches it."""

    reasons: dict[str, str]
    entries: dict[tuple[str, str], str]
    instead: dict[tuple[str, str], str]  # empty: none


def listed() -> Known:
    """What unreached.toml says."""
    content = tomllib.loads(LIST.read_text())
    reasons = content.pop("reasons")
    places = {(path, name): text.split() for path, names in content.items() for name, text in names.items()}
    return Known(
        reasons,
        {place: words[0] for place, words in places.items()},
        {place: " ".join(words[1:]) for place, words in places.items()},
    )


def report(files: list[File]) -> int:
    """Print it; how many places are neither reached nor listed, or listed and reached."""
    known = listed()
    width = max(len(file.path) for file in files)
    print(f"{'':{width}}  branches  reached  listed  unknown")
    bad: list[str] = []
    for file in files:
        unknown = [name for name in file.unreached if (file.path, name) not in known.entries]
        num_listed = len(file.unreached) - len(unknown)
        print(f"{file.path:{width}}  {file.num_branches:8}  {file.num_reached:7}  {num_listed:6}  {len(unknown):7}")
        bad += [f"{', '.join(file.unreached[name])}\n    {name}" for name in unknown]
    branches, reached = sum(file.num_branches for file in files), sum(file.num_reached for file in files)
    statements, run = sum(file.num_statements for file in files), sum(file.num_run for file in files)
    print(
        f"{reached} of {branches} branches ({100 * reached / branches:.1f} %) and {run} of {statements} statements"
        f" ({100 * run / statements:.1f} %) are reached"
    )
    there = {(file.path, name) for file in files for name in file.unreached}
    counts = Counter(key for entry, key in known.entries.items() if entry in there)
    for key, reason in known.reasons.items():
        print(f"{counts[key]:5}  {key}: {reason}")
    if bad:
        print("neither reached nor listed:", *bad, sep="\n  ")
    stale = [f"{entry[0]} {entry[1]}" for entry, key in known.entries.items() if key != RARE and entry not in there]
    if stale:
        print("listed, but reached or not there any more:", *stale, sep="\n  ")
    return len(bad) + len(stale)


def main() -> int:
    """See the module."""
    if sys.argv[1:2] == ["--measure"]:
        return measure(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(
        prog="scripts/coverage",
        description="Branches of the daemons that the simulated swarm reaches: fixed seeds, and its scenarios.",
        epilog="Exit code 1: a branch is neither reached nor in tests/simulated/unreached.toml, or both and not rare.",
    )
    parser.add_argument("--seeds", type=int, default=FIXED, help=f"how many, from 0 (default {FIXED})")
    parser.add_argument("--no-scenarios", action="store_true", help="seeds alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (default: all cores)")
    parser.add_argument("--data", type=Path, help="keep what was measured in this directory, and add what is there")
    parser.add_argument("scenarios", nargs="*", help="files or tests instead of all in tests/simulated")
    chosen = parser.parse_args()
    scenarios = chosen.scenarios or sorted(
        str(path.relative_to(ROOT)) for path in HERE.glob("test_*.py") if path.name not in NO_SCENARIOS
    )
    directory = chosen.data or Path(tempfile.mkdtemp(prefix="swarmtrain-coverage-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        failures = run_all(directory, chosen.seeds, [] if chosen.no_scenarios else scenarios, chosen.processes)
        include = [f"{PACKAGE / room}/*" for room in ROOMS]
        whole = coverage.Coverage(data_file=None, branch=True, config_file=False, include=include, messages=False)
        whole.combine([str(path) for path in sorted(directory.glob("data.*"))], keep=True)
        files = [analyse(whole, path) for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]
        num_bad = report([file for file in files if file.num_branches or file.unreached])
    finally:
        if chosen.data is None:
            shutil.rmtree(directory, ignore_errors=True)
    for text in failures:
        print(text)
    return 1 if num_bad or failures else 0


if __name__ == "__main__":
    sys.exit(main())
