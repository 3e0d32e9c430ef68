"""The learning rate of a step: a pure function of the manifest's schedule."""

from __future__ import annotations

import math

from swarmtrain.errors import DivergedError
from swarmtrain.run.manifest import Manifest

LARGEST_APPLIED = 2.0**60  # so that neither a momentum nor a square of it leaves the range of fp32


def learning_rate(manifest: Manifest, step: int) -> float:
    """The learning rate with which step `step` (0-based) is applied: linear warm-up, then the chosen decay."""
    schedule, peak = manifest.schedule, manifest.optimizer.learning_rate
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    span = max(1, schedule.steps - 1 - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / span)
    remaining = 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * remaining)


def gradient_scale(manifest: Manifest, squared_norms: list[float]) -> tuple[float, float]:
    """(global gradient norm, factor to apply to the gradient sum) from every stage's squared norm of its sum.

    The factor takes the mean over the step's microbatches and clips the global norm. Both the reference trainer and
    the coordinator call this, with the stages' numbers in stage order, so they decide the same bits.
    """
    mean = 1.0 / manifest.batch.microbatches_per_step
    norm = math.sqrt(math.fsum(squared_norms)) * mean
    bound = manifest.optimizer.clip_norm
    return norm, mean * (bound / norm) if 0.0 < bound < norm else mean


def check_norm(manifest: Manifest, step: int, norm: float, scale: float) -> None:
    """DivergedError unless a gradient of this norm, times `scale`, can be applied in step `step`."""
    fix = "lower optimizer.learning_rate"
    if not norm < math.inf:
        raise DivergedError(f"the gradient norm of step {step} is {norm}", fix=fix)
    applied = norm * scale * manifest.batch.microbatches_per_step
    if manifest.optimizer.kind == "muon" and not applied < LARGEST_APPLIED:
        raise DivergedError(f"the gradient norm of step {step} is {applied:g}: too large to be applied", fix=fix)


def mean_loss(losses: list[float]) -> float:
    """The step's loss: correctly rounded sum, so the order of reports does not matter."""
    return math.fsum(losses) / len(losses)
