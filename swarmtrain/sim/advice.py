"""What limits a forecast, and what would help: one sentence. Every number in it is that of another forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmtrain.model.reduce_bytes import ReduceBytes
from swarmtrain.run.manifest import Manifest
from swarmtrain.sim.demand import demand_of
from swarmtrain.sim.plan import Forecast, forecast
from swarmtrain.sim.profiles import MAX_MACHINES, PeerProfile
from swarmtrain.units import show_size

# From the least loss to the fewest bytes. Not topk: it costs far more loss than these.
CODECS = ("bf16", "int8", "lowrank100", "lowrank40")
FACTORS = ("powersgd", "lowrank")  # codecs of matrices: all else travels exactly
WIRE_CODEC = "quant8"
GOOD_SHARE = 0.8  # of a step in which the weakest stage works
_WORTH = 1.05  # times the tokens per second
_WORTH_A_MACHINE = 1.02
_LARGEST_GROWTH = 8  # of the batch: a larger one learns less per token
_MOST_TOKENS = 1 << 24  # of a step

Profiles = Sequence[tuple[PeerProfile, float]]


@dataclass(frozen=True, slots=True)
class Change:
    """What to set or to add, and the forecast with it."""

    words: str
    found: Forecast

    def __str__(self) -> str:
        return f"{self.words} ({self.found.tokens_per_s:,.0f} tokens/s)"


def advice(manifest: Manifest, profiles: Profiles, found: Forecast) -> str:
    """What takes the largest share of a step, and what to change."""
    if found.empty_stages:
        return _of_what_does_not_fit(found)
    waits = found.waiting_s > (1.0 - GOOD_SHARE) * found.step_s
    if not waits and not (_keeps_idle(found) and _would_gain_without_all_reduce(manifest, profiles, found)):
        return _of_a_busy_pipeline(manifest, profiles, found)
    is_fill = waits and found.fill_s > found.reduce_s
    tried = (_delay, _batch) if is_fill else (_codec, _batch, _delay)
    changes = [change for how in tried if (change := how(manifest, profiles, found)) is not None]
    if not changes and not waits:
        return _of_a_busy_pipeline(manifest, profiles, found)
    if not changes:
        return f"{_what_waits(found, is_fill=is_fill)}, and no key of the manifest changes that"
    return f"{_what_waits(found, is_fill=is_fill)}: set {_either(changes)}"


def _of_what_does_not_fit(found: Forecast) -> str:
    """The least that the largest of these stages needs, and what else would do."""
    need = max(
        (found.stages[stage] for stage in found.empty_stages), key=lambda item: item.memory_bytes + item.host_bytes
    )
    if not need.host_bytes:
        return f"stage {need.stage} has no machine that holds it: {show_size(need.memory_bytes)}, or more stages.count"
    return (
        f"stage {need.stage} has no machine that holds it: {show_size(need.memory_bytes)} on the card and"
        f" {show_size(need.host_bytes)} beside it, or more stages.count"
    )


def _what_waits(found: Forecast, *, is_fill: bool) -> str:
    is_delayed = found.waiting_share < 1.0
    waiting = found.waiting_s / found.step_s
    if is_fill and is_delayed:
        return f"{waiting:.0%} of a step waits until microbatches have passed the pipeline"
    if is_fill:
        return f"{(found.waiting_s - found.reduce_s) / found.step_s:.0%} of a step fills and empties the pipeline"
    if found.reduce_s and waiting >= 1.0 - GOOD_SHARE:
        share, verb = (waiting, "waits for") if is_delayed else (found.reduce_s / found.step_s, "is")
        return f"{share:.0%} of a step {verb} the all-reduce of stage {found.reduce_stage}"
    number = sum(item.count for item in found.idle if item.has_memory)
    return (
        f"{number:,} of {found.num_peers + number:,} machines are better left out:"
        " they would cost more in the all-reduce than they save"
    )


def _keeps_idle(found: Forecast) -> bool:
    """Whether so many machines that would fit are left out that it is no matter of whole machines."""
    number = sum(item.count for item in found.idle if item.has_memory)
    return number >= max(len(found.stages), found.num_peers * (1.0 - GOOD_SHARE))


def _would_gain_without_all_reduce(manifest: Manifest, profiles: Profiles, found: Forecast) -> bool:
    """Whether it is because of the all-reduce that machines are left out."""
    workload = demand_of(manifest)
    stages = tuple(replace(stage, reduced=ReduceBytes(0.0)) for stage in workload.stages)
    return forecast(replace(workload, stages=stages), profiles).tokens_per_s > _WORTH * found.tokens_per_s


def _of_a_busy_pipeline(manifest: Manifest, profiles: Profiles, found: Forecast) -> str:
    weakest = max(range(len(found.stages)), key=lambda index: found.stages[index].busy)
    what = "sending of" if found.is_short_of_bytes else "computing of"
    sentence = f"{found.work_s / found.step_s:.0%} of a step is the {what} stage {weakest}: "
    wire = _wire(manifest, profiles, found) if found.is_short_of_bytes else None
    faster = "faster lines" if found.is_short_of_bytes else "faster machines"
    more = _machines(manifest, profiles, found)
    sentence += f"set {wire}, or " if wire is not None else ""
    return sentence + f"more machines or {faster} there help" + (f", as {more}" if more is not None else "")


def _either(changes: Sequence[Change]) -> str:
    """The most helpful first."""
    return ", or ".join(str(change) for change in sorted(changes, key=lambda change: -change.found.tokens_per_s))


def _forecast_with(manifest: Manifest, profiles: Profiles) -> Forecast:
    return forecast(demand_of(manifest), profiles)


def _codec(manifest: Manifest, profiles: Profiles, found: Forecast) -> Change | None:
    """The mildest codec with which steps mostly work, else the one with most tokens per second."""
    best: Change | None = None
    for codec in CODECS:
        if manifest.boundary.track_every and not codec.startswith(FACTORS):
            continue  # it would round the statistics that tracking needs
        changed = replace(manifest, reduce=replace(manifest.reduce, codec=codec))
        tried = _forecast_with(changed, profiles)
        if tried.tokens_per_s > _WORTH * (best.found if best else found).tokens_per_s:
            best = Change(f"reduce.codec = {codec}", tried)
        if tried.waiting_s <= (1.0 - GOOD_SHARE) * tried.step_s and not _keeps_idle(tried):
            break
    return best


def _batch(manifest: Manifest, profiles: Profiles, found: Forecast) -> Change | None:
    """The smallest batch with which steps mostly work, or the largest that is worth trying."""
    batch, tried = manifest.batch, found
    most = _MOST_TOKENS * batch.microbatches_per_step // manifest.tokens_per_step
    largest = min(_LARGEST_GROWTH * batch.microbatches_per_step, max(most, batch.microbatches_per_step))
    while 2 * batch.microbatches_per_step <= largest and (
        tried is found or tried.waiting_s > (1.0 - GOOD_SHARE) * tried.step_s or _keeps_idle(tried)
    ):
        batch = replace(batch, microbatches_per_step=2 * batch.microbatches_per_step)
        tried = _forecast_with(replace(manifest, batch=batch), profiles)
    if tried.tokens_per_s <= _WORTH * found.tokens_per_s:
        return None
    return Change(f"batch.microbatches_per_step = {batch.microbatches_per_step}", tried)


def _delay(manifest: Manifest, profiles: Profiles, found: Forecast) -> Change | None:
    """All-reduces in the background of the next step."""
    if manifest.schedule.delay:
        return None
    tried = _forecast_with(replace(manifest, schedule=replace(manifest.schedule, delay=1)), profiles)
    return Change("schedule.delay = 1", tried) if tried.tokens_per_s > _WORTH * found.tokens_per_s else None


def _wire(manifest: Manifest, profiles: Profiles, found: Forecast) -> Change | None:
    """Fewer bytes for a boundary tensor."""
    if (manifest.wire.forward, manifest.wire.backward) != ("fp32", "fp32"):
        return None
    changed = replace(manifest, wire=replace(manifest.wire, forward=WIRE_CODEC, backward=WIRE_CODEC))
    tried = _forecast_with(changed, profiles)
    if tried.tokens_per_s <= _WORTH * found.tokens_per_s:
        return None
    return Change(f"wire.forward = wire.backward = {WIRE_CODEC}", tried)


def _machines(manifest: Manifest, profiles: Profiles, found: Forecast) -> Change | None:
    """The fewest more machines that help: of the profile of which it takes the fewest."""
    peers = [(profile, number) for profile, number in profiles if profile.role == "peer"]
    total, number = sum(int(count) for _, count in peers), 1
    while number <= total and total + number <= MAX_MACHINES:
        tried = [
            Change(f"{number} more: {profile.name}", _forecast_with(manifest, [*profiles, (profile, float(number))]))
            for profile in dict.fromkeys(profile for profile, _ in peers)
        ]
        best = max(tried, key=lambda change: change.found.tokens_per_s)
        if best.found.tokens_per_s > _WORTH_A_MACHINE * found.tokens_per_s:
            return best
        number *= 2
    return None
