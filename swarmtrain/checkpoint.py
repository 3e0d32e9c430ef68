"""Checkpoints: one safetensors file per stage and one manifest, written last. A checkpoint exists whole or not at all.

    DIR/step-00000050/stage-000.safetensors ... stage-003.safetensors   parameters, moments, basis
    DIR/step-00000050/checkpoint.json                                   step, run manifest, hashes, codecs

It is written into a hidden sibling directory, flushed to disk, and renamed into place.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmtrain.errors import CheckpointError, ManifestError, StorageError
from swarmtrain.model.state import StageState
from swarmtrain.run.manifest import Manifest, parse_manifest

FORMAT = 1
MAX_INDEX_BYTES = 1 << 24  # of checkpoint.json: a manifest and three lines per stage are far below
_INDEX = "checkpoint.json"
_PARTIAL = ".partial-"
_LOST = "lost-"
_FIX = "remove this checkpoint to go on from an earlier one, or copy it again"

T = TypeVar("T")


@dataclass(frozen=True)
class StageFile:
    """One stage's file as the index describes it."""

    file: str
    num_bytes: int
    sha256: str
    state_digest: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. Its index is checked on opening, a stage's file when it is loaded."""

    path: Path
    step: int
    basis_epoch: int
    manifest: Manifest
    stages: tuple[StageFile, ...]

    def load_stage(self, index: int) -> dict[str, Tensor]:
        """The tensors of one stage, after checking its hash."""
        entry = self.stages[index]
        path = self.path / entry.file
        try:
            num_bytes = path.stat().st_size
            if num_bytes != entry.num_bytes:
                raise CheckpointError(f"{path} has {num_bytes} bytes, should have {entry.num_bytes}", fix=_FIX)
            if _sha256(path) != entry.sha256:
                raise CheckpointError(f"{path} is damaged: its hash differs from the one in {_INDEX}", fix=_FIX)
            tensors: dict[str, Tensor] = load_file(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}", fix=_FIX) from error
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {path}: {error}", fix=_FIX) from error
        return tensors

    def restore(self, state: StageState) -> None:
        """Put the stage of `state` into this checkpoint's state."""
        state.load(self.load_stage(state.plan.index), step=self.step, basis_epoch=self.basis_epoch)
        wanted = self.stages[state.plan.index].state_digest
        if state.digest() != wanted:
            raise CheckpointError(f"stage {state.plan.index} of {self.path} does not have the digest it should have")

    def check_run(self, manifest: Manifest) -> None:
        """Refuse a checkpoint of another run; names the first key that differs."""
        if self.manifest == manifest:
            return
        there, here = self.manifest.canonical().splitlines(), manifest.canonical().splitlines()
        section = ""
        for old, new in zip(there, here, strict=True):
            section = new if new.startswith("[") else section
            if old != new:
                raise CheckpointError(
                    f"{self.path} belongs to another manifest: {section} {old!r} there, {new!r} here",
                    fix="use the manifest it was made with, or another directory",
                )


class CheckpointWriter:
    """Writes one checkpoint. As a context manager: what was not committed is removed."""

    def __init__(self, directory: Path, manifest: Manifest, step: int, basis_epoch: int) -> None:
        self.directory, self.manifest, self.step, self.basis_epoch = directory, manifest, step, basis_epoch
        self.final = directory / f"step-{step:08d}"
        self._partial = directory / f"{_PARTIAL}{self.final.name}-{os.getpid()}"
        self._stages: dict[int, StageFile] = {}

    def __enter__(self) -> CheckpointWriter:
        with storage(self._partial):
            self._partial.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def write_stage(self, index: int, tensors: dict[str, Tensor], state_digest: str) -> None:
        """Write one stage's tensors and flush them to disk."""
        path = self._partial / _stage_name(index)
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        with storage(path):
            save_file(plain, path, metadata={"step": str(self.step), "stage": str(index)})
            flush(path)
            self._stages[index] = StageFile(path.name, path.stat().st_size, _sha256(path), state_digest)

    def commit(self) -> Path:
        """Write the index and move the checkpoint into place."""
        missing = set(range(self.manifest.stages.count)) - self._stages.keys()
        if missing:
            raise CheckpointError(f"checkpoint of step {self.step} lacks stage {min(missing)}")
        index = {
            "format": FORMAT,
            "step": self.step,
            "basis_epoch": self.basis_epoch,
            "manifest_digest": self.manifest.digest(),
            "forward_codec": self.manifest.wire.forward,
            "stages": [vars(self._stages[stage]) for stage in sorted(self._stages)],
            "manifest": self.manifest.canonical(),
        }
        with storage(self.final):
            path = self._partial / _INDEX
            path.write_text(json.dumps(index, indent=1))
            flush(path)
            flush(self._partial)
            if self.final.exists():
                _remove(self.final)
            self._partial.rename(self.final)
            flush(self.directory)
        return self.final


def save_states(directory: Path, states: list[StageState], *, keep: int) -> Path:
    """Checkpoint all stages of one process; older checkpoints beyond `keep` are removed afterwards."""
    first = states[0]
    with CheckpointWriter(directory, first.manifest, first.step, first.basis_epoch) as writer:
        for state in states:
            writer.write_stage(state.plan.index, dict(state.named_tensors()), state.digest())
        path = writer.commit()
    prune(directory, keep)
    return path


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, or the newest one below it."""
    if not (path / _INDEX).is_file():
        newest = latest(path)
        if newest is None:
            raise CheckpointError(f"no checkpoint in {path}", fix="name a directory that `swarmtrain train` wrote")
        return newest
    return _read_index(path)


def _read_index(path: Path) -> Checkpoint:
    """The checkpoint that `path/checkpoint.json` describes; `CheckpointError` if it is not what a writer wrote."""
    index = path / _INDEX
    try:
        with index.open("rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
        if len(content) > MAX_INDEX_BYTES:
            raise ValueError(f"larger than {MAX_INDEX_BYTES} bytes")
        raw: dict[str, Any] = json.loads(content)
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {raw['format']!r:.40}; this version reads format {FORMAT}")
        manifest = parse_manifest(_typed(raw, "manifest", str))
        stages = tuple(_stage_file(number, entry) for number, entry in enumerate(_typed(raw, "stages", list)))
        step, basis_epoch = _typed(raw, "step", int), _typed(raw, "basis_epoch", int)
        if len(stages) != manifest.stages.count or manifest.digest() != raw["manifest_digest"] or step < 0:
            raise ValueError("it contradicts its own manifest")
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror or error}") from error
    except KeyError as error:
        raise CheckpointError(f"{index} is damaged: it has no {error}", fix=_FIX) from error
    except (ValueError, TypeError, RecursionError, ManifestError) as error:
        raise CheckpointError(f"{index} is damaged: {error}", fix=_FIX) from error
    return Checkpoint(path, step, basis_epoch, manifest, stages)


def _typed(raw: dict[str, Any], name: str, kind: type[T]) -> T:
    value = raw[name]
    if type(value) is not kind:
        raise TypeError(f"{name} is not {kind.__name__}")
    return value


def _stage_file(number: int, entry: dict[str, Any]) -> StageFile:
    name = _typed(entry, "file", str)
    if name != _stage_name(number):  # also keeps reading inside the checkpoint's own directory
        raise ValueError(f"the file of stage {number} is {name!r:.60}, not {_stage_name(number)!r}")
    return StageFile(
        name,
        _typed(entry, "num_bytes", int),
        _typed(entry, "sha256", str),
        _typed(entry, "state_digest", str),
    )


def _stage_name(number: int) -> str:
    return f"stage-{number:03d}.safetensors"


def latest(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint below `directory` (or its `checkpoints` folder), if any."""
    found = complete(directory) or complete(directory / "checkpoints")
    return open_checkpoint(found[-1]) if found else None


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.glob("step-*") if path.name[5:].isdecimal() and (path / _INDEX).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what an interrupted write left behind."""
    for path in complete(directory)[:-keep]:
        _remove(path)
    clear_partial(directory)


def set_aside(directory: Path, *, after: int) -> list[Path]:
    """Rename checkpoints of later steps: they are of a history that is lost, and must never count."""
    renamed = []
    for path in complete(directory):
        if int(path.name[5:]) > after:
            free = (path.with_name(f"{_LOST}{path.name}-{number}") for number in itertools.count(1))
            with storage(path):
                renamed.append(path.rename(next(place for place in free if not place.exists())))
    return renamed


def clear_partial(directory: Path) -> None:
    """Remove what an interrupted write left behind. Only for the one process that writes here."""
    for path in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint; renamed first, so that one that is half removed is not taken for a checkpoint."""
    with storage(path):
        doomed = path.with_name(f"{_PARTIAL}{path.name}-removed-{os.getpid()}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class storage:
    """Turn a failed write into a `StorageError` that names the place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, OSError | SafetensorError):
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise StorageError(
                f"cannot write {self.path}: {reason}", fix="free some space, or choose another --out directory"
            ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Have the file or directory at `path` on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
