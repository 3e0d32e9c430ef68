"""Who coordinates: what a coordinator's record in the directory claims, and which of several claims counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmtrain.chain.rebalancing import MoveRules
from swarmtrain.wire.field_types import Addresses, Incarnation, Step, Term
from swarmtrain.wire.schema import Message, Priority, message


@dataclass(frozen=True, order=True)
class Claim:
    """The greatest of several claims counts.

    That is the highest term. Two can have the same one if a copy of the journal took over and the original came back:
    then the one that has got further counts, which is the one that peers have worked for. The peer id decides the rest,
    and between two processes with one identity, which run on copies of one directory, their lives.
    """

    term: int
    step: int  # applied steps
    peer_id: str
    life: str = ""  # of the process: drawn when it starts


@message(kind="coordinator", priority=Priority.CONTROL)
class CoordinatorRecord(Message):
    """What a coordinator publishes under COORDINATOR_TOPIC, countersigned by the run's key."""

    term: Term
    step: Step = 0
    life: Incarnation = ""
    addresses: Addresses = ()
    rules: MoveRules = field(default_factory=MoveRules)
    is_over: bool = False  # the run is complete, and its coordinator may be gone

    def claim(self, peer_id: str) -> Claim:
        """What the owner of this record claims."""
        return Claim(self.term, self.step, peer_id, self.life)
