"""Memory that received messages may take: reserved before it is allocated, first come first served."""

from __future__ import annotations

from collections.abc import Callable


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
        """Give the share back, or leave the queue. A second call does nothing."""
        if self.released:
            return
        self.released = True
        self.on_admitted = _nothing  # it knows the message, which knows this: they must not keep each other alive
        self._budget._give_back(self)


class Budget:
    """`limit_bytes` of memory. A child budget takes from its parent as well, and all of a family share one queue."""

    def __init__(self, limit_bytes: int, parent: Budget | None = None) -> None:
        self.limit_bytes: int = limit_bytes if parent is None else min(limit_bytes, parent.limit_bytes)
        self.used_bytes = 0
        self._parent = parent
        self._queue: list[Reservation] = [] if parent is None else parent._queue

    def reserve(self, num_bytes: int, on_admitted: Callable[[], None]) -> Reservation:
        """Reserve now (`admitted` is True, `on_admitted` is not called) or queue (it is called once there is room).

        `num_bytes` must not be above `limit_bytes`: such a reservation could never be admitted.
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
        """Admit in order. A full child blocks its own reservations only, a full parent blocks everybody's.

        So nothing is overtaken for ever by smaller ones. `fresh` is told by its `admitted`, not by its callback.
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
