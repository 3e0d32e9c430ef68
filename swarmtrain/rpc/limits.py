"""The limits that all links of a daemon share: rates, memory for received messages, running handlers.

Rates: one token bucket for everything that a daemon sends, one for everything that it receives. All links queue at the
same bucket by priority, so that a state download on one link cannot delay a boundary tensor on another. The token count
may go negative by one grant; the next grant waits that much longer, so the average is exact. Over any window of w
seconds a bucket lets through at most rate * (w + BURST_S) bytes plus one grant.

Memory: reserved before it is allocated, first come first served.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from swarmtrain import world
from swarmtrain.errors import UsageError
from swarmtrain.units import MIB
from swarmtrain.wire.limits import Priority

BURST_S = 0.2  # how much unused rate may accumulate: makes up for late timers
HEADERS = 0.05  # overhead of TCP, IP and encryption relative to the bytes that this program counts; the cap includes it
LOW_SHARE = 16  # one grant in LOW_SHARE goes to the least urgent priority, so that none starves
FREE_SHARE = 8
LEAST_PLACES = 8  # what a peer that trains needs at once
_GRANT_S = 0.05  # at low rates a grant covers this much time, so that control frames do not wait long
_MIN_GRANT_BYTES = 2048
Schedule = Callable[[float, Callable[[], None]], "Cancellable"]


class Cancellable(Protocol):
    """The handle of a scheduled callback."""

    def cancel(self) -> None:
        """Drop the callback."""


class SendTicket:
    """A place in the queue of a bucket."""

    __slots__ = ("cancelled", "granted", "num_bytes", "priority")

    def __init__(self, num_bytes: int, priority: Priority, granted: Callable[[], None]) -> None:
        self.num_bytes = num_bytes
        self.priority = priority
        self.granted = granted
        self.cancelled = False

    def cancel(self) -> None:
        """Leave the queue."""
        self.cancelled = True


def _schedule_on_running_loop(delay_s: float, callback: Callable[[], None]) -> Cancellable:
    return asyncio.get_running_loop().call_later(delay_s, callback)


class TokenBucket:
    """Lets bytes through at `rate_bytes_per_s`; None means no limit."""

    def __init__(
        self,
        rate_bytes_per_s: float | None,
        *,
        clock: Callable[[], float] = world.monotonic,
        schedule: Schedule = _schedule_on_running_loop,
    ) -> None:
        if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
            raise UsageError(
                f"a rate limit must be above zero, not {rate_bytes_per_s}", fix="leave it out for no limit"
            )
        self.rate_bytes_per_s = rate_bytes_per_s
        self._clock = clock
        self._schedule = schedule
        self._tokens = 0.0 if rate_bytes_per_s is None else rate_bytes_per_s * BURST_S
        self._refilled_at = clock()
        self._queue: list[tuple[Priority, int, SendTicket]] = []
        self._num_tickets = 0
        self._num_served = 0
        self._timer: Cancellable | None = None

    def grant_bytes(self, wanted: int) -> int:
        """How much of `wanted` to acquire at once: small enough that the bucket can switch between senders."""
        if self.rate_bytes_per_s is None:
            return wanted
        return min(wanted, max(_MIN_GRANT_BYTES, int(self.rate_bytes_per_s * _GRANT_S)))

    def acquire(self, num_bytes: int, priority: Priority, granted: Callable[[], None]) -> SendTicket | None:
        """Take `num_bytes` now and return None, or queue and return a ticket: `granted` is called once it is served."""
        if self.rate_bytes_per_s is None:
            return None
        self._drop_cancelled()
        if not self._queue and self._available() > 0:
            self._tokens -= num_bytes
            return None
        ticket = SendTicket(num_bytes, priority, granted)
        heapq.heappush(self._queue, (priority, self._num_tickets, ticket))
        self._num_tickets += 1
        self._set_timer()
        return ticket

    def change(self, rate_bytes_per_s: float | None) -> None:
        """Another rate from now on; None lets all go that wait."""
        self._available()
        self.rate_bytes_per_s = rate_bytes_per_s
        self._tokens = min(self._tokens, 0.0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if rate_bytes_per_s is not None:
            self._set_timer()
            return
        self._drop_cancelled()
        while self._queue:
            self._next_ticket().granted()
            self._drop_cancelled()

    def raise_priority(self, ticket: SendTicket, priority: Priority) -> SendTicket:
        """Move a queued ticket up, because a more urgent message waits behind it. Returns the new ticket."""
        ticket.cancel()
        moved = SendTicket(ticket.num_bytes, priority, ticket.granted)
        heapq.heappush(self._queue, (priority, self._num_tickets, moved))
        self._num_tickets += 1
        return moved

    def charge(self, num_bytes: int) -> None:
        """Count bytes that do not wait: control frames, and everything received."""
        if self.rate_bytes_per_s is not None:
            self._available()
            self._tokens -= num_bytes

    @property
    def num_waiting(self) -> int:
        """Senders that wait for tokens."""
        return sum(not ticket.cancelled for _, _, ticket in self._queue)

    def in_debt(self) -> bool:
        """Whether more has passed than the rate allows so far."""
        return self.rate_bytes_per_s is not None and self._available() < 0

    def _available(self) -> float:
        now = self._clock()
        rate = self.rate_bytes_per_s or 0.0
        self._tokens = min(rate * BURST_S, self._tokens + (now - self._refilled_at) * rate)
        self._refilled_at = now
        return self._tokens

    def _drop_cancelled(self) -> None:
        while self._queue and self._queue[0][2].cancelled:
            heapq.heappop(self._queue)

    def _set_timer(self) -> None:
        if self._timer is not None or not self._queue or self.rate_bytes_per_s is None:
            return
        # Until there is at least one token: one byte more than the debt, so that rounding cannot fire the timer early.
        delay_s = max(0.0, 1.0 - self._available()) / self.rate_bytes_per_s
        self._timer = self._schedule(delay_s, self._serve)

    def _serve(self) -> None:
        self._timer = None
        self._drop_cancelled()
        while self._queue and self._available() > 0:
            ticket = self._next_ticket()
            self._tokens -= ticket.num_bytes
            ticket.granted()
            self._drop_cancelled()
        self._set_timer()

    def _next_ticket(self) -> SendTicket:
        """The most urgent ticket; every LOW_SHARE-th time, the oldest of the least urgent ones."""
        self._num_served += 1
        if self._num_served % LOW_SHARE:
            return heapq.heappop(self._queue)[2]
        lowest = max(priority for priority, _, ticket in self._queue if not ticket.cancelled)
        index = min(
            (number, i)
            for i, (priority, number, ticket) in enumerate(self._queue)
            if priority is lowest and not ticket.cancelled
        )[1]
        ticket = self._queue.pop(index)[2]
        heapq.heapify(self._queue)
        return ticket


class RateLimiter:
    """One daemon's rate caps, over all of its links. `RateLimiter()` limits nothing."""

    def __init__(
        self,
        max_up_bytes_per_s: float | None = None,
        max_down_bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = world.monotonic,
        schedule: Schedule = _schedule_on_running_loop,
    ) -> None:
        self.max_up_bytes_per_s, self.max_down_bytes_per_s = max_up_bytes_per_s, max_down_bytes_per_s
        self.up = TokenBucket(_without_headers(max_up_bytes_per_s), clock=clock, schedule=schedule)
        self.down = TokenBucket(_without_headers(max_down_bytes_per_s), clock=clock, schedule=schedule)

    def change(self, max_up_bytes_per_s: float | None, max_down_bytes_per_s: float | None) -> None:
        """Other caps from now on, on all links. What waits goes on waiting, at the new rate."""
        self.max_up_bytes_per_s, self.max_down_bytes_per_s = max_up_bytes_per_s, max_down_bytes_per_s
        self.up.change(_without_headers(max_up_bytes_per_s))
        self.down.change(_without_headers(max_down_bytes_per_s))


def _without_headers(rate_bytes_per_s: float | None) -> float | None:
    return None if rate_bytes_per_s is None else rate_bytes_per_s / (1.0 + HEADERS)


def _nothing() -> None:
    pass


class Reservation:
    """A share of a budget, or a place in the queue for it."""

    __slots__ = ("_budget", "admitted", "num_bytes", "on_admitted", "released")

    def __init__(self, budget: Budget, num_bytes: int, on_admitted: Callable[[], None]) -> None:
        self._budget = budget
        self.on_admitted = on_admitted
        self.num_bytes = num_bytes
        self.admitted = False
        self.released = False

    def release(self) -> None:
        """Return the share, or leave the queue. A second call does nothing."""
        if self.released:
            return
        self.released = True
        self.on_admitted = _nothing  # breaks the cycle: the callback holds the message, which holds this reservation
        self._budget._give_back(self)


class Budget:
    """`limit_bytes` of memory. A child budget also draws on its parent, and a parent and its children share a queue."""

    def __init__(self, limit_bytes: int, parent: Budget | None = None) -> None:
        self.limit_bytes: int = limit_bytes if parent is None else min(limit_bytes, parent.limit_bytes)
        self.used_bytes = 0
        self._parent = parent
        self._queue: list[Reservation] = [] if parent is None else parent._queue

    def reserve(self, num_bytes: int, on_admitted: Callable[[], None]) -> Reservation:
        """Reserve now (`admitted` is True, `on_admitted` is not called) or queue (`on_admitted` is called later).

        Raises ValueError if `num_bytes` is above `limit_bytes`: such a reservation could never be admitted.
        """
        if num_bytes > self.limit_bytes:
            raise ValueError(f"{num_bytes} bytes can never fit a budget of {self.limit_bytes}")
        reservation = Reservation(self, num_bytes, on_admitted)
        self._queue.append(reservation)
        self._serve_queue(fresh=reservation)
        return reservation

    def _fits(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.limit_bytes

    def _take(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        if self._parent is not None:
            self._parent._take(num_bytes)

    def _give_back(self, reservation: Reservation) -> None:
        if reservation.admitted:
            self._take(-reservation.num_bytes)
        else:
            self._queue.remove(reservation)
        self._serve_queue()

    def _serve_queue(self, fresh: Reservation | None = None) -> None:
        """Admit in order, so that small reservations cannot overtake a large one for ever.

        A full child blocks only its own reservations, a full parent blocks all. `fresh` is admitted without a callback.
        """
        blocked: set[Budget] = set()
        for reservation in tuple(self._queue):
            budget = reservation._budget
            if reservation.released or reservation.admitted or budget in blocked:
                continue
            if budget._parent is not None and not budget._parent._fits(reservation.num_bytes):
                return
            if not budget._fits(reservation.num_bytes):
                blocked.add(budget)
                continue
            self._queue.remove(reservation)
            budget._take(reservation.num_bytes)
            reservation.admitted = True
            if reservation is not fresh:
                reservation.on_admitted()


class HandlerTasks:
    """The tasks in which handlers run. They outlive their links: losing the caller does not cancel the work.

    While half of the places are free anybody gets one. After that an identity, over all its links, may hold as many as
    one in FREE_SHARE of those that are free, and LEAST_PLACES in any case: a few that take all they can get leave
    places to all others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_claimed = 0
        self._held: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    @property
    def num_free(self) -> int:
        """Places that nobody has claimed."""
        return self._limit - self._num_claimed

    def try_claim(self, peer_id: str) -> bool:
        """Claim a place for a request of `peer_id`; False if it may have none now. `unclaim` returns it."""
        is_crowded = self._num_claimed >= self._limit // 2
        if self.num_free <= 0 or (is_crowded and self._held[peer_id] >= max(LEAST_PLACES, self.num_free // FREE_SHARE)):
            return False
        self._num_claimed += 1
        self._held[peer_id] += 1
        return True

    def unclaim(self, peer_id: str) -> None:
        """Return a place."""
        self._num_claimed -= 1
        self._held[peer_id] -= 1
        if not self._held[peer_id]:
            del self._held[peer_id]

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `coroutine` in a task that is kept until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Wait for all tasks; cancel those that have not ended after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Shared:
    """The limits that all links of a daemon share: rate caps, memory, slots for handlers."""

    limiter: RateLimiter = field(default_factory=RateLimiter)
    tasks: HandlerTasks = field(default_factory=lambda: HandlerTasks(4096))
    request_budget: Budget = field(default_factory=lambda: Budget(512 * MIB))
    answer_budget: Budget = field(default_factory=lambda: Budget(512 * MIB))
