"""The way of a microbatch through the simulated swarm, with the real router: send, queue, compute, answer, replay.

Follows the rules of chain/: the caller replays; a peer that holds a microbatch answers again without recomputing it;
losing a caller does not cancel the work downstream of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

from swarmtrain.route.policies import RouterOptions
from swarmtrain.route.router import Router
from swarmtrain.route.views import LinkView
from swarmtrain.sim.directory import stage_bytes
from swarmtrain.sim.peer import BACKWARD, FORWARD, REPLAY, Job, Microbatch, SimPeer
from swarmtrain.sim.processor import FORWARD_SHARE, Processors
from swarmtrain.sim.world import World

NO_PEER_RETRY_S = 2.0  # back-off when a stage seems to have no peers
DRAINING_RETRY_S = 30.0  # back-off for a draining peer: by then its record says so
CONNECT_TIMEOUT_S = 3.0
STEAL_BACKOFF_S = 0.2  # back-off for a victim: what was stolen is not sent back at once; as the daemons do


@lru_cache(maxsize=256)
def router_options(up_rate: float, bytes_in: float, bytes_out: float) -> RouterOptions:
    """One for all machines of a kind: fewer fit a processor's cache."""
    return RouterOptions(my_up_bytes_per_s=up_rate, bytes_in=bytes_in, bytes_out=bytes_out)


class Pipeline:
    """Moves microbatches. Leases, steps and membership set the `on_…` hooks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine = world.engine
        self.meters = world.meters
        self.scenario = world.scenario
        self.last = world.scenario.num_stages - 1
        self.num_bytes = world.scenario.boundary_bytes
        self.bytes_back = world.scenario.bytes_back
        self.on_finished: Callable[[Microbatch, SimPeer], None] = lambda microbatch, owner: None
        self.on_owner_lost: Callable[[Microbatch, SimPeer], None] = lambda microbatch, owner: None
        self.on_forwarded: Callable[[SimPeer, Job, float], None] = lambda owner, job, began_at: None
        self.on_drained: Callable[[SimPeer], None] = lambda peer: None
        self.on_lease_stolen: Callable[[Microbatch, SimPeer, SimPeer], None] = lambda microbatch, victim, thief: None
        self.processors = Processors(world)
        self.processors.on_forward_done = self._forward_done
        self.processors.on_backward_done = self._backward_done
        self.processors.on_refusal = self._refuses
        self._costs = world.scenario.costs
        self._backbone_latency_s = world.scenario.backbone_latency_s
        self._routing_rng = random.Random(
            f"routing {world.scenario.seed}"
        )  # one for all routers: many would not fit a cache

    def _clock(self) -> float:
        return self.engine.now

    # -- entering and leaving a stage

    def equip(self, peer: SimPeer) -> None:
        """Give a peer that starts serving a fresh router."""
        scenario, stage = self.scenario, peer.stage
        peer.router = None
        if stage < self.last:
            options = router_options(peer.up_rate, *stage_bytes(scenario, stage + 1))
            peer.router = Router(scenario.routing, clock=self._clock, rng=self._routing_rng, options=options)
            peer.router.update_peers(self.world.directory.snapshots[stage + 1])

    def start(self, microbatch: Microbatch, owner: SimPeer) -> None:
        """The owner starts its forward in stage 0. If the lease had another owner before, a hint asks stage 1."""
        owner.held[microbatch] = 0
        microbatch.route[0] = owner
        microbatch.token[0] += 1
        self._lose_work(microbatch, 0)
        now = self.engine.now
        self.processors.enqueue(owner, Job(FORWARD, microbatch, 0, microbatch.token[0], now, now))

    def replay_piece(self, stage: int, peer: SimPeer, step: int) -> None:
        """Recompute one stage of a finished microbatch of a step: its gradient was lost with its peer."""
        peer.replaying[step & 1] += 1
        arrival = (
            self.engine.now
            + (self.num_bytes + self.bytes_back) / min(peer.up_rate, peer.down_rate)
            + 4.0 * peer.latency_s
        )
        self.engine.at(arrival, self._replay_arrives, stage, peer, peer.incarnation, step)

    def _replay_arrives(self, stage: int, peer: SimPeer, incarnation: int, step: int) -> None:
        if peer.incarnation == incarnation:
            now = self.engine.now
            self.processors.enqueue(peer, Job(REPLAY, Microbatch(0, 0, now, step), stage, 0, now, now))

    def peer_lost(self, peer: SimPeer) -> None:
        """The machine has died with everything it held; its callers notice after some missed heartbeats."""
        if peer.busy:
            self.meters.count("jobs cut off", self.engine.now)
        self._let_go(peer, self.scenario.detect_s, planned=False)

    def hand_over(self, peer: SimPeer) -> None:
        """The machine leaves its stage and announces it: its callers send what it held to other peers at once."""
        self._let_go(peer, peer.latency_s + self._backbone_latency_s, planned=True)

    def _let_go(self, peer: SimPeer, delay_s: float, *, planned: bool) -> None:
        held = peer.held
        peer.forget_work()
        for microbatch, stage in held.items():
            self.engine.after(delay_s, self._recover, microbatch, stage, peer, planned)

    def _recover(self, microbatch: Microbatch, stage: int, gone: SimPeer, planned: bool) -> None:
        """The caller sends the same bytes to another peer. If the caller is lost, too, its own caller replays first."""
        if microbatch.route[stage] is not gone or microbatch.ready[stage]:
            return
        if stage == 0:
            self.meters.count("leases given again", self.engine.now)
            self.on_owner_lost(microbatch, gone)
            return
        caller = microbatch.route[stage - 1]
        if caller is None or microbatch not in caller.held or caller.router is None:
            return
        if not microbatch.computed[stage - 1]:
            return  # the caller is a replacement itself: it sends once its forward is done
        if planned:
            caller.router.busy(gone.peer_id, DRAINING_RETRY_S)
        else:
            caller.router.failed(gone.peer_id)
        self.meters.count("replays after a move" if planned else "replays after a loss", self.engine.now)
        microbatch.route[stage] = None
        self._lose_work(microbatch, stage)
        self._send(microbatch, stage, caller)

    def _lose_work(self, microbatch: Microbatch, stage: int) -> None:
        """The microbatch will be recomputed in this stage: its work there counts once."""
        if microbatch.computed[stage]:
            self.meters.worked(-1.0 if microbatch.ready[stage] else -FORWARD_SHARE, self.engine.now)
        microbatch.computed[stage] = microbatch.ready[stage] = False

    # -- forward

    def _send(self, microbatch: Microbatch, stage: int, sender: SimPeer) -> None:
        """Route the microbatch to a peer of `stage`; a peer that already holds it is asked first."""
        if sender.router is None or microbatch not in sender.held:
            return
        now = self.engine.now
        holder = microbatch.route[stage]
        if holder is not None and self._holds(holder, microbatch, stage):
            self.engine.at(
                self._transfer(sender, holder, self.num_bytes), self._hint_arrives, microbatch, stage, holder
            )
            return
        microbatch.route[stage] = None
        pick = sender.router.pick(self.num_bytes, now, microbatch.exclude)
        if pick is None or pick.wait_s > 0.0:
            microbatch.exclude = frozenset()
            microbatch.queue_s += 0.0 if pick is None else pick.wait_s  # as the daemons count it
            self.meters.count("nobody to ask" if pick is None else "all busy", now)
            self.engine.after(NO_PEER_RETRY_S if pick is None else pick.wait_s, self._send, microbatch, stage, sender)
            return
        self._send_to(self.world.by_id[pick.peer_id], microbatch, stage, sender)

    def _send_to(self, peer: SimPeer, microbatch: Microbatch, stage: int, sender: SimPeer) -> None:
        microbatch.route[stage] = peer
        if microbatch.computed[stage]:
            self._lose_work(microbatch, stage)
        microbatch.answered[stage] = -1
        microbatch.token[stage] += 1
        token = microbatch.token[stage]
        if peer.state == "gone":
            self.engine.after(CONNECT_TIMEOUT_S, self._refused, microbatch, stage, sender, peer, token, "dead")
            return
        if peer.state != "serving" or peer.stage != stage:  # the directory was stale
            back_at = self._transfer(sender, peer, self.num_bytes)
            self.engine.at(back_at, self._refused, microbatch, stage, sender, peer, token, "draining")
            return
        peer.held[microbatch] = stage
        now, up_free = self.engine.now, sender.up_free
        sent_at = up_free if up_free > now else now
        arrives_at = self._transfer(sender, peer, self.num_bytes)
        self.processors.expect(peer, Job(FORWARD, microbatch, stage, token, sent_at, arrives_at, sender))

    def _holds(self, peer: SimPeer, microbatch: Microbatch, stage: int) -> bool:
        """Whether this peer has the microbatch, done or under way."""
        return peer.held.get(microbatch) == stage or (
            microbatch.ready[stage] and peer.state != "gone" and peer.stage == stage
        )

    def _transfer(self, source: SimPeer, target: SimPeer, num_bytes: float) -> float:
        """The time of arrival. Each link is busy for its own share of the time; the slower one decides."""
        now = self.engine.now
        up_free, down_free = source.up_free, target.down_free
        up_s, down_s = num_bytes / source.up_rate, num_bytes / target.down_rate
        up_free = (up_free if up_free > now else now) + up_s
        down_free = (down_free if down_free > now else now) + down_s
        source.up_free, target.down_free = up_free, down_free
        source.up_booked_s += up_s
        target.down_booked_s += down_s
        self.meters.sent(num_bytes, now)
        latency_s = source.latency_s + target.latency_s + self._backbone_latency_s
        return (up_free if up_free > down_free else down_free) + latency_s

    def _refuses(self, peer: SimPeer, job: Job, why: str) -> None:
        """The peer refuses the job: the refusal goes to its sender."""
        sender = job.sender
        assert sender is not None  # only replays have none
        back_s = peer.latency_s + sender.latency_s + self._backbone_latency_s
        if why == "busy":
            job.microbatch.queue_s += self.engine.now + back_s - job.sent_at  # the detour, as the daemons count it
        self.engine.after(back_s, self._refused, job.microbatch, job.stage, sender, peer, job.token, why)

    def _refused(
        self, microbatch: Microbatch, stage: int, sender: SimPeer, peer: SimPeer, token: int, why: str
    ) -> None:
        if microbatch.token[stage] != token:
            return
        self.meters.count(f"reroutes: {why}", self.engine.now)
        if sender.router is not None and sender.stage == stage - 1:
            if why == "dead":
                sender.router.failed(peer.peer_id)
            elif why == "draining":
                sender.router.busy(peer.peer_id, DRAINING_RETRY_S)
            else:
                self.processors.receive(peer)
                sender.router.busy(peer.peer_id, peer.queue_s(self._costs[stage]) * 0.5)
        if why != "busy":  # a busy peer may be chosen again after its back-off, as by the daemons
            microbatch.exclude |= {peer.peer_id}
        microbatch.route[stage] = None
        # The refusal goes to the present caller: the sender may have died and been replaced.
        caller = microbatch.route[stage - 1]
        if caller is not None and microbatch.computed[stage - 1]:
            self._send(microbatch, stage, caller)

    def _hint_arrives(self, microbatch: Microbatch, stage: int, peer: SimPeer) -> None:
        """A hint asks a peer for a microbatch that it has: it answers once the microbatch is done."""
        if microbatch.route[stage] is not peer:
            return
        if not self._holds(peer, microbatch, stage):  # it died or moved meanwhile
            caller = microbatch.route[stage - 1]
            if caller is not None:
                self._send(microbatch, stage, caller)
        elif microbatch.ready[stage]:
            self._answer(microbatch, stage, peer)

    def steal(self, victim: SimPeer, thief: SimPeer, after_s: float) -> bool:
        """The thief gets the forward that the victim would do last; False if no forward of it may be stolen."""
        job = victim.take_last_forward()
        if job is None:
            return False
        microbatch, stage = job.microbatch, job.stage
        victim.held.pop(microbatch, None)
        microbatch.stolen_in = stage
        microbatch.route[stage] = None
        caller = microbatch.route[stage - 1] if stage else None
        after_s += victim.latency_s + self._backbone_latency_s + (caller.latency_s if caller is not None else 0.0)
        self.meters.count("stolen", self.engine.now)
        self.engine.after(after_s, self._redirect, job, victim, thief)
        return True

    def _redirect(self, job: Job, victim: SimPeer, thief: SimPeer) -> None:
        """The caller, if it still waits for the microbatch, is redirected to the thief."""
        if job.is_void():
            return
        microbatch, stage = job.microbatch, job.stage
        microbatch.queue_s += self.engine.now - job.sent_at  # the detour, as the daemons count it
        if stage == 0:
            self.on_lease_stolen(microbatch, victim, thief)
            return
        caller = microbatch.route[stage - 1]
        if caller is None or caller.router is None or microbatch not in caller.held:
            return  # its replacement will send
        if microbatch.computed[stage - 1]:
            caller.router.busy(victim.peer_id, STEAL_BACKOFF_S)
            self._send_to(thief, microbatch, stage, caller)

    def _forward_done(self, peer: SimPeer, job: Job, began_at: float) -> None:
        microbatch, stage, now = job.microbatch, job.stage, self.engine.now
        microbatch.computed[stage] = True
        caller = microbatch.route[stage - 1] if stage else None
        if caller is not None and caller.router is not None and caller.stage == stage - 1:
            share = 1.0 / 3.0 if stage == self.last else 1.0
            caller.router.succeeded(
                peer.peer_id,
                wire_s=job.arrived_at - job.sent_at,
                queue_s=began_at - job.arrived_at,
                compute_s=(now - began_at) * share,
                load_s=peer.load_s(self._costs[stage]),
                link=self._link(caller, peer),
                now=now,
            )
        elif stage == 0:
            self.on_forwarded(peer, job, began_at)
        if stage == self.last:
            self._backward_done(peer, job)
        else:
            microbatch.exclude = frozenset()
            self._send(microbatch, stage + 1, peer)

    def _link(self, source: SimPeer, target: SimPeer) -> LinkView:
        """The measured rate: the receiver times a message from its first byte on, without the wait before it."""
        backlog_s = source.up_free - self.engine.now
        return LinkView(
            source.up_rate if source.up_rate < target.down_rate else target.down_rate,
            2.0 * (source.latency_s + target.latency_s + self._backbone_latency_s),
            int(backlog_s * source.up_rate) if backlog_s > 0.0 else 0,
            1,
        )

    def _backward_done(self, peer: SimPeer, job: Job) -> None:
        microbatch, stage = job.microbatch, job.stage
        microbatch.ready[stage] = True
        peer.accumulated[microbatch.step & 1] += 1
        peer.held.pop(microbatch, None)
        if stage == 0:
            self.meters.finished(microbatch, self.engine.now)
            self.on_finished(microbatch, peer)
        else:
            self._answer(microbatch, stage, peer)
        if not peer.held:
            self.on_drained(peer)

    def _answer(self, microbatch: Microbatch, stage: int, peer: SimPeer) -> None:
        """Send the gradient to the present caller. Without one it is kept until a replacement asks."""
        caller = microbatch.route[stage - 1]
        token = microbatch.token[stage - 1]
        if caller is not None and microbatch in caller.held and microbatch.computed[stage - 1]:
            if microbatch.answered[stage] == token:
                return
            microbatch.answered[stage] = token
            if peer.stage == stage and caller.router is not None:  # the answer reports its sender's load
                caller.router.observed(peer.peer_id, load_s=peer.load_s(self._costs[stage]), now=self.engine.now)
            sent_at, arrives_at = self.engine.now, self._transfer(peer, caller, self.bytes_back)
            self.processors.expect(caller, Job(BACKWARD, microbatch, stage - 1, token, sent_at, arrives_at, peer))
