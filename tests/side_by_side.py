"""The whole suite in one process per core: most of what tests with daemons do is wait.

scripts/test gives `-n CORES --dist loadfile`: a file's tests stay together, in their order. Files with daemons come
before the others, so that none of these is left for the end. Files that are marked `alone`, because they compare times
or rates of real processes, come last, and nothing else runs beside them: a lock that all files share and they do not.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import pytest

LOCK = pytest.StashKey[IO[bytes]]()


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs a part of the tests, beside another one."""
    return hasattr(config, "workerinput")


def in_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """What has daemons, what has none, what wants to be alone; otherwise as they are."""

    def files(mark: str) -> set[Path]:
        return {item.path for item in items if item.get_closest_marker(mark)}

    swarm, alone = files("swarm"), files("alone")
    return sorted(items, key=lambda item: (item.path in alone, item.path not in swarm))


class Turns:
    """Holds the lock from the first test of a file to its last one, teardown included."""

    def __init__(self, lock: str) -> None:
        """`lock`: a file that the processes of one run of the suite have in common."""
        self._path = lock
        self._alone: set[Path] = set()
        self._lock: IO[str] | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._alone = {item.path for item in items if item.get_closest_marker("alone")}
        items[:] = in_turn(items)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before a test's own time runs
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        if self._lock is None:
            self._lock = open(self._path)  # noqa: SIM115  # held beyond this call
            fcntl.flock(self._lock, fcntl.LOCK_EX if item.path in self._alone else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                self._lock.close()
                self._lock = None


def pytest_configure(config: pytest.Config) -> None:
    if is_worker(config):
        config.pluginmanager.register(Turns(config.workerinput["turns"]), "turns")  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the process that starts the others."""
    if LOCK not in node.config.stash:
        file = node.config.stash[LOCK] = tempfile.NamedTemporaryFile(prefix="swarmtrain-turns-")  # noqa: SIM115
        node.config.add_cleanup(file.close)
    node.workerinput["turns"] = node.config.stash[LOCK].name
