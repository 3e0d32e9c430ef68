"""The excluded peers with why and since when, as the journal holds them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from swarmtrain.chain.exclusions import Exclusions
from swarmtrain.coordinator.journal import ExclusionRow
from swarmtrain.wire.messages import Exclusion

REVOKED_MARK = "#"  # such an entry names an admission that was taken back, and no peer: chain/membership.py


class Bans:
    """What the operator sees, and the list that peers are told."""

    def __init__(self, rows: Iterable[ExclusionRow] = ()) -> None:
        self.exclusions = Exclusions()
        self._rows: dict[str, ExclusionRow] = {}  # of those that are excluded now
        for row in rows:
            self.note(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._rows

    def note(self, row: ExclusionRow) -> None:
        """The journal has one more row."""
        self.exclusions.hear([Exclusion(row.number, row.peer, row.is_lifted)])
        if row.is_lifted:
            self._rows.pop(row.peer, None)
        elif not row.peer.startswith(REVOKED_MARK):
            self._rows[row.peer] = row

    def get(self, peer_id: str) -> ExclusionRow | None:
        """Why a peer is excluded; None if it is not."""
        return self._rows.get(peer_id)

    def newest(self, count: int) -> list[ExclusionRow]:
        """The peers that were excluded last, newest first."""
        return sorted(self._rows.values(), key=lambda row: -row.number)[:count]
