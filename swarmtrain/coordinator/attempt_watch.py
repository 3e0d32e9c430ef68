"""Whether an attempt at an all-reduce still makes progress, and which member holds it up if not. Pure: times are given.

An all-reduce has no deadline, since links may be slow and gradients large; it has to make progress. Every member
reports again and again how much it has received and which peers it waits for. A member without reports is given up: a
straggler may not know that it is one. How much has to move follows from the bytes of the all-reduce and from how long
it should take (`Pace`). When no member has moved that much for a while, the attempt has stalled, and the members' last
reports say which peers they wait for. It has also if it takes SLOW_FACTOR times as long as expected: a member that lies
could report progress for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from swarmtrain.wire.messages import Preparing, Unprepared

SILENT_S = 30.0  # a member without a report for this long is given up; longer than it may wait for its step
STALL_S = 30.0  # an attempt in which no byte moves for this long has failed
MIN_MOVED_BYTES = 4096  # less than this in STALL_S is no progress, whatever the pace
SLOW_FACTOR = 32.0  # so much slower than expected is no progress; background traffic may be left a sixteenth of a line
PATIENT_S = 300.0  # every attempt may take so long, however fast the ones before were
COMPUTE_S = 120.0  # a member may report for this long that its device is at work, and nothing else moves
UNKNOWN_BYTES_PER_S = 125e3  # what a line should carry of which nothing is known yet


@dataclass(frozen=True)
class Pace:
    """What an all-reduce moves to one member, and how long that should take by announced rates and former attempts."""

    num_bytes: float = 0.0
    expected_s: float = 0.0  # 0: nothing is known

    @property
    def least_bytes(self) -> float:
        """What one member at least must have moved for STALL_S to count as progress."""
        expected_s = self.expected_s or self.num_bytes / UNKNOWN_BYTES_PER_S
        return max(MIN_MOVED_BYTES, self.num_bytes * STALL_S / (SLOW_FACTOR * max(expected_s, STALL_S)))

    @property
    def longest_s(self) -> float:
        """How long an attempt may take, whatever its members report: a report is only what a member says of itself."""
        expected_s = self.expected_s or self.num_bytes / UNKNOWN_BYTES_PER_S
        return COMPUTE_S + max(PATIENT_S, SLOW_FACTOR * expected_s)


class AttemptWatch:
    """The members of one attempt that have not answered yet."""

    def __init__(self, peers: Iterable[str], now: float, pace: Pace | None = None) -> None:
        self._heard_at = dict.fromkeys(peers, now)
        self._reports: dict[str, Preparing] = {}
        self._moved_at = now
        self._least_bytes = (pace or Pace()).least_bytes
        self._ends_at = now + pace.longest_s if pace is not None else math.inf
        self._marked_bytes = dict.fromkeys(self._heard_at, 0)

    def heard(self, peer_id: str, report: Preparing, now: float) -> None:
        """A member has reported its progress."""
        if peer_id not in self._heard_at:
            return
        known = self._reports.get(peer_id)
        self._heard_at[peer_id], self._reports[peer_id] = now, report
        has_turned = known is None or known.is_computing is not report.is_computing
        if has_turned or report.moved_bytes >= self._marked_bytes[peer_id] + self._least_bytes:
            self._moved_at = now
            self._marked_bytes.update((name, item.moved_bytes) for name, item in self._reports.items())

    def answered(self, peer_id: str, now: float) -> None:
        """A member has given its final answer."""
        if self._heard_at.pop(peer_id, None) is not None:
            self._moved_at = now
            self._reports.pop(peer_id, None)  # it waits for nobody any more

    def excuse(self, seconds: float) -> None:
        """No member could be heard for this long, because this process stood still or its host was cut off."""
        self._heard_at = {peer_id: at + seconds for peer_id, at in self._heard_at.items()}
        self._moved_at += seconds
        self._ends_at += seconds

    def silent(self, now: float) -> list[str]:
        """Members whose last report is older than SILENT_S."""
        return [peer_id for peer_id, at in self._heard_at.items() if now - at > SILENT_S]

    def has_stalled(self, now: float) -> bool:
        """Whether the attempt makes no progress any more."""
        if now > self._ends_at:
            return True
        computes = any(report.is_computing for report in self._reports.values())
        return now - self._moved_at > (COMPUTE_S if computes else STALL_S)

    def complaint(self, peer_id: str) -> Unprepared | None:
        """In a stalled attempt: the peers that a member waits for; None if there are none, and it holds the attempt up.

        What a member waits for may itself wait for something: only those who wait for what comes first (`Lacks`)
        complain.
        """
        report = self._reports.get(peer_id)
        if report is None or report.is_computing or not report.waits_for:
            return None
        first = min(item.lacks for item in self._reports.values() if item.waits_for)
        suspects = report.waits_for if report.lacks == first else ()
        return Unprepared(b"", suspects, f"next to nothing has moved for {STALL_S:.0f} s")
