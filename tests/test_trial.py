"""`swarmtrain doctor --preset`: one stage is built and tried here; what does not fit is refused before it is built."""

from __future__ import annotations

import os

import pytest
import torch
from cli.programs import call

from swarmtrain import trial
from swarmtrain.errors import ExitCode, HardwareError, UsageError
from swarmtrain.model.peak import measured_peak
from swarmtrain.native.bf16 import require_bf16
from swarmtrain.run.presets import preset
from swarmtrain.trial import try_stage


def test_a_stage_is_tried_and_what_it_holds_is_what_was_told() -> None:
    notes: list[str] = []
    manifest = preset("micro", ["model.sequence_length=128"])
    found = try_stage(manifest, 3, "cpu", "auto", notes.append)
    assert len(notes) == 3, "it says what it does"
    assert found.tokens == 4 * 128
    assert found.share_of_peak == pytest.approx(found.tflops / found.peak_tflops)
    assert found.share_of_peak > 0.0  # how much, depends on what else the machine does
    assert found.tflops == pytest.approx(found.tflop / found.microbatch_s)
    assert found.way.device_bytes == 0
    assert found.device_bytes == 0
    assert found.host_bytes > 4 * found.num_parameters


@pytest.mark.parametrize("stage", ["0", "3"])
def test_the_verb_tells_time_memory_and_speed(stage: str) -> None:
    done = call("doctor", "--preset", "nano", "--stage", stage, "--threads", "1")
    assert done.code == 0
    for word in ("building stage", "microbatch ", "host memory", "told in advance", "TFLOP/s", "a plain product"):
        assert word in done.out


def test_a_stage_that_does_not_fit_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "free_bytes", lambda device="cpu": 3 << 30)
    monkeypatch.setattr(trial, "StageState", None)  # building it would fail
    with pytest.raises(HardwareError, match=r"stage 31 needs about 1\d\.\d GB, there are 3\.2 GB"):
        try_stage(preset("llama-8b"), 31, "cpu", "auto", lambda _: None)


def test_the_last_stage_of_the_eight_billion_is_tried_on_a_card_of_12_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 16 * 10**9, "cuda:0": 11 * 10**9}
    monkeypatch.setattr(trial, "free_bytes", lambda device="cpu": free[device])
    way = trial._way(preset("llama-8b"), 31, "cuda:0", "auto")
    assert way.fits(free["cuda:0"], free["cpu"])
    with pytest.raises(HardwareError, match="of the device"):
        trial._way(preset("llama-8b"), 31, "cuda:0", "off")


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no stage 4"):
        try_stage(preset("nano"), 4, "cpu", "auto", lambda _: None)
    assert call("doctor", "--preset", "nano", "--stage", "4").code == ExitCode.USAGE
    assert call("doctor", "--preset", "nano", "--offload", "perhaps").code == ExitCode.USAGE


@pytest.mark.long
@pytest.mark.parametrize("stage", [30, 31])
def test_a_stage_of_true_size_computes_a_microbatch_within_what_was_told(stage: int) -> None:
    """A middle stage and the last one of llama-8b, 4,096 tokens; minutes, and for the last one 16 GB of free memory."""
    manifest = preset("llama-8b")
    require_bf16("cpu")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        found = try_stage(manifest, stage, "cpu", "auto", print)
    except HardwareError as error:
        pytest.skip(str(error))
    assert found.tokens == 4096
    assert found.host_bytes < 1.2 * found.way.host_bytes  # libraries and the allocator keep some that no tensor holds
    assert found.host_bytes < 16 * 10**9


def test_the_peak_is_that_of_a_product() -> None:
    assert measured_peak("cpu", torch.float32) > 0.0
