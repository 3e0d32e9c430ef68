"""`--help` fits any window with whole words, names what is there, and its examples can be typed; so can completions."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from typer.main import get_command

from swarmtrain.cli.completion import VARIABLE, Shell
from swarmtrain.cli.help_texts import EXAMPLES, OPTION_GROUPS, VERB_GROUPS
from swarmtrain.cli.main import app

from .programs import call
from .test_documented_commands import END, unknown

ROOT: Any = get_command(app)


def pages(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every verb and every group of verbs."""
    yield path
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from pages(command, (*path, name))
        else:
            yield (*path, name)


def find(path: tuple[str, ...]) -> Any:
    found = ROOT
    for name in path:
        found = found.commands[name]
    return found


def shown(path: tuple[str, ...], columns: int) -> list[str]:
    with mock.patch.dict(os.environ, {"COLUMNS": str(columns)}):
        done = call(*path, "--help")
    assert done.code == 0
    return done.out.splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("path", list(pages()), ids=lambda path: " ".join(path) or "swarmtrain")
def test_help_fits_and_is_not_cut(path: tuple[str, ...], columns: int) -> None:
    lines = shown(path, columns)
    text = "\n".join(lines)
    commands = [line for line in lines if line.startswith("  swarmtrain ")]  # stay whole: they are there to be copied
    assert all(len(line) <= columns for line in lines if line not in commands)
    assert not any(mark in text for mark in ("…", "<", "\x1b", "│"))
    for option in find(path).params:
        for name in () if option.hidden else (*option.opts, *option.secondary_opts):
            assert not name.startswith("-") or name in text.replace(",", " ").split(), name


def test_every_verb_has_a_group_and_every_group_is_of_verbs() -> None:
    grouped = [verb for verbs in VERB_GROUPS.values() for verb in verbs]
    assert sorted(grouped) == sorted(ROOT.commands)
    overview = "\n".join(shown((), 80))
    assert all(f"\n{title}:\n" in overview for title in VERB_GROUPS)


def test_options_of_long_helps_are_in_groups_and_groups_name_options() -> None:
    for path in pages():
        names = [option.name for option in find(path).params if option.param_type_name == "option"]
        groups = OPTION_GROUPS.get(" ".join(path), {})
        members = [name for group in groups.values() for name in group]
        assert len(set(members)) == len(members)
        assert set(members) <= set(names), path
        if path == ("join",):
            assert set(names) - set(members) == {"events", "as_json", "test_faults"}
        assert groups or len([name for name in names if name not in members]) < 16, path


def test_examples_are_of_every_verb_and_can_be_typed() -> None:
    assert set(EXAMPLES) == {" ".join(path) for path in pages()}
    for path, examples in EXAMPLES.items():
        for command, about in examples:
            assert command.startswith(f"swarmtrain {path}".rstrip()), command
            assert about
            assert unknown(END.split(command)[0]) == [], command


def test_a_mistyped_option_is_said_without_a_drawing() -> None:
    done = call("join", "--gpus", "0")
    assert done.code == 2
    assert "--gpus" in done.err
    assert "╭" not in done.err


@pytest.mark.parametrize("shell", list(Shell))
def test_completion_prints_a_script_that_asks_the_program(shell: Shell) -> None:
    script = call("completion", shell.value).out
    assert f"{VARIABLE}=complete_{shell.value}" in script
    assert "swarmtrain" in script
    if shutil.which(shell.value):
        subprocess.run([shell.value, "-n"], input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("swarmtrain jo", {"join"}),
        ("swarmtrain train na", {"nano"}),
        ("swarmtrain local llama-1b", {"llama-1b"}),
        ("swarmtrain completion f", {"fish"}),
        ("swarmtrain join --max-m", {"--max-memory"}),
    ],
)
def test_a_shell_that_asks_is_answered(typed: str, wanted: set[str]) -> None:
    environment = {VARIABLE: "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    with mock.patch.dict(os.environ, environment):
        done = call()
    assert set(done.out.split()) == wanted
