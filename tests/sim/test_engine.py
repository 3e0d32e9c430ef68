"""The clock of the simulation: whatever is scheduled, and when, runs in the order of time and then of scheduling."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.sim.engine import SLICE_S, Engine

# On the edges of slices, within them, at once, and far away.
DELAYS = st.one_of(st.integers(0, 40).map(lambda n: n * SLICE_S / 4.0), st.floats(0.0, 3.0), st.just(1000.0))


@settings(deadline=None, max_examples=200)
@given(
    first=st.lists(DELAYS, min_size=1, max_size=20),
    follow_ups=st.lists(DELAYS, max_size=40),
    stops=st.lists(st.floats(0.0, 4.0), max_size=4),
)
def test_events_run_in_order_of_time_and_then_of_scheduling(
    first: list[float], follow_ups: list[float], stops: list[float]
) -> None:
    engine = Engine()
    scheduled: list[tuple[float, int]] = []
    done: list[tuple[float, int]] = []
    to_come = list(follow_ups)

    def schedule(delay: float) -> None:
        event = (engine.now + delay, len(scheduled))
        scheduled.append(event)
        engine.after(delay, happen, event)

    def happen(event: tuple[float, int]) -> None:
        assert engine.now == event[0]
        done.append(event)
        if to_come:
            schedule(to_come.pop())

    for delay in first:
        schedule(delay)
    for stop in sorted(stops):
        engine.run(stop)
        assert engine.now == stop
        assert all(time <= stop for time, _ in done)
        assert all(time > stop for time, _ in set(scheduled) - set(done))
        if to_come:
            schedule(to_come.pop())  # from outside, in the middle of a slice
    engine.run(100_000.0)
    assert done == sorted(scheduled)
    assert engine.num_events == len(scheduled)
