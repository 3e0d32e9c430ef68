"""One coordinator at a time: who yields to whom, and that a refused start leaves no trace in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.chain.claim import Claim
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.coordinator.journal import Journal
from swarmtrain.coordinator.rivals import Superseded, check_running
from swarmtrain.net.errors import NetError
from swarmtrain.observe.events import Events
from swarmtrain.run.presets import preset

OWN = "m"
HOST = cast(Any, SimpleNamespace(peer_id=OWN))
Records = dict[str, dict[str, Any]]


class Listed:
    """A directory that lists these records, or none at all."""

    def __init__(self, records: Records | None) -> None:
        self._records = records

    async def lookup(self, topic: str) -> dict[str, Any]:
        if self._records is None:
            raise NetError("down")
        return {peer_id: SimpleNamespace(value=value) for peer_id, value in self._records.items()}


def daemon_in(directory: Path) -> CoordinatorDaemon:
    manifest = preset("nano")
    made = CoordinatorDaemon(CoordinatorOptions(manifest, directory), Events(), cast(Callable[..., Any], None))
    made.journal = Journal(directory / "journal.sqlite")
    made.journal.set("term", "3")
    return made


@pytest.mark.parametrize("term", [4, 5])
def test_a_coordinator_does_not_start_beside_one_that_has_its_term_and_takes_none(tmp_path: Path, term: int) -> None:
    daemon = daemon_in(tmp_path)
    for _ in range(2):  # nor by trying again
        with pytest.raises(Superseded):
            asyncio.run(daemon._take_term(cast(Any, Listed({"x": {"t": term, "s": 0}})), HOST))
    assert daemon.journal.get("term") == "3"


@pytest.mark.parametrize("records", [{}, {OWN: {"t": 9}}, {"x": {"t": 3}}, {"x": {"t": "9"}}, {"x": b"9"}, None])
def test_former_terms_and_its_own_former_life_do_not_keep_a_coordinator_from_starting(
    tmp_path: Path, records: Any
) -> None:
    daemon = daemon_in(tmp_path)
    asyncio.run(daemon._take_term(cast(Any, Listed(records)), HOST))
    assert daemon.journal.get("term") == "4"


@pytest.mark.parametrize(
    ("records", "yields"),
    [
        ({"x": {"t": 5, "s": 0}}, True),
        ({"x": {"t": 4, "s": 8}}, True),  # the same term, further
        ({"x": {"t": 4, "s": 7}}, True),  # as far: one of them must go
        ({"a": {"t": 4, "s": 7}}, False),
        ({"x": {"t": 4, "s": 6}}, False),
        ({"x": {"t": 3, "s": 99}}, False),
        (None, False),
    ],
)
def test_of_two_that_run_exactly_one_yields(records: Records | None, yields: bool) -> None:
    checking = check_running(cast(Any, Listed(records)), Claim(4, 7, OWN))
    if yields:
        with pytest.raises(Superseded):
            asyncio.run(checking)
    else:
        asyncio.run(checking)
