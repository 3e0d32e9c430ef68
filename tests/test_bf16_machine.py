"""Products in bf16 are tried in a child process: what kills it is a clear refusal here, or a variable that helps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from needs import needs_bf16

from swarmtrain.doctor import Grade
from swarmtrain.doctor import bf16 as doctor_bf16
from swarmtrain.errors import HardwareError
from swarmtrain.native import bf16 as module
from swarmtrain.native.bf16 import RESTRICTED, VARIABLE, Bf16, require_bf16, tried, try_processor
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.presets import preset

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_UNLESS_RESTRICTED = f"import os\nif os.environ.get({VARIABLE!r}) != {RESTRICTED!r}:\n    " + DIES.replace(
    "; ", "\n    "
)


@pytest.fixture(autouse=True)
def _its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    tried.cache_clear()
    yield
    tried.cache_clear()


@pytest.fixture
def _fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "try_processor", lambda: Bf16.FAILS)


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        ("pass", Bf16.WORKS),
        (DIES, Bf16.FAILS),
        ("raise SystemExit(3)", Bf16.FAILS),  # it lives, and its numbers are wrong
        (DIES_UNLESS_RESTRICTED, Bf16.RESTRICTED),
    ],
)
def test_a_child_takes_the_risk(trial: str, expected: Bf16) -> None:
    assert try_processor(trial) is expected


def test_another_failure_of_the_child_says_nothing_about_the_processor() -> None:
    with pytest.raises(HardwareError, match="cannot be tried: MemoryError"):
        try_processor("raise MemoryError")


@needs_bf16()
def test_the_real_trial_passes_here() -> None:
    assert try_processor() is not Bf16.FAILS


def test_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trials: list[int] = []

    def once() -> Bf16:
        trials.append(1)
        return Bf16.RESTRICTED

    monkeypatch.setattr(module, "try_processor", once)
    assert tried() is Bf16.RESTRICTED
    tried.cache_clear()  # as another process
    assert tried() is Bf16.RESTRICTED
    assert len(trials) == 1
    (kept,) = tmp_path.rglob("bf16-*")
    kept.write_text("no answer")
    tried.cache_clear()
    assert tried() is Bf16.RESTRICTED
    assert len(trials) == 2


def test_what_helps_is_set_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "try_processor", lambda: Bf16.RESTRICTED)
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    require_bf16("cpu")
    assert os.environ[VARIABLE] == RESTRICTED


@pytest.mark.usefixtures("_fails")
def test_a_run_in_bf16_is_refused_where_nothing_helps() -> None:
    with pytest.raises(HardwareError, match=f"bf16 fail.*{VARIABLE}={RESTRICTED} does not help") as caught:
        ReferenceTrainer(preset("nano", ["model.precision=bf16"]))
    assert "fp32" in caught.value.fix


@pytest.mark.usefixtures("_fails")
def test_doctor_says_so() -> None:
    found = doctor_bf16(None)
    assert found.verdict is Grade.ODD
    assert "bf16 fail" in found.detail


def test_train_ends_with_a_line_instead_of_a_signal(tmp_path: Path) -> None:
    """In a real process whose trial dies whatever it is told."""
    program = (
        "import sys; from swarmtrain.native import bf16; real = bf16.try_processor; "
        f"bf16.try_processor = lambda: real({DIES!r}); "
        "from swarmtrain.cli.main import main; sys.exit(main())"
    )
    arguments = ["train", "nano", "--set", "model.precision=bf16", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 5, done.stderr
    assert VARIABLE in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    with pytest.raises(HardwareError, match="an older GPU has no bf16"):
        require_bf16("cuda:0")
