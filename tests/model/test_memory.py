"""A model that is too large for the machine is an error that says what is needed and what there is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from swarmtrain.errors import HardwareError
from swarmtrain.model import buffers, memory
from swarmtrain.model.buffers import StateLayout
from swarmtrain.model.memory import check_memory
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.presets import preset

WIDE = ("model.hidden_size=16384", "model.num_heads=64", "model.num_kv_heads=64", "model.ffn_size=65536")
HUGE = preset("nano", [*WIDE, "model.num_layers=512"])  # terabytes for each of its stages


def test_the_state_of_a_stage_that_does_not_fit() -> None:
    with pytest.raises(HardwareError, match=r"stage 1 needs about \d+\.\d GB of memory, there are \d+") as found:
        StateLayout(HUGE, 1).empty()
    assert "swarmtrain plan" in found.value.fix


def test_memory_that_linux_would_promise_and_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives out more than there is, and kills the process when that is filled."""
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 1000)
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: SimpleNamespace(free=1000))
    with pytest.raises(HardwareError, match=r"stage 0 needs about .* GB of memory, there are 0\.0 GB"):
        StateLayout(preset("nano"), 0).empty()


def test_memory_that_is_there_and_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a `ulimit`: the machine has it, the process does not get it."""
    monkeypatch.setattr(buffers, "check_memory", lambda needed_bytes, what: None)
    with pytest.raises(HardwareError, match="the state of stage 0 needs"):
        StateLayout(HUGE, 0).empty()


def test_a_model_whose_stages_fit_one_by_one_and_not_together(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = preset("nano")
    largest = max(StateLayout(manifest, stage).num_bytes for stage in range(manifest.stages.count))
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": largest + 1)
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    for stage in range(manifest.stages.count):
        StateLayout(manifest, stage).empty()
    with pytest.raises(HardwareError, match="training this model needs"):
        ReferenceTrainer(manifest)


def test_control_what_fits_is_not_refused() -> None:
    check_memory(1 << 20, "a small thing")
