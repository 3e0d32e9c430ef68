"""docs/errors.md lists every error that a user can meet, with its exit code, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import swarmtrain
from swarmtrain.errors import ExitCode, SwarmtrainError

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
ROW = re.compile(r"^\| (ST-[A-Z0-9-]+) \| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)


def error_classes() -> list[type[SwarmtrainError]]:
    """Of every module of the package, imported or not."""
    for module in pkgutil.walk_packages(swarmtrain.__path__, "swarmtrain."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [
        found
        for found in (SwarmtrainError, *descendants(SwarmtrainError))
        if found.__module__.startswith("swarmtrain.")
    ]


def descendants(parent: type[SwarmtrainError]) -> Iterator[type[SwarmtrainError]]:
    for child in parent.__subclasses__():
        yield child
        yield from descendants(child)


def test_every_error_is_on_the_page_with_its_exit_code() -> None:
    listed = {error_id: int(code) for error_id, code, _, _ in ROW.findall(PAGE)}
    found = {cls.error_id: int(cls.exit_code) for cls in error_classes()}
    assert found.keys() - listed.keys() == set(), "errors that docs/errors.md does not list"
    assert listed.keys() - found.keys() == set(), "errors on the page that no longer exist"
    assert listed == found


def test_the_page_lists_each_id_once() -> None:
    ids = [error_id for error_id, *_ in ROW.findall(PAGE)]
    assert len(ids) == len(set(ids)) > 20


def test_every_exit_code_is_explained() -> None:
    for code in ExitCode:
        assert re.search(rf"^\| {int(code)} \| \S", PAGE, re.MULTILINE), code


def test_errors_have_a_sentence_for_people() -> None:
    for cls in error_classes():
        assert cls.__doc__, cls
