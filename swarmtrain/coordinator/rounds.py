"""Which microbatches were begun anew on all stages, because work on them was found to be wrong.

A round is in the journal before any peer hears of it: a restarted coordinator must not take from a ledger what was
found to be wrong. Rounds outlive a roll-back, since peers may remember them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable

from swarmtrain.wire.messages import MAX_REDONE, REDONE

KEY = "rounds"  # in the journal
MAX_KEPT = MAX_REDONE  # the newest ones; of steps that are long over no peer remembers any


class Rounds:
    """By step and microbatch; 0 where nothing was begun anew."""

    def __init__(self, save: Callable[[str], None] = lambda text: None, saved: str | None = None) -> None:
        """`save` is given what a later life starts from, `saved`."""
        self._save = save
        self._rounds: dict[tuple[int, int], int] = {}
        for step, microbatch, round in json.loads(saved) if saved else ():
            self._rounds[step, microbatch] = round

    def of(self, step: int, microbatch: int) -> int:
        """The current round of a microbatch."""
        return self._rounds.get((step, microbatch), 0)

    def begin(self, items: Iterable[tuple[int, int]]) -> None:
        """The next round of each (step, microbatch). When this returns, it is on disk."""
        for step, microbatch in items:
            round = self._rounds.pop((step, microbatch), 0) + 1
            self._rounds[step, microbatch] = round  # at the end: the newest ones are kept
        while len(self._rounds) > MAX_KEPT:
            del self._rounds[next(iter(self._rounds))]
        self._save(json.dumps([[*key, round] for key, round in self._rounds.items()]))

    def packed(self, steps: Collection[int]) -> bytes:
        """Those of open steps, as a verdict tells them."""
        return b"".join(REDONE.pack(*key, round) for key, round in self._rounds.items() if key[0] in steps)
