"""Simulated peers that run out of work and ask others of their stage (the rule: `route/hunger.py`)."""

from __future__ import annotations

import random

from swarmtrain.route.hunger import Appetite, gives, is_held_up
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.pipeline import Pipeline, World


class Sharing:
    """Listens to the processors; what is given away goes back to its caller, which sends it to the one that asked."""

    def __init__(self, world: World, pipeline: Pipeline) -> None:
        scenario = world.scenario
        self._world = world
        self._pipeline = pipeline
        self._rng = random.Random(f"sharing {scenario.seed}")
        self._num_asked = scenario.num_asked
        self._appetites: dict[int, Appetite] = {}
        if self._num_asked:
            pipeline.on_running_out = self._runs_out

    def _runs_out(self, peer: SimPeer) -> None:
        now = self._world.engine.now
        backlog_bytes = (peer.up_free - now) * peer.up_rate
        if peer.is_asking or peer.state != "serving" or is_held_up(backlog_bytes, self._world.scenario.boundary_bytes):
            return
        appetite = self._appetites.get(peer.number)
        if appetite is None:
            appetite = self._appetites[peer.number] = Appetite(self._rng, self._num_asked)
        offers = self._world.directory.snapshots[peer.stage].offers
        self._ask(peer, [offer.peer_id for offer in appetite.whom_to_ask(offers, now)], peer.incarnation)

    def _ask(self, peer: SimPeer, others: list[str], incarnation: int) -> None:
        """The next one, unless work has come meanwhile."""
        if peer.incarnation != incarnation:
            return
        peer.is_asking = bool(others) and not peer.jobs
        if peer.is_asking:
            other = self._world.by_id[others.pop()]
            self._world.engine.after(self._latency_s(peer, other), self._asked, other, peer, others, incarnation)

    def _asked(self, giver: SimPeer, peer: SimPeer, others: list[str], incarnation: int) -> None:
        if self._gives(giver, peer) and self._pipeline.give_away(giver, peer):
            others = []
        self._world.engine.after(self._latency_s(peer, giver), self._ask, peer, others, incarnation)

    def _gives(self, giver: SimPeer, peer: SimPeer) -> bool:
        if giver is peer or giver.state != "serving" or giver.stage != peer.stage or not giver.num_forward:
            return False
        cost = self._world.scenario.costs[peer.stage]
        return gives(
            waiting_s=giver.queue_s(cost),
            load_s=giver.load_s(cost),
            asker_load_s=peer.load_s(cost),
            asker_service_s=cost / peer.speed,
        )

    def _latency_s(self, peer: SimPeer, other: SimPeer) -> float:
        return peer.latency_s + self._world.scenario.backbone_latency_s + other.latency_s
