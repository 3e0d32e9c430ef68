"""The table of docs/memory.md: what the stages of the large presets take of ordinary machines."""

from __future__ import annotations

from swarmtrain.model.footprint import Footprint, choices
from swarmtrain.model.layout import StagePlan, plan_stages
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset
from swarmtrain.units import show_gb

CARDS_GB = {"llama-125m": (4,), "llama-1b": (6, 12), "llama-8b": (12,)}
HEADERS = ("preset", "stages", "card", "on the card", "on the host", "how")
_HOW = ("all on the card", "parameters and moments on the host", "sums on the host too")


def as_markdown() -> str:
    """One row for each preset, card and kind of stage."""
    lines = [_line(HEADERS), _line(["---"] * len(HEADERS))]
    for name, cards in CARDS_GB.items():
        manifest = preset(name)
        for card in cards:
            lines += [_row(manifest, plans, card) for plans in _kinds(manifest)]
    return "\n".join(lines) + "\n"


def way_for(manifest: Manifest, plan: StagePlan, device_bytes: int) -> Footprint:
    """The fastest way that fits a card, whatever the host; the smallest on the device if none does."""
    ways = choices(manifest, plan)
    return next((way for way in ways if way.device_bytes <= device_bytes), ways[-1])


def _kinds(manifest: Manifest) -> list[list[StagePlan]]:
    """The first stage, those between, the last one."""
    plans = plan_stages(manifest)
    return [plans[:1], plans[1:-1], plans[-1:]]


def _row(manifest: Manifest, plans: list[StagePlan], card_gb: int) -> str:
    way = max((way_for(manifest, plan, card_gb * 10**9) for plan in plans), key=lambda item: item.device_bytes)
    stages = str(plans[0].index) if len(plans) == 1 else f"{plans[0].index}-{plans[-1].index}"
    how = _HOW[way.offload] + (", layers computed again" if way.recomputes else "")
    sizes = (f"{card_gb} GB", show_gb(way.device_bytes), show_gb(way.host_bytes))
    return _line((f"`{manifest.run.name}`", stages, *sizes, how))


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
