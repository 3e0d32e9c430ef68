"""The event queue of the simulation, ordered by time and then by order of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

# A calendar queue: only events of the present slice of time are kept in order. Later ones lie unsorted in a box per
# slice, which is sorted when the slice begins: faster than one heap. A power of two, so that division is exact.
SLICE_S = 0.03125

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Engine:
    """Runs scheduled calls. Equal times run in the order in which they were scheduled, so a run is reproducible."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._slice: list[Event] = []  # what was in the present slice's box, the next one last
        self._heap: list[Event] = []  # what was scheduled for the present slice since it began
        self._slice_end = 0.0
        self._later: dict[int, list[Event]] = {}  # by slice
        self._slices: list[int] = []  # a heap of the keys of `_later`
        self._scheduled = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at `time`, which must not be in the past."""
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
        """Run all events up to `until`."""
        heap, pop, num_events = self._heap, heapq.heappop, 0
        while True:
            due = self._slice
            while due or heap:
                if not heap or (due and due[-1] < heap[0]):
                    event = due.pop()
                else:
                    event = pop(heap)
                if event[0] > until:
                    heapq.heappush(heap, event)
                    break
                self.now, _, call, arguments = event
                num_events += 1
                call(*arguments)
            if due or heap or not self._slices:
                break
            self._next_slice()
        self.num_events += num_events
        self.now = until

    def pending(self) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
        """Events that have not run, in no order."""
        for events in (self._slice, self._heap, *self._later.values()):
            for _, _, call, arguments in events:
                yield call, arguments

    def _next_slice(self) -> None:
        key = heapq.heappop(self._slices)
        self._slice = self._later.pop(key)
        self._slice.sort(reverse=True)
        self._slice_end = (key + 1) * SLICE_S
