"""Choosing the next peer by predicted finish time (ours).

A virtual clock per peer advances by the service time of what it was given: as the clocks keep pace with one another,
shares become proportional to speed. Of two candidates the one with the smaller clock + prediction + load is taken;
load is the work that a peer has committed itself to, of which its queue shows only a part.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Set as AbstractSet

from swarmtrain.route.estimate import PeerEstimate, Trouble, moved
from swarmtrain.route.policies import Candidate, RouterOptions
from swarmtrain.route.table import PeerTable
from swarmtrain.route.views import Offer

BEST_LINK_FORGETTING = 0.005  # per measurement
MAX_DRAWS = 8
MAX_KNOWN = 128  # peers that a sender remembers; of a larger stage, those it met last


class FinishTimePolicy:
    """Better of two candidates by predicted finish, both drawn in proportion to service rate.

    Drawing by rate bounds the herd: however many senders share one stale view, no peer is expected to get more than
    twice its fair share of their picks. (Drawing among the few that look best sends all callers to those few.)
    """

    def __init__(self, table: PeerTable, rng: random.Random, options: RouterOptions) -> None:
        self._table = table
        self._rng = rng
        self._options = options
        self._num_candidates, self._exploration = options.num_candidates, options.exploration
        self._prior_goodput = options.my_up_bytes_per_s or options.default_goodput
        self._virtual_time = 0.0
        self._stranger = PeerEstimate(clock=0.0)  # stands for all that nothing is known of
        self._usual_prediction_s = 0.0
        self._max_speedup = 1.0  # the most by which a peer was lately faster than it announces
        self._best_goodput = 0.0  # of all links measured lately; 0: none yet

    def choose(self, num_bytes: float, now: float, exclude: AbstractSet[str]) -> Candidate | None:
        """The better of `num_candidates` draws."""
        best: Candidate | None = None
        best_score = 0.0
        offers = self._table.snapshot.offers
        for _ in range(self._num_candidates):
            candidate = self._draw(num_bytes, now, exclude)
            if candidate is None:
                return None
            position, predicted_s, service_s, known = candidate
            # A short queue may hide work that will come back for its second pass: what the peer holds counts as well.
            score = predicted_s + known.load_now_s(offers[position], now) + self._clamped_lead(known, service_s)
            if best is None or score < best_score:
                best, best_score = candidate, score
        return best

    def explore(self, num_bytes: float, now: float, exclude: AbstractSet[str]) -> Candidate | None:
        """Any peer with equal probability, unless it has had its share already: a very slow one must not be flooded."""
        offers = self._table.snapshot.offers
        if not offers or self._rng.random() >= self._exploration:
            return None
        position = self._rng.randrange(len(offers))
        offer = offers[position]
        known = self._table.estimates.get(offer.peer_id)
        if not self._table.is_usable(offer, now, exclude) or (known and known.clock > self._virtual_time):
            return None
        return self.candidate(position, num_bytes, now)

    def candidate(self, position: int, num_bytes: float, now: float) -> Candidate:
        """As drawn, whether it is usable or not."""
        offer = self._table.snapshot.offers[position]
        known, trouble = self._table.estimates.get(offer.peer_id), self._table.troubles.get(offer.peer_id)
        service_s = self._service_s(offer, known, trouble, num_bytes, now)
        return self._candidate(position, offer, known, trouble, service_s, num_bytes, now)

    def _candidate(
        self,
        position: int,
        offer: Offer,
        known: PeerEstimate | None,
        trouble: Trouble | None,
        service_s: float,
        num_bytes: float,
        now: float,
    ) -> Candidate:
        """Predicted finish: own backlog on the link + transfer + half a round trip + its queue + its forward."""
        if known is None:
            known = self._newcomer(offer)
        predicted_s = (
            (known.backlog_bytes + num_bytes) / (known.goodput or self._prior(offer))
            + 0.5 * (known.rtt_s or self._options.default_rtt_s)
            + known.queue_now_s(offer, now)
            + (known.forward_s or offer.forward_s)
        )
        if trouble is not None:
            predicted_s += trouble.stall_now_s(now)
        return Candidate(position, predicted_s, service_s, known)

    def charge(self, candidate: Candidate) -> None:
        """Virtual time is the mean of all clocks, weighted by rate: one pick advances it by that peer's share of it."""
        known = candidate.known
        if known is self._stranger:
            known = self.estimate(self._table.snapshot.offers[candidate.position].peer_id)
        # A clock far behind (long banned, long queue) must not cause a burst, one far ahead must not starve its peer.
        lead = self._clamped_lead(known, candidate.service_s) + candidate.service_s
        known.clock = self._virtual_time + lead
        self._usual_prediction_s = moved(self._usual_prediction_s, candidate.predicted_s, 0.1)
        self._virtual_time += lead * min(1.0, 1.0 / (candidate.service_s * self._table.snapshot.total_rate))

    def estimate(self, peer_id: str) -> PeerEstimate:
        """A newcomer's clock starts at the virtual time."""
        known = self._table.estimates.get(peer_id)
        if known is None:
            self._table.forget_oldest(MAX_KNOWN)
            known = self._table.estimates[peer_id] = PeerEstimate(clock=self._virtual_time)
        return known

    def _newcomer(self, offer: Offer) -> PeerEstimate:
        """Its clock starts when it is first looked at: however slow it seems, its turn comes.

        Of a stage that is too large to remember, only the peers that got work are remembered: the others would be
        forgotten before their turn.
        """
        if len(self._table.snapshot.offers) <= MAX_KNOWN:
            return self.estimate(offer.peer_id)
        self._stranger.clock = self._virtual_time
        return self._stranger

    def back_off_s(self, strikes: int) -> float:
        """Doubled with every ban since the last success."""
        return min(self._options.first_back_off_s * 2.0 ** min(strikes, 16), self._options.max_back_off_s)

    def answered(self, known: PeerEstimate, latency_s: float) -> None:
        """The parts of this time are known; their sum says nothing more."""

    def timed_out(self, trouble: Trouble, elapsed_s: float, now: float) -> bool:
        """The time already spent is a lower bound of what this peer takes; the second in a row bans it."""
        trouble.observe_stall(elapsed_s, now)
        trouble.timeouts_in_a_row += 1
        return trouble.timeouts_in_a_row >= 2

    def link_measured(self, known: PeerEstimate) -> None:
        """Keep track of the best link; it is forgotten slowly, since the own uplink may have become slower for all."""
        self._best_goodput = max(known.goodput, self._best_goodput * (1.0 - BEST_LINK_FORGETTING))

    def _prior(self, offer: Offer) -> float:
        """Of a link that was not measured yet: the slower of my uplink and its downlink, much less when relayed."""
        mine, its = self._prior_goodput, offer.down_rate
        prior = mine if mine < its else its
        return prior * self._options.relay_factor if offer.relayed else prior

    def _clamped_lead(self, known: PeerEstimate, service_s: float) -> float:
        """How far the peer's clock is ahead of virtual time.

        In equilibrium clock + prediction is the same for all, so clocks lie as far apart as predictions do: the bound
        must be wider than that, or it would shift shares.
        """
        lead = known.clock - self._virtual_time
        bound = self._options.max_clock_lead * (service_s + self._usual_prediction_s)
        return bound if lead > bound else -bound if lead < -bound else lead

    def _service_s(
        self, offer: Offer, known: PeerEstimate | None, trouble: Trouble | None, num_bytes: float, now: float
    ) -> float:
        """Seconds that one microbatch of mine occupies this peer or the path to it.

        What all links have in common is the own uplink, which says nothing about the peer: only the time above that of
        the best link counts. A round trip occupies no peer and is not charged at all.
        """
        service_s, goodput = offer.announced_s, 0.0
        if known is not None:
            goodput = known.goodput
            measured_s = known.compute_now_s(offer)
            # The announced time may be a link's and not the processor's; then a fast processor does not lower it.
            if not offer.link_bound or measured_s > service_s:
                service_s = measured_s
        if trouble is not None and trouble.stall_s > service_s:
            service_s = max(service_s, trouble.stall_now_s(now))
        goodput = goodput or self._prior(offer)
        if goodput < self._best_goodput:
            path_s = num_bytes / goodput - num_bytes / self._best_goodput
            return path_s if path_s > service_s else service_s
        return service_s

    def _draw(self, num_bytes: float, now: float, exclude: AbstractSet[str]) -> Candidate | None:
        """A usable one, with a probability proportional to its service rate for this sender.

        Drawn by the announced rates and accepted by how the own estimate compares with the announcement, which needs no
        pass over all peers; after some misses one pass is made, with the same distribution. Who is usable is decided as
        by `PeerTable.is_usable`, but with one look at the troubles for all that they are asked: nothing is as hot.
        """
        table, random_ = self._table, self._rng.random
        snapshot, estimates, troubles = table.snapshot, table.estimates, table.troubles
        offers, cumulative_rate, total_rate = snapshot.offers, snapshot.cumulative_rate, snapshot.total_rate
        if not offers:
            return None
        for _ in range(MAX_DRAWS):
            position = bisect_right(cumulative_rate, random_() * total_rate)
            if position == len(offers):
                position -= 1
            offer = offers[position]
            peer_id = offer.peer_id
            if offer.expires_at <= now or (exclude and peer_id in exclude):
                continue
            trouble = troubles.get(peer_id) if troubles else None
            if trouble is not None and trouble.keeps_away(offer, now):
                continue
            known = estimates.get(peer_id)
            service_s = self._service_s(offer, known, trouble, num_bytes, now)
            speedup = offer.announced_s / service_s
            max_speedup = 1.0 + 0.999 * (self._max_speedup - 1.0)
            if speedup > max_speedup:
                max_speedup = speedup
            self._max_speedup = max_speedup
            if max_speedup * random_() <= speedup:
                return self._candidate(position, offer, known, trouble, service_s, num_bytes, now)
        usable = table.usable_positions(now, exclude)
        if not usable:
            return None
        rates = []
        for position in usable:
            peer_id = offers[position].peer_id
            known, trouble = estimates.get(peer_id), troubles.get(peer_id)
            rates.append(1.0 / self._service_s(offers[position], known, trouble, num_bytes, now))
        return self.candidate(self._rng.choices(usable, rates)[0], num_bytes, now)
