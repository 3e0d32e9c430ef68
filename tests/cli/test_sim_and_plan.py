"""`swarmtrain sim` and `swarmtrain plan` as a person calls them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from swarmtrain.sim.profiles import OWN_PROFILES

from .programs import assert_one_line, call, run

PEERS = OWN_PROFILES
SHORT = ("--minutes", 6, "--warmup", 2, "--peers", 12, "--stages", 3)


def test_sim_prints_one_screen_and_the_same_again() -> None:
    first, second = call("sim", *SHORT), call("sim", *SHORT)
    assert first.code == 0
    assert "upper bound" in first.out
    assert "reached:" in first.out

    def digest(text: str) -> str:
        return text.rsplit("trace ", 1)[1].split(",")[0]

    assert digest(first.out) == digest(second.out)


def test_sim_compares_policies_and_writes_tables_and_plots(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    policies = ("--policy", "ours", "--policy", "swarm", "--policy", "none")
    done = call("sim", *SHORT, "--stages", 2, *policies, "--runs", 2, "--out", out)
    assert done.code == 0, done.err
    rows = list(csv.DictReader((out / "summary.csv").open()))
    assert len(rows) == 2 * 3 * 2
    assert {row["rebalance"] for row in rows} == {"capacity", "queue", "none"}
    assert {row["routing"] for row in rows} == {"finish-time", "swarm-latency"}
    assert all(0.0 < float(row["efficiency"]) < 1.1 for row in rows)
    assert (out / "stages.svg").read_text().startswith("<?xml")
    assert {path.name for path in out.iterdir()} >= {"time.svg", "shares.svg", "samples-0.csv", "samples-11.csv"}
    assert done.out.count("capacity, finish-time") == 2  # seeds share a line


def test_sim_json_has_one_object_per_run() -> None:
    done = call("sim", *SHORT, "--policy", "ours", "--policy", "queue:60", "--json", "--no-churn")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [item["scenario"]["rebalance"] for item in found] == ["capacity", "queue"]
    assert all(item["scenario"]["churn"] == "none" for item in found)
    assert all(0.0 < item["efficiency"] <= 1.1 for item in found)


def test_sim_of_a_manifest_with_profiles_has_steps() -> None:
    profile = f"{PEERS / 'office-workstation.toml'}=2"
    done = call("sim", "--manifest", "llama-125m", "--peers", 16, "--minutes", 4, "--warmup", 1, "--no-churn",
                "--profile", profile, "--json")  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] >= 1


def test_sim_takes_keys_of_the_manifest_beside_parameters_of_the_scenario() -> None:
    arguments = ("sim", "--manifest", "nano", "--peers", 8, "--minutes", 3, "--warmup", 1, "--no-churn", "--json")
    settings = ("--set", "boundary.k=4", "--set", "stages.count=2", "--set", "download_s=7", "--set")
    plain = json.loads(call(*arguments).out)["scenario"]
    done = call(*arguments, *settings, "rebalance.min_gain=0.3")
    assert done.code == 0, done.err
    found = json.loads(done.out)["scenario"]
    assert (plain["num_stages"], found["num_stages"], found["download_s"]) == (4, 2, 7.0)
    assert found["boundary_bytes"] < plain["boundary_bytes"]
    assert_one_line(call(*arguments, "--set", "boundary.k=999"), 2, "ST-MANIFEST")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--peers", 2, "--stages", 4), "2 peers"),
        (("--set", "boundary.k=8"), "add --manifest"),
        (("--policy", "fastest"), "fastest"),
        (("--set", "colour=red"), "colour"),
        (("--warmup", 99), "warmup_minutes"),
        (("--manifest", "nano", "--stages", 3), "contradict"),
        (("--peers", 9, "--peers-per-stage", 3), "contradict"),
        (("--profile", "nowhere.toml"), "nowhere.toml"),
        (("--trace", "nowhere.csv"), "nowhere.csv"),
        (("--mean-life", "inf"), "--mean-life"),
    ],
)
def test_sim_refuses_what_cannot_be_simulated(arguments: tuple[object, ...], named: str) -> None:
    assert named in assert_one_line(call("sim", *arguments), 2, "ST-USAGE")


def test_sim_finds_out_first_that_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_one_line(call("sim", "--minutes", 600, "--out", tmp_path / "file"), 8, "ST-STORAGE")


def test_plan_prints_what_is_asked_for() -> None:
    done = run("plan", "llama-8b")
    assert done.code == 0, done.err
    for word in ("tokens/s", "short stage", "done in", "volunteers", "limit: ", "memory", "up/day", "coordinator"):
        assert word in done.out
    profiles = ("--peers", f"{PEERS / 'gaming-gpu.toml'}=10", "--peers", f"{PEERS / 'laptop-cpu.toml'}=2")
    found = json.loads(call("plan", "llama-125m", *profiles, "--peers", PEERS / "coordinator.toml", "--json").out)
    left_out = {item["name"]: item["count"] for item in found["idle"]}
    assert found["num_peers"] + sum(left_out.values()) == 12
    assert left_out["laptop CPU"] == 2  # its relay would hold up the others
    assert found["tokens_per_s"] > 0
    assert sum(stage["num_peers"] for stage in found["stages"]) == found["num_peers"]
    assert found["advice"]


def test_plan_says_which_stages_nobody_can_host() -> None:
    done = call("plan", "llama-8b", "--peers", f"{PEERS / 'laptop-cpu.toml'}=40")
    assert done.code == 0
    assert "left out: 40 of 40 laptop CPU (their memory holds no stage)" in done.out
    assert "no peers for stage 0-31" in done.out
    assert "tokens/s" not in done.out


def test_plan_counts_the_hours_of_volunteers() -> None:
    profiles = ("--peers", f"{PEERS / 'gaming-gpu.toml'}=8", "--json")
    evenings, always = (
        json.loads(call("plan", "llama-125m", *profiles, *hours).out) for hours in ((), ("--hours-per-day", 24))
    )
    assert (evenings["hours_per_day"], always["hours_per_day"]) == (6.0, 24.0)
    assert evenings["num_volunteers"] == 4 * always["num_volunteers"]
    assert evenings["days"] == always["days"] > 0
    for stage, other in zip(evenings["stages"], always["stages"], strict=True):
        assert 4 * stage["up_bytes_per_day"] == pytest.approx(other["up_bytes_per_day"])


@pytest.mark.parametrize(
    ("arguments", "error_id"),
    [
        (("plan", "atlantis"), "ST-USAGE"),
        (("plan", "nano", "--peers", "nowhere.toml"), "ST-USAGE"),
        (("plan", "nano", "--peers", f"{PEERS / 'gaming-gpu.toml'}=0"), "ST-USAGE"),
        (("plan", "nano", "--peers", f"{PEERS / 'gaming-gpu.toml'}=2.5"), "ST-USAGE"),
        (("plan", "nano", "--set", "model.color=red"), "ST-MANIFEST"),
        (("plan", "nano", "--set", "wire.forward=quant99"), "ST-MANIFEST"),
        (("plan", "nano", "--hours-per-day", "0"), "ST-USAGE"),
        (("plan", "nano", "--hours-per-day", "25"), "ST-USAGE"),
    ],
)
def test_plan_refuses_bad_input(arguments: tuple[str, ...], error_id: str) -> None:
    assert_one_line(call(*arguments), 2, error_id)
