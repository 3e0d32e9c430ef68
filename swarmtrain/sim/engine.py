"""The clock of the simulation: a heap of things to do, in the order of their time, then of their scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Engine:
    """Runs scheduled calls. Equal times run in the order in which they were scheduled, so a run is reproducible."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at `time`, which must not lie in the past."""
        self._scheduled += 1
        heapq.heappush(self._heap, (time, self._scheduled, call, arguments))

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call `delay` seconds from now."""
        self._scheduled += 1
        heapq.heappush(self._heap, (self.now + delay, self._scheduled, call, arguments))

    def run(self, until: float) -> None:
        """Do everything that is due up to `until`."""
        heap, pop, num_events = self._heap, heapq.heappop, 0
        while heap and heap[0][0] <= until:
            self.now, _, call, arguments = pop(heap)
            num_events += 1
            call(*arguments)
        self.num_events += num_events
        self.now = until
