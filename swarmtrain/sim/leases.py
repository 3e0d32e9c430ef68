"""The coordinator's leases: one window for the whole swarm, and the real router, which chooses peers of stage 0."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from swarmtrain.route.policies import RouterOptions
from swarmtrain.route.router import Router
from swarmtrain.route.window import InFlightWindow, WindowOptions, stepwise
from swarmtrain.sim.directory import stage_bytes
from swarmtrain.sim.peer import Job, Microbatch, SimPeer
from swarmtrain.sim.pipeline import DRAINING_RETRY_S, NO_PEER_RETRY_S, STEAL_BACKOFF_S, Pipeline
from swarmtrain.sim.world import World

MIN_IN_FLIGHT = 4
LEASE_BYTES = 16e3  # tokens: negligible next to a boundary tensor


class Leases:
    """Starts microbatches while the window is not full. When a lease's owner is lost, another peer gets the lease."""

    def __init__(self, world: World, pipeline: Pipeline) -> None:
        scenario = world.scenario
        self._world = world
        self._pipeline = pipeline
        options_of = stepwise if scenario.batch else WindowOptions
        self._window = InFlightWindow(options_of(initial=MIN_IN_FLIGHT, maximum=scenario.window_limit))
        bytes_in, bytes_out = stage_bytes(scenario, 0)
        self._router = Router(
            scenario.routing,
            clock=lambda: world.engine.now,
            rng=random.Random(f"leases {scenario.seed}"),
            options=RouterOptions(bytes_in=bytes_in, bytes_out=bytes_out),
        )
        self.on_all_given: Callable[[], None] = lambda: None
        self.num_given = 0
        self._in_flight = 0
        self._unleased = 0
        self._step = 0
        self.homeless: list[Microbatch] = []  # leases whose owners were lost: they go first
        self._waiting: Counter[int] = Counter()  # of each peer of stage 0: leases whose forward it has not done yet
        self._retry_at = -1.0

    def refresh(self) -> None:
        """The directory has new records."""
        self._router.update_peers(self._world.directory.snapshots[0])

    @property
    def are_all_given(self) -> bool:
        """Whether the newest step has no microbatch left to lease."""
        return self._unleased == 0

    def open_step(self, step: int) -> None:
        """The next step: `batch` microbatches to lease."""
        self._unleased = self._world.scenario.batch
        self._step = step

    def fill(self) -> None:
        """Start microbatches until none are left or the window (at least two per peer) is full."""
        while self._has_next() and self._world.engine.now >= self._retry_at:
            owner = self._choose()
            if owner is None:
                return
            self._give(owner)

    def finished(self, microbatch: Microbatch, owner: SimPeer) -> None:
        """The owner has answered `microbatch`."""
        now = self._world.engine.now
        self._in_flight -= 1
        self._window.finished(now - microbatch.started_at, microbatch.queue_s)
        self._router.observed(owner.peer_id, load_s=owner.load_s(self._world.scenario.costs[0]), now=now)

    def owner_lost(self, microbatch: Microbatch, owner: SimPeer) -> None:
        """The lease goes to another peer, with a hint: which peer of stage 1 holds the microbatch."""
        self._waiting.pop(owner.number, None)
        if owner.state == "gone":
            self._router.failed(owner.peer_id)
        else:
            self._router.busy(owner.peer_id, DRAINING_RETRY_S)
        self.homeless.append(microbatch)
        self.fill()

    def stolen(self, microbatch: Microbatch, victim: SimPeer, thief: SimPeer) -> None:
        """A thief, another peer of stage 0, takes over the lease of `victim`."""
        if self._waiting[victim.number] > 0:
            self._waiting[victim.number] -= 1
        self._router.busy(victim.peer_id, STEAL_BACKOFF_S)
        self._hand(microbatch, thief)

    def forwarded(self, owner: SimPeer, job: Job, began_at: float) -> None:
        """An owner has done its forward and reports its times."""
        now = self._world.engine.now
        self._router.succeeded(
            owner.peer_id,
            wire_s=job.arrived_at - job.sent_at,
            queue_s=began_at - job.arrived_at,
            compute_s=(now - began_at) * (1.0 / 3.0 if self._pipeline.last == 0 else 1.0),
            load_s=owner.load_s(self._world.scenario.costs[0]),
            now=now,
        )
        if self._waiting[owner.number] > 0:
            self._waiting[owner.number] -= 1
        # When all peers had enough, the owner that has just become free gets the next lease.
        if now < self._retry_at and self._has_next() and owner.state == "serving":
            self._router.pick(LEASE_BYTES, now, prefer=(owner.peer_id,))  # charges its clock
            self._give(owner)
        else:
            self.fill()

    def _has_next(self) -> bool:
        if self.homeless:
            return True
        limit = max(self._window.size, 2 * len(self._world.directory.members))
        return self._in_flight < limit and (self._unleased > 0 or not self._world.scenario.batch)

    def _give(self, owner: SimPeer) -> None:
        if self.homeless:
            microbatch = self.homeless.pop()
        else:
            self._in_flight += 1
            self.num_given += 1
            microbatch = Microbatch(self.num_given, self._world.scenario.num_stages, self._world.engine.now, self._step)
            if self._world.scenario.batch:
                self._unleased -= 1
                if not self._unleased:
                    self.on_all_given()
        self._hand(microbatch, owner)

    def _hand(self, microbatch: Microbatch, owner: SimPeer) -> None:
        self._waiting[owner.number] += 1
        delay_s = owner.latency_s + self._world.scenario.backbone_latency_s
        self._world.engine.after(delay_s, self._arrives, microbatch, owner)

    def _choose(self) -> SimPeer | None:
        """The router's choice, except peers that have enough leases to start with."""
        scenario, now = self._world.scenario, self._world.engine.now
        while True:
            pick = self._router.pick(LEASE_BYTES, now)
            if pick is None or pick.wait_s > 0.0:
                self._retry_at = now + (NO_PEER_RETRY_S if pick is None else pick.wait_s)
                self._world.engine.at(self._retry_at, self.fill)
                return None
            owner = self._world.by_id[pick.peer_id]
            if self._waiting[owner.number] < scenario.queue_limit:
                return owner
            self._pipeline.processors.receive(owner)
            self._router.busy(owner.peer_id, max(0.1, 0.5 * owner.queue_s(scenario.costs[0])), now)

    def _arrives(self, microbatch: Microbatch, owner: SimPeer) -> None:
        if owner.state != "serving" or owner.stage != 0:
            self.owner_lost(microbatch, owner)
        else:
            self._pipeline.start(microbatch, owner)
