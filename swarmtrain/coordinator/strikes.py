"""What is held against peers: strikes that outlive steps, incarnations and failed attempts, and fade. Pure.

A strike is what an honest peer earns now and then and a hostile one in every step. Its weight halves every HALF_LIFE_S.
A peer whose strikes add up to LIMIT is suspended: it is in no roster and its work does not count, for FIRST_OUT_S, and
for twice as long each further time. So a culprit costs its stage about LIMIT strikes once, then next to nothing.

Strikes belong to an identity. A new incarnation, which a peer chooses itself, changes nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

LIMIT = 3.0
HALF_LIFE_S = 600.0
FIRST_OUT_S = 300.0  # several times what the longest deadline of an all-reduce has cost
MAX_OUT_S = 86400.0
MAX_REMEMBERED = 4096  # identities; the one that did something longest ago is forgotten


class Offence(Enum):
    """What a strike is for: the text for people, and its weight."""

    SILENT = "it was silent in an all-reduce", 3.0  # costs a whole deadline: once is enough
    FALSE_MISSING = "it says that it lacks microbatches that it never had or has answered for", 1.0
    UNEXPLAINED = "it does not reduce, and names nothing that keeps it from it", 1.0
    IMPOSSIBLE = "its answer cannot be right", 3.0
    BLAMED = "others of its stage cannot reduce with it", 1.0
    DIFFERENT = "its sum differs from that of its stage", 1.5
    REFUSED_PREPARE = "it refuses to reduce", 0.5
    REFUSED_APPLY = "it does not apply what it has prepared", 1.0
    UNSEALED = "it does not say what it did in a step", 1.5
    UNSENT = "what it says it has sent or received is not what its neighbour says", 1.0
    UNCHECKING = "it does not answer when it is asked to check others", 1.0
    DISPUTED_DIVERGENCE = "it says that training diverged, and others have done the same work", 1.5

    def __init__(self, text: str, weight: float) -> None:
        self.text, self.weight = text, weight


@dataclass
class _Record:
    score: float = 0.0
    at: float = 0.0
    out_until: float = 0.0
    num_out: int = 0
    reason: str = ""
    disputes: set[str] = field(default_factory=set)  # with whom it could not reduce


class Strikes:
    """The record of all identities of one run."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._out: dict[str, float] = {}  # suspended identities, and until when

    def note(self, peer_id: str, offence: Offence, now: float) -> bool:
        """One more strike. True if it suspends the peer."""
        record = self._touched(peer_id)
        record.score = self._faded(record, now) + offence.weight
        record.at, record.reason = now, offence.text
        if record.score < LIMIT or now < record.out_until:
            return False
        record.out_until = now + min(MAX_OUT_S, FIRST_OUT_S * 2.0 ** min(record.num_out, 16))
        self._out[peer_id] = record.out_until
        record.num_out += 1
        record.score = LIMIT / 2.0  # on probation afterwards
        return True

    def disputed(self, one: str, other: str) -> None:
        """Two peers could not reduce with each other; which of them is at fault is not known."""
        self._touched(one).disputes.add(other)
        self._touched(other).disputes.add(one)

    def num_disputes(self, peer_id: str) -> int:
        """With how many different peers it could not reduce. Of two that accuse each other, this tells them apart."""
        record = self._records.get(peer_id)
        return len(record.disputes) if record is not None else 0

    def score(self, peer_id: str, now: float) -> float:
        """What its strikes weigh now."""
        record = self._records.get(peer_id)
        return self._faded(record, now) if record is not None else 0.0

    def out_s(self, peer_id: str, now: float) -> float:
        """For how much longer it is suspended; 0 if it is not."""
        return max(0.0, self._out.get(peer_id, 0.0) - now)

    def reason(self, peer_id: str) -> str:
        """What its last strike was for."""
        record = self._records.get(peer_id)
        return record.reason if record is not None else ""

    def suspended(self, now: float) -> dict[str, str]:
        """The identities that are suspended now, and what for."""
        self._out = {peer_id: until for peer_id, until in self._out.items() if until > now}
        return {peer_id: self.reason(peer_id) for peer_id in self._out}

    def _touched(self, peer_id: str) -> _Record:
        record = self._records.setdefault(peer_id, _Record())
        self._records.move_to_end(peer_id)
        while len(self._records) > MAX_REMEMBERED:
            self._records.popitem(last=False)
        return record

    @staticmethod
    def _faded(record: _Record, now: float) -> float:
        return record.score * math.exp2(-max(0.0, now - record.at) / HALF_LIFE_S)
