"""The three things that a peer's parts share, without a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from swarmtrain.chain.membership import Membership
from swarmtrain.p2p.identity import RunKey
from swarmtrain.peer.compute import ComputeThread
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.ledger import Ledger
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.run.invite import Invite
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.certificates import Certificate, pack_credential, signed_part

from .test_stage_jobs import jobs_of

HUGE = 1 << 40
CALLER = "caller"  # a member that serves the stage before


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
    """A peer of a stage of `run`, in its first life. It has met `CALLER`."""
    membership = met_caller(stage)
    peer = PeerIdentity("run", stage, "life", cast(Any, node), authority, state=state, membership=membership)
    jobs = jobs_of(manifest, stage)
    return Parts(peer, StepClock(peer, manifest, max_ledger_bytes), Stage(manifest, compute, compute, jobs))


def met_caller(stage: int) -> Membership:
    """Who is in the run, as a peer of `stage` knows it: `CALLER` has shown its certificate."""
    key = RunKey(bytes(range(32)))
    membership = Membership(Invite("run", key.public_bytes, ()))
    certificate = Certificate("run", CALLER, 1, 1e12, stage=stage - 1)
    assert membership.met(CALLER, pack_credential(certificate, key.sign(signed_part(certificate))))
    return membership
