"""Measurements of a link: goodput, round-trip time, bytes by kind. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

_GOODPUT_WEIGHT = 0.3  # of the newest sample
_RTT_WEIGHT = 0.125  # as in TCP's smoothed round-trip time
_FEWEST_SAMPLE_BYTES = 4096
_SHORTEST_SAMPLE_S = 1e-5


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """The link to one peer, as routing sees it. A rate is None until a large message is measured or a prior is set."""

    peer_id: str
    up_bytes_per_s: float | None  # from here to the peer
    down_bytes_per_s: float | None
    rtt_s: float | None
    lowest_rtt_s: float | None
    num_up_samples: int
    num_down_samples: int
    backlog_bytes: int = 0  # queued here, not yet written


class GoodputEstimator:
    """Moving average of seconds per byte: routing predicts times, not rates.

    Averaging times also shows a collapsing link within a few messages.
    """

    __slots__ = ("_seconds_per_byte", "num_samples", "total_bytes", "total_s")

    def __init__(self, prior_bytes_per_s: float | None = None) -> None:
        self._seconds_per_byte: float | None = None if prior_bytes_per_s is None else 1.0 / prior_bytes_per_s
        self.num_samples = 0
        self.total_bytes = 0
        self.total_s = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Add one measured transfer. Small or impossible ones are ignored."""
        if num_bytes < _FEWEST_SAMPLE_BYTES or not math.isfinite(seconds) or seconds < 0:
            return
        sample = max(seconds, _SHORTEST_SAMPLE_S) / num_bytes
        if self._seconds_per_byte is None:
            self._seconds_per_byte = sample
        else:
            self._seconds_per_byte += _GOODPUT_WEIGHT * (sample - self._seconds_per_byte)
        self.num_samples += 1
        self.total_bytes += num_bytes
        self.total_s += seconds

    def set_prior(self, bytes_per_s: float) -> None:
        """The rate that the peer announces; it counts only until the first measurement."""
        if self.num_samples == 0 and math.isfinite(bytes_per_s) and bytes_per_s > 0:
            self._seconds_per_byte = 1.0 / bytes_per_s

    @property
    def bytes_per_s(self) -> float | None:
        """The estimate, or None."""
        return None if self._seconds_per_byte is None else 1.0 / self._seconds_per_byte


class RoundTripEstimator:
    """Smoothed and lowest round-trip time. The smoothed one includes queueing on the way, the lowest does not."""

    __slots__ = ("lowest_s", "smoothed_s")

    def __init__(self) -> None:
        self.smoothed_s: float | None = None
        self.lowest_s: float | None = None

    def add(self, seconds: float) -> None:
        """Add one ping that was answered after `seconds`."""
        if not math.isfinite(seconds) or seconds < 0:
            return
        if self.smoothed_s is None or self.lowest_s is None:
            self.smoothed_s = self.lowest_s = seconds
            return
        self.smoothed_s += _RTT_WEIGHT * (seconds - self.smoothed_s)
        self.lowest_s = min(self.lowest_s, seconds)


class LinkMeter:
    """The measurements of one peer; they outlive the links to it."""

    __slots__ = ("down", "peer_id", "rtt", "up")

    def __init__(self, peer_id: str, *, prior_up_bytes_per_s: float | None = None) -> None:
        self.peer_id = peer_id
        self.up = GoodputEstimator(prior_up_bytes_per_s)
        self.down = GoodputEstimator()
        self.rtt = RoundTripEstimator()

    def estimate(self, backlog_bytes: int = 0) -> LinkEstimate:
        """A snapshot."""
        return LinkEstimate(
            peer_id=self.peer_id,
            up_bytes_per_s=self.up.bytes_per_s,
            down_bytes_per_s=self.down.bytes_per_s,
            rtt_s=self.rtt.smoothed_s,
            lowest_rtt_s=self.rtt.lowest_s,
            num_up_samples=self.up.num_samples,
            num_down_samples=self.down.num_samples,
            backlog_bytes=backlog_bytes,
        )


@dataclass(slots=True)
class KindTraffic:
    """One direction, one message kind. `body_bytes + frame_bytes` is everything its messages put on the stream."""

    num_messages: int = 0  # complete ones
    blob_bytes: int = 0  # tensors and other raw bytes of complete messages
    body_bytes: int = 0  # msgpack headers, padding and blobs
    frame_bytes: int = 0  # frame headers and the frames that begin messages

    def add(self, other: KindTraffic) -> None:
        """Sum into this one."""
        self.num_messages += other.num_messages
        self.blob_bytes += other.blob_bytes
        self.body_bytes += other.body_bytes
        self.frame_bytes += other.frame_bytes


@dataclass(slots=True)
class DirectionTraffic:
    """All traffic in one direction. `total_bytes` equals the bytes that crossed the stream."""

    by_kind: dict[str, KindTraffic] = field(default_factory=dict)
    control_bytes: int = 0  # hello, pings, credits, refusals, cancels

    def kind(self, name: str) -> KindTraffic:
        """The counters of one kind, created if missing. The registry bounds the number of kinds."""
        traffic = self.by_kind.get(name)
        if traffic is None:
            traffic = self.by_kind[name] = KindTraffic()
        return traffic

    @property
    def total_bytes(self) -> int:
        """Every byte that was counted."""
        return self.control_bytes + sum(kind.body_bytes + kind.frame_bytes for kind in self.by_kind.values())

    def add(self, other: DirectionTraffic) -> None:
        """Sum into this one."""
        self.control_bytes += other.control_bytes
        for name, traffic in other.by_kind.items():
            self.kind(name).add(traffic)


@dataclass(slots=True)
class Traffic:
    """Counters of one link, or of a whole node."""

    sent: DirectionTraffic = field(default_factory=DirectionTraffic)
    received: DirectionTraffic = field(default_factory=DirectionTraffic)
    violations: Counter[str] = field(default_factory=Counter)  # by Violation
    refusals_sent: Counter[str] = field(default_factory=Counter)  # by code of the link layer
    num_malformed: int = 0  # messages that arrived complete and broke their schema
    num_progress_dropped: int = 0  # progress messages that newer ones displaced

    @property
    def total_bytes(self) -> int:
        """In both directions."""
        return self.sent.total_bytes + self.received.total_bytes

    def add(self, other: Traffic) -> None:
        """Sum into this one."""
        self.sent.add(other.sent)
        self.received.add(other.received)
        self.violations.update(other.violations)
        self.refusals_sent.update(other.refusals_sent)
        self.num_malformed += other.num_malformed
        self.num_progress_dropped += other.num_progress_dropped

    def summary(self) -> dict[str, Any]:
        """Plain data for the status: bytes by direction and kind with totals, and the other ends' violations."""
        directions = {
            name: {
                "total_bytes": direction.total_bytes,
                "control_bytes": direction.control_bytes,
                "kinds": {kind: asdict(traffic) for kind, traffic in sorted(direction.by_kind.items())},
            }
            for name, direction in (("sent", self.sent), ("received", self.received))
        }
        return {
            **directions,
            "violations": dict(self.violations),
            "refusals_sent": dict(self.refusals_sent),
            "malformed": self.num_malformed,
        }
