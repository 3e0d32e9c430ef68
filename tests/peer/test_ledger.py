"""The ledger: what a peer has computed in a step."""

from __future__ import annotations

import pytest

from swarmtrain.peer.ledger import Ledger
from swarmtrain.wire.messages import Done


def answer(gradient: bytes = b"gggg") -> Done:
    return Done(1.0, (), 0.0, 0.0, 0.0, gradient)


def test_what_was_opened_is_found_and_what_is_answered_is_finished() -> None:
    ledger = Ledger(3)
    entry = ledger.open(5, b"tokens", b"boundary")
    assert ledger.get(5) is entry
    assert ledger.get(4) is None
    assert ledger.finished() == set()
    entry.answer = answer()
    assert ledger.finished() == {5}
    assert len(ledger) == 1


def test_a_microbatch_is_taken_once() -> None:
    ledger = Ledger(0)
    ledger.open(1, b"", b"")
    with pytest.raises(AssertionError):
        ledger.open(1, b"", b"")


def test_what_came_to_nothing_can_be_taken_again() -> None:
    ledger = Ledger(0)
    ledger.drop(ledger.open(1, b"", b""))
    again = ledger.open(1, b"", b"")
    assert ledger.get(1) is again


def test_dropping_an_old_entry_does_not_touch_its_successor() -> None:
    ledger = Ledger(0)
    old = ledger.open(1, b"", b"")
    ledger.drop(old)
    new = ledger.open(1, b"", b"")
    ledger.drop(old)
    assert ledger.get(1) is new


def test_what_is_in_the_sum_cannot_be_forgotten() -> None:
    ledger = Ledger(0)
    entry = ledger.open(1, b"", b"")
    entry.accumulated = True
    assert ledger.accumulated() == {1}
    with pytest.raises(AssertionError):
        ledger.drop(entry)


def test_bytes_count_everything_that_is_held() -> None:
    ledger = Ledger(0)
    entry = ledger.open(1, b"12", b"345")
    entry.output, entry.gradient, entry.answer = b"6789", b"0", answer(b"22")
    ledger.open(2, b"1", b"")
    assert ledger.num_bytes() == 2 + 3 + 4 + 1 + 2 + 1
