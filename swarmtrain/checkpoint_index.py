"""`checkpoint.json`: what a checkpoint holds, written last. It carries a digest of its own fields, so that an edited
one is noticed before anything is loaded. Older versions have no digest; only their fields are checked.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swarmtrain.errors import CheckpointError, ManifestError
from swarmtrain.run.manifest import Manifest, parse_manifest

FORMAT = 1
FILE = "checkpoint.json"
FIX = "remove this checkpoint to go on from an earlier one, or copy it again"
MAX_INDEX_BYTES = 1 << 24  # a manifest and three lines per stage are far below
_OWN_DIGEST = "index_digest"

T = TypeVar("T")


@dataclass(frozen=True)
class StageFile:
    """One stage's file as the index describes it."""

    file: str
    num_bytes: int
    sha256: str
    state_digest: str


@dataclass(frozen=True)
class Index:
    """Everything that `checkpoint.json` says."""

    step: int
    basis_epoch: int
    manifest: Manifest
    stages: tuple[StageFile, ...]
    data_digest: str = ""  # of the tokens that it was trained on (`TokenSource.digest`); empty in older versions

    def to_json(self) -> str:
        """The content of the file: the same for equal checkpoints."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "basis_epoch": self.basis_epoch,
            "manifest_digest": self.manifest.digest(),
            "data_digest": self.data_digest,
            "forward_codec": self.manifest.wire.forward,
            "stages": [vars(stage) for stage in self.stages],
            "manifest": self.manifest.canonical(),
        }
        return json.dumps({_OWN_DIGEST: _digest(content), **content}, indent=1)


def read_index(directory: Path) -> Index:
    """Read `directory/checkpoint.json`; `CheckpointError` if it is damaged or edited."""
    path = directory / FILE
    try:
        with path.open("rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
        if len(content) > MAX_INDEX_BYTES:
            raise ValueError(f"larger than {MAX_INDEX_BYTES} bytes")
        raw: dict[str, Any] = json.loads(content)
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{directory} has format {raw['format']!r:.40}; this version reads format {FORMAT}")
        if _OWN_DIGEST in raw and raw.pop(_OWN_DIGEST) != _digest(raw):
            raise ValueError("it was changed after it was written: it does not have its own digest")
        manifest = parse_manifest(_typed(raw, "manifest", str))
        stages = tuple(_stage_file(number, entry) for number, entry in enumerate(_typed(raw, "stages", list)))
        step, basis_epoch = _typed(raw, "step", int), _typed(raw, "basis_epoch", int)
        if len(stages) != manifest.stages.count or manifest.digest() != raw["manifest_digest"] or step < 0:
            raise ValueError("it contradicts its own manifest")
        data_digest = _typed(raw, "data_digest", str) if "data_digest" in raw else ""
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: it has no {error}", fix=FIX) from error
    except (ValueError, TypeError, RecursionError, ManifestError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", fix=FIX) from error
    return Index(step, basis_epoch, manifest, stages, data_digest)


def stage_name(number: int) -> str:
    """The file of a stage."""
    return f"stage-{number:03d}.safetensors"


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _typed(raw: dict[str, Any], name: str, kind: type[T]) -> T:
    value = raw[name]
    if type(value) is not kind:
        raise TypeError(f"{name} is not {kind.__name__}")
    return value


def _stage_file(number: int, entry: dict[str, Any]) -> StageFile:
    name = _typed(entry, "file", str)
    if name != stage_name(number):  # also keeps reading inside the checkpoint's own directory
        raise ValueError(f"the file of stage {number} is {name!r:.60}, not {stage_name(number)!r}")
    return StageFile(
        name,
        _typed(entry, "num_bytes", int),
        _typed(entry, "sha256", str),
        _typed(entry, "state_digest", str),
    )
