"""Selective stage compression: which stages compress their all-reduce in the next step. Pure: times in, stages out.

All stages start their all-reduce when the step's last microbatch has come back, so the step ends with the slowest one.
A stage compresses only if the step ends sooner for it (codec/policy.py); the others stay exact.

A mode that is not used is not measured, and links change: a stage that has compressed PROBE_AFTER times in a row runs
one exact all-reduce, and a compressed time that is as many all-reduces old is forgotten. All stages that are due probe
in the same step, because that step lasts as long as the slowest of them anyway.
"""

from __future__ import annotations

from swarmtrain.codec.policy import StageAllReduce, stages_to_compress
from swarmtrain.reduce.coding import gradient_spec
from swarmtrain.run.manifest import Manifest

_WEIGHT = 0.5  # of the newest measurement
_GUESS = 0.25  # a compressed all-reduce's time relative to the exact one's, until it has been measured
_WORTH_S = 0.02  # differences below this are noise
PROBE_AFTER = 16  # all-reduces of one kind in a row: then the other kind's time is outdated


class StageCompression:
    """Remembers how long the all-reduces of each stage took, exact and compressed."""

    def __init__(self, manifest: Manifest) -> None:
        self._is_lossy = gradient_spec(manifest).lossy
        self._is_selective = manifest.reduce.selective
        self._num_stages = manifest.stages.count
        self._exact_s: dict[int, float] = {}
        self._compressed_s: dict[int, float] = {}
        self._in_a_row: dict[int, tuple[bool, int]] = {}  # whether compressed, and how often since the other kind

    def choose(self) -> frozenset[int]:
        """The stages that compress next."""
        if not self._is_lossy:
            return frozenset()
        if not self._is_selective:
            return frozenset(range(self._num_stages))
        if len(self._exact_s) < self._num_stages:
            return frozenset()  # measure first
        stages = [
            StageAllReduce(0.0, self._exact_s[stage], self._compressed_s.get(stage, _GUESS * self._exact_s[stage]))
            for stage in range(self._num_stages)
        ]
        if max(self._exact_s.values()) <= _WORTH_S:
            return frozenset()
        return frozenset(
            stage for stage in stages_to_compress(stages) if not self._is_outdated(stage, compressed=False)
        )

    def measured_s(self, stage: int) -> float:
        """How long the slower kind of this stage's all-reduce took of late; 0 if none has ended."""
        return max(self._exact_s.get(stage, 0.0), self._compressed_s.get(stage, 0.0))

    def took(self, stage: int, seconds: float, *, compressed: bool) -> None:
        """An all-reduce of `stage` has ended."""
        times = self._compressed_s if compressed else self._exact_s
        known = None if self._is_outdated(stage, compressed=compressed) else times.get(stage)
        times[stage] = seconds if known is None else (1 - _WEIGHT) * known + _WEIGHT * seconds
        kind, count = self._in_a_row.get(stage, (compressed, 0))
        self._in_a_row[stage] = (compressed, count + 1 if kind is compressed else 1)
        if self._is_outdated(stage, compressed=True):
            self._compressed_s.pop(stage, None)  # guessed again: what did not help once may help now

    def _is_outdated(self, stage: int, *, compressed: bool) -> bool:
        """Whether a stage's time of this kind was measured too many all-reduces ago."""
        kind, count = self._in_a_row.get(stage, (compressed, 0))
        return kind is not compressed and count >= PROBE_AFTER
