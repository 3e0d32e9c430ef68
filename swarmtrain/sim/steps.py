"""Optimizer steps: leases, all-reduce, decision; lost microbatches are replayed. With a delay two steps are open."""

from __future__ import annotations

import random
from collections import deque

from swarmtrain.sim.all_reduce import BackgroundAllReduce, all_reduce_seconds
from swarmtrain.sim.leases import Leases
from swarmtrain.sim.peer import Microbatch, SimPeer
from swarmtrain.sim.pipeline import Pipeline
from swarmtrain.sim.world import World


class _OpenStep:
    """A step from its first lease to its decision."""

    __slots__ = ("all_reduce", "is_reducing", "num_outstanding", "number")

    def __init__(self, number: int, num_microbatches: int) -> None:
        self.number = number
        self.num_outstanding = num_microbatches  # microbatches and replayed pieces that it still waits for
        self.is_reducing = False
        self.all_reduce: BackgroundAllReduce | None = None


class Steps:
    """Opens steps, waits for their microbatches, then for the all-reduce. Without `batch` leases never end.

    The microbatches of a step need the weights of `Scenario.weights_step`: its leases begin when these are applied and
    all leases of the step before are given. Steps are reduced one after the other, and so decided in order.
    """

    def __init__(self, world: World, pipeline: Pipeline, leases: Leases, rng: random.Random) -> None:
        self._world = world
        self._pipeline = pipeline
        self._leases = leases
        self._rng = rng
        self._batch = world.scenario.batch
        self._open: deque[_OpenStep] = deque()
        self._num_opened = 0
        self._is_waiting = False  # for an all-reduce: no microbatch may be leased until it ends
        self.num_steps = 0
        pipeline.on_finished = self._finished
        pipeline.on_owner_lost = leases.owner_lost
        pipeline.on_forwarded = leases.forwarded
        pipeline.on_lease_stolen = leases.stolen
        pipeline.processors.on_replayed = self._settle_one
        leases.on_all_given = self._open_next

    def start(self) -> None:
        """Open the first step."""
        self._open_next()
        self._leases.fill()

    def work_lost(self, peer: SimPeer) -> None:
        """A peer died during a step: other peers of its stage recompute what it had accumulated.

        Without a delay, its share counts as delivered once the all-reduce has begun. An all-reduce in the background
        lasts longer: until its stage is done, the share is lost.
        """
        engine, detect_s = self._world.engine, self._world.scenario.detect_s
        for step in self._open:
            if step.all_reduce.has_sum(peer.stage) if step.all_reduce is not None else step.is_reducing:
                continue
            slot = step.number & 1
            num_lost = peer.accumulated[slot] + peer.replaying[slot]
            step.num_outstanding += peer.accumulated[slot]
            if num_lost:
                engine.after(detect_s, self._replay, peer.stage, num_lost, step.number)
            if step.all_reduce is not None and step.all_reduce.lost(peer):
                step.num_outstanding += 1  # the loss itself, until it is noticed
                engine.after(detect_s, self._settle_one, step.number)

    def may_leave(self) -> bool:
        """Whether a drained peer may leave now: not before the end of a step, which needs its gradient."""
        return not self._batch

    # -- what a step waits for

    def _replay(self, stage: int, num_lost: int, number: int) -> None:
        serving = [p for p in self._world.peers if p.state == "serving" and p.stage == stage]
        if not serving:
            self._world.engine.after(self._world.scenario.detect_s, self._replay, stage, num_lost, number)
            return
        for peer in self._rng.choices(serving, [p.speed for p in serving], k=num_lost):
            self._world.meters.count("pieces computed again", self._world.engine.now)
            self._pipeline.replay_piece(stage, peer, number)

    def _finished(self, microbatch: Microbatch, owner: SimPeer) -> None:
        self._leases.finished(microbatch, owner)
        self._settle_one(microbatch.step)
        self._leases.fill()

    def _settle_one(self, number: int) -> None:
        if not self._batch:
            return
        step = next(step for step in self._open if step.number == number)
        step.num_outstanding -= 1
        self._reduce_oldest()

    # -- all-reduce and decision

    def _reduce_oldest(self) -> None:
        if not self._open or self._open[0].num_outstanding > 0:
            return
        step = self._open[0]
        if not self._world.scenario.delay:
            if not step.is_reducing:
                step.is_reducing = True
                self._note_waiting()
                self._world.engine.after(self._reduce_s(), self._applied)
            return
        if not step.is_reducing:
            step.is_reducing = True
            step.all_reduce = BackgroundAllReduce(self._world, self._reduced)
            self._note_waiting()
        if step.all_reduce is not None:
            step.all_reduce.begin()  # or begin again where a member was lost

    def _reduced(self) -> None:
        """All stages have their sums: prepare, decide, apply take a round trip each."""
        self._world.engine.after(4.0 * self._world.scenario.backbone_latency_s, self._applied)

    def _reduce_s(self) -> float:
        """Duration of a step's end without a delay: the all-reduce of the stage that takes longest."""
        scenario = self._world.scenario
        rates: dict[int, list[float]] = {}
        for peer in self._world.peers:
            if peer.state in ("serving", "draining"):
                rates.setdefault(peer.stage, []).append(min(peer.up_rate, peer.down_rate))
        seconds = (
            all_reduce_seconds(scenario.gradient_bytes_of(stage, len(group)), group) for stage, group in rates.items()
        )
        return max(seconds, default=0.0) + 4.0 * scenario.backbone_latency_s

    def _applied(self) -> None:
        step = self._open.popleft()
        self.num_steps += 1
        slot = step.number & 1
        for peer in self._world.peers:
            peer.accumulated[slot] = 0
            if peer.state == "draining" and not peer.held:
                self._pipeline.on_drained(peer)
        if self._leases.are_all_given:
            self._open_next()
            self._leases.fill()
        self._reduce_oldest()

    # -- the next step

    def _open_next(self) -> None:
        """Give the leases of the next step, if the weights that its microbatches need are there."""
        if self.num_steps >= self._world.scenario.weights_step(self._num_opened):
            if self._batch:
                self._open.append(_OpenStep(self._num_opened, self._batch))
            self._leases.open_step(self._num_opened)
            self._num_opened += 1
        self._note_waiting()

    def _note_waiting(self) -> None:
        """Machines that idle while leases wait for an all-reduce, idle because of it."""
        is_waiting = bool(self._open) and self._open[0].is_reducing and self._leases.are_all_given
        if is_waiting is not self._is_waiting:
            self._is_waiting = is_waiting
            self._world.meters.waiting_for_all_reduce(is_waiting, self._world.engine.now)
