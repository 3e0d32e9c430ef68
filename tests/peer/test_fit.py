"""Whether a stage fits a machine, and what is left for microbatches between their forward and their backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from swarmtrain.errors import HardwareError
from swarmtrain.model.activations import activations
from swarmtrain.model.layout import plan_stages
from swarmtrain.peer.options import Fit, PeerOptions, check_fit
from swarmtrain.run.presets import preset

MANIFEST = preset("llama-1b", ["stages.count=4"])


def fit(max_memory_bytes: int, stage: int = 1) -> Fit:
    nothing = cast(Any, None)
    return check_fit(MANIFEST, PeerOptions(nothing, stage, Path(), max_memory_bytes=max_memory_bytes))


def test_a_short_memory_holds_no_whole_graph_and_a_large_one_does() -> None:
    plan = plan_stages(MANIFEST)[1]
    whole, layered = (activations(MANIFEST, plan, recomputes=flag) for flag in (False, True))
    needed = fit(1 << 60).needed_bytes
    short = fit(needed)
    assert layered.kept_bytes <= short.graph_budget_bytes < whole.kept_bytes
    extra = whole.kept_bytes + whole.peak_bytes - layered.kept_bytes - layered.peak_bytes
    assert fit(needed + extra - 1).graph_budget_bytes < whole.kept_bytes
    assert fit(needed + extra).graph_budget_bytes >= whole.kept_bytes
    assert fit(1 << 60).graph_budget_bytes > 1 << 50


def test_less_than_the_least_is_refused() -> None:
    with pytest.raises(HardwareError, match="stage 1 needs about"):
        fit(fit(1 << 60).needed_bytes - 1)
