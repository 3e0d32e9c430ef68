"""`swarmtrain credit`: receipts on this machine, and checks of anybody's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarmtrain.chain.receipt import Receipt, sign_receipt
from swarmtrain.cli.credit_text import receipt_lines
from swarmtrain.coordinator.journal import Decision, Journal
from swarmtrain.p2p.identity import RunKey
from swarmtrain.run.invite import Invite

from .programs import assert_one_line, call

KEY = RunKey(bytes(32))
RUN = "0123456789abcdef"
INVITE = Invite(RUN, KEY.public_bytes, ()).text()
PEER = "12D3KooWWJcE7dS7"
ENTRIES = {0: {(PEER, "1"): [0, 1]}, 1: {("other", "1"): [0, 1]}}


def decision(step: int) -> Decision:
    return Decision(step, 1, 2.5, 1.0, 1.0, 0.1, (("x", 1.0), ("y", 1.0)), ENTRIES, {0: 2.5, 1: 2.5})


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "coordinator" / "journal.sqlite") as journal:
        journal.set("run_id", RUN)
        for step in range(3):
            journal.decide(decision(step), seconds=60.0)
        yield journal


@pytest.fixture(autouse=True)
def _a_state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "coordinator").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


def receipt(journal: Journal, step: int = 3) -> Receipt:
    """What a coordinator would sign after `step` steps."""
    known = journal.contributions(before=step)[PEER]
    return Receipt(
        RUN, "nano", PEER, "attic", 1, step, journal.chain_after(step), 1e9, known.microbatches,
        100 * known.microbatches, known.seconds, 4 * step,
        {str(stage): count for stage, count in known.stages.items()}, dict(known.days),
    )  # fmt: skip


def test_a_peers_receipt_is_shown_and_the_newest_counts(tmp_path: Path, books: Journal) -> None:
    place = tmp_path / "home" / "swarmtrain" / "peers" / "one"
    place.mkdir(parents=True)
    sign_receipt(receipt(books), KEY).save(place / f"receipt-{RUN}.json")
    sign_receipt(receipt(books, 2), KEY).save(place / "receipt-old.json")
    shown = call("credit")
    assert (shown.code, shown.err) == (0, "")
    assert "attic (WJcE7dS7) of nano" in shown.out
    assert "6 microbatches, 600 tokens, 50 % of the run's work, in 3 min" in shown.out
    assert "by stage: stage 0 6" in shown.out
    assert "4 microbatches" not in shown.out
    (line,) = [json.loads(text) for text in call("credit", "--json").out.splitlines()]
    assert (line["microbatches"], line["share"], line["step"]) == (6, 0.5, 3)


def test_receipts_are_checked_without_the_run_and_against_its_books(tmp_path: Path, books: Journal) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    sign_receipt(receipt(books), KEY).save(new)
    sign_receipt(receipt(books, 1), KEY).save(old)
    arguments = ("credit", "--verify", old, "--verify", new, "--verify", new, "--invite", INVITE)
    shown = call(*arguments)
    assert (shown.code, shown.out.count("microbatches, ")) == (0, 1)
    assert "6 microbatches, " in shown.out
    assert "2 more of the same peers: older, so they add nothing" in shown.out
    assert "compared with the journal" in call(*arguments, "--journal", tmp_path).out

    inflated = replace(receipt(books), microbatches=9, stages={"0": 9}, days={"2001-09-09": 9})
    sign_receipt(inflated, KEY).save(new)  # signed, and not what the books say
    fault = assert_one_line(call("credit", "--verify", new, "--invite", INVITE, "--journal", tmp_path), 7, "ST-RECEIPT")
    assert "the journal has 6 microbatches" in fault
    sign_receipt(receipt(books), RunKey(bytes([1]) * 32)).save(new)
    assert "not signed" in assert_one_line(call("credit", "--verify", new, "--invite", INVITE), 7, "ST-RECEIPT")

    sign_receipt(receipt(books), KEY).save(new)
    books.roll_back(1)
    books.decide(replace(decision(1), term=2), seconds=60.0)
    books.decide(replace(decision(2), term=2), seconds=60.0)
    fault = assert_one_line(call("credit", "--verify", new, "--invite", INVITE, "--journal", tmp_path), 7, "ST-RECEIPT")
    assert "taken back" in fault
    sign_receipt(receipt(books), KEY).save(new)
    assert call("credit", "--verify", new, "--invite", INVITE, "--journal", tmp_path).code == 0


def test_what_cannot_be_done_says_so(tmp_path: Path) -> None:
    assert "no receipt yet" in assert_one_line(call("credit"), 2, "ST-USAGE")
    assert "belong to --verify" in assert_one_line(call("credit", "--invite", INVITE), 2, "ST-USAGE")
    missing = call("credit", "--verify", tmp_path / "none.json", "--invite", INVITE)
    assert "cannot read" in assert_one_line(missing, 7, "ST-RECEIPT")
    (tmp_path / "none.json").mkdir()
    assert call("credit", "--verify", tmp_path / "none.json", "--invite", INVITE).code == 7


def test_of_many_days_the_last_ones_are_named(books: Journal) -> None:
    days = {f"2026-11-{day:02}": day for day in range(1, 11)} | {"earlier": 5}
    lines = receipt_lines({**receipt(books).as_dict(), "days": days}, "here")
    assert "  by day: earlier 11, 2026-11-04 4, " in "\n".join(lines)
