"""Which machines serve which stage: more machines are never slower, and what is promised is what they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.model.reduce_bytes import ReduceBytes
from swarmtrain.model.workload import StageWork, Workload
from swarmtrain.run.presets import resolve_manifest
from swarmtrain.sim.demand import demand_of
from swarmtrain.sim.placement import DECIDE_S, MachineKind, demands_of, place
from swarmtrain.sim.plan import forecast
from swarmtrain.sim.profiles import GAMING_GPU, PeerProfile, load_profile
from swarmtrain.sim.run import simulate
from swarmtrain.sim.scenario import PeerSpec, Scenario
from swarmtrain.sim.settings import with_workload

PEERS = Path(__file__).parents[2] / "peers"
PROFILES = [load_profile(path) for path in sorted(PEERS.glob("*.toml"))]
SHIPPED = [profile for profile in PROFILES if profile.role == "peer"]

machines = st.builds(
    replace,
    st.just(GAMING_GPU),
    tflops=st.sampled_from([0.3, 3.0, 20.0, 60.0]),
    memory_gb=st.sampled_from([2.0, 8.0, 24.0]),
    up_mbit=st.sampled_from([2.0, 40.0, 1000.0]),
    down_mbit=st.sampled_from([100.0, 1000.0]),
    latency_ms=st.sampled_from([3.0, 60.0]),
    relayed=st.booleans(),
)
mixes = st.lists(st.tuples(machines, st.integers(1, 12)), min_size=1, max_size=4)
stage_works = st.builds(
    StageWork,
    tflop=st.sampled_from([0.1, 0.5, 2.0]),
    num_parameters=st.just(0),
    state_bytes=st.just(0),
    memory_bytes=st.sampled_from([10**9, 6 * 10**9, 20 * 10**9]),
    reduced=st.sampled_from([ReduceBytes(0.0), ReduceBytes(3e6), ReduceBytes(4e8), ReduceBytes(1e6, 1e6)]),
)
workloads = st.builds(
    Workload,
    name=st.just("any"),
    stages=st.lists(stage_works, min_size=1, max_size=5).map(tuple),
    boundary_bytes=st.sampled_from([0.0, 9e4, 3e6]),
    backward_bytes=st.sampled_from([0.0, 8e4, 3e6]),
    token_bytes=st.just(100),
    tokens=st.just(1000),
    batch=st.sampled_from([1, 64, 1000]),
    checkpoint_every=st.sampled_from([0, 1, 10, 500]),
    steps=st.just(10_000),
    delay=st.integers(0, 1),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(workload=workloads, mix=mixes, more=mixes)
def test_more_machines_are_never_slower(
    workload: Workload, mix: list[tuple[PeerProfile, int]], more: list[tuple[PeerProfile, int]]
) -> None:
    before, after = forecast(workload, mix), forecast(workload, [*mix, *more])
    assert after.tokens_per_s >= before.tokens_per_s
    assert len(after.empty_stages) <= len(before.empty_stages)


@pytest.mark.parametrize("settings_", [(), ("schedule.delay=1",), ("schedule.delay=1", "reduce.codec=powersgd8")])
@pytest.mark.parametrize("first", SHIPPED, ids=lambda profile: profile.name)
def test_a_mix_of_shipped_profiles_is_as_fast_as_its_faster_half(
    first: PeerProfile, settings_: tuple[str, ...]
) -> None:
    workload = demand_of(resolve_manifest("llama-1b", list(settings_)))
    alone = forecast(workload, [(first, 64)])
    for second in SHIPPED:
        assert forecast(workload, [(first, 64), (second, 64)]).tokens_per_s >= alone.tokens_per_s


@settings(deadline=None, max_examples=60, derandomize=True)
@given(workload=workloads, mix=mixes)
def test_the_machines_of_a_placement_exist_hold_their_stages_and_do_the_work_in_time(
    workload: Workload, mix: list[tuple[PeerProfile, int]]
) -> None:
    kinds = [MachineKind.of(profile, number) for profile, number in dict(mix).items()]
    placement = place(workload, kinds)
    for kind in kinds:
        assert sum(number for group in placement.stages for other, number in group if other is kind) <= kind.count
    for group, demand in zip(placement.stages, demands_of(workload), strict=True):
        assert all(kind.holds(demand) and number > 0 for kind, number in group)
        if placement.step_s:
            work_s = workload.batch / sum(number * demand.rate(kind) for kind, number in group)
            assert placement.step_s >= work_s * (1.0 - 1e-6)
    if placement.step_s and not workload.delay:
        assert placement.step_s >= placement.fill_s + DECIDE_S


@settings(deadline=None, max_examples=30, derandomize=True)
@given(workload=workloads, mix=mixes)
def test_no_placement_beats_the_bound(workload: Workload, mix: list[tuple[PeerProfile, int]]) -> None:
    found = forecast(workload, mix)
    assert found.tokens_per_s <= found.bound_tokens_per_s * (1.0 + 1e-6)


def step_s_in_simulation(workload: Workload, layout: list[PeerSpec], minutes: float) -> float:
    scenario = Scenario(
        num_peers=len(layout),
        num_stages=len(workload.stages),
        layout=tuple(layout),
        churn="none",
        rebalance="none",
        minutes=minutes,
        warmup_minutes=minutes / 4,
    )
    return workload.batch / simulate(with_workload(scenario, workload)).throughput


@pytest.mark.parametrize("delay", [0, 1])
def test_a_mixed_swarm_is_as_fast_in_the_simulator_and_slower_with_those_that_were_left_out(delay: int) -> None:
    settings_ = [f"schedule.delay={delay}", "reduce.codec=powersgd8", "microbatches_per_step=256", "stages.count=4"]
    workload = demand_of(resolve_manifest("llama-125m", [*settings_, "wire.forward=quant8", "wire.backward=quant8"]))
    counts = {"gaming-gpu": 10, "cloud-spot-gpu": 4, "office-workstation": 6, "laptop-cpu": 8}
    kinds = [MachineKind.of(load_profile(PEERS / f"{name}.toml"), number) for name, number in counts.items()]
    placement = place(workload, kinds)
    layout = [
        replace(kind.profile.spec(workload.mean_tflop), stage=stage)
        for stage, group in enumerate(placement.stages)
        for kind, number in group
        for _ in range(number)
    ]
    minutes = 12 * placement.step_s / 60
    simulated_s = step_s_in_simulation(workload, layout, minutes)
    assert placement.step_s == pytest.approx(simulated_s, rel=0.15)
    laptop = kinds[-1].profile.spec(workload.mean_tflop)
    assert not any(kind is kinds[-1] for group in placement.stages for kind, _ in group)
    everybody = [*layout, *(replace(laptop, stage=number % 4) for number in range(8))]
    assert step_s_in_simulation(workload, everybody, 10 * minutes) > 2 * simulated_s


def test_slow_lines_are_left_out_where_they_would_hold_up_the_others() -> None:
    """A laptop behind a relay needs longer for an all-reduce than all others for a step."""
    workload = demand_of(resolve_manifest("llama-125m", ["reduce.codec=int8", "microbatches_per_step=512"]))
    cloud, laptop = (load_profile(PEERS / f"{name}.toml") for name in ("cloud-spot-gpu", "laptop-cpu"))
    found = forecast(workload, [(cloud, 16), (laptop, 16)])
    assert [(item.name, item.count) for item in found.idle] == [("laptop CPU", 16)]
    assert found.tokens_per_s == forecast(workload, [(cloud, 16)]).tokens_per_s


def test_a_slow_machine_still_serves_where_nobody_waits_for_it() -> None:
    """Alone in a small first stage, it takes no part in an all-reduce."""
    work = StageWork(1.0, 0, 0, 10**9, ReduceBytes(1e9))
    workload = Workload("two", (replace(work, tflop=0.01), work), 1e3, 1e3, 100, 1000, 100, 0)
    fast, slow = replace(GAMING_GPU, tflops=100.0), replace(GAMING_GPU, tflops=1.0, up_mbit=8.0)
    kinds = [MachineKind.of(fast, 1), MachineKind.of(slow, 1)]
    placement = place(workload, kinds)
    assert placement.stages == (((kinds[1], 1),), ((kinds[0], 1),))
