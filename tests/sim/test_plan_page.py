"""docs/simulator.md shows what `plan` says of the large presets, and the presets reach their goal."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtrain.run.presets import preset
from swarmtrain.sim.demand import demand_of
from swarmtrain.sim.plan import Forecast, forecast
from swarmtrain.sim.plan_table import SWARMS, WAYS, as_markdown, rows
from swarmtrain.sim.profiles import load_profile

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "peers"
LARGE = tuple(SWARMS)


def planned(name: str, swarm: dict[str, int], *settings: str) -> Forecast:
    profiles = [(load_profile(PEERS / f"{profile}.toml"), float(number)) for profile, number in swarm.items()]
    return forecast(demand_of(preset(name, settings)), profiles)


def test_the_page_shows_the_plans() -> None:
    table = list(rows(PEERS))
    assert len(table) == sum(len(swarms) for swarms in SWARMS.values()) * len(WAYS)
    page = (ROOT / "docs" / "simulator.md").read_text()
    assert f"<!-- plans -->\n{as_markdown(table)}<!-- end -->\n" in page, "run scripts/plans"


def test_a_billion_parameters_on_gaming_computers_reach_four_fifths_of_the_bound() -> None:
    found = planned("llama-1b", {"gaming-gpu": 128}, "schedule.delay=1", "schedule.predict=true")
    assert found.share_of_bound >= 0.8
    assert found.num_peers > 120


@pytest.mark.parametrize("name", LARGE)
def test_delay_and_codec_each_help_at_home(name: str) -> None:
    swarm = SWARMS[name][0]
    assert any(profile.startswith("gaming-gpu") for profile in swarm)
    exact, coded, delayed, both = (planned(name, swarm, *settings).tokens_per_s for _, settings in WAYS)
    assert both > coded > exact
    assert both > delayed >= exact


@pytest.mark.parametrize("name", LARGE)
def test_the_large_presets_choose_what_the_page_says(name: str) -> None:
    manifest = preset(name)
    assert manifest.optimizer.kind == "muon"
    assert manifest.reduce.codec != "none"
    assert (manifest.wire.forward, manifest.wire.backward) == ("quant8", "quant8")
    assert manifest.tokens_per_step == {"llama-125m": 2**19, "llama-1b": 2**22, "llama-8b": 2**23}[name]


def test_every_stage_of_the_billion_fits_the_cards_of_volunteers() -> None:
    gaming = load_profile(PEERS / "gaming-gpu.toml")
    assert all(gaming.way(stage) is not None for stage in demand_of(preset("llama-1b")).stages)
