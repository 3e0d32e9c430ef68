"""Dashboards as data, and how they become what Grafana loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "prometheus"}


@dataclass(frozen=True)
class Query:
    """PromQL and how its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture. `width` is in 24ths of the page."""

    title: str
    queries: Sequence[Query]
    about: str
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    thresholds: Sequence[tuple[float | None, str]] = ()
    mappings: Sequence[tuple[str, str]] = ()
    decimals: int | None = None  # digits behind the point; None: as Grafana chooses


@dataclass(frozen=True)
class Dashboard:
    """One file."""

    uid: str
    title: str
    about: str
    panels: Sequence[Panel]
    variables: Sequence[tuple[str, str]] = field(default_factory=tuple)  # name, label_values query

    def as_json(self) -> dict[str, Any]:
        """What Grafana loads."""
        return {
            "uid": f"swarmtrain-{self.uid}",
            "title": self.title,
            "description": self.about,
            "tags": ["swarmtrain"],
            "editable": True,
            "graphTooltip": 1,
            "refresh": "5s",
            "schemaVersion": 39,
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [_variable(name, query) for name, query in self.variables]},
            "links": [_links()],
            "panels": _placed(self.panels),
        }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "variable"},
        "refresh": 2,
        "sort": 3,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _links() -> dict[str, Any]:
    return {
        "title": "swarmtrain",
        "type": "dashboards",
        "tags": ["swarmtrain"],
        "asDropdown": False,
        "includeVars": False,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Left to right, row after row."""
    placed, x, y, row = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > 24:
            x, y, row = 0, y + row, 0
        placed.append({"id": number, "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height}, **_panel(panel)})
        x, row = x + panel.width, max(row, panel.height)
    return placed


def _panel(panel: Panel) -> dict[str, Any]:
    steps = [{"color": colour, "value": value} for value, colour in panel.thresholds or ((None, "green"),)]
    options = [{"type": "value", "options": {key: {"text": text}}} for key, text in panel.mappings]
    custom = {"fillOpacity": 60 if panel.stacked else 8, "lineWidth": 1, "showPoints": "never", "spanNulls": False}
    custom |= {"stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "mappings": options}
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.kind == "bargauge":
        defaults |= {"min": 0, "color": {"mode": "continuous-GrYlRd"}}  # from 0, or the least contributor has no bar
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend,
             "range": panel.kind == "timeseries", "instant": panel.kind != "timeseries"}
            for i, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _options(kind: str) -> dict[str, Any]:
    if kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if kind == "bargauge":
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "gradient", "showUnfilled": True}
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {
        "reduceOptions": reduce,
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
    }
