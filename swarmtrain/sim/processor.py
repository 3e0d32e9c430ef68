"""A machine's processor: arrivals, queue and computing. Routes are none of its business."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from swarmtrain.sim.peer import BACKWARD, FORWARD, REPLAY, Job, SimPeer
from swarmtrain.sim.world import World

FORWARD_SHARE = 1.0 / 3.0  # of a stage's compute for a microbatch


class Processors:
    """The processors of all machines. `pipeline` and others set the `on_…` hooks."""

    def __init__(self, world: World) -> None:
        scenario = world.scenario
        self.on_forward_done: Callable[[SimPeer, Job, float], None] = lambda peer, job, began_at: None
        self.on_backward_done: Callable[[SimPeer, Job], None] = lambda peer, job: None
        self.on_replayed: Callable[[int], None] = lambda step: None
        self.on_refusal: Callable[[SimPeer, Job, str], None] = lambda peer, job, why: None
        self.on_running_out: Callable[[SimPeer], None] = lambda peer: None
        self._engine = world.engine
        self._meters = world.meters
        self._last = scenario.num_stages - 1
        self._costs = scenario.costs
        self._gauss = world.rng.gauss
        self._jitter = scenario.compute_jitter
        self._job_order = scenario.job_order
        self._queue_limit = scenario.queue_limit
        self._sequence = 0

    # -- what arrives

    def expect(self, peer: SimPeer, job: Job) -> None:
        """A message is under way. Its arrival is scheduled as an event only if it has an immediate effect.

        Otherwise `receive` finds it: when a busy processor needs its next job, or when the queue's length is asked for.
        """
        self._sequence += 1
        heapq.heappush(peer.incoming, (job.arrived_at, self._sequence, job))
        num_over = peer.num_forward + len(peer.incoming) - self._queue_limit
        if num_over == 1:
            self.refuse_in_time(peer)
        elif not peer.busy or peer.state != "serving" or num_over > 1:
            self._engine.at(job.arrived_at, self._arrives, peer)

    def receive(self, peer: SimPeer) -> None:
        """Queue what has arrived since the last call. To be called before the peer changes its state."""
        incoming, now = peer.incoming, self._engine.now
        while incoming and incoming[0][0] <= now:
            _, sequence, job = heapq.heappop(incoming)
            if self._takes(peer, job):
                peer.push(job, sequence, self._job_order)

    def refuse_in_time(self, peer: SimPeer) -> None:
        """The peer stops serving, or its queue may overflow: schedule the arrivals of all that is under way."""
        for arrives_at, _, _ in peer.incoming:
            self._engine.at(arrives_at, self._arrives, peer)

    def _arrives(self, peer: SimPeer) -> None:
        self.receive(peer)
        if peer.busy:
            return
        if peer.jobs:
            self._meters.idle_ended(peer, peer.jobs[0][3], self._engine.now)
            self._compute_next(peer)
        elif peer.incoming:  # all arrivals were void
            self._engine.at(peer.incoming[0][0], self._arrives, peer)

    def _takes(self, peer: SimPeer, job: Job) -> bool:
        """Whether the job is still wanted here; a peer that cannot take it refuses it."""
        microbatch, stage = job.microbatch, job.stage
        if microbatch.token[stage] != job.token or microbatch not in peer.held:
            return False  # sent elsewhere meanwhile
        if job.kind == BACKWARD:
            return (
                microbatch.route[stage + 1] is job.sender
            )  # else the sender died, and another peer was asked meanwhile
        if peer.state == "serving" and peer.num_forward < self._queue_limit:
            return True
        peer.held.pop(microbatch)
        self.on_refusal(peer, job, "draining" if peer.state != "serving" else "busy")
        return False

    # -- what is computed

    def enqueue(self, peer: SimPeer, job: Job) -> None:
        """Queue a job that has arrived."""
        self._sequence += 1
        peer.push(job, self._sequence, self._job_order)
        if not peer.busy:
            self._meters.idle_ended(peer, job, self._engine.now)
            self._compute_next(peer)

    def _compute_next(self, peer: SimPeer) -> None:
        engine, jobs = self._engine, peer.jobs
        if peer.incoming:
            self.receive(peer)
        if not jobs:
            peer.busy = False
            peer.idle_since = engine.now
            if peer.incoming:
                engine.at(peer.incoming[0][0], self._arrives, peer)
            self.on_running_out(peer)
            return
        job = peer.pop()
        peer.busy = True
        if not jobs:
            self.on_running_out(peer)
        share = self._share(job)
        seconds = share * self._costs[job.stage] / peer.speed
        if self._jitter:
            factor = self._gauss(1.0, self._jitter)
            seconds *= factor if factor > 0.2 else 0.2
        engine.at(engine.now + seconds, self._computed, peer, job, share, engine.now, peer.incarnation)

    def _share(self, job: Job) -> float:
        """The job's fraction of a microbatch: a backward costs two forwards; the last stage does both in one job."""
        if job.stage == self._last or job.kind == REPLAY:
            return 1.0
        return 1.0 - FORWARD_SHARE if job.kind == BACKWARD else FORWARD_SHARE

    def _computed(self, peer: SimPeer, job: Job, share: float, began_at: float, incarnation: int) -> None:
        now, meters = self._engine.now, self._meters
        if peer.incarnation != incarnation:
            meters.spent("wasted", began_at, now)
            return
        microbatch, stage, kind = job.microbatch, job.stage, job.kind
        if kind == REPLAY:
            meters.spent("wasted", began_at, now)
            peer.accumulated[microbatch.step & 1] += 1
            peer.replaying[microbatch.step & 1] -= 1
            self.on_replayed(microbatch.step)
        elif microbatch not in peer.held or microbatch.token[stage] != job.token:
            meters.spent("wasted", began_at, now)
        else:
            if microbatch.ready[stage] or (kind == FORWARD and microbatch.computed[stage]):
                meters.spent("wasted", began_at, now)
            else:
                meters.spent("useful", began_at, now)
                meters.worked(share, now)
            microbatch.queue_s += began_at - job.arrived_at
            if kind == FORWARD:
                self.on_forward_done(peer, job, began_at)
            else:
                self.on_backward_done(peer, job)
        if peer.incarnation == incarnation:
            self._compute_next(peer)
