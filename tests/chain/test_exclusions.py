"""The list of excluded peers reaches every reader, whatever it knew before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.chain.exclusions import Exclusions
from swarmtrain.wire.messages import MAX_EXCLUSIONS_TOLD, Exclusion


def entries_of(said: list[tuple[str, bool]]) -> list[Exclusion]:
    return [Exclusion(number, peer_id, is_lifted) for number, (peer_id, is_lifted) in enumerate(said, 1)]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=40), st.integers(0, 40))
def test_a_reader_that_asks_again_comes_to_the_same_list(said: list[tuple[str, bool]], known: int) -> None:
    entries = entries_of(said)
    source, reader = Exclusions(entries), Exclusions(entries[:known])
    reader.hear(source.after(reader.head))
    for peer_id in "abcdef":
        last = [entry for entry in entries if entry.peer_id == peer_id][-1:]
        assert (peer_id in source) == (peer_id in reader) == any(not entry.is_lifted for entry in last)
    assert source.after(reader.head) == ()


def test_a_long_list_is_told_in_pieces() -> None:
    source, reader = Exclusions(entries_of([(f"peer{i}", False) for i in range(300)])), Exclusions()
    rounds = 0
    while told := source.after(reader.head):
        assert len(told) <= MAX_EXCLUSIONS_TOLD
        rounds += len(reader.hear(told)) > 0
    assert (len(reader), rounds) == (300, 3)


def test_under_a_new_term_it_is_asked_for_from_the_start_and_what_was_heard_still_counts() -> None:
    reader = Exclusions(entries_of([("a", False), ("b", False)]))
    reader.enter_term(2)
    assert reader.head == 0
    assert "a" in reader
    other = Exclusions(entries_of([("c", False)]))  # an older copy of the journal, which then excluded another one
    reader.hear(other.after(reader.head))
    assert "c" in reader
    assert reader.head == 1
