"""Every alert of the committed rules fires in a real Prometheus when its cause is produced in a real swarm.

The rules are the committed ones with a second for every minute (prometheus.in_seconds): nothing else is changed. One
swarm for most alerts, in the order of the tests: each leaves it as the next one needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm.conftest import short_directory
from swarm.faults import hold, release, start_armed
from swarm.harness import PACE, Swarm, tiny, until

from swarmtrain.errors import ExitCode

from .prometheus import RULES, Prometheus, in_seconds, promtool, with_prometheus

pytestmark = [pytest.mark.swarm, with_prometheus]

METRICS = ("--metrics", "127.0.0.1:0")
PRODUCED = {"PeerDiverged", "ThroughputHalved", "StageEmpty", "NoAppliedStep", "CoordinatorDown", "LossNotFinite"}


@pytest.fixture(scope="module")
def swarm(shared_place: Path) -> Iterator[Swarm]:
    """Two peers of the first stage, one of the last."""
    manifest = tiny("schedule.steps=1000000", "stages.count=2")
    swarm = Swarm(manifest, shared_place, num_peers=3, min_peers=3, pace=PACE)
    try:
        swarm.start_coordinator()
        for stage in (0, 0, 1):
            swarm.start_peer(stage, *METRICS)
        swarm.wait_step(2)
        yield swarm
    finally:
        swarm.close()


@pytest.fixture(scope="module")
def prometheus(swarm: Swarm, shared_place: Path) -> Iterator[Prometheus]:
    yield from watching(swarm, shared_place)


def watching(swarm: Swarm, place: Path) -> Iterator[Prometheus]:
    server = Prometheus(place, (swarm.coordinator_dir / "page").read_text().strip())
    try:
        yield server
    finally:
        server.close()


def test_every_alert_has_its_cause_below(tmp_path: Path) -> None:
    text = RULES.read_text()
    assert set(re.findall(r"- alert: (\w+)", text)) == PRODUCED
    shorter = in_seconds(text)
    assert re.findall(r"[0-9]+[mh]\b", shorter) == []
    assert len(re.findall(r"[0-9]+s\b", shorter)) == len(re.findall(r"[0-9]+[mh]\b", text)) >= 6
    (tmp_path / "rules.yml").write_text(shorter)
    assert promtool("check", "rules", tmp_path / "rules.yml").returncode == 0


def test_a_peer_whose_state_is_damaged(prometheus: Prometheus, swarm: Swarm) -> None:
    until(lambda: len(prometheus.query("up == 1")) == 4, "coordinator and three peers are scraped")
    assert not prometheus.firing()
    # With two others, who are the majority; and not in one of its first steps, which it only follows: a newcomer whose
    # state is wrong is not let in at all.
    victim = start_armed(swarm, 0, "before-apply:15:corrupt")
    assert prometheus.wait_firing("PeerDiverged", timeout_s=180)["labels"]["severity"] == "warning"
    assert [event["peer"] for event in swarm.events("peer_diverged")] == [victim.status()["peer"]]
    victim.end()


def test_quick_peers_die_and_one_with_a_slow_line_is_left(prometheus: Prometheus, swarm: Swarm) -> None:
    until(
        lambda: bool(prometheus.query("count_over_time(swarmtrain_run_tokens_per_second[60s] offset 5s) > 5")),
        "there is something to compare with",
    )
    slow = swarm.start_peer(0, "--max-up", "40kbit", *METRICS)
    swarm.wait_serving(slow)
    for quick in swarm.peers[:2]:
        quick.kill()
    fired = prometheus.wait_firing("ThroughputHalved", timeout_s=180)
    assert "less than half" in fired["annotations"]["summary"]
    assert "StageEmpty" not in prometheus.firing()  # it is slow, and goes on


def test_the_only_peer_of_a_stage_dies_and_then_the_coordinator(prometheus: Prometheus, swarm: Swarm) -> None:
    assert not prometheus.firing().keys() & {"StageEmpty", "CoordinatorDown"}
    swarm.peers[2].kill()
    assert prometheus.wait_firing("StageEmpty", timeout_s=180)["labels"]["stage"] == "1"
    prometheus.wait_firing("NoAppliedStep", timeout_s=180)
    swarm.coordinator.kill()
    prometheus.wait_firing("CoordinatorDown", timeout_s=180)


@pytest.fixture
def doomed() -> Iterator[Swarm]:
    """With this learning rate the second step has no finite gradients. Its last stage is held."""
    for place in short_directory():
        manifest = tiny("schedule.steps=100", "stages.count=2", "optimizer.learning_rate=1000")
        swarm = Swarm(manifest, place, num_peers=2)
        try:
            swarm.start_coordinator()
            last = swarm.start_peer(1, *METRICS)
            swarm.wait_serving(last)
            hold(last)
            swarm.start_peer(0, *METRICS)
            yield swarm
        finally:
            swarm.close()


@pytest.fixture
def its_prometheus(doomed: Swarm) -> Iterator[Prometheus]:
    yield from watching(doomed, doomed.directory)


def test_training_that_diverges(doomed: Swarm, its_prometheus: Prometheus) -> None:
    until(lambda: len(its_prometheus.query("up == 1")) == 3, "all are scraped: an increase is one over something")
    release(doomed.peers[0])
    fired = its_prometheus.wait_firing("LossNotFinite", timeout_s=180)
    assert "not finite" in fired["annotations"]["summary"]
    doomed.wait_until(lambda: not doomed.coordinator.is_running, "the run has ended")
    assert doomed.coordinator.process.poll() == ExitCode.DIVERGED
    assert len(doomed.losses()) == 1
