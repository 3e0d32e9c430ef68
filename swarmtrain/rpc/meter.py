"""What is known about the wire to one peer: goodput as its receiver measured it, and round-trip time. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

_GOODPUT_WEIGHT = 0.3  # of the newest sample
_RTT_WEIGHT = 0.125  # as TCP's smoothed round-trip time
_FEWEST_SAMPLE_BYTES = 4096
_SHORTEST_SAMPLE_S = 1e-5


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """What routing reads about one peer. Rates are None until a large message was measured or a prior set."""

    peer_id: str
    up_bytes_per_s: float | None  # from here to the peer
    down_bytes_per_s: float | None
    rtt_s: float | None
    lowest_rtt_s: float | None
    num_up_samples: int
    num_down_samples: int
    backlog_bytes: int = 0  # queued here, not yet written


class GoodputEstimator:
    """Moving average of seconds per byte, since it is times that are predicted.

    Averaging the time and not the rate also makes a link that collapses show within a few messages.
    """

    __slots__ = ("_seconds_per_byte", "num_samples", "total_bytes", "total_s")

    def __init__(self, prior_bytes_per_s: float | None = None) -> None:
        self._seconds_per_byte: float | None = None if prior_bytes_per_s is None else 1.0 / prior_bytes_per_s
        self.num_samples = 0
        self.total_bytes = 0
        self.total_s = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """One measured transfer. Too small or impossible ones are ignored."""
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
        """What the peer announces; counts only until the first measurement."""
        if self.num_samples == 0 and math.isfinite(bytes_per_s) and bytes_per_s > 0:
            self._seconds_per_byte = 1.0 / bytes_per_s

    @property
    def bytes_per_s(self) -> float | None:
        """The estimate, or None."""
        return None if self._seconds_per_byte is None else 1.0 / self._seconds_per_byte


class RoundTripEstimator:
    """Smoothed and lowest round-trip time. The smoothed one includes what queues on the way, the lowest does not."""

    __slots__ = ("lowest_s", "smoothed_s")

    def __init__(self) -> None:
        self.smoothed_s: float | None = None
        self.lowest_s: float | None = None

    def add(self, seconds: float) -> None:
        """One ping that was answered after `seconds`."""
        if not math.isfinite(seconds) or seconds < 0:
            return
        if self.smoothed_s is None or self.lowest_s is None:
            self.smoothed_s = self.lowest_s = seconds
            return
        self.smoothed_s += _RTT_WEIGHT * (seconds - self.smoothed_s)
        self.lowest_s = min(self.lowest_s, seconds)


class LinkMeter:
    """The record of one peer; outlives the links to it."""

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
