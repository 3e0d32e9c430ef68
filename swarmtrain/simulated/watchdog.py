"""Ends a schedule that never ends: a daemon that does not yield to the loop would stop virtual time for ever."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

LOOK_S = 20.0  # processor time between two checks
MAX_S = 240.0  # for one schedule; a typical one takes two


class Endless(KeyboardInterrupt):
    """Virtual time no longer advances. (A BaseException, so that no task swallows it.)"""


@contextlib.contextmanager
def watched(now: Callable[[], float]) -> Iterator[None]:
    """Raise Endless inside if the clock `now` stands still for a while, or if the schedule takes far too long."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    seen, num_looks = now(), 0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal seen, num_looks
        before, seen = seen, now()
        num_looks += 1
        if seen == before or num_looks * LOOK_S > MAX_S:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "nowhere"
            raise Endless(f"a daemon computes without end, in {place.rpartition('swarmtrain/')[2]}")

    former = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, LOOK_S, LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, former)
