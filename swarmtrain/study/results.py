"""The result of one training, and its file: one JSON per method and seed, written when the training is finished."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmtrain.errors import StorageError
from swarmtrain.study.links import TokenCosts


@dataclass(frozen=True)
class Point:
    """A validation during training."""

    step: int
    tokens: int
    val_loss: float | None  # None: not finite


@dataclass(frozen=True)
class RunResult:
    """One method with one seed. Losses are None where training diverged."""

    method: str
    seed: int
    manifest_digest: str
    num_trained: int
    steps: int
    tokens: int
    train_loss: float | None
    val_loss: float | None  # through the codec
    val_loss_codec_off: float | None
    points: tuple[Point, ...]
    costs: TokenCosts
    diverged: str = ""  # the reason, if it diverged

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
            os.replace(partial, path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another --out") from error


def load_result(path: Path) -> RunResult:
    """Read what `RunResult.save` wrote; StorageError if it is something else."""
    try:
        return _result(path.read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            f"{path} is not a result of this study: {error}", fix="remove it to train it again"
        ) from error


def as_lines(results: Sequence[RunResult]) -> str:
    """All results as text, one JSON object per line: everything that tables and plots are made from."""
    return "".join(json.dumps(asdict(result)) + "\n" for result in results)


def from_lines(text: str) -> list[RunResult]:
    """What `as_lines` wrote."""
    return [_result(line) for line in text.splitlines()]


def _result(text: str) -> RunResult:
    raw = json.loads(text)
    points = tuple(Point(**item) for item in raw.pop("points"))
    return RunResult(points=points, costs=TokenCosts(**raw.pop("costs")), **raw)


def finite(value: float | None) -> float | None:
    """The number, or None if it is not finite, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
