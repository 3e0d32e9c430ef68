"""A simulated machine: one processor with a queue, an uplink, a downlink; and the microbatches that pass it."""

from __future__ import annotations

import heapq
import random

from swarmtrain.route.router import Router
from swarmtrain.sim.scenario import PeerSpec

BACKWARD, FORWARD, REPLAY = 0, 1, 2


class Microbatch:
    """One microbatch on its way: who serves it in each stage, and how far it has come there."""

    __slots__ = (
        "answered",
        "computed",
        "exclude",
        "given",
        "number",
        "queue_s",
        "ready",
        "route",
        "started_at",
        "token",
    )

    def __init__(self, number: int, num_stages: int, now: float) -> None:
        self.number = number
        self.started_at = now
        self.queue_s = 0.0  # spent in queues
        self.route: list[SimPeer | None] = [None] * num_stages
        self.token = [0] * num_stages  # raised by every (re)send to a stage: late events of earlier sends are void
        self.computed = [False] * num_stages  # forward done by route[stage]
        self.ready = [False] * num_stages  # backward done: its gradient can be had from route[stage]
        self.answered = [-1] * num_stages  # the caller's token for which the gradient was sent
        self.given = -1  # the last stage in which it was given away
        self.exclude: frozenset[str] = frozenset()  # peers of the next stage that refused it


class Job:
    """A piece of work in a peer's queue."""

    __slots__ = ("arrived_at", "is_spare", "kind", "microbatch", "sender", "sent_at", "stage", "token")

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
        self.is_spare = kind == FORWARD and microbatch.given != stage  # nobody of the stage has given it away yet

    def is_void(self) -> bool:
        """Whether it was sent elsewhere meanwhile."""
        return self.microbatch.token[self.stage] != self.token


class SimPeer:
    """State of one machine. It is changed by `pipeline`, `membership` and `steps`; idle time is kept by `meters`."""

    __slots__ = (
        "accumulated",
        "available_from",
        "busy",
        "down_free",
        "down_rate",
        "held",
        "idle_since",
        "incarnation",
        "incoming",
        "jobs",
        "latency_s",
        "num_forward",
        "num_spare",
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
        self.available_from = 0.0  # when a machine that does nothing but join could serve at the earliest
        self.target = -1  # where a moving peer is going; -1: it is not moving
        self.synced_at = 0.0  # when a mover will have fetched the state of its new stage
        self.record_until = 0.0
        self.incarnation = 0
        self.up_free = 0.0
        self.down_free = 0.0
        self.jobs: list[tuple[int, int, int, Job]] = []
        self.incoming: list[tuple[float, int, Job]] = []  # a heap of messages that were under way when looked at last
        self.num_forward = 0  # in the queue
        self.num_spare = 0  # of them, such as may be given away
        self.busy = False
        self.idle_since = 0.0
        self.held: dict[Microbatch, int] = {}
        self.accumulated = 0  # microbatches of the current step whose gradient it has
        self.replaying = 0  # pieces that it computes for a peer that was lost
        self.router: Router | None = None

    def forget_work(self) -> None:
        """Everything in memory is lost: the machine died, or it left the stage."""
        self.jobs.clear()
        self.incoming.clear()
        self.held = {}
        self.num_forward = self.num_spare = 0
        self.busy = False
        self.accumulated = 0
        self.replaying = 0
        self.incarnation += 1

    def push(self, job: Job, sequence: int, order: str) -> None:
        """Queue a job, in one of `JOB_ORDERS`."""
        rank = 0 if job.kind == BACKWARD or order != "backward-first" else 1
        age = 0 if order == "fifo" else job.microbatch.number
        heapq.heappush(self.jobs, (rank, age, sequence, job))
        if job.kind != BACKWARD:
            self.num_forward += 1
            self.num_spare += job.is_spare

    def pop(self) -> Job:
        """The next job to compute."""
        job = heapq.heappop(self.jobs)[3]
        if job.kind != BACKWARD:
            self.num_forward -= 1
            self.num_spare -= job.is_spare
        return job

    def take_last_forward(self) -> Job | None:
        """Out of the queue: the forward that would be done last. What was given away once stays."""
        last = None
        for place in self.jobs:
            if place[3].is_spare and (last is None or place > last):
                last = place
        if last is None or last[3].is_void():
            return None
        self.jobs.remove(last)
        heapq.heapify(self.jobs)
        self.num_forward -= 1
        self.num_spare -= 1
        return last[3]

    def load_s(self, cost: float) -> float:
        """Both passes of everything it holds."""
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
