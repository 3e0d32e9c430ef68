"""`swarmtrain local --kill-every`: the promise on the first page of the README, on a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmtrain.audit import audit
from swarmtrain.checkpoint import open_checkpoint

from .comparison import References, assert_same_weights
from .harness import swarmtrain, tiny

pytestmark = pytest.mark.swarm


def test_peers_are_killed_again_and_again_and_the_bits_are_the_references(place: Path, reference: References) -> None:
    manifest = tiny("stages.count=2", "schedule.steps=50")
    (place / "run.toml").write_text(manifest.canonical())
    arguments = ["--peers", "4", "--kill-every", "1s", "--state-dir", str(place / "local"), "--json"]
    done = swarmtrain("local", str(place / "run.toml"), *arguments, environment={"XDG_STATE_HOME": str(place)})
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    kills = [number for number, item in enumerate(said) if item.get("event") == "killed"]
    steps = [number for number, item in enumerate(said) if "loss" in item]
    assert [number for number in kills if steps[0] < number < steps[-1]], "nobody was killed while it trained"
    assert any(item.get("event") in ("peer_doubted", "peer_lost") for item in said)  # the run saw it, too
    logs = {path.stem for path in (place / "local").glob("*.log")}
    assert "coordinator" in logs
    assert len(logs) > 5, "every daemon has a log of its own, the killed and the new ones"
    assert {said[number]["victim"] for number in kills} <= logs
    expected = reference(manifest)
    assert_same_weights(open_checkpoint(Path(said[-1]["checkpoint"])), expected.checkpoint)
    # A step is said again if the run went back: whoever was to stay behind may not have served yet.
    losses = {said[number]["step"]: said[number]["loss"] for number in steps}
    assert [losses[step] for step in sorted(losses)] == expected.losses
    assert audit(place / "local").passed
