"""Numbers on the command line: what no machine has is one clear line and exit code 2, for every option of any verb."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from swarmtrain.cli.main import app
from swarmtrain.cli.numbers import MAX_THREADS

from .programs import Outcome, assert_one_line, call, run
from .test_environment import options

BEYOND = {float: ("nan", "inf", "-inf", "1e308", "-1e308"), int: (str(10**30), str(-(10**30)))}


def functions(group: typer.Typer = app, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb's function."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*path, command.name or command.callback.__name__), command.callback
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from functions(below.typer_instance, (*path, str(below.name)))


def numeric_options() -> list[tuple[tuple[str, ...], Any, type]]:
    """(verb, option, int or float) of every option that a function takes as a number, or as a list of them."""
    hints = {path: get_type_hints(function) for path, function in functions()}
    found = []
    for path, option in options():
        kinds = str(hints[path][option.name])
        kind = float if "float" in kinds else int if "int" in kinds else None
        if kind is not None:
            found.append((path, option, kind))
    return found


def test_the_numeric_options_are_found() -> None:
    names = {(*path, option.opts[0]) for path, option, _ in numeric_options()}
    expected = {
        ("join", "--threads"),
        ("join", "--drain-timeout"),
        ("coordinator", "--min-gain"),
        ("sim", "--stages"),
        ("sim", "--minutes"),
        ("train", "--steps"),
        ("generate", "--temperature"),
        ("data", "prepare", "--shard-tokens"),
        ("top", "--interval"),
        ("study", "--stage-seconds"),
    }
    assert expected <= names
    assert len(names) > 35


@pytest.mark.parametrize(
    ("path", "option", "kind"),
    [pytest.param(*item, id=" ".join([*item[0], item[1].opts[0]])) for item in numeric_options()],
)
def test_every_numeric_option_has_bounds_and_keeps_to_them(path: tuple[str, ...], option: Any, kind: type) -> None:
    name = option.opts[0]
    for text in BEYOND[kind]:
        line = assert_one_line(call(*path, f"{name}={text}"), 2, "ST-USAGE")
        assert name in line
        assert "it must be from" in line


def join(*arguments: str) -> Outcome:
    return call("join", "nobody-reads-this-invite", *arguments)


@pytest.mark.parametrize("option", ["--max-memory", "--max-samples"])
@pytest.mark.parametrize("text", ["infGB", "nanGB", "-3GB", "1e99GB", "some", "8 elephants"])
def test_sizes_that_no_machine_has(option: str, text: str) -> None:
    assert "is" in assert_one_line(join(f"{option}={text}"), 2, "ST-USAGE")


@pytest.mark.parametrize("text", ["0GB", "0"])
def test_no_memory_at_all_is_not_taken_for_no_limit(text: str) -> None:
    assert "--max-memory" in assert_one_line(join(f"--max-memory={text}"), 2, "ST-USAGE")


@pytest.mark.parametrize("option", ["--max-up", "--max-down"])
@pytest.mark.parametrize("text", ["infmbit", "nanmbit", "-5mbit", "0mbit", "1e99mbit"])
def test_rates_that_no_line_has(option: str, text: str) -> None:
    assert_one_line(join(f"{option}={text}"), 2, "ST-USAGE")


@pytest.mark.parametrize("text", ["inf", "nan", "-5s", "0", "infs", "1e300s", "soon"])
def test_times_between_kills_that_make_no_sense(tmp_path: Path, text: str) -> None:
    outcome = call("local", "nano", "--state-dir", tmp_path / "state", f"--kill-every={text}")
    assert "is not a time" in assert_one_line(outcome, 2, "ST-USAGE")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "setting",
    [
        "queue_limit=-5",
        "batch=-3",
        "num_asked=-1",
        "window_maximum=-9",
        "backbone_latency_s=-5",
        "boundary_bytes=1e300",
        "speed_spread=1e300",
        "download_s=nan",
        "download_s=inf",
        "mean_life_s=1e-300",
        "directory_period_s=1e-300",
        "stage_costs=1,nan",
        "rebalance.stages_per_move=0",
        "rebalance.min_gain=nan",
        "rebalance.min_left=-4",
    ],
)
def test_parameters_of_a_scenario_that_cannot_be_simulated(setting: str) -> None:
    arguments = ("sim", "--minutes", 3, "--warmup", 1, "--peers", 6, "--stages", 2)
    line = assert_one_line(call(*arguments, "--set", setting), 2, "ST-USAGE")
    assert setting.partition("=")[0] in line


def test_more_threads_than_the_machine_could_use_are_refused_before_they_are_started() -> None:
    """They ended in a segmentation fault: as a process, so that it would be seen."""
    assert (os.cpu_count() or 1) <= MAX_THREADS < 100_000
    outcome = run("train", "nano", "--steps", 1, "--threads", 100_000)
    assert outcome.code != -signal.SIGSEGV
    assert "--threads" in assert_one_line(outcome, 2, "ST-USAGE")
