"""The dashboards as files: the program's output, known to Grafana's own types and schema, queries that parse."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from .dashboards import dashboards, panels
from .prometheus import DOCKER, RULES
from .web import known_metrics

SCHEMA = json.loads((Path(__file__).parent / "grafana" / "schema.json").read_text())


def dashboards_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", DOCKER / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboards"] = module
    spec.loader.exec_module(module)
    return module


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


def outside_schema(board: dict[str, Any]) -> list[str]:
    """Where a dashboard, or what a panel's kind lets it say, is not what Grafana's schema allows."""
    custom, options = (SCHEMA["properties"][name]["properties"] for name in ("custom", "options"))
    parts: list[tuple[str, dict[str, Any], Any]] = [("", SCHEMA["properties"]["dashboard"], board)]
    for number, panel in enumerate(board["panels"]):
        parts.append((f"/panels/{number}/options", options[panel["type"]], panel["options"]))
        if "custom" in panel["fieldConfig"]["defaults"]:
            place = f"/panels/{number}/fieldConfig/defaults/custom"
            parts.append((place, custom[panel["type"]], panel["fieldConfig"]["defaults"]["custom"]))
    return [fault for place, schema, item in parts for fault in _faults(place, schema, item)]


def _faults(place: str, schema: dict[str, Any], item: Any) -> Iterator[str]:
    validator = jsonschema.Draft7Validator({**schema, "definitions": SCHEMA["definitions"]})
    for error in validator.iter_errors(item):
        for cause in error.context or [error]:  # a panel may be a row: what neither may be
            yield "/".join([place, *map(str, cause.absolute_path)]) + f": {cause.message}"


def test_grafanas_own_schema_allows_the_dashboards() -> None:
    for board in dashboards().values():
        assert outside_schema(board) == []


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("tittle",), "planted", "'tittle' was unexpected"),
        (("panels", 0, "tittle"), "planted", "'tittle' was unexpected"),
        (("panels", 0, "fieldConfig", "defaults", "custm"), {}, "'custm' was unexpected"),
        (("panels", 0, "fieldConfig", "defaults", "thresholds", "mode"), "relative", "'relative' is not one of"),
        (("panels", 0, "options", "colourMode"), "value", "'colourMode' was unexpected"),
        (("panels", 0, "options", "reduceOptions", "calcs"), "last", "'last' is not of type 'array'"),
        (("panels", 6, "options", "legend", "placement"), "left", "'left' is not one of"),
        (("panels", 6, "fieldConfig", "defaults", "custom", "fillOpacty"), 8, "'fillOpacty' was unexpected"),
        (("panels", 6, "fieldConfig", "defaults", "custom", "stacking", "mode"), "all", "'all' is not one of"),
    ],
)
def test_the_schema_sees_planted_faults(path: tuple[str | int, ...], value: Any, named: str) -> None:
    board = copy.deepcopy(dashboards()["swarm"])
    assert [board["panels"][number]["type"] for number in (0, 6)] == ["stat", "timeseries"]
    part: Any = board
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert any(named in fault for fault in outside_schema(board)), outside_schema(board)


def test_every_query_is_promql() -> None:
    import promql_parser

    for _, queries in panels():
        for query in queries:
            promql_parser.parse(query)
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("sum by (x (y)")
