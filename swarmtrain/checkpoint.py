"""Checkpoints: one safetensors file per stage and one manifest, written last. A checkpoint exists whole or not at all.

    DIR/step-00000050/stage-000.safetensors ... stage-003.safetensors   parameters, moments, basis
    DIR/step-00000050/checkpoint.json                                   step, manifest, data, hashes, codecs

It is written into a hidden sibling directory, flushed to disk, and renamed into place.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swarmtrain import world
from swarmtrain.checkpoint_index import FILE, FIX, Index, StageFile, read_index, stage_name
from swarmtrain.errors import CheckpointError, DataError, StorageError
from swarmtrain.model.buffers import StateLayout, chunk_digests, state_digest
from swarmtrain.model.state import StageState
from swarmtrain.run.manifest import Manifest

_PARTIAL = ".partial-"
_LOST = "lost-"


@dataclass(frozen=True)
class StoredStage:
    """A stage's state as it was read from its file: it is the one that the index names."""

    layout: StateLayout
    buffers: list[Tensor]
    chunks: list[bytes]  # digests, in order
    step: int

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return dict(self.layout.named(self.buffers, self.step))


@dataclass(frozen=True)
class Checkpoint(Index):
    """A complete checkpoint on disk. Its index is checked on opening, a stage's file when it is loaded."""

    path: Path = field(kw_only=True)

    def load_stage(self, index: int) -> dict[str, Tensor]:
        """The tensors of one stage, after checking that they are the state that the index names."""
        return self.load(index).tensors()

    def load(self, index: int, *, known_digests: list[bytes] | None = None) -> StoredStage:
        """One stage's state, after checking the hash of its file, and the digest of state, step and basis epoch.

        With the `known_digests` of its chunks from an earlier load nothing is hashed: for callers that check chunks.
        """
        entry = self.stages[index]
        path = self.path / entry.file
        layout = StateLayout(self.manifest, index)
        try:
            num_bytes = path.stat().st_size
            if num_bytes != entry.num_bytes:
                raise CheckpointError(f"{path} has {num_bytes} bytes, should have {entry.num_bytes}", fix=FIX)
            if known_digests is None and _sha256(path) != entry.sha256:
                raise CheckpointError(f"{path} is damaged: its hash differs from the one in {FILE}", fix=FIX)
            buffers = _read_buffers(path, layout, self.step)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}", fix=FIX) from error
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {path}: {error}", fix=FIX) from error
        chunks = chunk_digests(layout, buffers) if known_digests is None else known_digests
        if state_digest(index, self.step, self.basis_epoch, chunks) != entry.state_digest:
            raise CheckpointError(
                f"stage {index} of {self.path} is not the state of step {self.step} with the digest in {FILE}", fix=FIX
            )
        return StoredStage(layout, buffers, chunks, self.step)

    def restore(self, state: StageState) -> None:
        """Put the stage of `state` into this checkpoint's state."""
        state.load(self.load_stage(state.plan.index), step=self.step, basis_epoch=self.basis_epoch)

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

    def check_data(self, digest: str) -> None:
        """Refuse to continue with other data: the result would be neither run. Old checkpoints do not name theirs."""
        if self.data_digest and self.data_digest != digest:
            raise other_data(str(self.path), self.manifest.data.source, self.data_digest, digest)


def other_data(what: str, source: str, there: str, here: str) -> DataError:
    """The error: `what` began with tokens of digest `there`, and the tokens found now have another digest."""
    return DataError(
        f"{what} was trained on other data than {source} holds now: digest {there[:16]} there, {here[:16]} here",
        fix="put the data back that it was begun with, or train anew in another directory",
    )


def _read_buffers(path: Path, layout: StateLayout, step: int) -> list[Tensor]:
    """The tensors of a file in their places. CheckpointError unless they are exactly those of the layout."""
    buffers = layout.empty()
    wanted = dict(layout.named(buffers, step))
    with safe_open(path, framework="pt") as file:
        if odd := sorted(wanted.keys() ^ set(file.keys())):
            raise CheckpointError(f"{path} has other tensors than its stage, first {odd[0]!r:.80}", fix=FIX)
        for name, place in wanted.items():  # one at a time: a stage may be most of what the memory holds
            found = file.get_tensor(name)
            if found.shape != place.shape or found.dtype != place.dtype:
                raise CheckpointError(
                    f"{path}: {name} is {tuple(found.shape)} {found.dtype}, not {tuple(place.shape)} {place.dtype}",
                    fix=FIX,
                )
            place.copy_(found)
    layout.complete(buffers, step)
    return buffers


class CheckpointWriter:
    """Writes one checkpoint. As a context manager: what was not committed is removed."""

    def __init__(
        self, directory: Path, manifest: Manifest, step: int, basis_epoch: int, *, data_digest: str = ""
    ) -> None:
        self.directory, self.manifest, self.step, self.basis_epoch = directory, manifest, step, basis_epoch
        self._data_digest = data_digest
        self.final = directory / f"step-{step:08d}"
        self._partial = directory / f"{_PARTIAL}{self.final.name}-{os.getpid()}"
        self._stages: dict[int, StageFile] = {}

    def __enter__(self) -> CheckpointWriter:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.discard()

    def open(self) -> None:
        """Make a place to write to."""
        with storage(self._partial):
            world.make_directory(self.directory)
            self._partial.mkdir(exist_ok=True)

    def discard(self) -> None:
        """Remove what was not committed."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def write_stage(self, index: int, tensors: dict[str, Tensor], state_digest: str) -> None:
        """Write one stage's tensors and flush them to disk."""
        path = self._partial / stage_name(index)
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        with storage(path):
            world.check_disk(path)
            # One entry: safetensors writes several in any order, and equal states are to be equal files.
            save_file(plain, path, metadata={"swarmtrain": f"stage {index} after step {self.step}"})
            world.sync(path)
            self._stages[index] = StageFile(path.name, path.stat().st_size, _sha256(path), state_digest)

    def commit(self) -> Path:
        """Write the index and move the checkpoint into place."""
        missing = set(range(self.manifest.stages.count)) - self._stages.keys()
        if missing:
            raise CheckpointError(f"checkpoint of step {self.step} lacks stage {min(missing)}")
        stages = tuple(self._stages[stage] for stage in sorted(self._stages))
        index = Index(self.step, self.basis_epoch, self.manifest, stages, self._data_digest)
        with storage(self.final):
            world.check_disk(self.final)
            path = self._partial / FILE
            path.write_text(index.to_json())
            world.sync(path)
            world.sync(self._partial)
            if self.final.exists():
                _remove(self.final)
            self._partial.rename(self.final)
            world.sync(self.directory)
        return self.final


def save_states(directory: Path, states: list[StageState], *, keep: int, data_digest: str = "") -> Path:
    """Checkpoint all stages of one process; older checkpoints beyond `keep` are removed afterwards."""
    first = states[0]
    with CheckpointWriter(directory, first.manifest, first.step, first.basis_epoch, data_digest=data_digest) as writer:
        for state in states:
            writer.write_stage(state.plan.index, dict(state.named_tensors()), state.digest())
        path = writer.commit()
    prune(directory, keep)
    return path


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, or the newest one below it."""
    if not (path / FILE).is_file():
        newest = latest(path)
        if newest is None:
            raise CheckpointError(f"no checkpoint in {path}", fix="name a directory that `swarmtrain train` wrote")
        return newest
    return Checkpoint(**vars(read_index(path)), path=path)


def latest(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint below `directory` (or its `checkpoints` folder), if any."""
    found = complete(directory) or complete(directory / "checkpoints")
    return open_checkpoint(found[-1]) if found else None


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.glob("step-*") if path.name[5:].isdecimal() and (path / FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what an interrupted write left behind."""
    for path in complete(directory)[:-keep]:
        _remove(path)
    clear_partial(directory)


def set_aside(directory: Path, *, after: int) -> list[Path]:
    """Rename checkpoints of later steps: their history is lost, and they must never be restored."""
    renamed = []
    for path in complete(directory):
        if int(path.name[5:]) > after:
            free = (path.with_name(f"{_LOST}{path.name}-{number}") for number in itertools.count(1))
            with storage(path):
                renamed.append(path.rename(next(place for place in free if not place.exists())))
                world.sync(directory)  # otherwise it could reappear after the journal has grown past its step
    return renamed


def clear_partial(directory: Path) -> None:
    """Remove what an interrupted write left behind. Only for the one process that writes here."""
    for path in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed one does not look complete."""
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


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
