"""What a coordinator finds in its state directory when it starts: it goes on with its own data, or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.checkpoint import save_states
from swarmtrain.coordinator.checkpointing import Checkpoints
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.coordinator.journal import DATA_DIGEST, Decision, Journal
from swarmtrain.errors import DataError
from swarmtrain.model.state import StageState
from swarmtrain.observe.events import Events
from swarmtrain.run.presets import preset

from .contexts import bare_context

MANIFEST = preset("nano")


def open_with(directory: Path, data_digest: str) -> None:
    """Open the run in `directory` as a daemon does that finds these data, and close it again."""
    sampler = cast(Any, SimpleNamespace(data_digest=data_digest))
    daemon = CoordinatorDaemon(CoordinatorOptions(MANIFEST, directory), Events(), lambda manifest: sampler)
    with contextlib.ExitStack() as stack:
        daemon._open(cast(Any, stack))


def noted(directory: Path) -> dict[str, str | None]:
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        return {key: journal.get(key) for key in (DATA_DIGEST, "manifest", "log_head")}


def test_a_run_is_not_resumed_with_other_data(tmp_path: Path) -> None:
    open_with(tmp_path, "a" * 64)
    open_with(tmp_path, "a" * 64)  # control
    before = noted(tmp_path)
    with pytest.raises(DataError, match="other data than embedded holds now") as caught:
        open_with(tmp_path, "b" * 64)
    assert "put the data back" in caught.value.fix
    assert noted(tmp_path) == before
    open_with(tmp_path, "a" * 64)


def test_a_journal_of_an_older_version_takes_note_of_its_data(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.set("manifest", MANIFEST.canonical())
    open_with(tmp_path, "a" * 64)
    assert noted(tmp_path)[DATA_DIGEST] == "a" * 64
    with pytest.raises(DataError):
        open_with(tmp_path, "b" * 64)


def test_a_resumed_run_knows_which_peers_took_part_and_their_names(tmp_path: Path) -> None:
    daemon = CoordinatorDaemon(CoordinatorOptions(MANIFEST, tmp_path), Events(), cast(Any, None))
    entries = {0: {("a", "1"): [0, 1]}}
    with Journal(tmp_path / "journal.sqlite") as daemon.journal:
        daemon.journal.decide(Decision(0, 1, 2.5, 1.0, 1.0, 0.1, (("x", 1.0),), entries, {0: 2.5}), {"a": "anna"})
        daemon.context = bare_context(MANIFEST, stages=[])
        daemon.checkpoints = cast(Any, SimpleNamespace(step=0))
        daemon._resume()
    assert daemon.context.tally.contributed == {"a": 2}
    assert daemon.context.tally.names == {"a": "anna"}


def test_a_checkpoint_of_other_data_is_refused_even_if_the_journal_does_not_know_its_own(tmp_path: Path) -> None:
    states = [StageState(MANIFEST, stage) for stage in range(MANIFEST.stages.count)]
    save_states(tmp_path, states, keep=1, data_digest="a" * 64)
    context = bare_context(MANIFEST, journal=SimpleNamespace(num_steps=lambda: 0))
    Checkpoints(context, tmp_path, data_digest="a" * 64)
    with pytest.raises(DataError, match="other data"):
        Checkpoints(context, tmp_path, data_digest="b" * 64)
