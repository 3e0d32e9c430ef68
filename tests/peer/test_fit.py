"""Whether a stage fits a machine, and what is left for microbatches between their forward and their backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from swarmtrain.errors import HardwareError
from swarmtrain.model.footprint import Offload, choices, cpu_choices
from swarmtrain.model.layout import plan_stages
from swarmtrain.peer import options
from swarmtrain.peer.options import Fit, PeerOptions, check_fit
from swarmtrain.run.presets import preset

MANIFEST = preset("llama-1b", ["stages.count=4"])


def fit(max_memory_bytes: int, stage: int = 1) -> Fit:
    nothing = cast(Any, None)
    return check_fit(MANIFEST, PeerOptions(nothing, stage, Path(), max_memory_bytes=max_memory_bytes))


def test_a_short_memory_holds_no_whole_graph_and_a_large_one_does() -> None:
    plan = plan_stages(MANIFEST)[1]
    whole, layered = cpu_choices(MANIFEST, plan)
    short = fit(layered.host_bytes)
    assert short.way == layered
    assert layered.kept_bytes <= short.graph_budget_bytes < whole.kept_bytes
    assert fit(whole.host_bytes - 1).graph_budget_bytes < whole.kept_bytes
    assert fit(whole.host_bytes).graph_budget_bytes >= whole.kept_bytes
    assert fit(whole.host_bytes).needed_bytes == whole.host_bytes
    assert fit(1 << 60).graph_budget_bytes > 1 << 50


def test_less_than_the_least_is_refused() -> None:
    with pytest.raises(HardwareError, match="stage 1 needs about"):
        fit(cpu_choices(MANIFEST, plan_stages(MANIFEST)[1])[-1].host_bytes - 1)


def on_card(monkeypatch: pytest.MonkeyPatch, device: int, host: int, offload: str = "auto") -> Fit:
    """On a machine with a graphics card that has so much memory free."""
    monkeypatch.setattr(options, "free_bytes", lambda where="cpu": host if where == "cpu" else device)
    nothing = cast(Any, None)
    return check_fit(MANIFEST, PeerOptions(nothing, 1, Path(), device="cuda:0", offload=offload))


def test_a_short_card_lays_the_state_and_then_the_sums_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in choices(MANIFEST, plan_stages(MANIFEST)[1]):
        found = on_card(monkeypatch, way.device_bytes, 1 << 50)
        assert found.way.device_bytes <= way.device_bytes
        assert found.way.offload <= way.offload, "no more than it must"
        assert found.needed_bytes == found.way.device_bytes
    assert found.way.offload is Offload.SUMS


def test_the_owner_may_say_what_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    least = choices(MANIFEST, plan_stages(MANIFEST)[1])[-1]
    assert on_card(monkeypatch, 1 << 50, 1 << 50).way.offload is Offload.NOTHING
    assert on_card(monkeypatch, 1 << 50, 1 << 50, "on").way.offload is Offload.STATE
    with pytest.raises(HardwareError, match=r"needs about .* of the device and .* of the host") as refused:
        on_card(monkeypatch, least.device_bytes, 1 << 50, "off")
    assert "--offload off" in refused.value.fix


def test_a_refusal_says_which_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    least = choices(MANIFEST, plan_stages(MANIFEST)[1])[-1]
    with pytest.raises(HardwareError) as refused:
        on_card(monkeypatch, least.device_bytes, least.host_bytes - (1 << 30))
    assert "1.1 GB more of the machine's own memory" in refused.value.fix
    with pytest.raises(HardwareError) as refused:
        on_card(monkeypatch, least.device_bytes - 1, 1 << 50)
    assert "memory of the device" in refused.value.fix
