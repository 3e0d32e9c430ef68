"""Rate caps: exact over ten seconds, shared by priority, on a clock that the test turns."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.errors import UsageError
from swarmtrain.rpc.limits import BURST_S, LOW_SHARE, RateLimiter, SendTicket, TokenBucket
from swarmtrain.rpc.meter import DirectionTraffic
from swarmtrain.rpc.outbound import OutboundQueue
from swarmtrain.wire.limits import Priority


class FakeTime:
    """A clock and a scheduler that advance only when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def schedule(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        self._count += 1
        heapq.heappush(self._timers, (self.now + delay_s, self._count, timer))
        return timer

    def advance(self, seconds: float, lateness_s: Callable[[], float] = lambda: 0.0) -> None:
        """Run all timers due in the next `seconds`, each late by `lateness_s()`."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, due + lateness_s())
            if not timer.cancelled:
                timer.callback()
        self.now = max(self.now, end)


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class GreedySender:
    """Always wants to send more; remembers what it sent and when."""

    def __init__(self, bucket: TokenBucket, priority: Priority, time: FakeTime, limit_bytes: float = 1e12) -> None:
        self._bucket, self._priority, self._time = bucket, priority, time
        self._left = limit_bytes
        self.sent: list[tuple[float, int]] = []
        self.ticket: SendTicket | None = None
        self.go_on()

    def go_on(self) -> None:
        while self._left > 0:
            wanted = self._bucket.grant_bytes(128 << 10)
            self.ticket = self._bucket.acquire(wanted, self._priority, lambda wanted=wanted: self._granted(wanted))  # type: ignore[misc]
            if self.ticket is not None:
                return
            self._record(wanted)

    def _granted(self, num_bytes: int) -> None:
        self._record(num_bytes)
        self.go_on()

    def _record(self, num_bytes: int) -> None:
        self._left -= num_bytes
        self.sent.append((self._time.now, num_bytes))

    def between(self, start: float, end: float) -> int:
        return sum(num_bytes for at, num_bytes in self.sent if start <= at < end)


def bucket_at(rate: float) -> tuple[TokenBucket, FakeTime]:
    time = FakeTime()
    return TokenBucket(rate, clock=time.clock, schedule=time.schedule), time


@pytest.mark.parametrize("rate", [20e3, 125e3, 2.5e6, 125e6])
@pytest.mark.parametrize("lateness_s", [0.0, 0.05])
def test_any_ten_seconds_carry_the_cap_within_ten_percent(rate: float, lateness_s: float) -> None:
    bucket, time = bucket_at(rate)
    senders = [GreedySender(bucket, Priority.STATE, time) for _ in range(3)]
    generator = random.Random(1)
    time.advance(35.0, lambda: generator.random() * lateness_s)
    for start in (0.0, 1.3, 7.77, 19.9, 24.0):
        total = sum(sender.between(start, start + 10.0) for sender in senders)
        assert total == pytest.approx(10 * rate, rel=0.10)


def test_no_window_of_any_length_exceeds_its_bound() -> None:
    rate = 1e6
    bucket, time = bucket_at(rate)
    sender = GreedySender(bucket, Priority.STATE, time)
    time.advance(20.0)
    grant = bucket.grant_bytes(128 << 10)
    for start in range(19):
        for width in (0.01, 0.3, 1.0, 5.0):
            assert sender.between(start, start + width) <= rate * (width + BURST_S) + 2 * grant


def test_the_urgent_one_gets_everything_it_wants_first() -> None:
    bucket, time = bucket_at(1e6)
    bulk = GreedySender(bucket, Priority.STATE, time)
    time.advance(5.0)
    urgent = GreedySender(bucket, Priority.BOUNDARY, time, limit_bytes=2e6)
    time.advance(2.3)
    assert urgent.between(5.0, 7.3) >= 2e6
    assert bulk.between(5.1, 6.9) <= 1.8e6 / LOW_SHARE + 2 * bucket.grant_bytes(128 << 10)
    time.advance(3.0)
    assert bulk.between(7.3, 10.0) > 2e6, "afterwards the bulk goes on"


def test_the_least_urgent_is_slowed_down_and_never_starved() -> None:
    bucket, time = bucket_at(1e6)
    urgent = GreedySender(bucket, Priority.BOUNDARY, time)
    bulk = GreedySender(bucket, Priority.STATE, time)
    time.advance(20.0)
    share = bulk.between(0.0, 20.0) / (urgent.between(0.0, 20.0) + bulk.between(0.0, 20.0))
    assert share == pytest.approx(1 / LOW_SHARE, rel=0.2)


def test_raising_a_ticket_moves_it_to_the_front_and_grants_once() -> None:
    bucket, time = bucket_at(1e6)
    assert bucket.acquire(400_000, Priority.STATE, lambda: None) is None
    order: list[str] = []
    first = bucket.acquire(1000, Priority.ALL_REDUCE, lambda: order.append("reduction"))
    second = bucket.acquire(1000, Priority.STATE, lambda: order.append("raised"))
    assert first is not None
    assert second is not None
    bucket.raise_priority(second, Priority.CONTROL)
    time.advance(2.0)
    assert order == ["raised", "reduction"]


def test_a_cancelled_ticket_takes_nothing() -> None:
    bucket, time = bucket_at(1e6)
    assert bucket.acquire(300_000, Priority.STATE, lambda: None) is None
    called: list[int] = []
    ticket = bucket.acquire(10**9, Priority.STATE, lambda: called.append(1))
    assert ticket is not None
    ticket.cancel()
    later = bucket.acquire(1000, Priority.STATE, lambda: called.append(2))
    assert later is not None
    time.advance(1.0)
    assert called == [2]


def test_charged_bytes_delay_the_others_so_that_the_sum_is_exact() -> None:
    bucket, time = bucket_at(1e6)
    sender = GreedySender(bucket, Priority.STATE, time)
    for _ in range(100):
        time.advance(0.1)
        bucket.charge(50_000)  # control frames that do not wait: half the rate
    assert sender.between(0.0, 10.0) == pytest.approx(5e6, rel=0.1)


def test_control_frames_of_a_queue_are_charged_and_do_not_wait() -> None:
    bucket, _ = bucket_at(1000.0)
    written: list[bytes | memoryview] = []
    queue = OutboundQueue(written.append, DirectionTraffic(), bucket, chunk_bytes=1000, limit_bytes=1000)
    for _ in range(5):
        queue.send_control(bytes(100))
    assert len(written) == 5
    assert bucket.in_debt()


def test_debt_ends_after_the_time_that_the_bytes_take() -> None:
    bucket, time = bucket_at(1e6)
    assert not bucket.in_debt()
    bucket.charge(700_000)
    assert bucket.in_debt()
    time.advance(0.4)
    assert bucket.in_debt()
    time.advance(0.2)
    assert not bucket.in_debt()


def test_headers_that_the_program_does_not_see_are_part_of_a_cap() -> None:
    limiter = RateLimiter(max_up_bytes_per_s=1.05e6, max_down_bytes_per_s=2.1e6)
    assert limiter.up.rate_bytes_per_s == pytest.approx(1e6)
    assert limiter.down.rate_bytes_per_s == pytest.approx(2e6)


def test_no_cap_never_waits() -> None:
    limiter = RateLimiter()
    for bucket in (limiter.up, limiter.down):
        assert bucket.acquire(10**12, Priority.STATE, lambda: None) is None
        bucket.charge(10**12)
        assert not bucket.in_debt()
        assert bucket.grant_bytes(12345) == 12345


@settings(deadline=None, max_examples=30)
@given(
    st.floats(1e4, 1e8),
    st.lists(st.tuples(st.sampled_from(Priority), st.floats(0, 3), st.integers(1, 10**6)), min_size=1, max_size=20),
)
def test_every_ticket_is_granted_exactly_once(rate: float, wishes: list[tuple[Priority, float, int]]) -> None:
    bucket, time = bucket_at(rate)
    granted = [0] * len(wishes)

    def grant(index: int) -> None:
        granted[index] += 1

    for index, (priority, pause_s, num_bytes) in enumerate(wishes):
        time.advance(pause_s)
        if bucket.acquire(num_bytes, priority, lambda index=index: grant(index)) is None:  # type: ignore[misc]
            grant(index)
    time.advance(sum(num_bytes for *_, num_bytes in wishes) / rate + 1.0)
    assert granted == [1] * len(wishes)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_an_impossible_cap_is_a_usage_error(rate: float) -> None:
    with pytest.raises(UsageError):
        TokenBucket(rate)


def test_another_rate_holds_from_now_on_for_those_that_wait_too() -> None:
    time = FakeTime()
    bucket = TokenBucket(1000.0, clock=time.clock, schedule=time.schedule)
    granted: list[float] = []
    assert bucket.acquire(1000, Priority.CONTROL, lambda: granted.append(time.now)) is None
    for _ in range(2):
        assert bucket.acquire(1000, Priority.CONTROL, lambda: granted.append(time.now)) is not None
    bucket.change(10_000.0)
    time.advance(0.3)
    assert len(granted) == 2, "at the old rate it would have taken two seconds"
    assert bucket.acquire(1000, Priority.CONTROL, lambda: None) is None
    assert bucket.acquire(1, Priority.CONTROL, lambda: granted.append(time.now)) is not None
    bucket.change(None)
    assert len(granted) == 3, "without a cap nobody waits"
    assert bucket.acquire(10**9, Priority.CONTROL, lambda: None) is None
    bucket.change(1000.0)
    assert bucket.acquire(1, Priority.CONTROL, lambda: None) is not None, "no burst of what an unlimited line let pass"
