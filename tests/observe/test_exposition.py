"""`/metrics` of both daemons, for strict readers: OpenMetrics' own parser, and a checker of the text format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from swarmtrain.observe.cost import Cost
from swarmtrain.observe.http import Request
from swarmtrain.observe.metrics import exposition, peer_families, run_families
from swarmtrain.observe.service import daemon_routes
from swarmtrain.run.presets import preset
from swarmtrain.simulated.schedule import TINY
from swarmtrain.simulated.swarm import SimulatedSwarm

from .exposition import faults

OPEN_METRICS = "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"
EVIL = 'a"b\\c\nd} 1 # EOF\u2028'
Families = Callable[[Any], Iterator[Metric]]
Shown = tuple[Families, dict[str, Any]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """Snapshots of the daemons of a simulated swarm, also of a coordinator before its first step, and with names and
    numbers that nobody should have."""
    manifest = preset(
        "nano", [*TINY, "stages.count=2", "model.num_layers=2", "schedule.steps=50", "validation.every=2"]
    )
    with SimulatedSwarm(manifest, seed="exposition", root=tmp_path_factory.mktemp("swarm")) as swarm:
        swarm.start_coordinator(min_peers=2)
        young = swarm.coordinator.status()
        for stage in range(2):
            swarm.start_peer(f"peer{stage}", stage)
        swarm.until(lambda: swarm.step >= 5, "step 5")
        run, peer = swarm.coordinator.status(), swarm.peers[0].status()
    evil = {
        **run,
        "last": {**run["last"], "loss": math.nan, "grad_norm": math.inf, "lr": 1e-12, "tokens_per_s": -math.inf},
        "contributors": [{**item, "name": EVIL} for item in run["contributors"]],
    }
    return {
        "young": (run_families, young),
        "run": (run_families, run),
        "evil": (run_families, evil),
        "peer": (peer_families, peer),
    }


@pytest.mark.parametrize("which", ["young", "run", "evil", "peer"])
def test_metrics_parse_strictly_in_both_formats_and_say_the_same(shown: dict[str, Shown], which: str) -> None:
    open_text, kind = exposition(*shown[which], OPEN_METRICS)
    assert kind.startswith("application/openmetrics-text")
    assert open_text.endswith(b"# EOF\n")
    strict = {
        (sample.name, *sample.labels.items()): sample.value
        for family in parse_open_metrics(open_text.decode())
        for sample in family.samples
    }
    plain, kind = exposition(*shown[which])
    assert kind.startswith("text/plain; version=0.0.4")
    assert faults(plain.decode()) == []
    lenient = {
        (sample.name, *sample.labels.items()): sample.value
        for family in parse_text(plain.decode())
        for sample in family.samples
    }
    assert strict.keys() == lenient.keys()
    assert len(strict) > 50
    for key, value in strict.items():
        assert value == lenient[key] or math.isnan(value)


def test_who_asks_for_openmetrics_gets_it_and_a_browser_does_not(shown: dict[str, Shown]) -> None:
    families, snapshot = shown["run"]
    metrics = daemon_routes(lambda: snapshot, families, Cost())["/metrics"]
    for accept, wanted in (
        (OPEN_METRICS, "application/openmetrics-text"),
        ("application/openmetrics-text; version=;;=,", "application/openmetrics-text"),
        ("text/html,*/*", "text/plain"),
        ("", "text/plain"),
    ):
        answer: Any = metrics(Request("/metrics", {}, {"accept": accept}))
        assert answer.content_type.startswith(wanted)


def test_contributors_have_names_and_counts_that_differ(shown: dict[str, Shown]) -> None:
    text = exposition(*shown["run"])[0].decode()
    samples = [s for family in parse_text(text) for s in family.samples if s.name.endswith("contributor_microbatches")]
    assert {sample.labels["name"] for sample in samples} == {"peer0", "peer1"}
    credit = {s.name: s.value for family in parse_text(exposition(*shown["peer"])[0].decode()) for s in family.samples}
    told = credit["swarmtrain_peer_credit_microbatches"]
    assert 0 < told <= max(sample.value for sample in samples)


PLANTED = {
    "a counter without _total": "# HELP a b\n# TYPE a counter\na 1\n",
    "a gauge with _total": "# HELP a_total b\n# TYPE a_total gauge\na_total 1\n",
    "a duplicate": '# HELP a b\n# TYPE a gauge\na{x="1"} 1\na{x="1"} 2\n',
    "a family twice": "# HELP a b\n# TYPE a gauge\na 1\n# HELP b b\n# TYPE b gauge\nb 1\n# HELP a b\n# TYPE a gauge\n",
    "a sample elsewhere": "# HELP a b\n# TYPE a gauge\nb 1\n",
    "no type": "# HELP a b\na 1\n",
    "no help": "# TYPE a gauge\na 1\n",
    "a quote": '# HELP a b\n# TYPE a gauge\na{x="1"2"} 1\n',
    "a unit": "# HELP a_ms b\n# TYPE a_ms gauge\na_ms 1\n",
    "a negative counter": "# HELP a_total b\n# TYPE a_total counter\na_total -1\n",
    "no number": "# HELP a b\n# TYPE a gauge\na nan?\n",
    "no end": "# HELP a b\n# TYPE a gauge\na 1",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_checker_sees_planted_faults(fault: str) -> None:
    assert faults(PLANTED[fault])
    assert faults("# HELP a b\n# TYPE a gauge\na 1\n") == []


def test_openmetrics_parser_is_strict(shown: dict[str, Shown]) -> None:
    """It refuses what is refused in the project's own test data: no end, duplicates, a counter without `_total`."""
    text = exposition(*shown["run"], OPEN_METRICS)[0].decode()
    for broken in (
        text.removesuffix("# EOF\n"),
        text.replace("# EOF\n", "swarmtrain_run_step 1\n# EOF\n"),
        text.replace("swarmtrain_run_tokens_total ", "swarmtrain_run_tokens "),
        text + "more\n",
    ):
        with pytest.raises(ValueError, match=r".*"):
            list(parse_open_metrics(broken))
