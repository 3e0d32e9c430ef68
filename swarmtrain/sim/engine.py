"""The clock of the simulation: things to do, in the order of their time, then of their scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

# Only what is due in the present slice of time is kept in order; the rest lies in boxes until its slice comes. One heap
# of everything does not fit a processor's cache. A power of two, so that a time and its slice always agree.
SLICE_S = 0.125

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Engine:
    """Runs scheduled calls. Equal times run in the order in which they were scheduled, so a run is reproducible."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[Event] = []  # due before `_slice_end`
        self._slice_end = 0.0
        self._later: dict[int, list[Event]] = {}  # by slice
        self._slices: list[int] = []  # a heap of the keys of `_later`
        self._scheduled = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at `time`, which must not lie in the past."""
        self._scheduled += 1
        if time < self._slice_end:
            heapq.heappush(self._heap, (time, self._scheduled, call, arguments))
            return
        key = int(time / SLICE_S)
        box = self._later.get(key)
        if box is None:
            self._later[key] = [(time, self._scheduled, call, arguments)]
            heapq.heappush(self._slices, key)
        else:
            box.append((time, self._scheduled, call, arguments))

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call `delay` seconds from now."""
        self.at(self.now + delay, call, *arguments)

    def run(self, until: float) -> None:
        """Do everything that is due up to `until`."""
        pop, num_events = heapq.heappop, 0
        while True:
            heap = self._heap
            while heap and heap[0][0] <= until:
                self.now, _, call, arguments = pop(heap)
                num_events += 1
                call(*arguments)
            if heap or not self._slices:
                break
            self._next_slice()
        self.num_events += num_events
        self.now = until

    def pending(self) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
        """What is still to be done, in no order."""
        for events in (self._heap, *self._later.values()):
            for _, _, call, arguments in events:
                yield call, arguments

    def _next_slice(self) -> None:
        key = heapq.heappop(self._slices)
        self._heap = self._later.pop(key)
        heapq.heapify(self._heap)
        self._slice_end = (key + 1) * SLICE_S
