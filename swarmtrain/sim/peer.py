"""A simulated machine (a processor with a queue, an uplink, a downlink) and its microbatches."""

from __future__ import annotations

import heapq
import random

from swarmtrain.route.router import Router
from swarmtrain.sim.scenario import PeerSpec

BACKWARD, FORWARD, REPLAY = 0, 1, 2


class Microbatch:
    """One microbatch on its way: the peer that serves it in each stage, and its progress there."""

    __slots__ = (
        "answered",
        "computed",
        "exclude",
        "number",
        "queue_s",
        "ready",
        "route",
        "started_at",
        "step",
        "stolen_in",
        "token",
    )

    def __init__(self, number: int, num_stages: int, now: float, step: int = 0) -> None:
        self.number = number
        self.step = step
        self.started_at = now
        self.queue_s = 0.0  # spent in queues
        self.route: list[SimPeer | None] = [None] * num_stages
        self.token = [0] * num_stages  # counts sends to a stage: events of earlier sends are void
        self.computed = [False] * num_stages  # forward done by route[stage]
        self.ready = [False] * num_stages  # backward done: route[stage] has its gradient
        self.answered = [-1] * num_stages  # the caller's token for which the gradient was sent
        self.stolen_in = -1  # the last stage in which it was stolen
        self.exclude: frozenset[str] = frozenset()  # peers of the next stage that refused it


class Job:
    """A piece of work in a peer's queue."""

    __slots__ = ("arrived_at", "is_stealable", "kind", "microbatch", "sender", "sent_at", "stage", "token")

    def __init__(
        self,
        kind: int,
        microbatch: Microbatch,
        stage: int,
        token: int,
        sent_at: float,
        arrived_at: float,
        sender: SimPeer | None = None,
    ) -> None:
        self.kind = kind
        self.microbatch = microbatch
        self.stage = stage
        self.token = token
        self.sent_at = sent_at
        self.arrived_at = arrived_at  # may lie in the future
        self.sender = sender
        self.is_stealable = (
            kind == FORWARD and microbatch.stolen_in != stage
        )  # each microbatch is stolen at most once per stage

    def is_void(self) -> bool:
        """Whether the microbatch was sent elsewhere meanwhile."""
        return self.microbatch.token[self.stage] != self.token


class SimPeer:
    """State of one machine. It is changed by `pipeline`, `membership` and `steps`; idle time is kept by `meters`."""

    __slots__ = (
        "accumulated",
        "available_from",
        "busy",
        "down_booked_s",
        "down_free",
        "down_rate",
        "held",
        "idle_since",
        "incarnation",
        "incoming",
        "jobs",
        "latency_s",
        "num_forward",
        "num_stealable",
        "number",
        "peer_id",
        "record_until",
        "relayed",
        "replaying",
        "router",
        "serving_since",
        "spec",
        "speed",
        "stage",
        "state",
        "state_since",
        "synced_at",
        "target",
        "up_booked_s",
        "up_free",
        "up_rate",
    )

    def __init__(self, number: int, spec: PeerSpec, speed: float) -> None:
        self.number = number
        self.peer_id = f"p{number}"
        self.spec = spec
        self.speed = speed
        relay_factor = 0.2 if spec.relayed else 1.0
        self.up_rate = spec.up_bytes_per_s * relay_factor
        self.down_rate = spec.down_bytes_per_s * relay_factor
        self.latency_s = spec.latency_s
        self.relayed = spec.relayed
        self.stage = 0
        self.state = "gone"
        self.state_since = 0.0
        self.serving_since = 0.0
        self.available_from = 0.0  # earliest time at which a machine could serve that joins and does nothing else
        self.target = -1  # the stage to which the peer moves; -1: it does not move
        self.synced_at = 0.0  # when a moving peer has fetched the state of its new stage
        self.record_until = 0.0
        self.incarnation = 0
        self.up_free = 0.0  # when the line has sent all boundary traffic that was put on it
        self.down_free = 0.0
        self.up_booked_s = 0.0  # of line time, for all boundary traffic ever
        self.down_booked_s = 0.0
        self.jobs: list[tuple[int, int, int, Job]] = []
        self.incoming: list[tuple[float, int, Job]] = []  # a heap of messages that were under way at the last look
        self.num_forward = 0  # in the queue
        self.num_stealable = 0  # of these, how many may be stolen
        self.busy = False
        self.idle_since = 0.0
        self.held: dict[Microbatch, int] = {}
        # Of the open steps, of which there are at most two: the even and the odd one.
        self.accumulated = [0, 0]  # microbatches in its gradient sum
        self.replaying = [0, 0]  # replayed pieces that it computes for a lost peer
        self.router: Router | None = None

    def forget_work(self) -> None:
        """Drop all work: the machine died, or left the stage."""
        self.jobs.clear()
        self.incoming.clear()
        self.held = {}
        self.num_forward = self.num_stealable = 0
        self.busy = False
        self.accumulated = [0, 0]
        self.replaying = [0, 0]
        self.incarnation += 1

    def push(self, job: Job, sequence: int, order: str) -> None:
        """Queue a job, in one of `JOB_ORDERS`."""
        rank = 0 if job.kind == BACKWARD or order != "backward-first" else 1
        age = 0 if order == "fifo" else job.microbatch.number
        heapq.heappush(self.jobs, (rank, age, sequence, job))
        if job.kind != BACKWARD:
            self.num_forward += 1
            self.num_stealable += job.is_stealable

    def pop(self) -> Job:
        """The next job to compute."""
        job = heapq.heappop(self.jobs)[3]
        if job.kind != BACKWARD:
            self.num_forward -= 1
            self.num_stealable -= job.is_stealable
        return job

    def take_last_forward(self) -> Job | None:
        """Remove the forward that would run last, for a thief. What was stolen before stays."""
        last = None
        for place in self.jobs:
            if place[3].is_stealable and (last is None or place > last):
                last = place
        if last is None or last[3].is_void():
            return None
        self.jobs.remove(last)
        heapq.heapify(self.jobs)
        self.num_forward -= 1
        self.num_stealable -= 1
        return last[3]

    def owes_gradient(self) -> bool:
        """Whether an open step needs what it has computed."""
        return any(self.accumulated) or any(self.replaying)

    def up_idle_s(self, now: float) -> float:
        """For how long, ever, its uplink has carried no boundary traffic."""
        return now - self.up_booked_s + (self.up_free - now if self.up_free > now else 0.0)

    def down_idle_s(self, now: float) -> float:
        """For how long, ever, its downlink has carried no boundary traffic."""
        return now - self.down_booked_s + (self.down_free - now if self.down_free > now else 0.0)

    def load_s(self, cost: float) -> float:
        """Compute time of both passes of everything it holds."""
        return len(self.held) * cost / self.speed

    def queue_s(self, cost: float) -> float:
        """Expected wait of a new forward job."""
        return len(self.jobs) * 0.5 * cost / self.speed


def draw_machines(num_peers: int, mix: tuple[PeerSpec, ...], spread: float, rng: random.Random) -> list[SimPeer]:
    """Machines from a mix of profiles; the spread leaves a profile's mean speed as it is."""
    weights = [spec.weight for spec in mix]
    peers = []
    for number in range(num_peers):
        spec = rng.choices(mix, weights)[0]
        factor = rng.lognormvariate(-0.5 * spread * spread, spread) if spread > 0.0 else 1.0
        peers.append(SimPeer(number, spec, spec.speed * factor))
    return peers
