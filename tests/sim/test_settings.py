"""What the command line says about a scenario."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtrain.errors import UsageError
from swarmtrain.sim.profiles import GAMING_GPU, load_mix, load_profile, load_trace
from swarmtrain.sim.scenario import ChurnEvent, Scenario
from swarmtrain.sim.settings import settable, with_policy, with_settings

PROFILE = """
name = "test"
[hardware]
tflops = 1.0
memory_gb = 2.0
[network]
up_mbit = 10.0
down_mbit = 20.0
latency_ms = 5.0
[presence]
hours_online = 1.0
hours_away = 1.0
"""


@pytest.mark.parametrize(
    ("text", "rule", "routing", "period"),
    [
        ("ours", "capacity", "finish-time", 300.0),
        ("swarm", "queue", "swarm-latency", 300.0),
        ("queue:60", "queue", "finish-time", 60.0),
        ("none+swarm-latency", "none", "swarm-latency", 300.0),
    ],
)
def test_policies_by_name(text: str, rule: str, routing: str, period: float) -> None:
    scenario = with_policy(Scenario(), text)
    assert (scenario.rebalance, scenario.routing, scenario.rebalance_period_s) == (rule, routing, period)


@pytest.mark.parametrize("text", ["", "fast", "queue:soon", "capacity:60", "none+", "ours+swarm-latency", "x" * 5000])
def test_unknown_policies_are_refused(text: str) -> None:
    if text == "none+":  # nothing after the plus: the routing stays as it is
        assert with_policy(Scenario(), text).rebalance == "none"
        return
    with pytest.raises(UsageError):
        with_policy(Scenario(), text)


def test_any_parameter_can_be_set() -> None:
    scenario = with_settings(
        Scenario(), ["download_s=30", "batch=8", "rebalance.min_gain=0.2", "stage_costs=1,2,1,1", "job_order=fifo"]
    )
    assert (scenario.download_s, scenario.batch) == (30.0, 8)
    assert scenario.rebalance_options.min_gain == 0.2
    assert scenario.costs == (1.0, 2.0, 1.0, 1.0)
    assert {"download_s", "rebalance.min_left"} <= set(settable())


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ("download_s", "NAME=VALUE"),
        ("colour=red", "colour"),
        ("download_s=long", "download_s"),
        ("batch=1.5", "batch"),
        ("mix=1", "mix"),
        ("rebalance.colour=1", "rebalance.colour"),
        ("download_s=nan", "download_s"),
        ("download_s=-1", "download_s"),
    ],
)
def test_bad_settings_are_named(item: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        with_settings(Scenario(), [item])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("tflops = 1.0", "tflops = true"), "hardware.tflops"),
        (("tflops = 1.0", "tflops = -1"), "hardware.tflops"),
        (("tflops = 1.0", ""), "hardware.tflops"),
        (("[presence]", "[presents]"), "presents"),
        (("up_mbit", "up_gbit"), "up_gbit"),
        (('name = "test"', ""), "name"),
        (('name = "test"', 'name = "test"\nrole = "king"'), "role"),
        (("latency_ms = 5.0", "latency_ms = 5.0\nrelayed = 1"), "relayed"),
        (("[hardware]", "[hardware"), "not valid TOML"),
    ],
)
def test_bad_profiles_are_named(tmp_path: Path, change: tuple[str, str], named: str) -> None:
    path = tmp_path / "peer.toml"
    path.write_text(PROFILE.replace(*change))
    with pytest.raises(UsageError, match=named):
        load_profile(path)


def test_a_mix_has_weights(tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    path.write_text(PROFILE)
    (plain, heavy) = load_mix([str(path), f"{path}=2.5"], stage_tflop=2.0)
    assert (plain.speed, plain.weight, heavy.weight) == (0.5, 1.0, 2.5)
    assert load_mix([], 1.0) == ()
    for bad in (f"{path}=0", f"{path}=x", f"{path}=inf", str(tmp_path), str(tmp_path / "absent.toml")):
        with pytest.raises(UsageError):
            load_mix([bad], 1.0)
    assert GAMING_GPU.spec(30.0).speed == 1.0


def test_a_trace_is_read_in_order_and_its_faults_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,change\n600,-2  # night\n\n300,+1\n")
    assert load_trace(path) == (ChurnEvent(300.0, 1), ChurnEvent(600.0, -2))
    for text, named in (("1,2,3", "line 1"), ("1,x", "line 1"), ("0,1\nnan,1", "line 2"), ("-1,1", "line 1")):
        path.write_text(text)
        with pytest.raises(UsageError, match=named):
            load_trace(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot read"):
        load_trace(path)
