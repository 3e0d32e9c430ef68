"""`swarmtrain local --kill-every`: the promise on the first page of the README, on a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmtrain.checkpoint import open_checkpoint

from .comparison import assert_same_weights
from .harness import swarmtrain, tiny

pytestmark = pytest.mark.swarm


# All peers serve when the first step is applied, and the time begins there: 39 more steps take seconds.
KILL_EVERY = "0.2s"
REPORTED = ("step", "loss", "tokens", "grad_norm", "lr")


DELAYED = ("schedule.delay=1", "schedule.predict=true", "optimizer.kind=muon", "optimizer.learning_rate=0.02")


@pytest.mark.parametrize("changes", [(), DELAYED], ids=["one step open", "two steps open"])
def test_peers_are_killed_again_and_again_and_steps_and_bits_are_those_of_train(
    place: Path, changes: tuple[str, ...]
) -> None:
    manifest = tiny("stages.count=2", "schedule.steps=40", *changes)
    (place / "run.toml").write_text(manifest.canonical())
    arguments = ["--peers", "4", "--kill-every", KILL_EVERY, "--state-dir", str(place / "local"), "--json"]
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
    trained = swarmtrain("train", str(place / "run.toml"), "--threads", "1", "--json", "--out", str(place / "train"))
    *theirs, end = [json.loads(line) for line in trained.stdout.splitlines()]
    # A step is said again if the run went back: whoever was to stay behind may not have served yet.
    ours = {said[number]["step"]: said[number] for number in steps}
    assert [[ours[step][key] for key in REPORTED] for step in sorted(ours)] == [
        [report[key] for key in REPORTED] for report in theirs
    ]
    assert len(theirs) == manifest.schedule.steps
    assert said[-1]["done"]
    assert said[-1]["val_loss"] == end["val_loss"]
    assert_same_weights(open_checkpoint(Path(said[-1]["checkpoint"])), open_checkpoint(Path(end["checkpoint"])))
    assert swarmtrain("audit", str(place / "local")).returncode == 0
