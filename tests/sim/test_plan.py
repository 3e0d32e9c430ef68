"""`plan`: arithmetic that can be checked by hand, and that agrees with the simulation of the same swarm."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from swarmtrain.errors import UsageError
from swarmtrain.model.reduce_bytes import ReduceBytes
from swarmtrain.model.workload import StageWork, Workload, workload_of
from swarmtrain.run.presets import resolve_manifest
from swarmtrain.sim.advice import advice
from swarmtrain.sim.plan import default_profile, forecast
from swarmtrain.sim.profiles import GAMING_GPU, PeerProfile, load_profile
from swarmtrain.sim.run import simulate
from swarmtrain.sim.scenario import Scenario
from swarmtrain.sim.settings import with_workload

PEERS = Path(__file__).parents[2] / "peers"
MACHINE = replace(GAMING_GPU, tflops=10.0, memory_gb=10.0, up_mbit=800.0, down_mbit=800.0)


def workload(*tflop: float, **changes: object) -> Workload:
    plain = Workload(
        name="plain",
        stages=tuple(StageWork(item, 0, 0, 10**9, ReduceBytes(0.0)) for item in tflop),
        boundary_bytes=1e3,
        token_bytes=100,
        tokens=1000,
        batch=200,
        checkpoint_every=0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_the_counts_of_a_manifest_are_those_of_its_matrices() -> None:
    manifest = resolve_manifest("nano", ["boundary.kind=dense", "stages.count=1"])
    model = manifest.model
    found = workload_of(manifest)
    kv = model.hidden_size // model.num_heads * model.num_kv_heads
    block = 2 * model.hidden_size**2 + 2 * kv * model.hidden_size + 3 * model.hidden_size * model.ffn_size
    matrices = model.num_layers * block + model.vocab_size * model.hidden_size
    tokens = manifest.batch.sequences_per_microbatch * model.sequence_length
    attention = model.num_layers * model.sequence_length * model.hidden_size
    assert found.stages[0].tflop == pytest.approx(3 * 2 * tokens * (matrices + attention) / 1e12)
    assert found.tokens == tokens
    assert found.batch == manifest.batch.microbatches_per_step


def test_splitting_a_model_leaves_its_arithmetic_as_it_is_and_the_subspace_shrinks_the_wire() -> None:
    whole, split = (workload_of(resolve_manifest("nano", [f"stages.count={count}"])) for count in (1, 4))
    assert sum(stage.tflop for stage in split.stages) == pytest.approx(sum(stage.tflop for stage in whole.stages))
    dense = workload_of(resolve_manifest("nano", ["boundary.kind=dense"]))
    manifest = resolve_manifest("nano", [])
    ratio = (dense.boundary_bytes - dense.token_bytes) / (split.boundary_bytes - split.token_bytes)
    assert ratio == pytest.approx(manifest.model.hidden_size / manifest.boundary.k)


def test_equal_machines_spread_evenly_and_a_costly_stage_gets_more_of_them() -> None:
    even = forecast(workload(1.0, 1.0), [(MACHINE, 6.0)])
    assert [stage.num_peers for stage in even.stages] == [3, 3]
    assert even.short_stage is None
    uneven = forecast(workload(1.0, 2.0, 1.0), [(MACHINE, 8.0)])
    assert [stage.num_peers for stage in uneven.stages] == [2, 4, 2]


def test_the_short_stage_is_named_and_sets_the_pace() -> None:
    found = forecast(workload(1.0, 1.0, 1.0), [(MACHINE, 5.0)])
    assert found.short_stage is not None
    weakest = found.stages[found.short_stage]
    assert weakest.num_peers == 1
    assert weakest.busy == pytest.approx(1.0)
    assert all(stage.busy == pytest.approx(0.5) for stage in found.stages if stage.num_peers == 2)
    assert found.tokens_per_s < 10.0 * 1000 <= found.bound_tokens_per_s


def test_large_stages_are_left_to_machines_that_hold_them() -> None:
    big = workload(1.0, 1.0)
    big = replace(big, stages=(big.stages[0], replace(big.stages[1], memory_bytes=20 * 10**9)))
    small, large = replace(MACHINE, name="small"), replace(MACHINE, name="large", memory_gb=24.0)
    found = forecast(big, [(small, 2.0), (large, 2.0)])
    assert [stage.num_peers for stage in found.stages] == [2, 2]
    alone = forecast(big, [(small, 4.0)])
    assert alone.empty_stages == (1,)
    assert alone.tokens_per_s == 0.0
    tiny = forecast(big, [(replace(MACHINE, name="tiny", memory_gb=0.5), 3.0)])
    assert tiny.left_out == ("tiny",)
    assert tiny.empty_stages == (0, 1)


def test_coordinators_host_nothing_and_half_machines_do_not_exist() -> None:
    coordinator = replace(MACHINE, role="coordinator")
    assert forecast(workload(1.0), [(MACHINE, 1.0), (coordinator, 1.0)]).num_peers == 1
    with pytest.raises(UsageError, match="whole number"):
        forecast(workload(1.0), [(MACHINE, 1.5)])


@pytest.mark.parametrize(
    ("preset", "machine", "count"),
    [
        ("llama-125m", replace(GAMING_GPU, memory_gb=64.0), 12),
        ("micro", replace(GAMING_GPU, tflops=0.05, up_mbit=200.0), 9),
    ],
)
def test_the_prediction_agrees_with_the_simulation(preset: str, machine: PeerProfile, count: int) -> None:
    load = workload_of(resolve_manifest(preset, []))
    predicted = forecast(load, [(machine, float(count))])
    minutes = 12.0 * predicted.step_s / 60.0
    spec = machine.spec(load.mean_tflop)
    layout = tuple(replace(spec, stage=stage.stage) for stage in predicted.stages for _ in range(stage.num_peers))
    scenario = Scenario(
        num_peers=count,
        num_stages=len(load.stages),
        layout=layout,
        churn="none",
        rebalance="none",
        minutes=minutes,
        warmup_minutes=minutes / 4,
    )
    result = simulate(with_workload(scenario, load))
    assert result.num_steps >= 6
    simulated = result.throughput * load.tokens
    assert predicted.tokens_per_s == pytest.approx(simulated, rel=0.15)


def test_the_profiles_in_the_repository_are_valid_and_the_default_is_one_of_them() -> None:
    profiles = {path.stem: load_profile(path) for path in sorted(PEERS.glob("*.toml"))}
    assert {"gaming-gpu", "laptop-cpu", "cloud-spot-gpu", "office-workstation", "coordinator"} <= profiles.keys()
    assert profiles["gaming-gpu"] == GAMING_GPU
    assert profiles["coordinator"].role == "coordinator"
    assert default_profile(workload(1.0)) == GAMING_GPU


GAMING = [(load_profile(PEERS / "gaming-gpu.toml"), 128.0)]


def test_a_codec_shortens_the_all_reduce_and_nothing_else() -> None:
    plain, coded = (
        forecast(workload_of(resolve_manifest("llama-1b", [f"reduce.codec={codec}"])), GAMING)
        for codec in ("none", "int8")
    )
    assert coded.reduce_s < plain.reduce_s / 4
    assert coded.step_s - coded.reduce_s == pytest.approx(plain.step_s - plain.reduce_s)
    assert coded.stages[3].up_bytes_per_day / coded.tokens_per_s < plain.stages[3].up_bytes_per_day / plain.tokens_per_s


def test_topk_takes_hardly_longer_with_more_peers_of_a_stage() -> None:
    """Its answers are as long for many peers as for few; between groups a little comes on top."""
    load = workload_of(resolve_manifest("llama-1b", ["reduce.codec=topk64"]))
    assert load.all_reduce_bytes(3, 32) == pytest.approx(load.all_reduce_bytes(3, 2))
    assert load.all_reduce_bytes(3, 32) < load.all_reduce_bytes(3, 1000) < 2 * load.all_reduce_bytes(3, 32)


@pytest.mark.parametrize(
    ("overrides", "count", "words"),
    [
        ([], 128.0, r"9\d % of a step is the all-reduce of stage \d+: reduce\.codec = \w+ \(.*, or batch\.micro"),
        (["boundary.track_every=100"], 128.0, r"all-reduce of stage \d+: reduce\.codec = powersgd32"),
        (
            ["reduce.codec=powersgd32", "batch.microbatches_per_step=8192"],
            128.0,
            r"stage \d+ set the pace: .* machines",
        ),
    ],
)
def test_advice_says_what_limits_and_what_to_change(overrides: list[str], count: float, words: str) -> None:
    manifest = resolve_manifest("llama-1b", overrides)
    profiles = [(GAMING[0][0], count)]
    found = forecast(workload_of(manifest), profiles)
    sentence = advice(manifest, profiles, found)
    assert re.search(words.replace(" %", "%"), sentence), sentence


def test_what_advice_promises_is_what_its_change_gives() -> None:
    manifest = resolve_manifest("llama-1b", [])
    sentence = advice(manifest, GAMING, forecast(workload_of(manifest), GAMING))
    promises = re.findall(r"([a-z.]+_?[a-z_.]*) = (\w+) \(([\d,]+) tokens/s\)", sentence)
    assert len(promises) == 2
    for key, value, tokens in promises:
        changed = forecast(workload_of(resolve_manifest("llama-1b", [f"{key}={value}"])), GAMING)
        assert f"{changed.tokens_per_s:,.0f}" == tokens
        assert changed.tokens_per_s > 2 * forecast(workload_of(manifest), GAMING).tokens_per_s
