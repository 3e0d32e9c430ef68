"""What a link moved: per message kind, payload and framing apart, so that traffic can be compared with a formula."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class KindTraffic:
    """One direction, one kind. `body_bytes + frame_bytes` is everything its messages put on the stream."""

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
class Direction:
    """All traffic in one direction. `total_bytes` equals the bytes that crossed the stream."""

    by_kind: dict[str, KindTraffic] = field(default_factory=dict)
    control_bytes: int = 0  # hello, pings, credits, refusals, cancels

    def kind(self, name: str) -> KindTraffic:
        """The counters of one kind, made if need be. Names come from the registry, so their number is bounded."""
        traffic = self.by_kind.get(name)
        if traffic is None:
            traffic = self.by_kind[name] = KindTraffic()
        return traffic

    @property
    def total_bytes(self) -> int:
        """Every byte that was counted."""
        return self.control_bytes + sum(kind.body_bytes + kind.frame_bytes for kind in self.by_kind.values())

    def add(self, other: Direction) -> None:
        """Sum into this one."""
        self.control_bytes += other.control_bytes
        for name, traffic in other.by_kind.items():
            self.kind(name).add(traffic)


@dataclass(slots=True)
class Traffic:
    """Counters of one link, or of a whole node."""

    sent: Direction = field(default_factory=Direction)
    received: Direction = field(default_factory=Direction)
    violations: Counter[str] = field(default_factory=Counter)  # by Violation
    refusals_sent: Counter[str] = field(default_factory=Counter)  # by code of the link layer
    num_malformed: int = 0  # messages that arrived whole and broke their schema
    num_progress_dropped: int = 0  # progress messages that were overtaken by newer ones

    def add(self, other: Traffic) -> None:
        """Sum into this one."""
        self.sent.add(other.sent)
        self.received.add(other.received)
        self.violations.update(other.violations)
        self.refusals_sent.update(other.refusals_sent)
        self.num_malformed += other.num_malformed
        self.num_progress_dropped += other.num_progress_dropped

    def summary(self) -> dict[str, Any]:
        """Plain data for the status: by direction and kind, with totals; and what the other ends did wrong."""
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
