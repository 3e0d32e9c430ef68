"""What the model writes at a checkpoint: made by a process of its own, kept beside the checkpoints, bounded."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.checkpoint import save_states
from swarmtrain.cli import samples
from swarmtrain.cli.samples import KEPT, MAX_BYTES, SampleWriter
from swarmtrain.coordinator.downloads import Downloads
from swarmtrain.model.state import StageState
from swarmtrain.observe.events import CheckpointWritten, PeerJoined
from swarmtrain.run.presets import preset
from swarmtrain.simulated.schedule import TINY

from .programs import DEADLINE_S

MANIFEST = preset("nano", [*TINY, "stages.count=2", "model.num_layers=2"])


def wait(writer: SampleWriter) -> None:
    """Until the sample under way is made or given up."""
    assert writer._working.acquire(timeout=DEADLINE_S)
    writer._working.release()


def test_a_checkpoint_gets_its_sample_and_the_page_shows_it(tmp_path: Path) -> None:
    states = [StageState(MANIFEST, stage) for stage in range(2)]
    path = save_states(tmp_path / "checkpoints", states, keep=1)
    writer = SampleWriter(tmp_path, 5)
    writer(PeerJoined("p", 0, 0))  # nothing to sample
    assert not (tmp_path / "samples").exists()
    writer(CheckpointWritten(0, str(path)))
    wait(writer)
    assert len((tmp_path / "samples" / f"{path.name}.txt").read_text()) > 0
    (listed,) = Downloads(tmp_path / "checkpoints").listed()
    assert listed["sample"]


class Said:
    """Instead of the program: a process that prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        real = subprocess.Popen
        self.started: list[Any] = []

        def start(command: list[str], **options: Any) -> Any:
            self.started.append(real([sys.executable, "-c", code], **options))
            return self.started[-1]

        monkeypatch.setattr(samples.subprocess, "Popen", start)


def test_samples_are_bounded_in_size_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Said(monkeypatch, "import json; print(json.dumps({'text': 'x' * 100000}))")
    writer = SampleWriter(tmp_path, 5)
    for step in range(KEPT + 3):
        writer(CheckpointWritten(step, f"/somewhere/step-{step:08d}"))
        wait(writer)
    kept = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert kept == [f"step-{step:08d}.txt" for step in range(3, KEPT + 3)]
    assert (tmp_path / "samples" / kept[0]).stat().st_size == MAX_BYTES


@pytest.mark.parametrize("code", ["print('no json')", "raise SystemExit(3)", "print('[]')"])
def test_a_sample_that_fails_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    Said(monkeypatch, code)
    writer = SampleWriter(tmp_path, 5)
    writer(CheckpointWritten(1, "/somewhere/step-00000001"))
    wait(writer)
    assert not list(tmp_path.glob("samples/*.txt"))


def test_one_at_a_time_and_none_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, "import time; time.sleep(600)")
    writer = SampleWriter(tmp_path, 5)
    writer(CheckpointWritten(1, "/somewhere/step-00000001"))
    ends_at = time.monotonic() + DEADLINE_S
    while writer._process is None and time.monotonic() < ends_at:
        time.sleep(0.01)
    writer(CheckpointWritten(2, "/somewhere/step-00000002"))  # is left out
    writer.close()
    wait(writer)
    assert len(said.started) == 1
    assert said.started[0].poll() is not None
