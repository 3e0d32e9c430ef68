"""The one trained run of these tests: `swarmtrain train nano`, until it has learned something."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from .programs import run

NUM_STEPS = 24
# Less than the preset's own: a fourth of the batch, and a learning rate that is there at once.
SETTINGS = ("batch.microbatches_per_step=1", "checkpoint.every=6", "schedule.warmup_steps=2")


@dataclass(frozen=True)
class NanoRun:
    """A finished run: its --out directory and what it printed."""

    out: Path
    printed: str


def arguments(out: Path) -> list[object]:
    """Of the run, with the verb."""
    settings = [item for key in SETTINGS for item in ("--set", key)]
    return ["train", "nano", "--steps", NUM_STEPS, "--threads", 1, "--out", out, "--json", *settings]


@pytest.fixture(scope="session")
def nano_run(tmp_path_factory: pytest.TempPathFactory) -> NanoRun:
    """The finished run."""
    out = tmp_path_factory.mktemp("nano") / "run"
    trained = run(*arguments(out))
    assert trained.code == 0, trained.err
    return NanoRun(out, trained.out)
