"""What peers spent their time on lately: shares of the last minute, from counters that only grow. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from swarmtrain.observe.split import Part

LOOK_BACK_S = 60.0
STRIDE_S = 5.0  # between two notes that are kept
PARTS = tuple(part.value for part in Part)


class Lately:
    """For each peer, its counters (seconds by part, in the order of `PARTS`) of about the last minute."""

    def __init__(self) -> None:
        self._notes: dict[str, deque[tuple[float, tuple[float, ...]]]] = {}

    def note(self, peer: str, now: float, spent: Sequence[float]) -> None:
        """A peer's counters, at `now`. Those of a restarted one begin again."""
        if len(spent) != len(PARTS):
            return
        notes = self._notes.setdefault(peer, deque())
        if notes and any(new < old for new, old in zip(spent, notes[-1][1], strict=True)):
            notes.clear()
        if len(notes) > 1 and notes[-1][0] - notes[-2][0] < STRIDE_S:
            notes.pop()
        if not notes or notes[-1][1] != tuple(spent):
            notes.append((now, tuple(spent)))
        while len(notes) > 2 and notes[1][0] <= now - LOOK_BACK_S:
            notes.popleft()

    def keep(self, peers: Iterable[str]) -> None:
        """Forget all others."""
        known = set(peers)
        for peer in [peer for peer in self._notes if peer not in known]:
            del self._notes[peer]

    def shares(self, peer: str, now: float) -> dict[str, float]:
        """By part, from 0 to 1, over the last minute; empty if nothing new was noted in it."""
        notes = self._notes.get(peer)
        if not notes or len(notes) < 2 or notes[-1][0] < now - LOOK_BACK_S / 2:
            return {}
        spent = [new - old for new, old in zip(notes[-1][1], notes[0][1], strict=True)]
        total = sum(spent)
        return {part: share / total for part, share in zip(PARTS, spent, strict=True)} if total > 0 else {}
