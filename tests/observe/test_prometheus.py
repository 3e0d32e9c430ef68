"""Dashboards and alerts: every query parses and finds data in a real Prometheus that watches a real swarm."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from swarm.harness import REPOSITORY, Swarm, tiny, until

from .prometheus import DOCKER, RULES, Prometheus, promtool, with_prometheus
from .web import get, get_json


def dashboards_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", DOCKER / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboards"] = module
    spec.loader.exec_module(module)
    return module


def dashboards() -> dict[str, dict[str, Any]]:
    return {
        path.stem: json.loads(path.read_text()) for path in sorted((DOCKER / "grafana" / "dashboards").glob("*.json"))
    }


def panels() -> list[tuple[str, list[str]]]:
    """(dashboard and title, queries with variables filled in)."""
    return [
        (f"{name}: {panel['title']}", [filled(target["expr"]) for target in panel["targets"]])
        for name, board in dashboards().items()
        for panel in board["panels"]
    ]


def filled(expr: str) -> str:
    return expr.replace("$__rate_interval", "10s").replace("$stage", ".*").replace("$name", ".*")


def known_metrics() -> set[str]:
    """Every metric on the page of docs/observe.md; a test below compares that page with real daemons."""
    section = (REPOSITORY / "docs" / "observe.md").read_text().split("## Metrics")[1]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return {f"swarmtrain_{name}" for row in rows for name in re.findall(r"`([a-z_]+)(?:\{[a-z,]+\})?`", row)}


def test_the_committed_dashboards_are_the_programs_output() -> None:
    for path, text in dashboards_program().files().items():
        assert path.read_text() == text, f"{path.name} is stale: run python docker/dashboards.py"
    assert set(dashboards()) == {"swarm", "stage", "peer", "wire"}


def test_dashboards_are_well_formed() -> None:
    boards = dashboards()
    assert len({board["uid"] for board in boards.values()}) == len(boards)
    for board in boards.values():
        taken: set[tuple[int, int]] = set()
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        for panel in board["panels"]:
            assert panel["description"]
            assert panel["targets"]
            place = panel["gridPos"]
            cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
            assert not cells & taken, f"{panel['title']} covers another panel"
            assert max(x for x, _ in cells) < 24
            taken |= cells


def test_every_panel_and_alert_refers_to_metrics_that_exist() -> None:
    known, used = known_metrics(), set()
    for _, queries in panels():
        used |= {name for query in queries for name in re.findall(r"\bswarmtrain_[a-z_]+", query)}
    used |= set(re.findall(r"\bswarmtrain_[a-z_]+", RULES.read_text()))
    assert len(used) > 30
    assert used <= known, used - known


def leaves(item: Any, path: str = "") -> dict[str, Any]:
    """Every value with its path."""
    if isinstance(item, dict):
        return {key: value for name, part in item.items() for key, value in leaves(part, f"{path}/{name}").items()}
    if isinstance(item, list):
        return {key: value for i, part in enumerate(item) for key, value in leaves(part, f"{path}/{i}").items()}
    return {path: item}


def lost_in_grafana(board: dict[str, Any]) -> list[str]:
    """What Grafana's own types do not know of a dashboard, or know otherwise."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    read = leaves(json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder)))
    return [path for path, value in leaves(board).items() if path not in read or read[path] != value]


def test_grafanas_own_types_read_the_dashboards_without_loss() -> None:
    for board in dashboards().values():
        assert lost_in_grafana(board) == []
    board = dashboards()["swarm"]
    board["panels"][0]["tittle"] = "planted"
    assert lost_in_grafana(board) == ["/panels/0/tittle"]


def test_every_query_is_promql() -> None:
    import promql_parser

    for _, queries in panels():
        for query in queries:
            promql_parser.parse(query)
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("sum by (x (y)")


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
    manifest = tiny(
        "schedule.steps=1000000", "stages.count=2", "checkpoint.every=10", "validation.every=5",
        "batch.sequences_per_microbatch=8",
    )  # fmt: skip
    swarm = Swarm(manifest, shared_place, num_peers=3, min_peers=3)
    try:
        swarm.start_coordinator()
        for stage in (0, 0, 1):
            swarm.start_peer(stage, "--metrics", "127.0.0.1:0")
        swarm.wait_step(12)
        yield swarm
    finally:
        swarm.close()


@pytest.fixture(scope="module")
def prometheus(swarm: Swarm, shared_place: Path) -> Iterator[Prometheus]:
    server = Prometheus(shared_place, (swarm.coordinator_dir / "page").read_text().strip())
    yield server
    server.close()


@pytest.mark.swarm
@with_prometheus
def test_prometheus_finds_all_peers_and_every_panel_has_data(prometheus: Prometheus, swarm: Swarm) -> None:
    until(lambda: len(prometheus.query("up == 1")) == 4, "coordinator and three peers are scraped")
    until(lambda: len(prometheus.query("count_over_time(swarmtrain_peer_step[12s]) >= 11")) == 3, "enough scrapes")

    for title, queries in panels():
        until(
            lambda queries=queries: any(prometheus.query(query) for query in queries),  # type: ignore[misc]
            f"{title} has data",
            timeout_s=60,
        )
    total = prometheus.query(
        "(sum by (name) (rate(swarmtrain_peer_seconds_total[10s]))"
        " + sum by (name) (rate(swarmtrain_peer_idle_seconds_total[10s])))"
    )
    assert len(total) == 3
    for item in total:
        assert float(item["value"][1]) == pytest.approx(1.0, abs=0.05)  # scrapes are not to the millisecond


@pytest.mark.swarm
@with_prometheus
def test_the_metrics_of_real_daemons_are_well_formed_and_exactly_those_of_the_page(swarm: Swarm) -> None:
    page = (swarm.coordinator_dir / "page").read_text().strip()
    found: set[str] = set()
    targets = [f"http://{item['targets'][0]}/" for item in get_json(page + "api/targets")]
    for url in (page, *targets):
        text = get(url + "metrics")[1]
        done = promtool("check", "metrics", text=text)
        assert done.returncode == 0, done.stdout + done.stderr
        found |= set(re.findall(r"^(swarmtrain_[a-z_]+)", text, re.MULTILINE))
        assert not re.search(r"[{,](job|instance)=", text)  # Prometheus's own: it would rename ours
    assert found == known_metrics()
