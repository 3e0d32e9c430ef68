"""Who did how much, and over which links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmtrain import world
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


DAY_S = 86400.0


def test_contributions_are_those_of_the_journal_before_and_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally, days = Tally(), iter(range(3))
    monkeypatch.setattr(world, "wall", lambda: DAY_S * next(days))
    with Journal(tmp_path / "journal.sqlite") as journal:
        for step in range(3):
            at = journal.decide(decision(step), seconds=2.5)
            tally.decided(decision(step), at, 2.5)
        again = Tally()
        again.resume(journal.contributions(), journal.num_steps())
        assert again.contributions == tally.contributions
        assert dict(again.contributed) == dict(tally.contributed) == {"a": 6, "b": 3, "c": 9}
        assert again.step == tally.step == 3
        assert tally.contributions["c"].seconds == 7.5
        assert tally.contributions["c"].stages == {1: 9}
        assert tally.contributions["a"].days == {"1970-01-01": 2, "1970-01-02": 2, "1970-01-03": 2}
        assert {peer: known.microbatches for peer, known in again.contributions.items()} == dict(again.contributed)
        journal.roll_back(1)
        again.resume(journal.contributions(), 1)
        assert dict(again.contributed) == {"a": 2, "b": 1, "c": 3}
        assert again.contributions["c"].seconds == 2.5


def test_a_peer_of_two_stages_gets_the_time_of_a_step_once(tmp_path: Path) -> None:
    both = replace(decision(0), entries={0: {("a", "1"): [0, 1, 2]}, 1: {("a", "2"): [0, 1], ("b", "1"): [2]}})
    tally = Tally()
    with Journal(tmp_path / "journal.sqlite") as journal:
        tally.decided(both, journal.decide(both, seconds=4.0), 4.0)
        assert journal.contributions() == tally.contributions
    assert tally.contributions["a"].seconds == 4.0
    assert tally.contributions["a"].stages == {0: 3, 1: 2}


def test_the_curve_of_a_long_journal_is_bounded_and_has_its_last_step_and_every_validation(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        for step in range(52):
            journal.decide(decision(step), seconds=0.5)
        for step in (7, 13, 52):
            journal.note_validation(step, 2.0)
        assert [known.step for known in journal.curve(100)] == list(range(1, 53))
        curve = journal.curve(10)
        assert [known.step for known in curve] == [6, 7, 12, 13, 18, 24, 30, 36, 42, 48, 52]
        assert [known.step for known in curve if known.val_loss == 2.0] == [7, 13, 52]
        assert (curve[0].loss, curve[0].grad_norm, curve[0].learning_rate, curve[0].seconds) == (2.5, 1.0, 0.1, 0.5)
        journal.roll_back(10)
        assert [(known.step, known.val_loss) for known in journal.curve(100)][-4:] == [
            (7, 2.0),
            (8, None),
            (9, None),
            (10, None),
        ]


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
