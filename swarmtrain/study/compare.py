"""Figures that need more than one training: gaps between runs of the same seed, and losses at the same time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from swarmtrain.study.links import TokenCosts, seconds_per_token
from swarmtrain.study.results import RunResult


def common_stage_s(results: Sequence[RunResult]) -> float:
    """Seconds of computing per token and stage, one number for all methods: the median of what was measured.

    A method's own measurement says more about what else the machine did than about the method. Runs that diverged have
    measured little; they count only if there are no others.
    """
    finished = [result for result in results if not result.diverged] or results
    return statistics.median(result.costs.stage_s for result in finished)


def projected_seconds(result: RunResult, stage_s: float, bytes_per_s: float, tokens: int) -> float:
    """The time for `tokens` tokens over such links."""
    costs = TokenCosts(stage_s, result.costs.codec_s, result.costs.forward_bytes, result.costs.backward_bytes)
    return tokens * seconds_per_token(costs, bytes_per_s)


def shortest_s(results: Sequence[RunResult], stage_s: float, bytes_per_s: float) -> float:
    """The time at which the fastest method has seen all tokens, as a mean over its seeds. Diverged runs do not count.

    A method with a shorter schedule of its own does not end the race.
    """
    finished = [result for result in results if result.val_loss is not None]
    most = max((result.tokens for result in finished), default=0)
    by_method: dict[str, list[float]] = {}
    for result in finished:
        if result.tokens == most:
            by_method.setdefault(result.method, []).append(projected_seconds(result, stage_s, bytes_per_s, most))
    return min((statistics.fmean(times) for times in by_method.values()), default=0.0)


def loss_at(result: RunResult, stage_s: float, bytes_per_s: float, seconds: float) -> float | None:
    """The validation loss of a run after `seconds` over such links, interpolated linearly between its validations.

    After the end it is the last one. None before the first validation, and for a run that diverged.
    """
    if result.val_loss is None:
        return None
    known = [
        (projected_seconds(result, stage_s, bytes_per_s, point.tokens), point.val_loss)
        for point in result.points
        if point.val_loss is not None
    ]
    if seconds >= known[-1][0]:
        return known[-1][1]
    for (start, before), (end, after) in itertools.pairwise(known):
        if start <= seconds < end:
            return before + (after - before) * (seconds - start) / (end - start)
    return None


def paired_gaps(results: Sequence[RunResult], baseline: Sequence[RunResult]) -> list[float]:
    """Validation loss minus that of the baseline's run with the same seed; pairs with a diverged run are left out."""
    known = {result.seed: result.val_loss for result in baseline}
    return [
        result.val_loss - base
        for result in results
        if result.val_loss is not None and (base := known.get(result.seed)) is not None
    ]
