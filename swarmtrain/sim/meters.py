"""Counters: finished microbatches over time, how machines spend their time, bytes, events by name."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import Counter

from swarmtrain.sim.peer import Job, Microbatch, SimPeer

# How a live machine spends its time. All but the first two are idle time, by cause.
CAUSES = ("useful", "wasted", "wire", "no work", "all-reduce", "draining", "syncing")


class Meters:
    """Counts only after the warm-up; intervals are clipped to that."""

    def __init__(self, warmup_s: float, bin_s: float) -> None:
        self.warmup_s = warmup_s
        self.bin_s = bin_s
        self.seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self.events: Counter[str] = Counter()
        self.finished_in_bin: Counter[int] = Counter()
        self.num_finished = 0
        self.stages_done = 0.0  # one is forward and backward of one microbatch in one stage
        self.delay_sum_s = 0.0
        self.queue_sum_s = 0.0
        self.bytes_sent = 0.0
        self.trace_digest = 0
        # Where leases begin or end to wait for an all-reduce, in turns, and how long they had waited until there.
        self._turns: list[float] = [0.0]
        self._waited_s: list[float] = [0.0]

    def count(self, name: str, now: float) -> None:
        """One event of this name."""
        if now >= self.warmup_s:
            self.events[name] += 1

    def finished(self, microbatch: Microbatch, now: float) -> None:
        """A microbatch is finished. Its route and time enter the digest of the trace."""
        route = ",".join("" if peer is None else peer.peer_id for peer in microbatch.route)
        self.trace_digest = zlib.crc32(f"{now!r} {microbatch.number} {route}".encode(), self.trace_digest)
        self.finished_in_bin[int(now / self.bin_s)] += 1
        if now >= self.warmup_s:
            self.num_finished += 1
            self.delay_sum_s += now - microbatch.started_at
            self.queue_sum_s += microbatch.queue_s

    def worked(self, share: float, now: float) -> None:
        """This fraction of one stage's compute for one microbatch is done."""
        if now >= self.warmup_s:
            self.stages_done += share

    def sent(self, num_bytes: float, now: float) -> None:
        """Bytes put on the wire."""
        if now >= self.warmup_s:
            self.bytes_sent += num_bytes

    def spent(self, cause: str, start: float, end: float) -> None:
        """Add an interval of one machine to how time was spent."""
        if start < self.warmup_s:
            start = self.warmup_s
        if end > start:
            self.seconds[cause] += end - start

    def waiting_for_all_reduce(self, begins: bool, now: float) -> None:
        """Leases begin, or end, to wait for an all-reduce: machines without work meanwhile have none because of it."""
        if begins is not self._is_waiting(len(self._turns)):
            self._waited_s.append(self._waited_until(now))
            self._turns.append(now)

    def had_no_work(self, start: float, end: float) -> None:
        """A machine had no work; as far as leases waited for an all-reduce meanwhile, that is the cause."""
        start = max(start, self.warmup_s)
        if end > start:
            waited_s = self._waited_until(end) - self._waited_until(start)
            self.seconds["all-reduce"] += waited_s
            self.seconds["no work"] += end - start - waited_s

    def _is_waiting(self, num_turns: int) -> bool:
        return num_turns % 2 == 0

    def _waited_until(self, moment: float) -> float:
        num_turns = bisect_right(self._turns, moment)
        waited_s = self._waited_s[num_turns - 1]
        return waited_s + (moment - self._turns[num_turns - 1] if self._is_waiting(num_turns) else 0.0)

    def idle_ended(self, peer: SimPeer, job: Job | None, now: float) -> None:
        """Split an idle interval: the job that ended it was on the wire, and before that no job had been sent."""
        start = peer.idle_since
        if now <= start:
            return
        if job is not None and job.sent_at < now:
            wire_from = max(start, job.sent_at)
            self.spent("wire", wire_from, now)
            self.had_no_work(start, wire_from)
        else:
            self.had_no_work(start, now)
