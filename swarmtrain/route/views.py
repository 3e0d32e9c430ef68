"""What routing sees of other peers (observations), and what it answers (picks). Plain immutable data.

Times are seconds on the caller's clock unless a name ends in `_ms`; rates are bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from swarmtrain.wire.peer_report import SERVING, PeerReport

# A record that announces nothing usable is not refused: the peer is tried, and what is measured replaces this.
DEFAULT_SERVICE_S = 1.0
# Bounds on what an announced time may claim, so that "0 ms" cannot draw all traffic before the first measurement.
MIN_SERVICE_S = 1e-4
MAX_SERVICE_S = 3600.0
MIN_RATE = 1e3


@dataclass(frozen=True, slots=True)
class PeerView:
    """A peer as it describes itself, and what only its reader knows."""

    peer_id: str
    report: PeerReport
    expires_at: float = math.inf  # of the directory record
    load_s: float = 0.0  # both passes of everything that the peer holds, if known


def narrower(up_bytes_per_s: float, down_bytes_per_s: float) -> float:
    """What a peer's announced links carry both ways at most; 0 means "not announced"."""
    return min((rate for rate in (up_bytes_per_s, down_bytes_per_s) if rate > 0.0), default=0.0)


def _bounded_rate(bytes_per_s: float) -> float:
    return max(bytes_per_s, MIN_RATE) if 0.0 < bytes_per_s < math.inf else math.inf


def _bounded_seconds(milliseconds: float) -> float:
    if not 0.0 < milliseconds < math.inf:  # also false for NaN
        return DEFAULT_SERVICE_S
    return min(max(milliseconds / 1000.0, MIN_SERVICE_S), MAX_SERVICE_S)


class LinkView(NamedTuple):
    """What the own link meter knows about the way to one peer. Goodput counts only if `samples` is positive."""

    goodput_bytes_per_s: float = 0.0
    rtt_s: float = 0.0
    backlog_bytes: int = 0
    samples: int = 0


class Pick(NamedTuple):
    """Send to `peer_id`. `predicted_s`: until its forward is done; `timeout_s`: when to give it up.

    `wait_s` is positive only when every candidate said BUSY: the least time after which this one may be asked again.
    """

    peer_id: str
    predicted_s: float
    timeout_s: float
    why: str
    wait_s: float = 0.0


class Offer:
    """A record made usable: bounded, in seconds and bytes per second, with what the choice needs worked out once."""

    __slots__ = (
        "announced_s",
        "backward_s",
        "down_rate",
        "expires_at",
        "forward_s",
        "link_bound",
        "load_s",
        "passes",
        "peer_id",
        "queue_s",
        "relayed",
    )

    def __init__(self, view: PeerView, bytes_in: float, bytes_out: float) -> None:
        report = view.report
        self.peer_id = view.peer_id
        self.relayed = report.relayed
        self.expires_at = view.expires_at
        self.forward_s = _bounded_seconds(report.forward_ms)
        # Not announced: backward is about twice the work of forward.
        self.backward_s = _bounded_seconds(report.backward_ms) if report.backward_ms else 2.0 * self.forward_s
        self.queue_s = min(report.queue_ms / 1000.0, MAX_SERVICE_S) if 0.0 < report.queue_ms < math.inf else 0.0
        self.load_s = min(view.load_s, MAX_SERVICE_S) if 0.0 < view.load_s < math.inf else 0.0
        self.down_rate = _bounded_rate(report.down_bytes_per_s)
        compute_s = self.forward_s + self.backward_s
        self.passes = compute_s / self.forward_s  # both, in units of a forward
        wire_s = max(bytes_in / self.down_rate, bytes_out / _bounded_rate(report.up_bytes_per_s))
        self.link_bound = wire_s > compute_s
        # Seconds that one microbatch occupies the peer's slowest resource: compute, downlink or uplink.
        self.announced_s = min(max(compute_s, wire_s), MAX_SERVICE_S)


class StageSnapshot:
    """The serving peers of one stage, prepared for drawing in proportion to their service rate.

    Not to be changed once built, so one snapshot may be shared by any number of routers. `bytes_in` and `bytes_out` are
    what a peer receives and sends per microbatch: one whose announced link is slower than its compute is rated by that.
    """

    __slots__ = ("cumulative_rate", "index", "offers", "total_rate")

    def __init__(self, views: Iterable[PeerView], *, bytes_in: float = 0.0, bytes_out: float = 0.0) -> None:
        """Keeps serving peers only; of two records of one peer the one that expires last."""
        newest: dict[str, PeerView] = {}
        for view in views:
            known = newest.get(view.peer_id)
            if view.report.state == SERVING and (known is None or view.expires_at > known.expires_at):
                newest[view.peer_id] = view
        self.offers = tuple(Offer(view, bytes_in, bytes_out) for view in newest.values())
        self.cumulative_rate = tuple(accumulate(1.0 / offer.announced_s for offer in self.offers))
        self.total_rate = self.cumulative_rate[-1] if self.offers else 0.0
        self.index = {offer.peer_id: position for position, offer in enumerate(self.offers)}
