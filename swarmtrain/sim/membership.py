"""Machines that join, leave, and move between stages, by the real rebalancing rules."""

from __future__ import annotations

import random

from swarmtrain.route.moves import LeaveAnswer, MoveArbiter, Mover
from swarmtrain.route.rebalance import PeerCapacity, PlannedMove, newcomer_stage, plan_move_by_queues, plan_moves
from swarmtrain.sim.directory import link_rate
from swarmtrain.sim.leases import Leases
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.pipeline import Pipeline
from swarmtrain.sim.steps import Steps
from swarmtrain.sim.world import World

FIRST_LOOK_JITTER_S = 10.0
ANSWER_S = 0.2  # request to the coordinator and back


class Membership:
    """Owns every change of `SimPeer.state` and `SimPeer.stage`."""

    def __init__(self, world: World, pipeline: Pipeline, leases: Leases, steps: Steps, rng: random.Random) -> None:
        self._world = world
        self._pipeline = pipeline
        self._leases = leases
        self._steps = steps
        self._rng = rng
        self._scenario = world.scenario
        self._arbiter = MoveArbiter(world.scenario.costs, world.scenario.rebalance_options)
        self._movers: dict[int, Mover] = {}
        self._versions: dict[int, int] = {}
        self._plan: list[PlannedMove] = []
        pipeline.on_drained = self._drained

    # -- start and churn

    def start(self, alive: list[SimPeer]) -> None:
        """Place the initial machines and start the periodic tasks."""
        num_stages = self._scenario.num_stages
        for position, peer in enumerate(alive):
            random_stage = self._rng.randrange(num_stages) if position >= num_stages else position
            even_stage = position % num_stages
            peer.stage = random_stage if self._scenario.placement == "random" else even_stage
            if peer.spec.stage is not None:
                peer.stage = peer.spec.stage
            peer.state = "serving"
        self.refresh_directory()
        for peer in alive:
            self._serve(peer)
        if self._scenario.rebalance == "queue":
            self._world.engine.after(self._scenario.rebalance_period_s, self._queue_rule)
        self._start_churn()
        self._steps.start()

    def _start_churn(self) -> None:
        engine, scenario = self._world.engine, self._scenario
        if scenario.churn == "exponential":
            for peer in self._world.peers:
                present = peer.state != "gone"
                mean_s = scenario.mean_life_s if present else scenario.mean_absence_s
                engine.after(self._rng.expovariate(1.0 / mean_s), self._flip, peer)
        elif scenario.churn == "trace":
            for event in scenario.trace:
                engine.at(event.time_s, self._trace_event, event.change)

    def _flip(self, peer: SimPeer) -> None:
        """Exponential churn: a machine that is online vanishes, one that is away returns."""
        if peer.state == "gone":
            self._join(peer)
            mean_s = self._scenario.mean_life_s
        else:
            self._vanish(peer)
            mean_s = self._scenario.mean_absence_s
        self._world.engine.after(self._rng.expovariate(1.0 / mean_s), self._flip, peer)

    def _trace_event(self, change: int) -> None:
        for _ in range(abs(change)):
            candidates = [peer for peer in self._world.peers if (peer.state == "gone") == (change > 0)]
            if candidates:
                peer = self._rng.choice(candidates)
                self._join(peer) if change > 0 else self._vanish(peer)

    def _vanish(self, peer: SimPeer) -> None:
        self._world.meters.count("peers lost", self._world.engine.now)
        self._steps.work_lost(peer)
        self._change_state(peer, "gone")
        self._pipeline.peer_lost(peer)
        self._movers.pop(peer.number, None)
        self._world.engine.after(self._scenario.detect_s, self._found_dead, peer, peer.incarnation)

    def _found_dead(self, peer: SimPeer, incarnation: int) -> None:
        if peer.incarnation == incarnation:
            self._arbiter.gone(peer.peer_id)

    def _join(self, peer: SimPeer) -> None:
        self._world.meters.count("peers joined", self._world.engine.now)
        peer.stage = self._newcomer_stage(peer)
        peer.target = -1
        peer.forget_work()
        peer.available_from = self._world.engine.now + self._scenario.download_s
        self._world.directory.announce_arrival(peer)
        self._change_state(peer, "syncing")
        self._world.engine.at(peer.available_from, self._synced, peer, peer.incarnation)

    def _newcomer_stage(self, peer: SimPeer) -> int:
        scenario, directory = self._scenario, self._world.directory
        if peer.spec.stage is not None:
            return peer.spec.stage
        if scenario.rebalance == "capacity":
            rate = link_rate(scenario, peer)
            return newcomer_stage(directory.capacities, scenario.costs, peer.speed, self._rng, rate)
        if scenario.rebalance == "queue" and not scenario.random_newcomers:
            loads = [0] * scenario.num_stages
            for member in directory.members:
                loads[member.stage] += member.queue_length
            return max(range(scenario.num_stages), key=lambda stage: (loads[stage], self._rng.random()))
        return self._rng.randrange(scenario.num_stages)

    # -- states

    def _change_state(self, peer: SimPeer, state: str) -> None:
        now, meters = self._world.engine.now, self._world.meters
        self._pipeline.processors.receive(peer)
        if peer.state == "serving" and not peer.busy:
            meters.idle_ended(peer, None, now)
        elif peer.state == "syncing":
            meters.spent("syncing", peer.state_since, now)
        elif peer.state == "draining" and not peer.busy:
            meters.spent("draining", max(peer.state_since, peer.idle_since), now)
        peer.state, peer.state_since, peer.idle_since = state, now, now
        if state == "draining":
            self._pipeline.processors.refuse_in_time(peer)

    def _synced(self, peer: SimPeer, incarnation: int) -> None:
        if peer.incarnation == incarnation and peer.state == "syncing":
            self._change_state(peer, "serving")
            peer.serving_since = self._world.engine.now
            self._serve(peer)

    def _announce(self, peer: SimPeer, version: int) -> None:
        """Tell the coordinator which stage the peer serves, with its new version."""
        self._versions[peer.number] = version
        member = PeerCapacity(peer.peer_id, peer.stage, peer.speed, link_rate(self._scenario, peer))
        self._arbiter.serving(member, version)

    def _serve(self, peer: SimPeer) -> None:
        self._announce(peer, self._versions.get(peer.number, 0) + 1)
        peer.idle_since = self._world.engine.now
        self._pipeline.equip(peer)

    # -- the directory and the rules

    def refresh_directory(self) -> None:
        """All peers renew their records; then rebalancing plans are made from them."""
        engine, directory = self._world.engine, self._world.directory
        for peer in self._world.peers:
            self._pipeline.processors.receive(peer)
        directory.refresh(engine.now)
        self._leases.refresh()
        for peer in self._world.peers:
            if peer.router is not None and peer.state in ("serving", "draining"):
                peer.router.update_peers(directory.snapshots[peer.stage + 1])
        if self._scenario.rebalance == "capacity" and engine.now > 0.0:
            self._plan = plan_moves(
                directory.members, self._scenario.costs, engine.now, self._scenario.rebalance_options
            )
            for move in self._plan:
                engine.after(self._rng.uniform(0.0, FIRST_LOOK_JITTER_S), self._look, self._world.by_id[move.peer_id])
        engine.after(self._scenario.directory_period_s, self.refresh_directory)

    def _queue_rule(self) -> None:
        move = plan_move_by_queues(self._world.directory.members, self._scenario.num_stages)
        if move is not None:
            peer = self._world.by_id[move.peer_id]
            if peer.state == "serving" and peer.stage == move.source:
                self._leave(peer, move.target)
        self._world.engine.after(self._scenario.rebalance_period_s, self._queue_rule)

    def _look(self, peer: SimPeer) -> None:
        """A peer that the plan names reads the directory now, and again some seconds later."""
        if peer.state != "serving" or peer.target >= 0:
            return
        now = self._world.engine.now
        mover = self._movers.get(peer.number)
        if mover is None or mover.stage != peer.stage:
            mover = Mover(peer.peer_id, peer.stage, self._versions[peer.number], self._rng)
            self._movers[peer.number] = mover
        intents = [other.intent for other in self._movers.values() if other.intent is not None]
        waited = mover.look_at
        request = mover.look(self._plan, intents, now)
        if request is not None:
            answer = self._arbiter.request(request)
            self._world.engine.after(ANSWER_S, self._answered, peer, mover, answer)
        elif mover.intent is not None and mover.look_at != waited:
            self._world.engine.at(mover.look_at, self._look, peer)
        elif mover.intent is None:
            self._movers.pop(peer.number, None)

    def _answered(self, peer: SimPeer, mover: Mover, answer: LeaveAnswer) -> None:
        if self._movers.get(peer.number) is not mover:
            return
        if mover.answered(answer) and peer.state == "serving":
            self._leave(peer, answer.target)
        else:
            self._movers.pop(peer.number, None)
            if peer.state == "serving" and mover.version > self._versions[peer.number]:
                self._announce(peer, mover.version)
            self._world.meters.count(f"moves refused: {answer.why}", self._world.engine.now)

    def _leave(self, peer: SimPeer, target: int) -> None:
        """Move. The peer leaves its stage and fetches the new one's state; or the other way round, `fetch_first`."""
        self._world.meters.count("moves", self._world.engine.now)
        peer.target = target
        peer.synced_at = self._world.engine.now + self._scenario.download_s
        if self._scenario.fetch_first:
            self._world.engine.at(peer.synced_at, self._switch, peer, peer.incarnation)
        else:
            self._switch(peer, peer.incarnation)

    def _switch(self, peer: SimPeer, incarnation: int) -> None:
        """Callers send what the peer held to other peers of its old stage; it belongs to the new one at once.

        With steps this happens between two of them, when no peer holds a microbatch.
        """
        if peer.incarnation != incarnation:
            return
        if not self._steps.may_leave():
            self._change_state(peer, "draining")
            if not peer.held:
                self._drained(peer)
            return
        self._change_state(peer, "syncing")
        self._pipeline.hand_over(peer)
        self._arrive(peer)

    def _drained(self, peer: SimPeer) -> None:
        """The old stage's work is done: wait for the rest of the new stage's state."""
        owes = peer.owes_gradient() and not self._steps.may_leave()
        if peer.state != "draining" or owes:
            return
        peer.forget_work()
        self._change_state(peer, "syncing")
        self._arrive(peer)

    def _arrive(self, peer: SimPeer) -> None:
        self._movers.pop(peer.number, None)
        peer.router = None
        peer.stage, peer.target = peer.target, -1
        self._world.engine.at(max(peer.synced_at, self._world.engine.now), self._synced, peer, peer.incarnation)
