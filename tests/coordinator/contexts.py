"""A run's context without network, journal and data, for tests that need none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from swarmtrain.coordinator.context import RunContext
from swarmtrain.observe.events import Events
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import Heartbeat
from swarmtrain.wire.peer_report import PeerReport


def heartbeat(
    stage: int = 0, state: str = "serving", incarnation: str = "1", step: int = 0, state_digest: str = "", **said: Any
) -> Heartbeat:
    """Of a peer whose report says that, and `said`."""
    report = PeerReport(stage, state, incarnation, step, state_digest, **said)
    return Heartbeat("run", report)


def changed(beat: Heartbeat, **said: Any) -> Heartbeat:
    """The same heartbeat, with another report."""
    return replace(beat, report=replace(beat.report, **said))


def bare_context(manifest: Manifest, **parts: Any) -> RunContext:
    """Only what is in `parts` may be used."""
    missing = {name: cast(Any, None) for name in ("node", "dispatcher", "journal", "sampler")}
    return RunContext(manifest=manifest, run_id="run", term=1, events=Events(), **{**missing, **parts})
