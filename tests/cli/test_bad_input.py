"""Bad input gives one clear line with an error id, the documented exit code, no traceback, and nothing half-written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import SMALL, shards, small, train

from swarmtrain.checkpoint import complete
from swarmtrain.run.invite import Invite

from .programs import assert_one_line, call, json_lines, run

SETTINGS = tuple(item for key in SMALL for item in ("--set", key))


def train_small(out: Path, *more: object) -> tuple[object, ...]:
    return ("train", "nano", *SETTINGS, "--threads", 1, "--out", out, "--json", *more)


def everything_below(path: Path) -> dict[str, bytes]:
    return {
        str(found.relative_to(path)): found.read_bytes()
        for found in sorted(path.rglob("*"))
        if found.is_file() and found.name != ".lock"
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[model\nhidden_size = 3", "not valid TOML"),
        ("", "run.name"),
        ("[surprise]\nx = 1", "surprise"),
        ("[run]\nname = 3", "run.name"),
        ("\0\0\0", "not valid TOML"),
    ],
)
def test_a_malformed_manifest(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    line = assert_one_line(call("train", file, "--out", tmp_path / "out"), 2, "ST-MANIFEST")
    assert named in line
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(bytes(range(128, 256)))
    assert_one_line(call("train", tmp_path / "run.toml"), 2, "ST-MANIFEST")


@pytest.mark.parametrize(
    ("setting", "key", "allowed"),
    [
        ("boundary.k=33", "boundary.k", "at most model.hidden_size = 32"),
        ("model.num_heads=5", "model.num_heads", "must divide model.hidden_size = 32"),
        ("model.num_kv_heads=3", "model.num_kv_heads", "must divide model.num_heads = 4"),
        ("stages.count=5", "stages.count", "at most model.num_layers = 4"),
        ("stages.layers=[2, 2]", "stages.layers", "needs stages.count = 4"),
        ("boundary.kind=round", "boundary.kind", '"subspace", "projected", "dense"'),
        ("schedule.steps=0", "schedule.steps", ">= 1"),
        ("model.color=red", "model.color", "unknown key"),
        ("nonsense", "nonsense", "section.key=value"),
        ("wire.forward=quant5", "wire.forward", "2, 3, 4, 6 or 8"),
        ("wire.backward=topk10", "wire.backward", "mask"),
        ("model.vocab_size=200", "model.vocab_size", "at least 256"),
        ("data.source=''", "data.source", "directory of token shards"),
    ],
)
def test_impossible_settings_name_the_key_and_what_is_allowed(
    tmp_path: Path, setting: str, key: str, allowed: str
) -> None:
    line = assert_one_line(call(*train_small(tmp_path / "out", "--set", setting)), 2, "ST-MANIFEST")
    assert key in line
    assert allowed in line
    assert not complete(tmp_path / "out" / "checkpoints")


def test_a_model_that_no_machine_holds(tmp_path: Path) -> None:
    settings = ("hidden_size=16384", "num_layers=512", "num_heads=64", "num_kv_heads=64", "ffn_size=65536")
    overrides = [item for setting in settings for item in ("--set", f"model.{setting}")]
    line = assert_one_line(call("train", "nano", *overrides, "--out", tmp_path / "out"), 5, "ST-HARDWARE")
    assert "needs about" in line
    assert "there are" in line
    assert not complete(tmp_path / "out" / "checkpoints")


@pytest.mark.parametrize("verb", ["train", "manifest"])
def test_something_that_is_no_manifest(tmp_path: Path, verb: str) -> None:
    line = assert_one_line(call(verb, tmp_path / "missing.toml"), 2, "ST-USAGE")
    assert "nano" in line  # says what there is


def test_a_malformed_command_line_is_exit_code_2() -> None:
    for arguments in (("train",), ("train", "nano", "--steps", "some"), ("nonsense",), ("eval",), ("export", "x")):
        outcome = call(*arguments)
        assert outcome.code == 2
        assert "Traceback" not in outcome.err


@pytest.fixture(scope="module")
def pristine_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards(tmp_path_factory.mktemp("shards"))


def drop_index(path: Path) -> None:
    (path / "index.json").unlink()


def garble_index(path: Path) -> None:
    (path / "index.json").write_text('{"format": ')


def drop_shard(path: Path) -> None:
    (path / "tokens-000001.bin").unlink()


def truncate_shard(path: Path) -> None:
    os.truncate(path / "tokens-000001.bin", 1001)


def drop_everything(path: Path) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize("damage", [drop_index, garble_index, drop_shard, truncate_shard, drop_everything])
def test_missing_or_truncated_shards(pristine_shards: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    source = Path(shutil.copytree(pristine_shards, tmp_path / "shards"))
    damage(source)
    arguments = train_small(tmp_path / "out", "--set", f"data.source={source}")
    line = assert_one_line(call(*arguments), 7, "ST-DATA")
    assert str(source) in line
    assert not complete(tmp_path / "out" / "checkpoints")


def test_control_the_same_shards_undamaged_train(pristine_shards: Path, tmp_path: Path) -> None:
    assert call(*train_small(tmp_path / "out", "--set", f"data.source={pristine_shards}")).code == 0


def test_training_does_not_go_on_with_other_data(pristine_shards: Path, tmp_path: Path) -> None:
    """What comes of that is neither training, and nobody could tell later."""
    source, before, out = tmp_path / "shards", tmp_path / "before", tmp_path / "out"
    shutil.copytree(pristine_shards, source)
    settings = (f"data.source={source}", "checkpoint.every=2")
    train(small(*settings), out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")  # as if it had been interrupted after step 2
    again = Path(shutil.copytree(out, tmp_path / "again"))
    source.rename(before)
    text = tmp_path / "other.txt"
    text.write_text("quite another text, of the same run\n" * 3000)
    assert call("data", "prepare", text, "--out", source).code == 0
    kept = everything_below(out)
    overrides = [item for setting in settings for item in ("--set", setting)]
    line = assert_one_line(call(*train_small(out, *overrides)), 7, "ST-DATA")
    assert "other data" in line
    assert "put the data back" in line
    assert everything_below(out) == kept
    shutil.rmtree(source)
    before.rename(source)
    resumed = call(*train_small(again, *overrides))  # control: with its own data it goes on
    assert resumed.code == 0
    assert "step-00000002" in resumed.err


@pytest.fixture(scope="module")
def pristine_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pristine")
    train(small(), out)
    return out


@pytest.fixture
def trained(pristine_run: Path, tmp_path: Path) -> Path:
    """A run that has ended; its checkpoint is OUT/checkpoints/step-00000004."""
    return Path(shutil.copytree(pristine_run, tmp_path / "trained"))


def flip_byte(path: Path) -> None:
    file = path / "stage-002.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)


def cut_file(path: Path) -> None:
    os.truncate(path / "stage-000.safetensors", 500)


def drop_file(path: Path) -> None:
    (path / "stage-001.safetensors").unlink()


def garble_json(path: Path) -> None:
    (path / "checkpoint.json").write_text("{]")


def empty_json(path: Path) -> None:
    (path / "checkpoint.json").write_text("{}")


def garble_header(path: Path) -> None:
    """A file with the right hash that is no safetensors file."""
    (path / "stage-000.safetensors").write_bytes(b"\xff" * 64)
    index = json.loads((path / "checkpoint.json").read_text())
    index["stages"][0].update(num_bytes=64, sha256=hashlib.sha256(b"\xff" * 64).hexdigest())
    del index["index_digest"]
    (path / "checkpoint.json").write_text(json.dumps(index))


def edit(path: Path, *, keep_own_digest: bool, **changes: object) -> None:
    index = json.loads((path / "checkpoint.json").read_text())
    if not keep_own_digest:  # as in an older version's
        del index["index_digest"]
    index.update(changes)
    (path / "checkpoint.json").write_text(json.dumps(index))


def edit_step(path: Path) -> None:
    edit(path, keep_own_digest=True, step=3)


def edit_step_of_old(path: Path) -> None:
    edit(path, keep_own_digest=False, step=3)


def edit_digest_of_old(path: Path) -> None:
    stages = json.loads((path / "checkpoint.json").read_text())["stages"]
    stages[2]["state_digest"] = "0" * 64
    edit(path, keep_own_digest=False, stages=stages)


DAMAGES = (
    *(flip_byte, cut_file, drop_file, garble_json, empty_json, garble_header),
    *(edit_step, edit_step_of_old, edit_digest_of_old),
)
VERBS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "train": lambda out: train_small(out, "--set", "schedule.steps=4"),
    "eval": lambda out: ("eval", out, "--threads", 1),
    "generate": lambda out: ("generate", out, "--tokens", 5, "--threads", 1),
    "export": lambda out: ("export", out, "--out", out.parent / "exported"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_damaged_checkpoint(trained: Path, damage: Callable[[Path], None], verb: str) -> None:
    damage(trained / "checkpoints" / "step-00000004")
    before = everything_below(trained)
    line = assert_one_line(call(*VERBS[verb](trained)), 7, "ST-CHECKPOINT")
    assert "step-00000004" in line
    assert everything_below(trained) == before
    assert not (trained.parent / "exported").exists()
    assert not list(trained.parent.glob(".partial*"))


@pytest.mark.parametrize("verb", VERBS)
def test_control_the_undamaged_checkpoint_is_taken(trained: Path, verb: str) -> None:
    outcome = call(*VERBS[verb](trained))
    assert outcome.code == 0, outcome
    assert outcome.out


@pytest.mark.parametrize("verb", ["eval", "generate", "export"])
def test_no_checkpoint_there(tmp_path: Path, verb: str) -> None:
    line = assert_one_line(call(*VERBS[verb](tmp_path / "nothing")), 7, "ST-CHECKPOINT")
    assert "no checkpoint in" in line


def test_a_checkpoint_of_another_manifest(trained: Path) -> None:
    before = everything_below(trained)
    line = assert_one_line(call(*train_small(trained, "--set", "boundary.k=4")), 7, "ST-CHECKPOINT")
    assert "k = 8" in line
    assert "k = 4" in line
    assert everything_below(trained) == before


def test_an_export_does_not_overwrite(trained: Path) -> None:
    before = everything_below(trained)
    assert_one_line(call("export", trained, "--out", trained), 2, "ST-USAGE")
    assert everything_below(trained) == before


@pytest.mark.parametrize(
    "option", [("--temperature", "-1"), ("--temperature", "nan"), ("--top-p", "0"), ("--top-p", "1.5")]
)
def test_impossible_sampling(trained: Path, option: tuple[str, str]) -> None:
    assert_one_line(call("generate", trained, *option, "--threads", 1), 2, "ST-USAGE")


@pytest.mark.parametrize("verb", ["train", "export"])
def test_a_directory_that_cannot_be_made(trained: Path, verb: str) -> None:
    blocked = trained / "checkpoints" / "step-00000004" / "checkpoint.json" / "below"
    arguments = train_small(blocked) if verb == "train" else ("export", trained, "--out", blocked)
    assert_one_line(call(*arguments), 8, "ST-STORAGE")


DAEMONS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "local": lambda state: ("local", "nano", *SETTINGS, "--state-dir", state),
    "coordinator": lambda state: ("coordinator", "nano", *SETTINGS, "--state-dir", state, "--page", "off"),
    "join": lambda state: ("join", invite(), "--state-dir", state),
}


def invite() -> str:
    return Invite(
        "0" * 16, bytes(32), ("/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",)
    ).text()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's daemons note themselves."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("verb", DAEMONS)
def test_a_state_directory_that_cannot_be_made(tmp_path: Path, home: Path, verb: str) -> None:
    (tmp_path / "file").write_text("")
    outcome = run(*DAEMONS[verb](tmp_path / "file" / "below"))
    line = assert_one_line(outcome, 8, "ST-STATE-DIR" if verb == "join" else "ST-STORAGE")
    assert str(tmp_path / "file" / "below") in line
    assert not list(home.rglob("*.json"))  # it does not claim to run


@pytest.mark.parametrize("verb", ["coordinator", "join"])
def test_notes_that_cannot_be_written(tmp_path: Path, home: Path, verb: str) -> None:
    home.write_text("no directory")
    line = assert_one_line(call(*DAEMONS[verb](tmp_path / "state")), 8, "ST-STORAGE")
    assert "XDG_STATE_HOME" in line
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("verb", ["status", "pause"])
def test_asking_a_daemon_that_is_not_there(tmp_path: Path, home: Path, verb: str) -> None:
    line = assert_one_line(call(verb, "--state-dir", tmp_path / "nowhere"), 3, "ST-CONTROL")
    assert f"no daemon runs on {tmp_path / 'nowhere'}" in line


def test_a_diverging_run_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    settings = ("optimizer.learning_rate=1000", "schedule.warmup_steps=0", "schedule.steps=500", "checkpoint.every=1")
    overrides = [item for setting in settings for item in ("--set", setting)]
    outcome = call(*train_small(tmp_path / "out", *overrides))
    assert_one_line(outcome, 6, "ST-DIVERGED")
    last = json_lines(outcome.out)[-1]["step"]
    assert complete(tmp_path / "out" / "checkpoints")[-1].name == f"step-{last:08d}"


def limit_file_size() -> None:
    """No file of this process may be larger than 20 kB: what a full disk does to writes, without a disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_disk_that_fills_up_while_training(trained: Path) -> None:
    before = everything_below(trained)
    shutil.rmtree(trained / "checkpoints")
    outcome = run(*train_small(trained, "--set", "checkpoint.every=2"), prepare=limit_file_size)
    line = assert_one_line(outcome, 8, "ST-STORAGE")
    assert "too large" in line
    assert [report["step"] for report in json_lines(outcome.out)] == [1]  # step 2 was to be written
    assert everything_below(trained) == {}
    assert before != {}


def test_a_disk_that_fills_up_while_exporting(trained: Path) -> None:
    arguments = ("export", trained, "--out", trained.parent / "exported")
    assert_one_line(run(*arguments, prepare=limit_file_size), 8, "ST-STORAGE")
    assert [path.name for path in trained.parent.iterdir()] == ["trained"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 600 kB, where we may mount one."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", mount], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("mounting a file system is not allowed here")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.mark.parametrize("verb", DAEMONS)
def test_a_disk_that_is_full_when_a_daemon_starts(small_disk: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Directories can still be made on it, files can not be filled."""
    monkeypatch.setenv("XDG_STATE_HOME", str(small_disk / "home"))
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(10**6))
    outcome = call(*DAEMONS[verb](small_disk / "state"))
    line = assert_one_line(outcome, 8, "ST-STORAGE")
    assert "No space left" in line
    assert [path.name for path in small_disk.rglob("*") if path.is_file() and path.stat().st_size] == ["filler"]


def test_a_really_full_disk_keeps_the_checkpoints_that_fit(small_disk: Path) -> None:
    """One checkpoint takes about 330 kB: the second does not fit, and the first stays usable."""
    out = small_disk / "run"
    outcome = run(*train_small(out, "--set", "checkpoint.every=1"))
    line = assert_one_line(outcome, 8, "ST-STORAGE")
    assert "No space left" in line
    assert [path.name for path in complete(out / "checkpoints")] == ["step-00000001"]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000001"]
    assert call("eval", out, "--threads", 1).code == 0
