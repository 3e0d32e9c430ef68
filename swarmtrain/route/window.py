"""How many microbatches are kept in flight, and how long a lease may take.

By Little's law, in flight = throughput x delay. Below saturation more in flight gives more throughput at the same
delay; above it, only more delay. The window grows while queueing is a moderate part of the delay, and shrinks when it
is most of it. The thresholds are high because a pipeline of many equal stages needs deep queues to keep every processor
busy: answers come back in bursts that no routing can smooth. With steps they are lower (`stepwise`), because what is in
flight when a step ends comes back as a row of backwards, during which the first stage is not fully used.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """Below `grow_below` times the delay without queues the window grows, above `shrink_above` times it shrinks."""

    initial: int = 2
    minimum: int = 1
    maximum: int = 64
    grow_below: float = 6.0
    shrink_above: float = 9.0
    base_memory: int = 256  # completions over which the delay without queues is remembered


def stepwise(*, initial: int, maximum: int) -> WindowOptions:
    """For work that ends together, step by step."""
    return WindowOptions(initial=initial, maximum=maximum, grow_below=3.0, shrink_above=4.0)


class InFlightWindow:
    """`size` microbatches may be in flight. Tell it of every completion."""

    def __init__(self, options: WindowOptions | None = None) -> None:
        self._options = options or WindowOptions()
        self._size = float(self._options.initial)
        self._starting = True
        self._delay_sum = 0.0
        self._num_in_epoch = 0
        self._epoch_length = max(2, self._options.initial)
        self._delays = Quantiles(self._options.base_memory)

    @property
    def size(self) -> int:
        """Microbatches that may be in flight now."""
        return int(self._size)

    def finished(self, delay_s: float, queue_s: float | None = None) -> None:
        """A microbatch came back `delay_s` after it was sent on, `queue_s` of which it waited in others' queues."""
        base_s = delay_s - queue_s if queue_s is not None else delay_s
        self._delays.add(max(0.0, base_s))
        self._delay_sum += delay_s
        self._num_in_epoch += 1
        if self._num_in_epoch >= self._epoch_length:
            # With queue times the base is the usual rest; without, the fastest tenth stands for an empty pipeline.
            base = self._delays.quantile(0.5 if queue_s is not None else 0.1)
            self._end_epoch(self._delay_sum / self._num_in_epoch, base)

    def lost(self) -> None:
        """A lease ran out: the delay is not known, but it was too long."""
        self._starting = False
        self._resize(self._size * 0.75)

    def _end_epoch(self, delay_s: float, base_s: float) -> None:
        ratio = delay_s / base_s if base_s > 0.0 else 1.0
        if ratio < self._options.grow_below:
            self._resize(self._size * 2.0 if self._starting else self._size + max(1.0, 0.25 * self._size))
        else:
            self._starting = False
            self._resize(self._size * 0.875 if ratio > self._options.shrink_above else self._size)

    def _resize(self, size: float) -> None:
        self._size = min(max(size, float(self._options.minimum)), float(self._options.maximum))
        self._delay_sum, self._num_in_epoch = 0.0, 0
        self._epoch_length = max(2, int(self._size))


class LeaseDeadlines:
    """How long to wait for a lease before it is given again: from the distribution of those that came back."""

    def __init__(self, *, initial_s: float = 120.0, minimum_s: float = 10.0, factor: float = 3.0) -> None:
        self._initial_s = initial_s
        self._minimum_s = minimum_s
        self._factor = factor
        self._delays = Quantiles(512)

    def finished(self, delay_s: float) -> None:
        """A lease came back after so long."""
        self._delays.add(delay_s)

    @property
    def deadline_s(self) -> float:
        """A multiple of the slow end of the distribution; the initial guess until there are enough samples."""
        if len(self._delays) < 16:
            return self._initial_s
        return max(self._minimum_s, self._factor * self._delays.quantile(0.95))


class Quantiles:
    """Quantiles of the last `capacity` values."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._recent: deque[float] = deque()
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, value: float) -> None:
        """Take a value in; the oldest goes out when full."""
        if value != value:
            return
        if len(self._recent) == self._capacity:
            self._ascending.remove(self._recent.popleft())
        self._recent.append(value)
        insort(self._ascending, value)

    def quantile(self, fraction: float) -> float:
        """The value below which this fraction lies; 0 without values."""
        if not self._ascending:
            return 0.0
        return self._ascending[min(int(fraction * len(self._ascending)), len(self._ascending) - 1)]
