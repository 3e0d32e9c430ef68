"""docs/memory.md shows what the model of memory says of the presets, and the presets fit ordinary machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtrain.model.footprint import best, choices
from swarmtrain.model.layout import plan_stages
from swarmtrain.model.memory_table import as_markdown
from swarmtrain.run.presets import preset

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
# What holds every stage, in GB of a card and of its host.
HOLDS = {"llama-1b": (5.5, 9.0), "llama-8b": (11.0, 46.0)}


def test_the_page_shows_the_table() -> None:
    assert f"<!-- memory -->\n{as_markdown()}<!-- end -->\n" in PAGE.read_text(), "write it anew with scripts/plans"


@pytest.mark.parametrize("name", HOLDS)
def test_every_stage_of_a_large_preset_fits(name: str) -> None:
    manifest = preset(name)
    card, host = (int(size * 1e9) for size in HOLDS[name])
    assert all(best(choices(manifest, plan), card, host) is not None for plan in plan_stages(manifest))


def test_every_stage_but_the_last_of_the_eight_billion_fits_a_card_of_12_gb_beside_16_gb() -> None:
    manifest = preset("llama-8b")
    short = [
        plan.index for plan in plan_stages(manifest) if best(choices(manifest, plan), 11 * 10**9, 16 * 10**9) is None
    ]
    assert short == [31]
