"""What one sender has learned about one peer of the next stage from its own traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmtrain.route.views import MAX_SERVICE_S, Offer

# A link that got slower must lose its share within a few microbatches; one that got faster may take its time.
GOODPUT_WEIGHT_DOWN = 0.5
GOODPUT_WEIGHT_UP = 0.25
COMPUTE_WEIGHT = 0.25
RTT_WEIGHT = 0.25
# An observed queue says little about the queue some seconds later.
QUEUE_MEMORY_S = 10.0
# What a peer holds changes more slowly: it stays until the gradient has come back.
LOAD_MEMORY_S = 20.0
# Why a call timed out is not known, and may be over: half of the suspicion is forgotten in so long.
STALL_HALF_LIFE_S = 15.0
MIN_STALL_S = 1e-3  # a suspicion smaller than this is none


def moved(old: float, new: float, weight: float) -> float:
    """One step of an exponential moving average."""
    return old + weight * (new - old)


@dataclass(slots=True)
class PeerEstimate:
    """Running estimates. A field of 0 samples falls back to the record (`PeerView`)."""

    clock: float  # virtual time at which this peer's share of the own traffic is used up
    goodput: float = 0.0
    rtt_s: float = 0.0
    backlog_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    queue_s: float = 0.0
    queue_seen_at: float = -math.inf
    load_s: float = 0.0
    load_seen_at: float = -math.inf
    latency_s: float = 0.0  # bias-corrected by `latency_weight`; only the latency policy uses it
    latency_weight: float = 0.0

    def observe_goodput(self, goodput: float) -> None:
        """Take a sample in bytes per second; falls are followed faster than rises."""
        if not 0.0 < goodput < math.inf:
            return
        if self.goodput == 0.0:
            self.goodput = goodput
            return
        weight = GOODPUT_WEIGHT_DOWN if goodput < self.goodput else GOODPUT_WEIGHT_UP
        # Averaging times, not rates: one fast sample must not hide a slow one.
        self.goodput = 1.0 / moved(1.0 / self.goodput, 1.0 / goodput, weight)

    def observe_rtt(self, rtt_s: float) -> None:
        """Take a round-trip sample."""
        if 0.0 < rtt_s < math.inf:
            self.rtt_s = moved(self.rtt_s, rtt_s, RTT_WEIGHT) if self.rtt_s else rtt_s

    def observe_compute(self, forward_s: float | None, backward_s: float | None) -> None:
        """Take measured compute times of one microbatch."""
        if forward_s is not None and 0.0 < forward_s <= MAX_SERVICE_S:
            self.forward_s = moved(self.forward_s, forward_s, COMPUTE_WEIGHT) if self.forward_s else forward_s
        if backward_s is not None and 0.0 < backward_s <= MAX_SERVICE_S:
            self.backward_s = moved(self.backward_s, backward_s, COMPUTE_WEIGHT) if self.backward_s else backward_s

    def observe_queue(self, queue_s: float, now: float) -> None:
        """Take the waiting time that the last piece of work met."""
        if 0.0 <= queue_s < math.inf:
            self.queue_s = queue_s if queue_s < MAX_SERVICE_S else MAX_SERVICE_S
            self.queue_seen_at = now

    def observe_load(self, load_s: float, now: float) -> None:
        """Take what the peer says it has committed itself to."""
        if 0.0 <= load_s < math.inf:
            self.load_s = load_s if load_s < MAX_SERVICE_S else MAX_SERVICE_S
            self.load_seen_at = now

    def observe_latency(self, seconds: float, weight: float) -> None:
        """The published router's only signal: wall time of the whole call."""
        if 0.0 <= seconds < math.inf:
            self.latency_s = moved(self.latency_s, seconds, weight)
            self.latency_weight = moved(self.latency_weight, 1.0, weight)

    def compute_now_s(self, offer: Offer) -> float:
        """Forward and backward as measured, else as announced."""
        if self.backward_s:
            return (self.forward_s or offer.forward_s) + self.backward_s
        # A peer measured slower or faster in forward than it announced is taken to be so in backward as well.
        return (self.forward_s or offer.forward_s) * offer.passes

    def queue_now_s(self, offer: Offer, now: float) -> float:
        """The expected wait: the last one seen fades away, and then the record counts again."""
        age_s = now - self.queue_seen_at
        if age_s >= QUEUE_MEMORY_S:
            return offer.queue_s
        return self.queue_s * math.exp(-age_s / QUEUE_MEMORY_S) if age_s > 0.0 else self.queue_s

    def load_now_s(self, offer: Offer, now: float) -> float:
        """Committed work, as heard lately from the peer itself, else as announced."""
        return self.load_s if now - self.load_seen_at < LOAD_MEMORY_S else offer.load_s


@dataclass(slots=True)
class Trouble:
    """Why a sender keeps away from a peer, or trusts it less. Most peers have none."""

    stall_s: float = 0.0  # from timeouts, whose cause is unknown; halves with every success, and with time
    stalled_at: float = -math.inf
    timeouts_in_a_row: int = 0
    strikes: int = 0  # bans since the last success: doubles the back-off
    banned_until: float = -math.inf
    banned_record_expires_at: float = -math.inf
    busy_until: float = -math.inf

    def succeeded(self) -> bool:
        """The peer answered. True: nothing is left of its trouble."""
        self.stall_s *= 0.5
        self.timeouts_in_a_row = 0
        self.strikes = 0
        self.banned_until = self.busy_until = -math.inf
        return self.stall_s < MIN_STALL_S

    def observe_stall(self, elapsed_s: float, now: float) -> None:
        """A call was given up after so long: a lower bound of what the peer takes."""
        self.stall_s = min(max(self.stall_now_s(now), elapsed_s), MAX_SERVICE_S)
        self.stalled_at = now

    def stall_now_s(self, now: float) -> float:
        """What is left of the last stall."""
        if not self.stall_s:
            return 0.0
        return self.stall_s * math.exp2(min(0.0, self.stalled_at - now) / STALL_HALF_LIFE_S)

    def is_banned(self, offer: Offer, now: float) -> bool:
        """A ban ends with its back-off, or as soon as the peer has published a newer record."""
        return now < self.banned_until and offer.expires_at <= self.banned_record_expires_at

    def keeps_away(self, offer: Offer, now: float) -> bool:
        """Banned, or BUSY."""
        return now < self.busy_until or self.is_banned(offer, now)

    def ban(self, now: float, back_off_s: float, record_expires_at: float) -> None:
        """Keep away for `back_off_s`, or until a record that expires later than `record_expires_at` is seen."""
        self.banned_until = now + back_off_s
        self.banned_record_expires_at = record_expires_at
        self.strikes += 1
        self.timeouts_in_a_row = 0
