"""Choosing the next peer by latency alone, as published (SWARM, appendix C). For comparison."""

from __future__ import annotations

import random
from collections.abc import Set as AbstractSet

from swarmtrain.route.estimate import PeerEstimate, Trouble
from swarmtrain.route.policies import Candidate, RouterOptions
from swarmtrain.route.table import PeerTable

INITIAL_LATENCY_S = 1.0  # the published prior: one second per sample


class SwarmLatencyPolicy:
    """Interleaved weighted round robin: smallest clock first, charged with the mean latency of whole calls.

    Kept as published: a timeout teaches nothing, a failure bans until the peer announces itself again.
    """

    def __init__(self, table: PeerTable, rng: random.Random, options: RouterOptions) -> None:
        self._table = table
        self._rng = rng
        self._options = options
        self._minimum = 0.0

    def choose(self, num_bytes: float, now: float, exclude: AbstractSet[str]) -> Candidate | None:
        """The usable peer with the smallest clock; ties are broken at random."""
        usable = self._table.usable_positions(now, exclude)
        if not usable:
            return None
        clocks = [self._clock(position) for position in usable]
        self._minimum = min(clocks)
        first = [i for i, clock in zip(usable, clocks, strict=True) if clock == self._minimum]
        return self.candidate(self._rng.choice(first), num_bytes, now)

    def explore(self, num_bytes: float, now: float, exclude: AbstractSet[str]) -> Candidate | None:
        """The published router does not."""
        return None

    def candidate(self, position: int, num_bytes: float, now: float) -> Candidate:
        """The mean latency stands for both times; nothing finer is known."""
        known = self.estimate(self._table.snapshot.offers[position].peer_id)
        seconds = known.latency_s / known.latency_weight if known.latency_weight else INITIAL_LATENCY_S
        return Candidate(position, seconds, seconds, known)

    def charge(self, candidate: Candidate) -> None:
        """Advance by the mean latency."""
        candidate.known.clock += candidate.service_s

    def estimate(self, peer_id: str) -> PeerEstimate:
        """A newcomer enters at the current minimum."""
        known = self._table.estimates.get(peer_id)
        if known is None:
            known = self._table.estimates[peer_id] = PeerEstimate(clock=self._minimum)
        return known

    def back_off_s(self, strikes: int) -> float:
        """Until the next record."""
        return float("inf")

    def answered(self, known: PeerEstimate, latency_s: float) -> None:
        """All that is learned from a call."""
        known.observe_latency(latency_s, self._options.latency_weight)

    def timed_out(self, trouble: Trouble, elapsed_s: float, now: float) -> bool:
        """Retried elsewhere, otherwise ignored."""
        return False

    def link_measured(self, known: PeerEstimate) -> None:
        """Links are not looked at."""

    def _clock(self, position: int) -> float:
        known = self._table.estimates.get(self._table.snapshot.offers[position].peer_id)
        return self._minimum if known is None else known.clock
