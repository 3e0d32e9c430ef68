"""What the two ways to choose the next peer have in common: their options, and what the router asks of them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from swarmtrain.route.estimate import PeerEstimate, Trouble


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Knobs of a router; the defaults are the ones the daemon uses."""

    my_up_bytes_per_s: float = 0.0  # own uplink or cap; 0: unknown
    default_goodput: float = 12.5e6  # prior of a link about which nothing is known: 100 Mbit/s
    default_rtt_s: float = 0.05
    relay_factor: float = 0.2  # a relayed link's prior, relative to a direct one
    bytes_in: float = 0.0  # what a peer of the next stage receives per microbatch (see StageSnapshot)
    bytes_out: float = 0.0
    exploration: float = 0.03
    num_candidates: int = 2
    max_clock_lead: float = 4.0  # how far a clock may be off, in units of service time + usual prediction
    min_timeout_s: float = 2.0
    timeout_factor: float = 3.0
    first_back_off_s: float = 5.0
    max_back_off_s: float = 80.0
    latency_weight: float = 0.1  # SWARM's smoothing


class Candidate(NamedTuple):
    """A peer that may be picked. `position` indexes the table's snapshot."""

    position: int
    predicted_s: float  # until the forward of work sent now would be done
    service_s: float  # how long the work occupies the peer or the path to it
    known: PeerEstimate


class Policy(Protocol):
    """What the router asks of a way to choose."""

    def choose(self, num_bytes: float, now: float, exclude: AbstractSet[str]) -> Candidate | None:
        """The peer to send to, or None when no peer is usable. Charges nothing."""

    def explore(self, num_bytes: float, now: float, exclude: AbstractSet[str]) -> Candidate | None:
        """Once in a while any peer, whatever its score, so that a wrong estimate is corrected; mostly None."""

    def candidate(self, position: int, num_bytes: float, now: float) -> Candidate:
        """Look at one position."""

    def charge(self, candidate: Candidate) -> None:
        """The work was given to this candidate: advance its clock."""

    def estimate(self, peer_id: str) -> PeerEstimate:
        """The peer's estimate; a newcomer's clock starts where the others are."""

    def back_off_s(self, strikes: int) -> float:
        """How long a peer is banned that already has this many strikes."""

    def answered(self, known: PeerEstimate, latency_s: float) -> None:
        """A call took so long in all."""

    def timed_out(self, trouble: Trouble, elapsed_s: float, now: float) -> bool:
        """Learn from a timeout; True: ban the peer."""

    def link_measured(self, known: PeerEstimate) -> None:
        """The estimate's goodput is new."""
