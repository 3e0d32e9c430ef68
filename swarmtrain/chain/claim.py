"""Who coordinates: what a coordinator's record in the directory claims, and which of several claims counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Claim:
    """A coordinator's, the greatest of which counts.

    That is the highest term. Two can have the same one if a copy of the journal took over and the original came back:
    then the one that has got further counts, which is the one that peers have worked for. The peer id decides the rest,
    and between two processes with one identity, which run on copies of one directory, their lives.
    """

    term: int
    step: int  # applied steps
    peer_id: str
    life: str = ""  # of the process: drawn when it starts

    @classmethod
    def read(cls, peer_id: str, value: Any) -> Claim | None:
        """What the value of a record claims; None for a value that is no coordinator's."""
        if not isinstance(value, dict):
            return None
        term, step, life = value.get("t"), value.get("s", 0), value.get("l", "")
        if not isinstance(term, int) or not isinstance(step, int) or not isinstance(life, str):
            return None
        return cls(term, step, peer_id, life)

    def as_value(self) -> dict[str, int | str]:
        """For a record, whose owner is known."""
        return {"t": self.term, "s": self.step, "l": self.life}
