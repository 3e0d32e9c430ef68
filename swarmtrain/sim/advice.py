"""What limits a forecast, and which key of the manifest would help most: one sentence. Pure: tries forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swarmtrain.model.workload import workload_of
from swarmtrain.run.manifest import Manifest
from swarmtrain.sim.plan import Forecast, forecast
from swarmtrain.sim.profiles import PeerProfile

# From the least loss to the fewest bytes. Not topk: it costs far more loss than these.
CODECS = ("bf16", "int8", "powersgd32")
GOOD_SHARE = 0.8  # of a step that computes
_WORTH = 1.05  # times the tokens per second
_LARGEST_GROWTH = 8  # of the batch: a larger one learns less per token


def advice(manifest: Manifest, profiles: Sequence[tuple[PeerProfile, float]], found: Forecast) -> str:
    """What takes the largest share of a step, and what to change."""
    if found.empty_stages:
        return f"stage {found.empty_stages[0]} has no machine that holds it: more memory, or more stages.count"
    idle = {"reduce": found.reduce_s, "fill": found.fill_s}
    if sum(idle.values()) <= (1.0 - GOOD_SHARE) * found.step_s:
        return _of_a_busy_pipeline(found)
    if found.reduce_s >= found.fill_s:
        what = f"{found.reduce_s / found.step_s:.0%} of a step is the all-reduce of stage {found.reduce_stage}"
        changes = [
            change for change in (_codec(manifest, profiles, found), _batch(manifest, profiles, found)) if change
        ]
    else:
        what = f"{found.fill_s / found.step_s:.0%} of a step fills and empties the pipeline"
        changes = [change for change in (_batch(manifest, profiles, found),) if change]
    return f"{what}: {', or '.join(changes)}" if changes else f"{what}, and no key of the manifest changes that"


def _of_a_busy_pipeline(found: Forecast) -> str:
    weakest = max(range(len(found.stages)), key=lambda index: found.stages[index].busy)
    what = "the lines of" if found.is_short_of_bytes else "the computing of"
    help_ = "a smaller boundary.k or wire codec, or" if found.is_short_of_bytes else "faster machines, or"
    return f"{what} stage {weakest} set the pace: {help_} more machines there"


def _codec(manifest: Manifest, profiles: Sequence[tuple[PeerProfile, float]], found: Forecast) -> str:
    """The mildest codec with which steps mostly compute, else the one with most tokens per second."""
    best, best_codec = found, ""
    for codec in CODECS:
        if manifest.boundary.track_every and not codec.startswith("powersgd"):
            continue  # it would round the statistics that tracking needs
        tried = forecast(workload_of(replace(manifest, reduce=replace(manifest.reduce, codec=codec))), profiles)
        if tried.tokens_per_s > _WORTH * best.tokens_per_s:
            best, best_codec = tried, codec
        if tried.reduce_s <= (1.0 - GOOD_SHARE) * tried.step_s:
            break
    return f"reduce.codec = {best_codec} ({best.tokens_per_s:,.0f} tokens/s)" if best_codec else ""


def _batch(manifest: Manifest, profiles: Sequence[tuple[PeerProfile, float]], found: Forecast) -> str:
    """The smallest batch with which steps mostly compute, or the largest that is worth trying."""
    batch, best = manifest.batch, found
    largest = _LARGEST_GROWTH * batch.microbatches_per_step
    while batch.microbatches_per_step < largest and best.reduce_s + best.fill_s > (1.0 - GOOD_SHARE) * best.step_s:
        batch = replace(batch, microbatches_per_step=2 * batch.microbatches_per_step)
        best = forecast(workload_of(replace(manifest, batch=batch)), profiles)
    if best.tokens_per_s <= _WORTH * found.tokens_per_s:
        return ""
    return f"batch.microbatches_per_step = {batch.microbatches_per_step} ({best.tokens_per_s:,.0f} tokens/s)"
