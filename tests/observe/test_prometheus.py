"""A real Prometheus that watches a real swarm: every query and alert parses, every panel finds data."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from swarm.harness import PACE, Swarm, swarmtrain, tiny, until

from .dashboards import panels, variables
from .prometheus import DOCKER, RULES, Prometheus, promtool, with_prometheus
from .web import get, get_json, known_metrics

WITHOUT_DATA = "swarmtrain_peer_gpu_memory_bytes"  # the one query that finds nothing: these peers compute on the CPU


@with_prometheus
def test_every_query_parses(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:number:{number}", "expr": query}
        for number, query in enumerate(query for _, queries in panels() for query in queries)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML, too
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": [{"record": "a:b", "expr": "sum by (x (y)"}]}]}))
    assert promtool("check", "rules", file).returncode == 1


@with_prometheus
def test_configuration_and_alerts_pass_promtool(tmp_path: Path) -> None:
    for arguments in (
        ("check", "config", DOCKER / "prometheus" / "prometheus.yml"),
        ("check", "rules", RULES),
        ("test", "rules", DOCKER / "prometheus" / "rules_test.yml"),
    ):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@with_prometheus
@pytest.mark.parametrize(
    ("correct", "wrong"),
    [
        ('{state="serving"}) == 0', '{state="serving"}) == 1'),
        ("abs(swarmtrain_run_loss) == Inf", "abs(swarmtrain_run_loss) == 7"),
        ("< 0.5 *", "< 0.9 *"),
        ("[10m]) > 0\n", "[10m]) > 5\n"),
        ('{code="diverged"}', ""),
        ("> 600", "> 6000"),
        ('up{job="coordinator"}', "up"),
    ],
)
def test_a_broken_alert_fails_its_unit_test(tmp_path: Path, correct: str, wrong: str) -> None:
    text = RULES.read_text()
    assert text.count(correct) == 1
    (tmp_path / "rules.yml").write_text(text.replace(correct, wrong))
    shutil.copy(DOCKER / "prometheus" / "rules_test.yml", tmp_path)
    assert promtool("test", "rules", tmp_path / "rules_test.yml").returncode == 1


@pytest.fixture(scope="module")
def swarm(shared_place: Path) -> Iterator[Swarm]:
    """Two stages, three peers; past its first checkpoint and validation."""
    manifest = tiny("schedule.steps=1000000", "stages.count=2", "checkpoint.every=10", "validation.every=5")
    with closing(Swarm(manifest, shared_place, num_peers=3, pace=PACE)) as swarm:
        swarm.start_coordinator()
        for stage in (0, 1, 0):
            swarm.start_peer(stage, "--metrics", "127.0.0.1:0")
        swarm.wait_step(12)
        yield swarm


@pytest.fixture(scope="module")
def page(swarm: Swarm) -> str:
    return (swarm.coordinator_dir / "page").read_text().strip()


@pytest.fixture(scope="module")
def prometheus(page: str, shared_place: Path) -> Iterator[Prometheus]:
    server = Prometheus(shared_place, page)
    yield server
    server.close()


@pytest.mark.swarm
@with_prometheus
def test_prometheus_finds_all_peers_and_every_query_has_data(prometheus: Prometheus) -> None:
    until(lambda: len(prometheus.query("up == 1")) == 4, "coordinator and three peers are scraped")
    until(lambda: len(prometheus.query("count_over_time(swarmtrain_peer_step[12s]) >= 11")) == 3, "enough scrapes")
    queries = {query: title for title, queries in panels() for query in queries}
    silent = {query for query in queries if WITHOUT_DATA in query}
    assert len(silent) == 1
    for query in queries.keys() - silent:
        has_data = functools.partial(prometheus.query, query)
        until(lambda has_data=has_data: bool(has_data()), f"{queries[query]} has data: {query}")  # type: ignore[misc]
    assert {query for query in silent if prometheus.query(query)} == set()


@pytest.mark.swarm
@with_prometheus
def test_every_variable_offers_what_there_is(prometheus: Prometheus) -> None:
    found = {title: sorted(prometheus.label_values(query)) for title, query in variables()}
    assert found == {"stage: $stage": ["0", "1"], "peer: $name": ["peer0", "peer1", "peer2"]}


@pytest.mark.swarm
@with_prometheus
def test_the_parts_of_time_add_up_in_prometheus_too(prometheus: Prometheus) -> None:
    """Samples of one scrape have one time stamp, so an offset takes all of them from one answer of the daemon."""
    spent, clock = (
        " + ".join(f"(sum by (name) ({name}) - sum by (name) ({name} offset 8s))" for name in names)
        for names in (
            ("swarmtrain_peer_seconds_total", "swarmtrain_peer_idle_seconds_total"),
            ("swarmtrain_daemon_time_seconds",),
        )
    )
    expr = f"({spent}) / ({clock})"
    until(lambda: len(prometheus.query(expr)) == 3, "there are samples of eight seconds ago")
    for item in prometheus.query(expr):
        assert float(item["value"][1]) == pytest.approx(1.0, rel=0.02)


@pytest.mark.swarm
@with_prometheus
def test_the_metrics_of_real_daemons_are_well_formed_and_exactly_those_of_the_page(page: str) -> None:
    found: set[str] = set()
    targets = [f"http://{item['targets'][0]}/" for item in get_json(page + "api/targets")]
    for url in (page, *targets):
        text = get(url + "metrics")[1]
        done = promtool("check", "metrics", text=text)
        assert done.returncode == 0, done.stdout + done.stderr
        found |= set(re.findall(r"^(swarmtrain_[a-z_]+)", text, re.MULTILINE))
        assert not re.search(r"[{,](job|instance)=", text)  # Prometheus's own: it would rename ours
    assert found == known_metrics()


@pytest.mark.swarm
def test_the_doctor_finds_nothing_to_mend_beside_a_running_swarm(swarm: Swarm) -> None:
    done = swarmtrain("doctor", "--json", environment=swarm.environment)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, found.pop()) == (0, {"done": True, "bad": 0}), done.stdout
    found = [item for item in found if item["name"] not in ("bf16", "gpu")]  # what this machine has, not the swarm's
    names = ["device", "memory", "disk", "p2pd", "ports", "bootstrap", "clock", "run", "dial", "line", "advice"]
    assert [(item["name"], item["verdict"]) for item in found] == [(name, "good") for name in names]


@pytest.mark.swarm
def test_top_finds_the_swarm_of_this_machine_and_shows_all_of_it(swarm: Swarm) -> None:
    done = swarmtrain("top", "--once", environment=swarm.environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("training since") for line in lines), done.stdout
    (numbers,) = [line for line in lines if re.match(r"step \d+/1000000  loss \d", line)]
    assert int(numbers.split("/")[0].removeprefix("step ")) >= 12
    stages = {row[1]: row[0] for row in map(str.split, lines) if len(row) > 2 and row[2] == "serving"}
    assert stages == {"peer0": "0", "peer1": "1", "peer2": "0"}
