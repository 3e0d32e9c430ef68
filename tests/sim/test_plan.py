"""`plan`: arithmetic that can be checked by hand, and that agrees with the simulation of the same swarm."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from swarmtrain.errors import UsageError
from swarmtrain.model.footprint import Offload
from swarmtrain.model.reduce_bytes import ReduceBytes
from swarmtrain.model.workload import StageWork, Workload, workload_of
from swarmtrain.run.presets import preset, resolve_manifest
from swarmtrain.sim.advice import advice
from swarmtrain.sim.demand import demand_of
from swarmtrain.sim.plan import Forecast, default_profiles, forecast
from swarmtrain.sim.profiles import GAMING_GPU, LARGE_GAMING_GPU, OWN_PROFILES, PeerProfile, load_profile
from swarmtrain.sim.run import simulate
from swarmtrain.sim.scenario import Scenario
from swarmtrain.sim.settings import with_workload

PEERS = OWN_PROFILES
MACHINE = replace(GAMING_GPU, tflops=10.0, memory_gb=10.0, up_mbit=800.0, down_mbit=800.0)


def workload(*tflop: float, **changes: object) -> Workload:
    plain = Workload(
        name="plain",
        stages=tuple(StageWork(item, 0, 0, 10**9, ReduceBytes(0.0)) for item in tflop),
        boundary_bytes=1e3,
        backward_bytes=1e3,
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
    found = forecast(workload(1.0, 3.0, 1.0), [(MACHINE, 4.0)])
    assert [stage.num_peers for stage in found.stages] == [1, 2, 1]
    assert found.short_stage == 1
    assert found.stages[1].busy == pytest.approx(1.0)
    assert found.stages[0].busy == pytest.approx(2 / 3)
    assert found.work_s == pytest.approx(200 / (20 / 3), rel=1e-3)


def test_machines_that_make_no_stage_faster_are_left_out() -> None:
    found = forecast(workload(1.0, 1.0, 1.0), [(MACHINE, 5.0)])
    assert [stage.num_peers for stage in found.stages] == [1, 1, 1]
    assert [(item.count, item.total, item.has_memory) for item in found.idle] == [(2, 5, True)]
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
    assert [(item.name, item.has_memory) for item in tiny.idle] == [("tiny", False)]
    assert tiny.empty_stages == (0, 1)


def test_coordinators_host_nothing_and_half_machines_do_not_exist() -> None:
    coordinator = replace(MACHINE, role="coordinator")
    assert forecast(workload(1.0), [(MACHINE, 1.0), (coordinator, 1.0)]).num_peers == 1
    with pytest.raises(UsageError, match="whole number"):
        forecast(workload(1.0), [(MACHINE, 1.5)])


_EXACT = ("schedule.delay=0", "optimizer.kind=adamw", "wire.forward=fp32", "wire.backward=fp32", "reduce.codec=none")
SMALL = (*_EXACT, "stages.count=4", "microbatches_per_step=64")  # whatever the presets say
LARGE = (*_EXACT, "stages.count=16", "microbatches_per_step=256")
HOME = replace(GAMING_GPU, memory_gb=64.0)
QUANT8 = ("wire.forward=quant8", "wire.backward=quant8")
DELAYED = (*QUANT8, "schedule.delay=1", "reduce.codec=powersgd8")


@pytest.mark.parametrize(
    ("preset", "settings", "machine", "count"),
    [
        ("llama-125m", SMALL, HOME, 12),
        ("llama-125m", (*SMALL, "reduce.codec=powersgd8"), HOME, 12),
        ("llama-125m", (*SMALL, "reduce.codec=powersgd8", "schedule.delay=1", "microbatches_per_step=256"), HOME, 12),
        ("llama-125m", (*SMALL, *DELAYED, "microbatches_per_step=64"), HOME, 16),
        ("llama-125m", (*SMALL, *DELAYED, "microbatches_per_step=64", "checkpoint.every=3"), HOME, 16),
        ("micro", (), replace(GAMING_GPU, tflops=0.05, up_mbit=200.0), 9),
        ("llama-1b", (*LARGE, *DELAYED, "microbatches_per_step=512"), HOME, 128),
        ("llama-1b", (*LARGE, *DELAYED, "microbatches_per_step=1024", "stages.count=8"), HOME, 128),
    ],
)
def test_the_prediction_agrees_with_the_simulation(
    preset: str, settings: tuple[str, ...], machine: PeerProfile, count: int
) -> None:
    load = demand_of(resolve_manifest(preset, ["optimizer.kind=muon", *settings]))
    predicted = forecast(load, [(machine, float(count))])
    minutes = 12.0 * predicted.step_s / 60.0
    spec = machine.spec(load.mean_tflop)
    layout = tuple(replace(spec, stage=stage.stage) for stage in predicted.stages for _ in range(stage.num_peers))
    scenario = Scenario(
        num_peers=len(layout),
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
    assert profiles["gaming-gpu-24gb"] == LARGE_GAMING_GPU
    assert default_profiles(workload(1.0)) == [(GAMING_GPU, 2.0)]


def test_the_default_is_machines_that_exist() -> None:
    """A stage that the smaller one does not hold gets the larger one."""
    plain = workload(1.0, 1.0, 1.0)
    big = replace(plain.stages[1], memory_bytes=20 * 10**9)
    found = default_profiles(replace(plain, stages=(plain.stages[0], big, plain.stages[2])))
    assert found == [(GAMING_GPU, 4.0), (LARGE_GAMING_GPU, 2.0)]


def test_a_card_that_is_short_lays_the_state_on_its_host() -> None:
    work = demand_of(preset("llama-1b")).stages[1]
    needs = {way.offload: way for way in work.ways if way.recomputes}
    state = needs[Offload.STATE]
    card, host = (state.device_bytes + 1) / 1e9, (state.host_bytes + 1) / 1e9
    found = replace(GAMING_GPU, memory_gb=card, host_gb=host).way(work)
    assert found == (state.device_bytes, state.host_bytes)
    assert state.device_bytes < needs[Offload.NOTHING].device_bytes
    assert replace(GAMING_GPU, memory_gb=card, host_gb=host / 2).way(work) is None
    assert replace(GAMING_GPU, memory_gb=card / 2, host_gb=host).way(work) is None
    own = work.memory_bytes / 1e9
    assert replace(GAMING_GPU, memory_gb=own + 0.001, host_gb=0.0).way(work) == (0, work.memory_bytes)
    assert replace(GAMING_GPU, memory_gb=own - 0.001, host_gb=0.0).way(work) is None


GAMING = [(load_profile(PEERS / "gaming-gpu.toml"), 128.0)]


def planned(preset: str, *settings: str, count: float = 128.0) -> Forecast:
    return forecast(demand_of(resolve_manifest(preset, list(settings))), [(GAMING[0][0], count)])


def test_a_codec_shortens_the_all_reduce_and_so_more_machines_are_of_use() -> None:
    plain, coded = (planned("llama-1b", *LARGE, f"reduce.codec={codec}") for codec in ("none", "powersgd8"))
    assert plain.num_peers < 32 < 100 < coded.num_peers
    assert coded.tokens_per_s > 4 * plain.tokens_per_s


def test_all_reduces_are_counted_once_in_each_direction() -> None:
    """Two machines a stage: each moves half of what the codec needs for all parts, up and down."""
    slow = replace(MACHINE, up_mbit=8.0, down_mbit=8.0, hours_online=24.0, hours_away=1e-9)
    load = workload(1.0, 1.0, boundary_bytes=0.0, backward_bytes=0.0, batch=10_000, token_bytes=0)
    load = replace(load, stages=tuple(replace(stage, reduced=ReduceBytes(6e6)) for stage in load.stages))
    found = forecast(load, [(slow, 4.0)])
    assert [stage.num_peers for stage in found.stages] == [2, 2]
    assert found.reduce_s == pytest.approx(3.0)  # 3 MB over 1 MB/s
    assert found.step_s == pytest.approx(500.0 + 3.0 + found.fill_s, rel=1e-3)
    for stage in found.stages:
        assert stage.up_bytes_per_day == pytest.approx(3e6 * 86400 / found.step_s)
        assert stage.down_bytes_per_day == pytest.approx(3e6 * 86400 / found.step_s)
    hidden = forecast(replace(load, delay=1, steps=10**6), [(slow, 4.0)])
    assert hidden.step_s == pytest.approx(500.0, rel=1e-3)


def test_a_delay_hides_nothing_where_every_step_waits() -> None:
    delay = "schedule.delay=1"
    plain, delayed, barriers, late, moves = (
        planned("llama-125m", *SMALL, "reduce.codec=powersgd8", *settings, count=16.0)
        for settings in (
            (),
            (delay,),
            (delay, "checkpoint.every=1"),
            (delay, "delay_from=1000000"),
            (delay, "track_every=1"),
        )
    )
    assert delayed.tokens_per_s > 1.05 * plain.tokens_per_s
    assert barriers.tokens_per_s == late.tokens_per_s == plain.tokens_per_s
    assert moves.waiting_share == 1.0 > delayed.waiting_share


def test_topk_takes_hardly_longer_with_more_peers_of_a_stage() -> None:
    """Its answers are as long for many peers as for few; between groups a little comes on top."""
    load = workload_of(resolve_manifest("llama-1b", ["reduce.codec=topk64"]))
    assert load.all_reduce_bytes(3, 32) == pytest.approx(load.all_reduce_bytes(3, 2))
    assert load.all_reduce_bytes(3, 32) < load.all_reduce_bytes(3, 1000) < 2 * load.all_reduce_bytes(3, 32)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"delay": 0}, 1.0),
        ({"delay": 1}, 1 / 60),
        ({"delay": 1, "checkpoint_every": 10}, 6 / 60),
        ({"delay": 1, "checkpoint_every": 10, "moves_every": 4}, 18 / 60),
        ({"delay": 1, "checkpoint_every": 10, "delay_from": 25}, 28 / 60),
        ({"delay": 1, "delay_from": 99}, 1.0),
    ],
)
def test_the_share_of_steps_that_wait_is_that_of_the_simulator(changes: dict[str, int], share: float) -> None:
    load = workload(1.0, steps=60, **changes)
    scenario = with_workload(Scenario(num_stages=1, num_peers=1), load)
    waiting = sum(scenario.weights_step(step) == step for step in range(60))
    assert load.synchronous_share == pytest.approx(share) == waiting / 60


def test_days_and_volunteers_follow_from_steps_and_hours() -> None:
    always = replace(MACHINE, hours_online=1e6, hours_away=1e-3)
    load = workload(1.0, 1.0, steps=5000)
    whole, third = (forecast(load, [(always, 6.0)], hours_per_day=hours) for hours in (None, 8.0))
    assert whole.days == pytest.approx(5000 * whole.step_s / 86400)
    assert (whole.num_volunteers, third.num_volunteers) == (6, 18)
    assert third.days == whole.days
    for stage, other in zip(whole.stages, third.stages, strict=True):
        assert other.up_bytes_per_day == pytest.approx(stage.up_bytes_per_day / 3, rel=1e-3)
    evenings = forecast(load, [(replace(MACHINE, hours_online=2.0, hours_away=4.0), 6.0)])
    assert evenings.hours_per_day == pytest.approx(8.0)


def test_every_arrival_fetches_a_state() -> None:
    load = replace(workload(1.0, 1.0), stages=tuple(replace(s, state_bytes=10**9) for s in workload(1.0, 1.0).stages))
    long, short = (
        forecast(load, [(replace(MACHINE, hours_online=hours, hours_away=hours), 4.0)]) for hours in (12.0, 1.0)
    )
    for stage, other in zip(long.stages, short.stages, strict=True):
        assert other.down_bytes_per_day - stage.down_bytes_per_day == pytest.approx(11e9)
        assert other.up_bytes_per_day - stage.up_bytes_per_day == pytest.approx(11e9)


@pytest.mark.parametrize(
    ("overrides", "count", "words"),
    [
        (
            ["reduce.codec=none"],
            128.0,
            r"^112 of 128 machines are better left out: .*: set reduce\.codec = \w+ \(.*batch\.micro",
        ),
        (["boundary.track_every=100", "reduce.codec=none"], 128.0, r"set reduce\.codec = lowrank"),
        (
            ["stages.count=4", "microbatches_per_step=8192"],
            8.0,
            r"^[23]\d% of a step is the all-reduce of stage \d: s",
        ),
        (["schedule.delay=1", "reduce.codec=powersgd8"], 128.0, r"\d+% of a step waits until .* pipeline: set batch\."),
        (["reduce.codec=powersgd8"], 128.0, r"\d+% of a step fills and empties the pipeline: set batch\."),
        (["reduce.codec=powersgd8", "microbatches_per_step=8192"], 128.0, r"the sending of stage \d+: set wire\."),
        (
            [*QUANT8, "reduce.codec=powersgd8", "stages.count=4", "microbatches_per_step=8192"],
            8.0,
            r"the computing of stage \d+: more machines or faster machines there help, as \d+ more: gaming",
        ),
    ],
)
def test_advice_says_what_limits_and_what_to_change(overrides: list[str], count: float, words: str) -> None:
    manifest = resolve_manifest("llama-1b", [*LARGE, *overrides])
    profiles = [(GAMING[0][0], count)]
    sentence = advice(manifest, profiles, forecast(demand_of(manifest), profiles))
    assert re.search(words, sentence), sentence


@pytest.mark.parametrize("codec", ["none", "int8", "powersgd32", "powersgd8"])
@pytest.mark.parametrize("preset", ["llama-125m", "llama-1b"])
def test_what_advice_promises_is_what_its_changes_give(preset: str, codec: str) -> None:
    settings = [*(LARGE if preset == "llama-1b" else SMALL), f"reduce.codec={codec}"]
    manifest = resolve_manifest(preset, settings)
    now = forecast(demand_of(manifest), GAMING)
    sentence = advice(manifest, GAMING, now)
    promises = re.findall(r"((?:[a-z]+\.[a-z_]+ = )+)(\w+) \(([\d,]+) tokens/s\)", sentence)
    assert promises, sentence
    for keys, value, tokens in promises:
        changes = [f"{key}={value}" for key in re.findall(r"[a-z]+\.[a-z_]+", keys)]
        changed = planned(preset, *settings, *changes)
        assert f"{changed.tokens_per_s:,.0f}" == tokens
        assert changed.tokens_per_s > 1.05 * now.tokens_per_s


def test_machines_that_advice_asks_for_give_what_it_says() -> None:
    settings = [*QUANT8, "reduce.codec=powersgd8", "stages.count=4", "microbatches_per_step=8192"]
    manifest = resolve_manifest("llama-1b", [*LARGE, *settings])
    profiles = [(GAMING[0][0], 8.0)]
    sentence = advice(manifest, profiles, forecast(demand_of(manifest), profiles))
    ((number, tokens),) = re.findall(r"(\d+) more: gaming GPU at home \(([\d,]+) tokens/s\)", sentence)
    more = planned("llama-1b", *LARGE, *settings, count=8.0 + int(number))
    assert f"{more.tokens_per_s:,.0f}" == tokens
