"""Who starts the next microbatch: stage-0 peers pull leases as windows allow; with steps, a barrier after each."""

from __future__ import annotations

import random
from collections.abc import Sequence

from swarmtrain.sim.peer import Microbatch, SimPeer
from swarmtrain.sim.pipeline import Pipeline, World


class Steps:
    """The coordinator. Without `batch`, leases never end and nothing is ever reduced."""

    def __init__(self, world: World, pipeline: Pipeline, rng: random.Random) -> None:
        self._world = world
        self._pipeline = pipeline
        self._rng = rng
        self._batch = world.scenario.batch
        self._next_number = 0
        self._unleased = self._batch
        self._outstanding = self._batch  # microbatches and replayed pieces the current step still waits for
        self._in_barrier = False
        self.num_steps = 0
        pipeline.on_finished = self._finished
        pipeline.on_owner_lost = self._owner_lost
        pipeline.on_hungry = self.fill
        pipeline.on_replayed = self._replayed

    def fill(self, owner: SimPeer) -> None:
        """Start microbatches while the owner's window has room, but none that would only wait at home."""
        if owner.window is None or self._in_barrier:
            return
        while owner.state == "serving" and not owner.num_forward and owner.in_flight < owner.window.size:
            if self._batch:
                if not self._unleased:
                    return
                self._unleased -= 1
            self._next_number += 1
            microbatch = Microbatch(self._next_number, self._world.scenario.num_stages, self._world.engine.now)
            self._pipeline.start(microbatch, owner)

    def work_lost(self, peer: SimPeer) -> None:
        """A peer died in mid-step: what it had accumulated is computed again, by others of its stage.

        Once the reduction has begun, the others are taken to have it.
        """
        if not self._batch or self._in_barrier:
            return
        self._outstanding += peer.accumulated
        num_lost = peer.accumulated + peer.replaying
        if num_lost:
            self._world.engine.after(self._world.scenario.detect_s, self._replay, peer.stage, num_lost)

    def may_leave(self) -> bool:
        """Whether a drained peer owes nothing to the current step."""
        return not self._batch

    def _replay(self, stage: int, num_lost: int) -> None:
        serving = [p for p in self._world.peers if p.state == "serving" and p.stage == stage]
        if not serving:
            self._world.engine.after(self._world.scenario.detect_s, self._replay, stage, num_lost)
            return
        for peer in self._rng.choices(serving, [p.speed for p in serving], k=num_lost):
            self._world.meters.count("pieces computed again", self._world.engine.now)
            self._pipeline.replay_piece(stage, peer)

    def _finished(self, owner: SimPeer) -> None:
        self._settle_one()
        self.fill(owner)

    def _owner_lost(self, microbatch: Microbatch) -> None:
        """The lease goes to another stage-0 peer, with the hint who holds the microbatch in stage 1."""
        serving = [p for p in self._world.peers if p.state == "serving" and p.stage == 0]
        if serving:
            self._pipeline.start(microbatch, self._rng.choices(serving, [p.speed for p in serving])[0])
        else:
            self._world.engine.after(self._world.scenario.detect_s, self._owner_lost, microbatch)

    def _replayed(self) -> None:
        self._settle_one()

    def _settle_one(self) -> None:
        if not self._batch:
            return
        self._outstanding -= 1
        if self._outstanding <= 0 and not self._in_barrier:
            self._in_barrier = True
            self._world.meters.barrier(True, self._world.engine.now)
            self._world.engine.after(self._reduce_s(), self._applied)

    def _reduce_s(self) -> float:
        """How long the barrier lasts: until the stage with the slowest link has reduced its gradient."""
        scenario = self._world.scenario
        slowest: dict[int, list[float]] = {}
        for peer in self._world.peers:
            if peer.state in ("serving", "draining"):
                slowest.setdefault(peer.stage, []).append(min(peer.up_rate, peer.down_rate))
        seconds = (reduction_seconds(scenario.gradient_bytes_of(stage), rates) for stage, rates in slowest.items())
        return max(seconds, default=0.0) + 4.0 * scenario.backbone_latency_s

    def _applied(self) -> None:
        self._in_barrier = False
        self.num_steps += 1
        self._unleased = self._outstanding = self._batch
        self._world.meters.barrier(False, self._world.engine.now)
        for peer in self._world.peers:
            peer.accumulated = 0
            if peer.state == "draining" and not peer.held:
                self._pipeline.on_drained(peer)
        self._fill_all()

    def _fill_all(self) -> None:
        for peer in self._world.peers:
            if peer.window is not None and peer.state == "serving":
                self.fill(peer)


def reduction_seconds(gradient_bytes: float, link_rates: Sequence[float]) -> float:
    """Every peer sends and receives `gradient_bytes` less its own part, both ways at once: the slowest link decides."""
    if not link_rates:
        return 0.0
    return gradient_bytes * (1.0 - 1.0 / len(link_rates)) / min(link_rates)
