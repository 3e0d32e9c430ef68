"""One coordinator at a time: who yields to whom, and that a refused start leaves no trace in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.chain.claim import Claim
from swarmtrain.chain.neighbours import PeerRecord
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.coordinator.journal import Journal
from swarmtrain.coordinator.split_brain import Known, StaleJournal, Superseded, check_running, next_term
from swarmtrain.observe.events import Events
from swarmtrain.p2p.errors import NetError
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


@pytest.mark.parametrize("rival", ["x", OWN])  # its own former life cannot have a term that its journal does not know
@pytest.mark.parametrize("term", [4, 5])
def test_a_coordinator_does_not_start_beside_one_that_has_its_term_and_takes_none(
    tmp_path: Path, term: int, rival: str
) -> None:
    daemon = daemon_in(tmp_path)
    for _ in range(2):  # nor by trying again
        with pytest.raises(Superseded):
            asyncio.run(daemon._take_term(cast(Any, Listed({rival: {"t": term, "s": 0}})), HOST))
    assert daemon.journal.get("term") == "3"


@pytest.mark.parametrize(
    ("listed", "is_stale"),
    [
        ([("coordinator", "x", 3, 11)], True),  # no step of term 3 may be unknown to a journal of term 3
        ([("coordinator", OWN, 3, 11)], True),
        ([("coordinator", "x", 2, 11)], False),  # the run went back in term 3
        ([("coordinator", "x", 3, 10)], False),
        ([("stage.0", "a", 3, 11), ("stage.1", "b", 3, 11), ("stage.1", "c", 3, 10)], True),
        ([("stage.0", "a", 3, 11), ("stage.1", "b", 3, 10)], False),  # one of two may be mistaken, or lie
        ([("stage.0", "a", 2, 11), ("stage.1", "b", 2, 11)], False),
    ],
)
def test_a_journal_is_an_old_copy_if_those_who_know_are_further(
    listed: list[tuple[str, str, int, int]], *, is_stale: bool
) -> None:
    async def lookup(topic: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for where, peer, term, step in listed:
            record = PeerRecord("serving", step, "life", 1.0, 1.0, 0.0, 0.0, False, (), state_term=term)
            if where == topic:
                values[peer] = {"t": term, "s": step, "l": "x"} if where == "coordinator" else record.as_value()
        return {peer: SimpleNamespace(value=value) for peer, value in values.items()}

    directory = cast(Any, SimpleNamespace(lookup=lookup))
    checking = next_term(directory, Claim(4, 10, OWN, "life"), Known(3, 10), num_stages=2)
    if is_stale:
        with pytest.raises(StaleJournal):
            asyncio.run(checking)
    else:
        assert asyncio.run(checking) == 4


def test_a_coordinator_takes_the_run_back_from_an_old_copy_of_its_journal() -> None:
    listed = Listed({"x": {"t": 4, "s": 9}, OWN: {"t": 3, "s": 10}})
    assert asyncio.run(next_term(cast(Any, listed), Claim(4, 10, OWN), Known(3, 10), num_stages=0)) == 5


@pytest.mark.parametrize(
    "records", [{}, {OWN: {"t": 3, "l": "former"}}, {"x": {"t": 3}}, {"x": {"t": "9"}}, {"x": b"9"}, None]
)
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
        ({OWN: {"t": 5, "s": 0, "l": "b"}}, True),  # another process with this identity
        ({OWN: {"t": 4, "s": 7, "l": "b"}}, True),
        ({OWN: {"t": 4, "s": 7, "l": ""}}, False),
        ({OWN: {"t": 5, "s": 9, "l": "a"}}, False),  # its own, whatever it says
    ],
)
def test_of_two_that_run_exactly_one_yields(records: Records | None, yields: bool) -> None:
    checking = check_running(cast(Any, Listed(records)), Claim(4, 7, OWN, "a"))
    if yields:
        with pytest.raises(Superseded):
            asyncio.run(checking)
    else:
        asyncio.run(checking)
