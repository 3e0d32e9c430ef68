"""Work in which training diverged. Every stage asks two peers before it believes it, so the same work comes often.

Without this a stage s would compute it 2^s times; with it a peer does once for each route that the coordinator tries.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from swarmtrain.wire.messages import Work

MAX_REMEMBERED = 1024


class Divergences:
    """The newest of them. The same work: the same microbatch with the same bytes, to go the same way."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[object, ...], str] = OrderedDict()

    def note(self, work: Work, text: str) -> None:
        """Training diverged in it, as `text` says."""
        self._texts[_key(work)] = text
        if len(self._texts) > MAX_REMEMBERED:
            self._texts.popitem(last=False)

    def of(self, work: Work) -> str | None:
        """What was found when the same work came before."""
        return self._texts.get(_key(work)) if self._texts else None


def _key(work: Work) -> tuple[object, ...]:
    digests = (hashlib.blake2b(part, digest_size=16).digest() for part in (work.tokens, work.boundary))
    return (work.term, work.step, work.microbatch, work.round, work.evaluate, work.hints, *digests)
