"""Schedules from seeds: fixed ones and some fresh ones, all judged; and that a seed is all that matters.

Twenty in the ordinary suite, eighty more with --long; scripts/simulate takes any number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmtrain.simulated.command import run_schedule
from swarmtrain.simulated.schedule import KINDS, draw

FIXED = range(100)
NUM_ORDINARY = 20
NUM_FRESH = 3


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=() if n < NUM_ORDINARY else pytest.mark.long) for n in FIXED[::5]]
)
def test_five_fixed_schedules_end_as_they_must(first: int) -> None:
    results = [run_schedule(draw(seed)) for seed in range(first, first + 5)]
    failed = {result.seed: result.failures for result in results if result.failures}
    assert not failed, f"scripts/simulate --seed {next(iter(failed))} --trace\n{failed}"
    assert sum(result.num_faults for result in results) > 0
    assert len({result.trace_hash for result in results}) == len(results), "another seed is another run"


def test_fresh_schedules_end_as_they_must() -> None:
    first = int.from_bytes(os.urandom(5), "big")
    print(f"fresh seeds: {first} to {first + NUM_FRESH - 1}")
    for seed in range(first, first + NUM_FRESH):
        result = run_schedule(draw(seed))
        assert not result.failures, f"scripts/simulate --seed {seed} --trace\n{result.failures}"


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in FIXED for fault in draw(seed).faults}
    assert drawn == set(KINDS)


IN_A_YEAR = """
import runpy, sys, time
seconds, nanoseconds = time.time, time.time_ns
time.time, time.time_ns = lambda: seconds() + 4e7, lambda: nanoseconds() + 40_000_000_000_000_000
runpy.run_module("swarmtrain.simulated.command", run_name="__main__", alter_sys=True)
"""


def test_a_seed_gives_the_same_trace_in_another_process_with_another_hash_seed_and_on_another_day() -> None:
    traces = set()
    for hash_seed, command in (("1", ("-m", "swarmtrain.simulated.command")), ("2", ("-c", IN_A_YEAR))):
        found = subprocess.run(
            [sys.executable, *command, "--seed", "14", "--seeds", "1", "--json", "--processes", "1"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        (result,) = (json.loads(line) for line in found.stdout.splitlines())
        assert result["seed"] == 14
        assert result["num_faults"] > 0
        traces.add(result["trace_hash"])
    assert len(traces) == 1
