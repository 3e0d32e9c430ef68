"""Real processes, really interrupted: what is on disk stays usable, and a resumed run ends in the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL, small, train

from swarmtrain.checkpoint import Checkpoint, complete, open_checkpoint

from .programs import DEADLINE_S, assert_one_line, call, environment, json_lines, started, until_step

# Ends in a process that hangs in the middle of writing its second checkpoint, and says so.
HANG_WHILE_WRITING = """
import signal, sys
from swarmtrain import world
from swarmtrain.cli.main import main
real, calls = world.sync, []
def sync(path):
    calls.append(path)
    if "step-00000020" in str(path) and len(calls) > 8:
        print("writing", flush=True)
        signal.pause()
    real(path)
world.sync = sync
sys.argv = ["swarmtrain", *sys.argv[1:]]
main()
"""

# Hangs when it has told of step 30: it cannot get further before it is killed, however slow the test is.
HANG_AFTER_STEP_30 = """
import signal, sys
from swarmtrain.cli.main import main
from swarmtrain.reference import ReferenceTrainer
real = ReferenceTrainer.run
def run(self):
    for report in real(self):
        yield report
        if report.step == 30:
            signal.pause()
ReferenceTrainer.run = run
sys.argv = ["swarmtrain", *sys.argv[1:]]
main()
"""

pytestmark = pytest.mark.timeout(3 * DEADLINE_S)


def arguments(out: Path, every: int, steps: int = 36) -> list[object]:
    settings = [item for key in (*SMALL, f"checkpoint.every={every}") for item in ("--set", key)]
    return ["train", "nano", "--steps", steps, "--threads", 1, "--out", out, "--json", *settings]


def weights(checkpoint: Checkpoint) -> list[str]:
    return [stage.state_digest for stage in checkpoint.stages]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """What a run that nobody disturbs ends with, by checkpoint interval."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert call(*arguments(out / "called", 10)).code == 0
    here = train(small("checkpoint.every=7", "schedule.steps=36"), out / "here")
    found = {7: weights(here), 10: weights(open_checkpoint(out / "called"))}
    assert found[7] == found[10]  # neither the command line nor writing more checkpoints changes anything
    return found


@pytest.mark.parametrize("every", [7, pytest.param(10, marks=pytest.mark.long)])
def test_killed_at_step_30_and_resumed_it_ends_in_the_same_bits(
    tmp_path: Path, undisturbed: dict[int, list[str]], every: int
) -> None:
    """With every = 10, step 30 is a checkpoint itself; with 7 the last one is two steps older."""
    out = tmp_path / "run"
    command = [sys.executable, "-c", HANG_AFTER_STEP_30, *map(str, arguments(out, every))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        until_step(process, 30)
        process.kill()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    left = open_checkpoint(out).step
    assert left == 30 - 30 % every
    resumed = call(*arguments(out, every))
    assert resumed.code == 0
    assert f"resuming from {out / 'checkpoints'}/step-{left:08d}" in resumed.err
    assert json_lines(resumed.out)[0]["step"] == left + 1
    assert weights(open_checkpoint(out)) == undisturbed[every]


def test_killed_while_writing_a_checkpoint_it_resumes_from_the_one_before(
    tmp_path: Path, undisturbed: dict[int, list[str]]
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", HANG_WHILE_WRITING, *map(str, arguments(out, 10))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        assert any(line == "writing\n" for line in process.stdout)
        process.kill()
    (partial,) = (out / "checkpoints").glob(".partial-*")
    assert any(partial.iterdir())  # the fault happened: a half-written checkpoint is there
    assert [path.name for path in complete(out / "checkpoints")] == ["step-00000010"]
    resumed = call(*arguments(out, 10))
    assert json_lines(resumed.out)[0]["step"] == 11
    assert weights(open_checkpoint(out)) == undisturbed[10]
    assert not list((out / "checkpoints").glob(".partial-*"))


def default_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("with_json", [True, pytest.param(False, marks=pytest.mark.long)])
def test_control_c_ends_it_at_once_and_keeps_the_last_checkpoint(tmp_path: Path, with_json: bool) -> None:
    out = tmp_path / "run"
    command = [item for item in arguments(out, 5, steps=10**6) if with_json or item != "--json"]
    with started(*command, prepare=default_sigint) as process:
        if with_json:
            until_step(process, 12)
        else:
            assert process.stdout is not None
            assert any("step     10/" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "Traceback" not in printed
    newest = open_checkpoint(out)
    assert newest.step >= 10
    for stage in range(newest.manifest.stages.count):
        newest.load_stage(stage)
    assert not list((out / "checkpoints").glob(".partial-*"))


def test_two_trainers_do_not_share_a_directory(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(*arguments(out, 5, steps=10**6)) as first:
        until_step(first, 1)
        line = assert_one_line(call(*arguments(out, 5, steps=10**6)), 2, "ST-USAGE")
        assert "in use" in line
        until_step(first, 6)  # the first goes on as if nothing had happened
    assert open_checkpoint(out).step >= 5
    again = call(*arguments(out, 5, steps=10**6), "--set", "seed=8")  # free again; and it is another run
    assert_one_line(again, 7, "ST-CHECKPOINT")
