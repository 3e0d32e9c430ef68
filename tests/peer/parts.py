"""The three things that a peer's parts share, without a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from swarmtrain.peer.compute import ComputeThread
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.ledger import Ledger
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.run.manifest import Manifest

from .test_stage_jobs import jobs_of

HUGE = 1 << 40


@dataclass
class Parts:
    """Who the peer is, where the run stands, and its stage."""

    peer: PeerIdentity
    clock: StepClock
    stage: Stage

    @property
    def all(self) -> tuple[PeerIdentity, StepClock, Stage]:
        """As constructors take them."""
        return self.peer, self.clock, self.stage

    @property
    def ledger(self) -> Ledger:
        """Of the step under way."""
        return self.clock.ledger

    @property
    def compute(self) -> ComputeThread:
        """The stage's."""
        return self.stage.compute


def parts_of(
    manifest: Manifest,
    stage: int,
    node: Any,
    compute: ComputeThread,
    *,
    authority: Any = None,
    state: PeerState = PeerState.SERVING,
    max_ledger_bytes: int = HUGE,
) -> Parts:
    """A peer of a stage of `run`, in its first life."""
    peer = PeerIdentity("run", stage, "life", cast(Any, node), authority, state=state)
    jobs = jobs_of(manifest, stage)
    return Parts(peer, StepClock(peer, manifest, max_ledger_bytes), Stage(manifest, compute, compute, jobs))
