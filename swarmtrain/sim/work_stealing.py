"""Work stealing: an idle peer steals from other peers of its stage (the policy is `route/work_stealing.py`)."""

from __future__ import annotations

import random

from swarmtrain.route.router import STEALING_POLICIES
from swarmtrain.route.work_stealing import StealPolicy, is_held_up, is_line_bound, is_worth_stealing
from swarmtrain.sim.directory import stage_bytes
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.pipeline import Pipeline
from swarmtrain.sim.world import World


class WorkStealing:
    """Called when a processor runs out of work. A stolen job goes back to its caller, which sends it to the thief."""

    def __init__(self, world: World, pipeline: Pipeline) -> None:
        scenario = world.scenario
        self._world = world
        self._pipeline = pipeline
        self._costs = scenario.costs
        self._bytes_out = [stage_bytes(scenario, stage)[1] for stage in range(scenario.num_stages)]
        self._rng = random.Random(f"sharing {scenario.seed}")  # the name is part of what a seed stands for
        self._num_asked = scenario.num_asked
        self._policies: dict[int, StealPolicy[SimPeer]] = {}
        if self._num_asked and scenario.routing in STEALING_POLICIES:
            pipeline.processors.on_running_out = self._runs_out

    def _runs_out(self, peer: SimPeer) -> None:
        now = self._world.engine.now
        backlog_bytes = (peer.up_free - now) * peer.up_rate
        if peer.state != "serving" or is_held_up(backlog_bytes, self._world.scenario.boundary_bytes):
            return
        if is_line_bound(self._bytes_out[peer.stage] / peer.up_rate, self._costs[peer.stage] / peer.speed):
            return
        policy = self._policies.get(peer.number)
        if policy is None:
            policy = self._policies[peer.number] = StealPolicy(self._rng, self._num_asked)
        round_trip_s = 2.0 * (2.0 * peer.latency_s + self._world.scenario.backbone_latency_s)
        asked_after_s = 0.5 * round_trip_s
        # All victims are examined now, not when the request would reach them: jobs last much longer than that.
        for other in policy.victims(self._world.directory.serving[peer.stage], now):
            if self._can_steal_from(other, peer) and self._pipeline.steal(other, peer, asked_after_s):
                policy.stole(other)
                return
            asked_after_s += round_trip_s
        if asked_after_s > round_trip_s:
            policy.failed()

    def _can_steal_from(self, victim: SimPeer, peer: SimPeer) -> bool:
        incoming = victim.incoming
        if incoming and incoming[0][0] <= self._world.engine.now:
            self._pipeline.processors.receive(victim)
        if not victim.num_stealable or victim is peer or victim.state != "serving" or victim.stage != peer.stage:
            return False
        cost = self._costs[peer.stage]
        return is_worth_stealing(
            waiting_s=victim.queue_s(cost),
            victim_load_s=victim.load_s(cost),
            thief_load_s=peer.load_s(cost),
            thief_service_s=cost / peer.speed,
        )
