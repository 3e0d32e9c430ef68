"""What a peer says of itself: in heartbeats, in its directory record, and so to every router."""

from __future__ import annotations

from collections.abc import Sequence

from swarmtrain.wire.field_types import (
    MAX_ADDRESS,
    MAX_ADDRESSES,
    Addresses,
    Assignment,
    Digest,
    Incarnation,
    Milliseconds,
    PeerState,
    Rate,
    Seconds,
    StageIndex,
    Step,
    Term,
)
from swarmtrain.wire.schema import Message, Priority, message

SERVING = "serving"
TAKES_NO_WORK = ("draining", "paused")
HOLDS_STATE = (SERVING, *TAKES_NO_WORK)  # a peer in one of these has its stage's state
STALLED = "stalled"  # the peer lives, its device does not answer


@message(kind="peer_report", priority=Priority.CONTROL)
class PeerReport(Message):
    """One description for all readers. Times and rates of 0 mean "not measured" and "not announced"."""

    stage: StageIndex
    state: PeerState = SERVING
    incarnation: Incarnation = ""  # of its process: a restarted one has an empty ledger
    step: Step = 0
    state_digest: Digest = ""
    state_term: Term = 0  # the coordinator's term in which it came to its state
    assignment: Assignment = 0  # rises with every move: of two reports of one peer the higher one counts
    forward_ms: Milliseconds = 0.0
    backward_ms: Milliseconds = 0.0
    queue_ms: Milliseconds = 0.0
    up_bytes_per_s: Rate = 0.0
    down_bytes_per_s: Rate = 0.0
    relayed: bool = False
    pinned: bool = False  # never moves to another stage
    served_s: Seconds = 0.0  # for how long it has been serving this stage
    download_s: Seconds = 0.0  # what fetching this stage's state took
    addresses: Addresses = ()


def published(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses that a record names: the first ones that fit into it."""
    return tuple([address for address in addresses if len(address) <= MAX_ADDRESS][:MAX_ADDRESSES])
