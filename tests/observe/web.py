"""Reading what daemons serve over HTTP."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from swarm.harness import REPOSITORY

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(url: str, *, timeout_s: float = 90.0) -> tuple[int, str, dict[str, str]]:
    """Status, body, headers (lower case)."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return answer.status, answer.read().decode(), {key.lower(): value for key, value in answer.headers.items()}


def get_json(url: str) -> Any:
    return json.loads(get(url)[1])


def scrape(url: str) -> Samples:
    """Every sample by name and labels, parsed by Prometheus's own client library."""
    families = text_string_to_metric_families(get(url)[1])
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def total(samples: Samples, name: str) -> float:
    return sum(number for (known, _), number in samples.items() if known == name)


def known_metrics() -> set[str]:
    """Every metric on the page of docs/observe.md; test_prometheus.py compares that page with real daemons."""
    section = (REPOSITORY / "docs" / "observe.md").read_text().split("## Metrics")[1]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return {f"swarmtrain_{name}" for row in rows for name in re.findall(r"`([a-z_]+)(?:\{[a-z,]+\})?`", row)}
