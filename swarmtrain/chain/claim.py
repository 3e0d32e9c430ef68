"""Who coordinates: what a coordinator's record in the directory claims, and which of several claims counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Claim:
    """A coordinator's, the greatest of which counts.

    That is the highest term. Two can have the same one if a copy of the journal took over and the original came back:
    then the one that has got further counts, which is the one that peers have worked for. The peer id decides the rest.
    """

    term: int
    step: int  # applied steps
    peer_id: str

    @classmethod
    def read(cls, peer_id: str, value: Any) -> Claim | None:
        """What the value of a record claims; None for a value that is no coordinator's."""
        if not isinstance(value, dict):
            return None
        term, step = value.get("t"), value.get("s", 0)
        if not isinstance(term, int) or not isinstance(step, int):
            return None
        return cls(term, step, peer_id)

    def as_value(self) -> dict[str, int]:
        """For a record, whose owner is known."""
        return {"t": self.term, "s": self.step}
