"""Which peer of the next stage gets this microbatch.

One `Router` per sender and next stage. Give it records (`update_peers`), link meters (`update_link`) and the outcome of
every call; ask it with `pick`. It does no I/O, reads no clock of its own and draws from the given random source only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from swarmtrain.errors import UsageError
from swarmtrain.route.estimate import PeerEstimate
from swarmtrain.route.finish_time import FinishTimePolicy
from swarmtrain.route.policies import Candidate, Policy, RouterOptions
from swarmtrain.route.swarm_latency import SwarmLatencyPolicy
from swarmtrain.route.table import PeerTable
from swarmtrain.route.views import LinkView, PeerView, Pick, StageSnapshot

NOBODY: frozenset[str] = frozenset()
POLICIES: dict[str, type[FinishTimePolicy] | type[SwarmLatencyPolicy]] = {
    "finish-time": FinishTimePolicy,
    "swarm-latency": SwarmLatencyPolicy,
}


# Peers of a stage share what waits (`thief.py`), except with the published router, which is there to be compared with.
STEALING_POLICIES = frozenset({"finish-time"})


class Router:
    """Chooses the next peer by the named policy, and keeps away from peers that failed."""

    def __init__(
        self,
        policy: str = "finish-time",
        *,
        clock: Callable[[], float],
        rng: random.Random,
        options: RouterOptions | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise UsageError(f"unknown routing policy {policy!r}", fix=f"use one of: {', '.join(sorted(POLICIES))}")
        self._clock = clock
        self._rng = rng
        self._options = options or RouterOptions()
        self._table = PeerTable()
        self._policy: Policy = POLICIES[policy](self._table, rng, self._options)

    def update_peers(self, peers: Iterable[PeerView] | StageSnapshot) -> None:
        """Replace all records. A peer that is not in `peers` is not picked any more."""
        if not isinstance(peers, StageSnapshot):
            peers = StageSnapshot(peers, bytes_in=self._options.bytes_in, bytes_out=self._options.bytes_out)
        self._table.replace_snapshot(peers)

    def update_link(self, peer_id: str, link: LinkView) -> None:
        """Take over what the link meter says; it replaces estimates made from `succeeded`."""
        self._take_over(link, self._policy.estimate(peer_id))

    def _take_over(self, link: LinkView, known: PeerEstimate) -> None:
        goodput, rtt_s, backlog_bytes, samples = link
        known.backlog_bytes = backlog_bytes if backlog_bytes > 0 else 0
        if rtt_s > 0.0:
            known.rtt_s = rtt_s
        if samples > 0 and goodput > 0.0:
            known.goodput = goodput
            self._policy.link_measured(known)

    def pick(
        self,
        num_bytes: float,
        now: float | None = None,
        exclude: AbstractSet[str] = NOBODY,
        prefer: Sequence[str] = (),
    ) -> Pick | None:
        """The peer for a message of `num_bytes`, or None when no listed peer may be asked at all.

        `exclude`: peers already tried for this microbatch. `prefer`: peers known to have taken it before; the first
        of them that is usable is picked, whatever it costs, because its work need not be done again.
        """
        now = self._clock() if now is None else now
        policy, table = self._policy, self._table
        for peer_id in prefer:
            offer = table.offer(peer_id)
            if offer is not None and table.is_usable(offer, now, exclude):
                return self._picked(policy.candidate(table.snapshot.index[peer_id], num_bytes, now), "hint")
        candidate = policy.explore(num_bytes, now, exclude)
        if candidate is not None:
            return self._picked(candidate, "explore")
        candidate = policy.choose(num_bytes, now, exclude)
        if candidate is not None:
            return self._picked(candidate, "best")
        if table.lift_bans_if_all_banned(now, exclude):
            candidate = policy.choose(num_bytes, now, exclude)
            if candidate is not None:
                return self._picked(candidate, "bans lifted")
        busy = table.soonest_busy(now, exclude)
        if busy is None:
            return None
        return self._picked(policy.candidate(busy[0], num_bytes, now), "all busy", busy[1])

    def has_other(self, known: AbstractSet[str]) -> bool:
        """Whether peers are listed besides these, whether or not they may be asked now."""
        return any(peer_id not in known for peer_id in self._table.snapshot.index)

    def succeeded(
        self,
        peer_id: str,
        *,
        wire_s: float,
        queue_s: float,
        compute_s: float,
        num_bytes: float = 0.0,
        backward_s: float | None = None,
        load_s: float | None = None,
        link: LinkView | None = None,
        now: float | None = None,
    ) -> None:
        """The peer has done its forward (`compute_s`); the three times are its own account of where the time went.

        `wire_s` is one way, with half a round trip in it. `backward_s` may come here or later through `observed`, and
        `link` here or through `update_link`.
        """
        now = self._clock() if now is None else now
        known = self._policy.estimate(peer_id)
        if link is not None:
            self._take_over(link, known)
        if num_bytes > 0.0 and wire_s > 0.0:
            rtt_s = known.rtt_s or self._options.default_rtt_s
            known.observe_goodput(num_bytes / max(wire_s - 0.5 * rtt_s, 0.1 * wire_s))
            self._policy.link_measured(known)
        self._policy.answered(known, wire_s + queue_s + compute_s)
        known.observe_compute(compute_s, backward_s)
        known.observe_queue(queue_s, now)
        if load_s is not None:
            known.observe_load(load_s, now)
        self._table.succeeded(peer_id)

    def observed(
        self,
        peer_id: str,
        *,
        queue_s: float | None = None,
        forward_s: float | None = None,
        backward_s: float | None = None,
        rtt_s: float | None = None,
        load_s: float | None = None,
        now: float | None = None,
    ) -> None:
        """Something learned in passing (a progress message, an answer's timings) that ends no call."""
        known = self._policy.estimate(peer_id)
        if forward_s is not None or backward_s is not None:
            known.observe_compute(forward_s, backward_s)
        if rtt_s is not None:
            known.observe_rtt(rtt_s)
        now = self._clock() if now is None else now
        if queue_s is not None:
            known.observe_queue(queue_s, now)
        if load_s is not None:
            known.observe_load(load_s, now)

    def timed_out(self, peer_id: str, elapsed_s: float, now: float | None = None) -> None:
        """No answer within the timeout. The elapsed time enters the estimate; two in a row ban the peer."""
        now = self._clock() if now is None else now
        if self._policy.timed_out(self._table.trouble(peer_id), elapsed_s, now):
            self._ban(peer_id, now)

    def failed(self, peer_id: str, now: float | None = None) -> None:
        """The connection broke or could not be made: banned for a back-off, or until its next record."""
        self._ban(peer_id, self._clock() if now is None else now)

    def busy(self, peer_id: str, retry_after_s: float, now: float | None = None) -> None:
        """The peer refused for now. Not a fault: it is asked again after `retry_after_s`."""
        now = self._clock() if now is None else now
        known = self._policy.estimate(peer_id)
        retry_after_s = min(max(retry_after_s, 0.0), 60.0)
        self._table.trouble(peer_id).busy_until = now + retry_after_s
        known.observe_queue(max(retry_after_s, known.queue_s), now)

    def is_banned(self, peer_id: str, now: float | None = None) -> bool:
        """Whether the peer is kept out of the choice because of failures (not because of BUSY)."""
        now = self._clock() if now is None else now
        offer, trouble = self._table.offer(peer_id), self._table.troubles.get(peer_id)
        return offer is not None and trouble is not None and trouble.is_banned(offer, now)

    def predict(self, peer_id: str, num_bytes: float, now: float | None = None) -> float | None:
        """Predicted seconds until a message sent now would be processed by this listed peer."""
        position = self._table.snapshot.index.get(peer_id)
        if position is None:
            return None
        return self._policy.candidate(position, num_bytes, self._clock() if now is None else now).predicted_s

    def num_peers(self) -> int:
        """Listed peers, usable or not."""
        return len(self._table.snapshot.offers)

    def _ban(self, peer_id: str, now: float) -> None:
        trouble = self._table.trouble(peer_id)
        offer = self._table.offer(peer_id)
        trouble.ban(now, self._policy.back_off_s(trouble.strikes), offer.expires_at if offer is not None else now)

    def _picked(self, candidate: Candidate, why: str, wait_s: float = 0.0) -> Pick:
        self._policy.charge(candidate)
        options, predicted_s = self._options, candidate.predicted_s
        timeout_s = max(options.min_timeout_s, options.timeout_factor * predicted_s)
        return Pick(self._table.snapshot.offers[candidate.position].peer_id, predicted_s, timeout_s, why, wait_s)
