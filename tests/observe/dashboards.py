"""The committed dashboards, as tests look at them."""

from __future__ import annotations

import json
from typing import Any

from .prometheus import DOCKER


def dashboards() -> dict[str, dict[str, Any]]:
    """By name."""
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
    """A query with all stages and peers chosen."""
    return expr.replace("$__rate_interval", "10s").replace("$stage", ".*").replace("$name", ".*")


def variables() -> list[tuple[str, str]]:
    """(dashboard and variable, its query)."""
    return [
        (f"{name}: ${variable['name']}", variable["query"]["query"])
        for name, board in dashboards().items()
        for variable in board["templating"]["list"]
    ]
