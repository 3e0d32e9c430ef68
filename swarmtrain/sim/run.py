"""One simulation from scenario to result."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarmtrain.sim.bound import Machine, StageKind, throughput_bound
from swarmtrain.sim.directory import SimDirectory, link_rate, stage_bytes
from swarmtrain.sim.engine import Engine
from swarmtrain.sim.leases import Leases
from swarmtrain.sim.membership import Membership
from swarmtrain.sim.meters import CAUSES, Meters
from swarmtrain.sim.peer import SimPeer, draw_machines
from swarmtrain.sim.pipeline import Pipeline
from swarmtrain.sim.scenario import Scenario
from swarmtrain.sim.steps import Steps
from swarmtrain.sim.work_stealing import WorkStealing
from swarmtrain.sim.world import World

BIN_S = 60.0
MAX_BOUND_SAMPLES = 60


@dataclass(frozen=True, slots=True)
class Sample:
    """The swarm at one moment."""

    time_s: float
    num_available: int
    bound: float  # microbatches per second of the best assignment of the machines that are available
    capacity: float  # of the weakest stage, as machines are placed and serving now
    finished: int  # microbatches that came back in the interval that ends here


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one run. Rates are microbatches per second; everything is measured after the warm-up."""

    scenario: Scenario
    throughput: float  # from compute that was done: filling or draining queues do not count
    bound: float
    assigned: float
    mean_delay_s: float
    mean_queue_s: float
    bytes_per_microbatch: float
    seconds: dict[str, float]
    events: dict[str, int]
    num_steps: int
    samples: tuple[Sample, ...]
    trace_digest: int
    num_events: int
    cpu_s: float

    @property
    def efficiency(self) -> float:
        """Throughput over the bound."""
        return self.throughput / self.bound if self.bound else 0.0

    def shares(self) -> dict[str, float]:
        """How machines spent their time, as fractions that add up to one."""
        total = sum(self.seconds.values()) or 1.0
        return {cause: self.seconds[cause] / total for cause in CAUSES}


class Simulation:
    """Build once, `run` once."""

    def __init__(self, scenario: Scenario, on_minute: Callable[[], None] | None = None) -> None:
        """`on_minute` is called after every simulated minute."""
        self.scenario = scenario
        self._on_minute = on_minute
        setup = random.Random(f"setup {scenario.seed}")
        peers, alive = _machines(scenario, setup)
        self.engine = Engine()
        self.meters = Meters(60.0 * scenario.warmup_minutes, BIN_S)
        world = World(
            scenario,
            self.engine,
            self.meters,
            peers,
            SimDirectory(scenario, peers),
            random.Random(f"compute {scenario.seed}"),
        )
        self.peers = peers
        self._alive = alive
        self.pipeline = Pipeline(world)
        self.leases = leases = Leases(world, self.pipeline)
        self.work_stealing = WorkStealing(world, self.pipeline)
        self.steps = Steps(world, self.pipeline, leases, random.Random(f"steps {scenario.seed}"))
        moving = random.Random(f"membership {scenario.seed}")
        self.membership = Membership(world, self.pipeline, leases, self.steps, moving)
        self._samples: list[Sample] = []
        kinds = []
        for stage, cost in enumerate(scenario.costs):
            bytes_in, bytes_out = stage_bytes(scenario, stage)
            kinds.append(StageKind(cost, bytes_in, bytes_out))
        self._kinds = tuple(kinds)

    def run(self) -> Result:
        """Simulate to the end."""
        began = time.process_time()
        scenario = self.scenario
        end = 60.0 * scenario.minutes
        self.membership.start(self._alive)
        interval = max(BIN_S, (end - self.meters.warmup_s) / MAX_BOUND_SAMPLES)
        num_before = self.meters.num_finished
        moment = self.meters.warmup_s
        self._run_until(moment)
        while moment < end - 1e-9:
            # The interval's middle represents all of it.
            middle, moment = moment + 0.5 * interval, min(moment + interval, end)
            self._run_until(min(middle, moment))
            available, bound, capacity = self._look()
            self._run_until(moment)
            self._samples.append(Sample(moment, available, bound, capacity, self.meters.num_finished - num_before))
            num_before = self.meters.num_finished
        self._close(end)
        return self._result(end - self.meters.warmup_s, time.process_time() - began)

    def _run_until(self, moment: float) -> None:
        minute = int(self.engine.now / 60.0) + 1
        while self._on_minute is not None and 60.0 * minute <= moment:
            self.engine.run(60.0 * minute)
            self._on_minute()
            minute += 1
        self.engine.run(moment)

    def _look(self) -> tuple[int, float, float]:
        now = self.engine.now
        available = [p for p in self.peers if p.state != "gone" and p.available_from <= now]
        machines = [Machine(p.speed, p.up_rate, p.down_rate) for p in available]
        capacities = [0.0] * self.scenario.num_stages
        for peer in available:
            if peer.state == "serving":
                rate = min(peer.speed / self.scenario.costs[peer.stage], link_rate(self.scenario, peer))
                capacities[peer.stage] += rate
        return len(available), throughput_bound(machines, self._kinds), min(capacities)

    def _close(self, end: float) -> None:
        """Account for what machines were doing when the simulation ended."""
        for peer in self.peers:
            if peer.state == "serving" and not peer.busy:
                self.meters.had_no_work(peer.idle_since, end)
            elif peer.state in ("syncing", "draining") and not peer.busy:
                self.meters.spent(peer.state, max(peer.state_since, peer.idle_since), end)

    def _result(self, measured_s: float, cpu_s: float) -> Result:
        meters, samples = self.meters, self._samples
        num_finished = max(1, meters.num_finished)
        return Result(
            scenario=self.scenario,
            throughput=meters.stages_done / self.scenario.num_stages / measured_s,
            bound=sum(sample.bound for sample in samples) / len(samples),
            assigned=sum(sample.capacity for sample in samples) / len(samples),
            mean_delay_s=meters.delay_sum_s / num_finished,
            mean_queue_s=meters.queue_sum_s / num_finished,
            bytes_per_microbatch=meters.bytes_sent / num_finished,
            seconds=dict(meters.seconds),
            events=dict(sorted(meters.events.items())),
            num_steps=self.steps.num_steps,
            samples=tuple(samples),
            trace_digest=meters.trace_digest,
            num_events=self.engine.num_events,
            cpu_s=cpu_s,
        )


def simulate(scenario: Scenario, on_minute: Callable[[], None] | None = None) -> Result:
    """Run one scenario. Cycle collection is off: nothing needs it, and it would visit all machines each time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return Simulation(scenario, on_minute).run()
    finally:
        if was_enabled:
            gc.enable()


def _machines(scenario: Scenario, rng: random.Random) -> tuple[list[SimPeer], list[SimPeer]]:
    """(all machines that will ever take part, those that are there at the beginning)."""
    if scenario.layout:
        peers = [SimPeer(number, spec, spec.speed) for number, spec in enumerate(scenario.layout)]
        return peers, list(peers)
    num_machines = scenario.num_peers
    if scenario.churn == "exponential":
        # As many as it takes for `num_peers` to be online on average.
        num_machines = round(scenario.num_peers * (1.0 + scenario.mean_absence_s / scenario.mean_life_s))
    elif scenario.churn == "trace":
        num_machines += sum(max(0, event.change) for event in scenario.trace)
    peers = draw_machines(num_machines, scenario.mix, scenario.speed_spread, rng)
    return peers, rng.sample(peers, scenario.num_peers)
