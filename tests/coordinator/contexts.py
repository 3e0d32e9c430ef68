"""A run's context without network, journal and data, for tests that need none of them."""

from __future__ import annotations

from typing import Any, cast

from swarmtrain.coordinator.context import RunContext
from swarmtrain.observe.events import Events
from swarmtrain.run.manifest import Manifest


def bare_context(manifest: Manifest, **parts: Any) -> RunContext:
    """Only what is in `parts` may be used."""
    missing = {name: cast(Any, None) for name in ("node", "dispatcher", "journal", "sampler")}
    return RunContext(manifest=manifest, run_id="run", term=1, events=Events(), **{**missing, **parts})
