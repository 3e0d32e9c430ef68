"""The whole suite in a few processes: scripts/test gives `-n NUMBER --dist loadfile --no-loadscope-reorder`.

A file's tests stay together, in their order, since they may share a swarm. Those of simulated swarms share nothing:
each goes wherever there is room. Files with daemons come first, simulated swarms last: in the end all have something to
do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

APART = "simulated"  # the directory whose tests share nothing


def in_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files with daemons, files without, tests that stand alone; otherwise as they are."""
    swarm: set[Path] = {item.path for item in items if item.get_closest_marker("swarm")}
    return sorted(items, key=lambda item: (item.path.parent.name == APART, item.path not in swarm))


def stays_together(nodeid: str) -> str:
    """Tests with the same answer run in one process."""
    file = nodeid.partition("::")[0]
    return nodeid if Path(file).parent.name == APART else file


class Turns:
    """In a process that runs a part of the tests."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = in_turn(items)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(), "turns")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In the process that starts the others."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return stays_together(nodeid)

    return Scheduling(config, log)
