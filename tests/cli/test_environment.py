"""Every option of every verb is also an environment variable with a plain name, and --help says which."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from typer.main import get_command

from swarmtrain.cli.main import app
from swarmtrain.cli.places import find_invite, remember_coordinator, remember_invite
from swarmtrain.errors import UsageError

from .programs import call

VALUES = ("1", "x=1", "on", "float32", "80mbit")  # every option takes one of them
SHARED = {"--json": "SWARMTRAIN_JSON", "--set": "SWARMTRAIN_SET"}
OWN_SET = ("sim",)  # its --set is of scenarios
ROOT: Any = get_command(app)


def verbs(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*path, name))
        else:
            yield (*path, name), command


def options() -> list[tuple[tuple[str, ...], Any]]:
    return [
        (path, option)
        for path, command in verbs()
        for option in command.params
        if option.param_type_name == "option" and not option.hidden and "--help" not in option.opts
    ]


def variable(path: tuple[str, ...], option: Any) -> str:
    """What the rule of docs/cli.md makes of an option."""
    (name,) = [item for item in option.opts if item.startswith("--")]
    if name in SHARED and not (name == "--set" and path[0] in OWN_SET):
        return SHARED[name]
    return "_".join(["SWARMTRAIN", *path, name.removeprefix("--").replace("-", "_")]).upper()


def parsed(path: tuple[str, ...], arguments: list[str]) -> Any:
    """The context of a verb, with its values and where they are from; nothing is run."""
    context = ROOT.make_context("swarmtrain", [*path, *arguments], resilient_parsing=True)
    group = ROOT
    for number, name in enumerate(path):
        command = group.commands[name]
        is_last = number == len(path) - 1
        context = command.make_context(name, arguments if is_last else [*path[number + 1 :]], parent=context)
        group = command
    return context


def source_of(option: str, path: tuple[str, ...], arguments: list[str], environment: dict[str, str]) -> str:
    """Where the option's value is from; empty if the value is refused."""
    with mock.patch.dict(os.environ, environment):
        try:
            return str(parsed(path, [*arguments]).get_parameter_source(option).name)
        except typer.BadParameter:
            return ""


def test_there_are_many_options() -> None:
    assert len(options()) > 90
    assert {path[0] for path, _ in options()} >= {"local", "join", "coordinator", "train", "data", "sim", "status"}


@pytest.mark.parametrize("path", [path for path, _ in verbs()], ids=" ".join)
def test_every_option_is_read_from_its_variable(path: tuple[str, ...]) -> None:
    command = dict(verbs())[path]
    needed = [f"--{item.name}=x" for item in command.params if item.required and item.param_type_name == "option"]
    needed += ["1" for item in command.params if item.required and item.param_type_name == "argument"]
    mine = [option for place, option in options() if place == path]
    for option in mine:
        given = [item for item in needed if not item.startswith(f"--{option.name}=")]
        name = variable(path, option)
        values = ("off",) if (path, option.name) == (("join",), "profile") else VALUES  # a file that is read must exist
        assert "ENVIRONMENT" in {source_of(option.name, path, given, {name: value}) for value in values}, name


@pytest.mark.parametrize("path", [path for path, _ in verbs()], ids=" ".join)
def test_help_names_every_variable(path: tuple[str, ...]) -> None:
    with mock.patch.dict(os.environ, {"COLUMNS": "80", "TERM": "dumb"}):
        shown = call(*path, "--help").out
    for place, option in options():
        if place == path:
            assert f"[{variable(path, option)}]" in shown, option.opts


def test_a_value_from_the_environment_does_what_the_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMTRAIN_SET", "boundary.k=8 schedule.steps=7")
    shown = call("manifest", "nano").out
    assert "\nk = 8" in shown
    assert "\nsteps = 7" in shown
    assert "\nsteps = 9" in call("manifest", "nano", "--set", "schedule.steps=9").out  # the command line comes first
    monkeypatch.setenv("SWARMTRAIN_VERSION", "1.2.3")  # nobody's option
    assert call("manifest", "nano").code == 0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path


def test_an_invite_is_given_or_of_a_coordinator_here_or_of_the_last_run_joined(home: Path) -> None:
    with pytest.raises(UsageError, match="no invite"):
        find_invite(None)
    remember_invite("the last one")
    assert find_invite(None) == "the last one"
    (home / "run").mkdir()
    (home / "run" / "invite").write_text("the one here\n")
    with remember_coordinator(home / "run"):
        assert find_invite(None) == "the one here"
        assert find_invite("given") == "given"
    assert find_invite(None) == "the last one"
