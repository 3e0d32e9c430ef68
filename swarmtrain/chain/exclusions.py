"""Who is excluded from a run: a list that only grows, kept in the coordinator's journal and told to every peer.

Each entry excludes a peer or takes that back; entries are numbered from 1. A reader that has all entries up to a number
asks for the later ones, so a change costs every peer a few bytes once; under a new term it asks from the start, because
another coordinator may have another copy of the journal. An entry names a peer by its id, which is a public key:
another incarnation, another address or another name change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmtrain.wire.messages import MAX_EXCLUSIONS_TOLD, Exclusion

MAX_EXCLUDED = 1 << 16  # peers that the list may name; the coordinator refuses to name more


class Exclusions:
    """The list, as far as it is known here."""

    def __init__(self, entries: Iterable[Exclusion] = ()) -> None:
        self._last: dict[str, Exclusion] = {}  # by peer
        self.head = 0  # the number of the last entry that was heard
        self.term = 0  # in which that was
        self.hear(entries)

    def __contains__(self, peer_id: str) -> bool:
        entry = self._last.get(peer_id)
        return entry is not None and not entry.is_lifted

    def __len__(self) -> int:
        return len(self._last)

    def enter_term(self, term: int) -> None:
        """What was heard in earlier terms still counts, and is asked for again."""
        if term > self.term:
            self.term, self.head = term, 0

    def hear(self, entries: Iterable[Exclusion]) -> set[str]:
        """Take entries over, in order. Returns the peers that are excluded now and were not before."""
        newly: set[str] = set()
        for entry in entries:
            self.head = entry.number
            if entry.peer_id not in self._last and len(self) >= MAX_EXCLUDED:
                continue
            if not entry.is_lifted and entry.peer_id not in self:
                newly.add(entry.peer_id)
            self._last[entry.peer_id] = entry
        return newly

    def after(self, number: int) -> tuple[Exclusion, ...]:
        """What a reader that knows the entries up to `number` is told next."""
        if number >= self.head:
            return ()
        later = [entry for entry in self._last.values() if entry.number > number]
        return tuple(sorted(later, key=lambda entry: entry.number)[:MAX_EXCLUSIONS_TOLD])
