"""The upper bound: closed form where only processors count, linear program where links do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.sim.bound import Machine, StageKind, _solve, throughput_bound

FAST = 1e12
INNER = StageKind(1.0, 2e6, 2e6)
EDGE = StageKind(1.0, 1e6, 1e6)


def test_with_fast_links_the_bound_is_total_speed_over_total_cost() -> None:
    machines = [Machine(1.0, FAST, FAST), Machine(3.0, FAST, FAST)]
    assert throughput_bound(machines, [StageKind(1.0, 0, 0), StageKind(3.0, 0, 0)]) == pytest.approx(1.0)


@settings(deadline=None, max_examples=40)
@given(
    speeds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8),
    costs=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=6),
)
def test_the_linear_program_agrees_with_the_closed_form(speeds: list[float], costs: list[float]) -> None:
    from collections import Counter

    machines = [Machine(speed, FAST, FAST) for speed in speeds]
    kinds = [StageKind(cost, 1.0, 1.0) for cost in costs]
    solved = _solve(Counter(machines), Counter(kinds))
    assert solved == pytest.approx(throughput_bound(machines, kinds), rel=1e-6)


def test_slow_uplinks_bind_and_edge_stages_need_half_the_traffic() -> None:
    # Each could compute 10 per second; its uplink carries one per second at an edge, half of one in an inner stage.
    machines = [Machine(10.0, 1e6, FAST)] * 4
    bound = throughput_bound(machines, [EDGE, INNER, EDGE])
    # 4 MB/s of uplink in all, 1 + 2 + 1 MB per microbatch.
    assert bound == pytest.approx(1.0, rel=1e-6)


def test_a_machine_with_a_slow_link_still_helps_with_a_fast_one_beside_it() -> None:
    slow_link = Machine(10.0, 1e5, FAST)
    fast_link = Machine(10.0, FAST, FAST)
    alone = throughput_bound([fast_link], [EDGE, EDGE])
    both = throughput_bound([fast_link, slow_link], [EDGE, EDGE])
    assert alone == pytest.approx(5.0)
    assert alone < both <= alone + 0.1


@settings(deadline=None, max_examples=30)
@given(data=st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(1e5, 1e7), st.floats(1e5, 1e7)), min_size=1, max_size=6))
def test_the_bound_never_falls_when_a_machine_is_added_and_never_exceeds_the_processors(
    data: list[tuple[float, float, float]],
) -> None:
    machines = [Machine(*entry) for entry in data]
    kinds = [EDGE, INNER, INNER, EDGE]
    bound = throughput_bound(machines, kinds)
    assert bound <= sum(machine.speed for machine in machines) / 4.0 + 1e-9
    assert throughput_bound([*machines, Machine(1.0, 1e6, 1e6)], kinds) >= bound - 1e-9


def test_without_machines_the_bound_is_zero() -> None:
    assert throughput_bound([], [INNER]) == 0.0
