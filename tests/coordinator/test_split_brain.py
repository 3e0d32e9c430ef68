"""One coordinator at a time: who yields to whom, and that a refused start leaves no trace in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.chain.claim import Claim, CoordinatorRecord
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.coordinator.journal import Journal
from swarmtrain.coordinator.split_brain import Known, StaleJournal, Superseded, check_peers, check_running, next_term
from swarmtrain.observe.events import Events
from swarmtrain.p2p.errors import NetError
from swarmtrain.run.presets import preset
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.records import pack_record

OWN = "m"
HOST = cast(Any, SimpleNamespace(peer_id=OWN))
Records = dict[str, bytes]


def coordinator(term: int, step: int = 0, life: str = "") -> bytes:
    """A coordinator's record."""
    return pack_record(CoordinatorRecord(term, step, life))


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
            asyncio.run(daemon._take_term(cast(Any, Listed({rival: coordinator(term, 0)})), HOST))
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
def test_a_journal_is_an_old_copy_if_the_peers_that_know_are_further(
    listed: list[tuple[str, str, int, int]], *, is_stale: bool
) -> None:
    async def lookup(topic: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for where, peer, term, step in listed:
            if where == topic == "coordinator":
                values[peer] = coordinator(term, step, "x")
            elif where == topic:
                stage = int(where[-1])
                values[peer] = pack_record(PeerReport(stage, "serving", "life", step, state_term=term))
        return {peer: SimpleNamespace(value=value) for peer, value in values.items()}

    directory = cast(Any, SimpleNamespace(lookup=lookup))
    checking = next_term(directory, Claim(4, 10, OWN, "life"), Known(3, 10), num_stages=2)
    if is_stale:
        with pytest.raises(StaleJournal):
            asyncio.run(checking)
    else:
        assert asyncio.run(checking) == 4


@pytest.mark.parametrize(
    ("further", "here", "veterans", "is_stale"),
    [
        ("abc", "d", "", True),  # the journal knows nobody
        ("xyz", "", "abc", False),  # newcomers
        ("xyza", "bc", "abc", False),
        ("xyzab", "c", "abc", True),
        ("a", "", "abc", False),  # the others have not called yet
        ("ab", "", "abc", True),
        ("a", "xyz", "a", True),
    ],
)
def test_only_peers_that_have_done_some_of_the_run_can_tell_that_a_journal_is_old(
    further: str, here: str, veterans: str, *, is_stale: bool
) -> None:
    known = Known(3, 10)
    states = dict.fromkeys(further, (3, 11)) | dict.fromkeys(here, (3, 10))
    if is_stale:
        with pytest.raises(StaleJournal):
            check_peers(known, states, veterans)
    else:
        check_peers(known, states, veterans)


def test_a_coordinator_takes_the_run_back_from_an_old_copy_of_its_journal() -> None:
    listed = Listed({"x": coordinator(4, 9), OWN: coordinator(3, 10)})
    assert asyncio.run(next_term(cast(Any, listed), Claim(4, 10, OWN), Known(3, 10), num_stages=0)) == 5


@pytest.mark.parametrize(
    "records", [{}, {OWN: coordinator(3, 0, "former")}, {"x": coordinator(3)}, {"x": {"term": 9}}, {"x": b"9"}, None]
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
        ({"x": coordinator(5, 0)}, True),
        ({"x": coordinator(4, 8)}, True),  # the same term, further
        ({"x": coordinator(4, 7)}, True),  # as far: one of them must go
        ({"a": coordinator(4, 7)}, False),
        ({"x": coordinator(4, 6)}, False),
        ({"x": coordinator(3, 99)}, False),
        (None, False),
        ({OWN: coordinator(5, 0, "b")}, True),  # another process with this identity
        ({OWN: coordinator(4, 7, "b")}, True),
        ({OWN: coordinator(4, 7, "")}, False),
        ({OWN: coordinator(5, 9, "a")}, False),  # its own, whatever it says
    ],
)
def test_of_two_that_run_exactly_one_yields(records: Records | None, yields: bool) -> None:
    checking = check_running(cast(Any, Listed(records)), Claim(4, 7, OWN, "a"))
    if yields:
        with pytest.raises(Superseded):
            asyncio.run(checking)
    else:
        asyncio.run(checking)
