"""Is the other end still there? Pings at a fixed interval, whatever else the link does.

Any received byte counts as a heartbeat, not only a pong: behind a long transfer a pong may be late, but then bytes
come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmtrain import world
from swarmtrain.rpc.meter import RoundTripEstimator


class KeepAlive:
    """Calls `send_ping(nonce)` every `interval_s`, and `on_silent` after `missed_limit` intervals without a byte."""

    def __init__(
        self,
        interval_s: float,
        missed_limit: int,
        *,
        send_ping: Callable[[int], None],
        on_silent: Callable[[float], None],
        on_tick: Callable[[float], None],
        rtt: RoundTripEstimator,
    ) -> None:
        self._interval_s = interval_s
        self._missed_limit = missed_limit
        self._send_ping = send_ping
        self._on_silent = on_silent
        self._on_tick = on_tick
        self._rtt = rtt
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self._ticked_at = self._heard_at
        self._nonce = 0
        self._sent_at: float | None = None

    def start(self) -> None:
        """Ping now and from now on."""
        self._heard_at = self._ticked_at = self._loop.time()
        self._ping()
        self._timer = self._loop.call_later(self._interval_s, self._tick)

    def stop(self) -> None:
        """No more pings and no more calls."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        """Bytes arrived."""
        self._heard_at = self._loop.time()

    def pong(self, nonce: int) -> None:
        """The other end answered; measures if it is the answer to the latest ping."""
        if nonce == self._nonce and self._sent_at is not None:
            self._rtt.add(world.monotonic() - self._sent_at)
            self._sent_at = None

    def _tick(self) -> None:
        now = self._loop.time()
        # If this process was stopped or its loop was blocked, what the peer sent meanwhile has not been read yet.
        if now - self._ticked_at > 2 * self._interval_s:
            self._heard_at = now
        self._ticked_at = now
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        silent_s = now - self._heard_at
        if silent_s > self._missed_limit * self._interval_s:
            self._on_silent(silent_s)
            return
        self._on_tick(now)
        self._ping()

    def _ping(self) -> None:
        self._nonce += 1
        self._sent_at = world.monotonic()  # finer than the loop's clock, which may count in milliseconds
        self._send_ping(self._nonce)
