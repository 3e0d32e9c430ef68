"""A real swarm, seen: metrics whose parts add up, discovery, API, live events, and why a peer is idle.

The other causes of idleness are in tests/simulated/test_seen.py. One swarm of two stages for all tests of this file, in
their order: each test leaves it as the next one needs it.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm.harness import PACE, Daemon, Swarm, ask_daemon, swarmtrain, tiny, until

from swarmtrain.cli.status_text import status_lines
from swarmtrain.observe.activity import Cause

from .web import Samples, get, get_json, scrape, total, value

pytestmark = pytest.mark.swarm

METRICS = ("--metrics", "127.0.0.1:0")


@pytest.fixture(scope="module")
def swarm(shared_place: Path) -> Iterator[Swarm]:
    """The coordinator, and a peer of the last stage only. No checkpoint: what dies with a stage's last peer is gone."""
    manifest = tiny("schedule.steps=1000000", "stages.count=2")
    swarm = Swarm(manifest, shared_place, num_peers=1, min_peers=1, pace=PACE)
    try:
        swarm.start_coordinator()
        swarm.start_peer(1, *METRICS, name="last")
        yield swarm
    finally:
        swarm.close()


@pytest.fixture(scope="module")
def page(swarm: Swarm) -> str:
    return (swarm.coordinator_dir / "page").read_text().strip()


def peer(swarm: Swarm, name: str) -> Daemon:
    return [daemon for daemon in swarm.peers if daemon.name == name][-1]


def idle_for(daemon: Daemon, cause: Cause, reason: str = "", *, timeout_s: float = 90.0) -> dict[str, Any]:
    """Wait until the peer says that it is idle for this cause, and in words; its snapshot at that moment."""
    found: dict[str, Any] = {}

    def is_so() -> bool:
        found.update(daemon.status())
        return found["cause"] == cause and reason in found["reason"] and bool(found["next"])

    until(is_so, f"{daemon.name} is idle because of {cause} {reason}", timeout_s=timeout_s)
    said = "\n".join(status_lines(found))  # what the verb prints
    assert found["reason"]
    assert found["reason"] in said
    assert found["next"] in said
    return found


def spent(samples: Samples) -> float:
    """All parts of a peer's time together."""
    return total(samples, "swarmtrain_peer_seconds_total") + total(samples, "swarmtrain_peer_idle_seconds_total")


def test_no_lease(swarm: Swarm) -> None:
    last = peer(swarm, "last")
    swarm.wait_serving(last)
    status = idle_for(last, Cause.NO_LEASE, "no work has come: stage 0 has no peers")
    shown = swarmtrain("status", "--state-dir", str(last.state_dir))
    assert "because no work has come: stage 0 has no peers" in shown.stdout
    assert status["since"] <= time.time() - 1.5


def test_the_coordinator_says_for_what_it_waits(swarm: Swarm, page: str) -> None:
    status = get_json(page + "api/status")
    assert (status["state"], status["reason"]) == ("waiting", "stage 0 has no peers")
    assert status == {**status, **{key: status[key] for key in ("since", "next", "invite")}}
    samples = scrape(page + "metrics")
    assert value(samples, "swarmtrain_run_peers", stage="0", state="serving") == 0
    assert value(samples, "swarmtrain_run_peers", stage="1", state="serving") == 1
    assert value(samples, "swarmtrain_daemon_state", state="waiting") == 1


def test_the_parts_of_a_peers_time_add_up_to_the_wall_clock(swarm: Swarm) -> None:
    """One peer per stage: both have work in every step. The clock is the daemon's own, read with the parts."""
    peers = (swarm.start_peer(0, *METRICS, name="first"), peer(swarm, "last"))
    swarm.wait_step(2)
    urls = [swarm.wait(daemon, "phase_reached", phase="metrics")["detail"] for daemon in peers]
    before = [scrape(url) for url in urls]
    clock = "swarmtrain_daemon_time_seconds"
    until(lambda: value(scrape(urls[0]), clock) > value(before[0], clock) + 3.0, "three seconds have passed")
    swarm.wait_step(swarm.coordinator.status()["step"] + 4)
    after = [scrape(url) for url in urls]
    for old, new in zip(before, after, strict=True):
        assert spent(new) - spent(old) == pytest.approx(value(new, clock) - value(old, clock), rel=0.02)
        started = value(new, "swarmtrain_daemon_start_time_seconds")
        assert spent(new) <= value(new, clock) - started  # nothing is counted twice
        computed = value(new, "swarmtrain_peer_seconds_total", part="compute")
        assert computed == pytest.approx(total(new, "swarmtrain_peer_compute_seconds_total"), rel=0.1, abs=0.1)
        finished = [value(samples, "swarmtrain_peer_microbatches_total", result="finished") for samples in (old, new)]
        assert finished[1] >= finished[0] + 4 * 6


def test_prometheus_finds_the_peers_through_the_coordinator(swarm: Swarm, page: str) -> None:
    targets = get_json(page + "api/targets")
    names = {item["labels"]["name"] for item in targets}
    assert names == {"first", "last"}
    for item in targets:
        assert set(item) == {"targets", "labels"}
        samples = scrape(f"http://{item['targets'][0]}/metrics")
        assert value(samples, "swarmtrain_peer_stage") == int(item["labels"]["stage"])
        health = f"http://{item['targets'][0]}/healthz"
        assert get(health)[1] == "serving\n"


def test_status_verb_api_and_metrics_show_the_same_numbers(swarm: Swarm, page: str) -> None:
    def agree() -> bool:
        first, samples, last = get_json(page + "api/status"), scrape(page + "metrics"), swarm.coordinator.status()
        if first["step"] != last["step"]:
            return False
        assert value(samples, "swarmtrain_run_step") == first["step"]
        assert value(samples, "swarmtrain_run_loss") == first["last"]["loss"] == last["last"]["loss"]
        assert first["last"]["loss"] == swarm.losses()[first["step"] - 1]
        assert sum(item["microbatches"] for item in first["contributors"]) == 6 * 2 * first["step"]
        return True

    until(agree, "three readings within one step")


def test_the_live_stream_tells_of_steps_and_repeats_nothing(swarm: Swarm, page: str) -> None:
    def read(wanted: Callable[[list[tuple[str, Any]]], bool], last_id: str = "0") -> list[tuple[str, Any]]:
        request = urllib.request.Request(page + "api/live", headers={"Last-Event-ID": last_id})
        found: list[tuple[str, Any]] = []
        with urllib.request.urlopen(request, timeout=90) as stream:
            name = ""
            for raw in stream:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    found.append((name, json.loads(line[6:])))
                    if wanted(found):
                        return found
        raise AssertionError("the stream ended")

    found = read(lambda items: sum(name == "points" for name, _ in items) >= 2)
    curve = next(item for name, item in found if name == "curve")
    steps = [point["step"] for point in curve] + [
        point["step"] for name, item in found if name == "points" for point in item
    ]
    assert steps == sorted(set(steps))
    numbers = [item["number"] for name, item in found if name == "happened"]
    assert numbers
    again = read(lambda items: items[-1][0] == "status", last_id=str(numbers[-1]))
    assert all(item["number"] > numbers[-1] for name, item in again if name == "happened")


def test_the_page_cannot_be_made_to_do_anything(swarm: Swarm, page: str) -> None:
    for path in ("api/status", "api/live", ""):
        request = urllib.request.Request(page + path, data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == 405
    headers = get(page)[2]
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]


def test_events_are_in_the_state_directory(swarm: Swarm) -> None:
    for daemon in (swarm.coordinator, peer(swarm, "first")):
        said = [{key: item for key, item in event.items() if key != "from"} for event in list(daemon.events)]
        kept = [json.loads(line) for line in (daemon.state_dir / "events.jsonl").read_text().splitlines()]
        assert kept[: len(said) - 3] == said[: len(said) - 3]


def test_paused(swarm: Swarm) -> None:
    first = peer(swarm, "first")
    ask_daemon(first.state_dir, "pause")
    status = idle_for(first, Cause.PAUSED, "paused by its owner")
    shown = swarmtrain("status", "--state-dir", str(first.state_dir))
    assert shown.returncode == 0
    assert "paused since" in shown.stdout
    assert "paused by its owner" in shown.stdout
    assert status["next"] in shown.stdout
