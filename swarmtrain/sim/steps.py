"""Optimizer steps: each ends with a barrier, and lost microbatches are replayed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from swarmtrain.sim.leases import Leases
from swarmtrain.sim.peer import Microbatch, SimPeer
from swarmtrain.sim.pipeline import Pipeline
from swarmtrain.sim.world import World


class Steps:
    """Opens a step, waits for all of its microbatches, then for the all-reduce. Without `batch` leases never end."""

    def __init__(self, world: World, pipeline: Pipeline, leases: Leases, rng: random.Random) -> None:
        self._world = world
        self._pipeline = pipeline
        self._leases = leases
        self._rng = rng
        self._batch = world.scenario.batch
        self._outstanding = self._batch  # microbatches and replayed pieces the current step still waits for
        self._in_barrier = False
        self.num_steps = 0
        pipeline.on_finished = self._finished
        pipeline.on_owner_lost = leases.owner_lost
        pipeline.on_forwarded = leases.forwarded
        pipeline.on_lease_stolen = leases.stolen
        pipeline.processors.on_replayed = self._settle_one

    def work_lost(self, peer: SimPeer) -> None:
        """A peer died during a step: other peers of its stage recompute what it had accumulated.

        Once the all-reduce has begun, its share counts as delivered.
        """
        if not self._batch or self._in_barrier:
            return
        self._outstanding += peer.accumulated
        num_lost = peer.accumulated + peer.replaying
        if num_lost:
            self._world.engine.after(self._world.scenario.detect_s, self._replay, peer.stage, num_lost)

    def may_leave(self) -> bool:
        """Whether a drained peer may leave now: not before the end of a step, which needs its gradient."""
        return not self._batch

    def _replay(self, stage: int, num_lost: int) -> None:
        serving = [p for p in self._world.peers if p.state == "serving" and p.stage == stage]
        if not serving:
            self._world.engine.after(self._world.scenario.detect_s, self._replay, stage, num_lost)
            return
        for peer in self._rng.choices(serving, [p.speed for p in serving], k=num_lost):
            self._world.meters.count("pieces computed again", self._world.engine.now)
            self._pipeline.replay_piece(stage, peer)

    def _finished(self, microbatch: Microbatch, owner: SimPeer) -> None:
        self._leases.finished(microbatch, owner)
        self._settle_one()
        self._leases.fill()

    def _settle_one(self) -> None:
        if not self._batch:
            return
        self._outstanding -= 1
        if self._outstanding <= 0 and not self._in_barrier:
            self._in_barrier = True
            self._world.meters.barrier(True, self._world.engine.now)
            self._world.engine.after(self._reduce_s(), self._applied)

    def _reduce_s(self) -> float:
        """Duration of the barrier: the all-reduce of the stage with the slowest link."""
        scenario = self._world.scenario
        slowest: dict[int, list[float]] = {}
        for peer in self._world.peers:
            if peer.state in ("serving", "draining"):
                slowest.setdefault(peer.stage, []).append(min(peer.up_rate, peer.down_rate))
        seconds = (
            all_reduce_seconds(scenario.gradient_bytes_of(stage, len(rates)), rates) for stage, rates in slowest.items()
        )
        return max(seconds, default=0.0) + 4.0 * scenario.backbone_latency_s

    def _applied(self) -> None:
        self._in_barrier = False
        self.num_steps += 1
        self._outstanding = self._batch
        self._world.meters.barrier(False, self._world.engine.now)
        for peer in self._world.peers:
            peer.accumulated = 0
            if peer.state == "draining" and not peer.held:
                self._pipeline.on_drained(peer)
        self._leases.open_step()


def all_reduce_seconds(gradient_bytes: float, link_rates: Sequence[float]) -> float:
    """Every peer sends and receives `gradient_bytes` less its own part, both ways at once: the slowest link decides."""
    if not link_rates:
        return 0.0
    return gradient_bytes * (1.0 - 1.0 / len(link_rates)) / min(link_rates)
