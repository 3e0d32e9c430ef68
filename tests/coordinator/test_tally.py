"""Who did how much, and over which links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmtrain.coordinator.journal import Decision, Journal
from swarmtrain.coordinator.members import Members
from swarmtrain.coordinator.tally import RECENT_ROUTES, Tally
from swarmtrain.wire.messages import Hop

from .contexts import heartbeat


def decision(step: int) -> Decision:
    entries = {0: {("a", "1"): [0, 1], ("b", "1"): [2]}, 1: {("c", "1"): [0, 1, 2]}}
    return Decision(step, 1, 2.5, 1.0, 1.0, 0.1, (("x", 1.0), ("y", 1.0)), entries, {0: 2.5, 1: 2.5, 2: 2.5})


def route(*peers: str) -> tuple[Hop, ...]:
    return tuple(Hop(stage, peer, "1") for stage, peer in enumerate(peers))


def test_contributions_are_those_of_the_journal_before_and_after_a_restart(tmp_path: Path) -> None:
    tally = Tally()
    with Journal(tmp_path / "journal.sqlite") as journal:
        for step in range(3):
            journal.decide(decision(step))
            tally.decided(decision(step))
        again = Tally()
        again.resume(journal.contributions())
        assert dict(again.contributed) == dict(tally.contributed) == {"a": 6, "b": 3, "c": 9}
        journal.roll_back(1)
        again.resume(journal.contributions())
        assert dict(again.contributed) == {"a": 2, "b": 1, "c": 3}


def test_the_curve_of_a_long_journal_is_bounded(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        for step in range(50):
            journal.decide(decision(step))
        assert [row[0] for row in journal.curve(100)] == list(range(1, 51))
        assert [row[0] for row in journal.curve(10)] == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50]
        assert journal.curve(10)[0][2:] == (2.5, 1.0, 0.1)


def test_links_carry_shares_of_the_last_answers_only() -> None:
    tally = Tally()
    for _ in range(RECENT_ROUTES):
        tally.answered(route("old", "old2"))
    for number in range(RECENT_ROUTES):
        tally.answered(route("a" if number % 4 else "b", "c"))
    assert tally.links() == [{"from": "a", "to": "c", "share": 0.75}, {"from": "b", "to": "c", "share": 0.25}]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("127.0.0.1:9100", True),
        ("peer-1.example:80", True),
        ("[::1]:9100", True),
        ("", False),
        ("host", False),
        ("host:port", False),
        ("http://host:80", False),
        ("host:80/path", False),
        ("user@host:80", False),
        ("a b:80", False),
    ],
)
def test_only_addresses_become_scrape_targets(text: str, kept: bool) -> None:
    members = Members()
    members.heartbeat("p", replace(heartbeat(), metrics=text), 0.0)
    member = members.get("p")
    assert member is not None
    assert member.metrics == (text if kept else "")
