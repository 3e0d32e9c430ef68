"""Selective stage compression: which stages compress their reduction in the next step. Pure: times in, stages out.

All stages begin to reduce when the step's last microbatch has come back, so the step ends with the slowest reduction.
Only those stages compress without which the step would end later (codec/policy.py); the others stay exact.
"""

from __future__ import annotations

from swarmtrain.codec.policy import StageReduction, stages_to_compress
from swarmtrain.reduce.coding import gradient_spec
from swarmtrain.run.manifest import Manifest

_WEIGHT = 0.5  # of the newest measurement
_GUESS = 0.25  # a compressed reduction's time, as a share of the exact one, before it has been measured
_WORTH_S = 0.02  # differences below this are noise


class StageCompression:
    """Remembers how long the reductions of each stage took, exact and compressed."""

    def __init__(self, manifest: Manifest) -> None:
        self._is_lossy = gradient_spec(manifest).lossy
        self._is_selective = manifest.reduce.selective
        self._num_stages = manifest.stages.count
        self._exact_s: dict[int, float] = {}
        self._compressed_s: dict[int, float] = {}

    def choose(self) -> frozenset[int]:
        """The stages that compress next."""
        if not self._is_lossy:
            return frozenset()
        if not self._is_selective:
            return frozenset(range(self._num_stages))
        if len(self._exact_s) < self._num_stages:
            return frozenset()  # measure first
        stages = [
            StageReduction(0.0, self._exact_s[stage], self._compressed_s.get(stage, _GUESS * self._exact_s[stage]))
            for stage in range(self._num_stages)
        ]
        ends = sorted(self._exact_s.values())
        return stages_to_compress(stages) if ends[-1] > _WORTH_S else frozenset()

    def took(self, stage: int, seconds: float, *, compressed: bool) -> None:
        """A reduction has ended."""
        times = self._compressed_s if compressed else self._exact_s
        known = times.get(stage)
        times[stage] = seconds if known is None else (1 - _WEIGHT) * known + _WEIGHT * seconds
