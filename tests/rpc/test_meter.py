"""Estimates: times are predicted well, a collapse shows fast, nonsense is ignored."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.rpc.meter import GoodputEstimator, LinkMeter, RoundTripEstimator


def test_a_prior_counts_until_the_first_measurement_and_is_then_blended() -> None:
    meter = LinkMeter("peer")
    assert meter.estimate().up_bytes_per_s is None
    meter.up.set_prior(1e6)
    assert meter.estimate().up_bytes_per_s == pytest.approx(1e6)
    meter.up.add(10**6, 0.5)
    after_one = meter.estimate().up_bytes_per_s
    assert after_one is not None
    assert 1e6 < after_one < 2e6
    meter.up.set_prior(5.0)
    assert meter.estimate().up_bytes_per_s == pytest.approx(after_one)


def test_a_link_that_falls_to_a_tenth_shows_within_a_few_messages() -> None:
    goodput = GoodputEstimator()
    for _ in range(20):
        goodput.add(10**6, 0.1)
    assert goodput.bytes_per_s == pytest.approx(1e7)
    for _ in range(3):
        goodput.add(10**6, 1.0)
    assert goodput.bytes_per_s is not None
    assert goodput.bytes_per_s < 2e6


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(), st.floats()), max_size=20))
def test_whatever_is_reported_the_estimate_is_none_or_positive_and_finite(samples: list[tuple[int, float]]) -> None:
    goodput, rtt = GoodputEstimator(), RoundTripEstimator()
    for num_bytes, seconds in samples:
        goodput.add(num_bytes, seconds)
        rtt.add(seconds)
    if goodput.bytes_per_s is not None:
        assert goodput.bytes_per_s > 0
        assert math.isfinite(goodput.bytes_per_s)
    if rtt.smoothed_s is not None:
        assert rtt.smoothed_s >= 0
        assert math.isfinite(rtt.smoothed_s)


def test_round_trips_are_smoothed_and_the_lowest_is_kept() -> None:
    rtt = RoundTripEstimator()
    for seconds in (0.1, 0.5, 0.1, 0.1):
        rtt.add(seconds)
    assert rtt.lowest_s == 0.1
    assert rtt.smoothed_s is not None
    assert 0.1 < rtt.smoothed_s < 0.2


def test_an_estimate_has_what_is_known_and_none_for_the_rest() -> None:
    meter = LinkMeter("peer", prior_up_bytes_per_s=1e6)
    meter.rtt.add(0.2)
    estimate = meter.estimate(backlog_bytes=500_000)
    assert (estimate.up_bytes_per_s, estimate.rtt_s, estimate.backlog_bytes) == (1e6, 0.2, 500_000)
    unknown = LinkMeter("other").estimate()
    assert (unknown.up_bytes_per_s, unknown.down_bytes_per_s, unknown.rtt_s, unknown.backlog_bytes) == (None,) * 3 + (
        0,
    )
