"""The in-flight window finds the knee of the delay/throughput curve; lease deadlines follow the distribution."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.route.window import InFlightWindow, LeaseDeadlines, Quantiles, WindowOptions


def steady_delay(size: int, base_s: float, rate: float) -> float:
    """A pipeline of this unloaded delay and capacity: past the knee, delay grows with what is in flight."""
    return max(base_s, size / rate)


@settings(deadline=None, max_examples=60)
@given(
    base_s=st.floats(0.1, 20.0),
    knee=st.floats(2.0, 40.0),
    told_queues=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_window_settles_above_the_knee_and_not_far_above(
    base_s: float, knee: float, told_queues: bool, seed: int
) -> None:
    rng = random.Random(seed)
    options = WindowOptions(maximum=512)
    window = InFlightWindow(options)
    rate = knee / base_s
    sizes = []
    for number in range(4000):
        delay_s = steady_delay(window.size, base_s, rate) * rng.uniform(0.97, 1.03)
        window.finished(delay_s, max(0.0, delay_s - base_s) if told_queues else None)
        if number > 3000:
            sizes.append(window.size)
    mean = sum(sizes) / len(sizes)
    # Without being told, the unloaded delay is forgotten after a while, and the window creeps up: it must stay bounded.
    assert 0.95 * knee <= mean <= ((options.shrink_above + 0.5) * knee + 2 if told_queues else 512)
    if told_queues:
        assert max(sizes) <= options.shrink_above / 0.75 * knee + 3


def test_lost_leases_shrink_the_window_to_its_minimum() -> None:
    window = InFlightWindow(WindowOptions(initial=32, minimum=1))
    for _ in range(30):
        window.lost()
    assert window.size == 1


def test_the_window_respects_its_bounds() -> None:
    window = InFlightWindow(WindowOptions(initial=2, maximum=10))
    for _ in range(500):
        window.finished(1.0, 0.0)
    assert window.size == 10


def test_deadlines_follow_the_slow_end_of_what_was_measured() -> None:
    deadlines = LeaseDeadlines(initial_s=120.0, minimum_s=1.0, factor=3.0)
    assert deadlines.deadline_s == 120.0
    for number in range(100):
        deadlines.finished(1.0 if number % 10 else 5.0)
    assert deadlines.deadline_s == pytest.approx(15.0)
    for _ in range(600):
        deadlines.finished(0.1)
    assert deadlines.deadline_s == 1.0


@settings(deadline=None, max_examples=100)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), capacity=st.integers(1, 20))
def test_quantiles_are_those_of_the_last_values(values: list[float], capacity: int) -> None:
    quantiles = Quantiles(capacity)
    for value in values:
        quantiles.add(value)
    last = sorted(values[-capacity:])
    assert len(quantiles) == len(last)
    assert quantiles.quantile(0.0) == last[0]
    assert quantiles.quantile(1.0) == last[-1]
    assert quantiles.quantile(0.5) == last[min(len(last) // 2, len(last) - 1)]
