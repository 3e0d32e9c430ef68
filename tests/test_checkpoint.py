"""A checkpoint exists whole or not at all, and anything that was done to it since is noticed."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import KINDS, small, train

from swarmtrain import checkpoint as checkpoints
from swarmtrain.checkpoint import Checkpoint, CheckpointWriter, complete, latest, open_checkpoint, prune
from swarmtrain.errors import CheckpointError, StorageError
from swarmtrain.model.state import StageState


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return train(small("schedule.steps=2"), tmp_path_factory.mktemp("run"))


@pytest.fixture
def copy(pristine: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(pristine.path, tmp_path / "step-00000002"))


def restore_all(path: Path) -> list[StageState]:
    opened = open_checkpoint(path)
    states = [StageState(opened.manifest, index) for index in range(opened.manifest.stages.count)]
    for state in states:
        opened.restore(state)
    return states


def change_index(path: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool = False) -> None:
    """Edit the index; unless `sealed`, it then has no digest of its own, like those of older versions."""
    index = path / "checkpoint.json"
    content = json.loads(index.read_text())
    if not sealed:
        del content["index_digest"]
    change(content)
    index.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_state_has_every_bit_of_the_saved_one(tmp_path: Path, kind: str) -> None:
    track = ("boundary.track_every=1",) if kind in ("subspace", "projected") else ()
    manifest = small(f"boundary.kind={kind}", *track)
    fresh = StageState(manifest, 3)
    saved = train(manifest, tmp_path)
    restored = restore_all(tmp_path)
    assert [state.digest() for state in restored] == [stage.state_digest for stage in saved.stages]
    assert restored[3].digest() != fresh.digest()
    assert {state.step for state in restored} == {4}
    assert {state.basis_epoch for state in restored} == {4 if track else 0}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def remove(path: Path) -> None:
    path.unlink()


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, cut, lengthen, remove, replace_by_directory])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_damaged_stage_file_is_named(copy: Path, damage: Callable[[Path], None], stage: int) -> None:
    restore_all(copy)  # control: it was whole
    damage(copy / f"stage-{stage:03d}.safetensors")
    with pytest.raises(CheckpointError, match=f"stage-{stage:03d}.safetensors") as caught:
        restore_all(copy)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_swapped_stage_files_are_noticed(copy: Path) -> None:
    (copy / "stage-000.safetensors").rename(copy / "other")
    (copy / "stage-001.safetensors").rename(copy / "stage-000.safetensors")
    (copy / "other").rename(copy / "stage-001.safetensors")
    with pytest.raises(CheckpointError):
        restore_all(copy)


def test_a_consistent_file_of_a_wrong_state_is_noticed(copy: Path) -> None:
    """Hash and size fit, but the state does not have its digest."""
    change_index(copy, lambda index: index["stages"][1].update(state_digest="0" * 64))
    with pytest.raises(CheckpointError, match="digest"):
        restore_all(copy)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe garbage",
        b"[]",
        b"null",
        b"3",
        b'{"format": 1}',
        b'{"format": 99}',
        b'{"format": {"a": 1}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
        b" " * ((1 << 24) + 1),
    ],
)
def test_a_garbage_index_is_one_clear_error(copy: Path, content: bytes) -> None:
    (copy / "checkpoint.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(copy)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["stages"][0].update(file="../../../etc/passwd"),
        lambda index: index["stages"][0].update(file="stage-001.safetensors"),
        lambda index: index["stages"][0].update(file=5),
        lambda index: index["stages"][0].update(num_bytes="many"),
        lambda index: index["stages"][0].pop("sha256"),
        lambda index: index["stages"].pop(),
        lambda index: index.update(stages="none"),
        lambda index: index.update(stages=[1, 2, 3, 4]),
        lambda index: index.update(step=-1),
        lambda index: index.update(step=True),
        lambda index: index.update(step="2"),
        lambda index: index.update(basis_epoch=None),
        lambda index: index.update(manifest=["no", "text"]),
        lambda index: index.update(manifest="[run]\nname = 5"),
        lambda index: index.update(manifest=index["manifest"].replace("seed = 7", "seed = 8")),
        lambda index: index.update(manifest_digest=None),
    ],
)
def test_an_index_that_was_edited_is_refused(copy: Path, change: Callable[[dict[str, Any]], object]) -> None:
    change_index(copy, change)
    with pytest.raises(CheckpointError):
        open_checkpoint(copy)


FIELDS = ("step", "basis_epoch", "manifest_digest", "data_digest", "forward_codec", "manifest")


def other_value(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value[:-1] + ("0" if value[-1:] != "0" else "1")


@pytest.mark.parametrize("field", [*FIELDS, "num_bytes", "sha256", "state_digest"])
def test_every_field_of_the_index_is_covered_by_its_own_digest(copy: Path, field: str) -> None:
    def edit(index: dict[str, Any]) -> None:
        place = index if field in FIELDS else index["stages"][1]
        place[field] = other_value(place[field])

    change_index(copy, edit, sealed=True)
    with pytest.raises(CheckpointError, match="its own digest") as caught:
        open_checkpoint(copy)
    assert caught.value.fix


def test_the_fields_of_the_index_are_all_in_the_test_above(copy: Path) -> None:
    index = json.loads((copy / "checkpoint.json").read_text())
    assert set(index) == {*FIELDS, "format", "index_digest", "stages"}
    assert set(index["stages"][0]) == {"file", "num_bytes", "sha256", "state_digest"}


@pytest.mark.parametrize("field", ["step", "basis_epoch", "state_digest"])
def test_an_edited_index_without_a_digest_does_not_fit_its_tensors(copy: Path, field: str) -> None:
    """Whoever only reads a checkpoint, as `eval` does, notices as well."""

    def edit(index: dict[str, Any]) -> None:
        place = index["stages"][1] if field == "state_digest" else index
        place[field] = other_value(place[field])

    change_index(copy, edit)
    with pytest.raises(CheckpointError, match="is not the state of step"):
        open_checkpoint(copy).load_stage(1)


def test_a_checkpoint_of_an_older_version_is_accepted(copy: Path) -> None:
    """It knows neither its own digest nor its data's."""
    change_index(copy, lambda index: index.pop("data_digest"))
    opened = open_checkpoint(copy)
    assert opened.data_digest == ""
    opened.check_data("whatever there is")
    restore_all(copy)


def test_equal_states_are_equal_files(pristine: Checkpoint, tmp_path: Path) -> None:
    """Several times: what is written in any order may be in the same one by chance."""

    def written() -> dict[str, bytes]:
        path = checkpoints.save_states(tmp_path, states, keep=1, data_digest=pristine.data_digest)
        return {file.name: file.read_bytes() for file in path.iterdir()}

    states = restore_all(pristine.path)
    first = written()
    assert first == {file.name: file.read_bytes() for file in pristine.path.iterdir()}
    assert all(written() == first for _ in range(8))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_one_changed_byte_of_the_index_never_gives_another_state(copy: Path, position: float, byte: int) -> None:
    """Either the checkpoint is refused with a `CheckpointError`, or nothing that matters was changed."""
    index = copy / "checkpoint.json"
    content = index.read_bytes()
    changed = bytearray(content)
    changed[int(position * len(changed))] = byte
    index.write_bytes(changed)
    try:
        states = restore_all(copy)
    except CheckpointError:
        return
    finally:
        index.write_bytes(content)
    assert [state.digest() for state in states] == [state.digest() for state in restore_all(copy)]


def test_a_directory_without_checkpoints_is_a_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            open_checkpoint(path)


def test_the_newest_complete_checkpoint_is_found_by_number(pristine: Checkpoint, tmp_path: Path) -> None:
    for name in ("step-00000009", "step-99999999", "step-100000000"):
        shutil.copytree(pristine.path, tmp_path / "checkpoints" / name)
    (tmp_path / "checkpoints" / "step-200000000").mkdir()  # no index: not a checkpoint
    (tmp_path / "checkpoints" / ".partial-step-00000300-1").mkdir()
    (tmp_path / "checkpoints" / "step-strange").mkdir()
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.path.name == "step-100000000"
    prune(tmp_path / "checkpoints", keep=2)
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step-99999999", "step-100000000"]
    assert not list((tmp_path / "checkpoints").glob(".partial*"))


def test_what_is_not_committed_leaves_nothing(pristine: Checkpoint, tmp_path: Path) -> None:
    state = restore_all(pristine.path)[0]
    with CheckpointWriter(tmp_path, pristine.manifest, 2, 0) as writer:
        writer.write_stage(0, dict(state.named_tensors()), state.digest())
        assert any(tmp_path.iterdir())  # control: something was there
        with pytest.raises(CheckpointError, match="lacks stage 1"):
            writer.commit()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("failing", ["save_file", "flush"])
def test_a_failed_write_is_a_storage_error_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    before = train(small("schedule.steps=2"), tmp_path)
    calls = []

    def no_space(*_: object, **__: object) -> None:
        calls.append(1)
        if len(calls) > 2:  # the third file does not fit any more
            raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "save_file":
        real = checkpoints.save_file
        monkeypatch.setattr(checkpoints, "save_file", lambda *a, **k: (no_space(), real(*a, **k)))
    else:
        monkeypatch.setattr(checkpoints.world, "sync", no_space)
    states = restore_all(tmp_path)
    for state in states:
        state.step = 3
    with pytest.raises(StorageError, match="No space left"):
        checkpoints.save_states(tmp_path / "checkpoints", states, keep=3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    restore_all(before.path)
