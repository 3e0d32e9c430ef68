"""Forecast of a run on a given set of machines, before anything is started. Arithmetic only.

It uses the simulator's quantities: rates of machines, bytes of stages, the all-reduce's barrier, the bound. A test
compares the forecast with the simulation of the same swarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.errors import UsageError
from swarmtrain.model.workload import StageWork, Workload
from swarmtrain.sim.all_reduce import all_reduce_seconds, moved_bytes
from swarmtrain.sim.bound import Machine, StageKind, throughput_bound
from swarmtrain.sim.placement import Demand, Group, MachineKind, demands_of, place
from swarmtrain.sim.profiles import AT_HOME, MAX_MACHINES, PeerProfile

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage with the machines that would host it. Rates are microbatches per second, bytes are of one volunteer."""

    stage: int
    num_peers: int
    capacity: float
    busy: float  # share of its capacity that the weakest stage lets it use
    memory_bytes: int  # of the card; of the machine, if it computes on its CPU
    host_bytes: int  # beside the card; 0 on a CPU
    up_bytes_per_day: float
    down_bytes_per_day: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Machines of a profile that no stage needs, or that would make it slower."""

    name: str
    count: int
    total: int
    has_memory: bool  # for some stage


@dataclass(frozen=True, slots=True)
class Forecast:
    """The whole run."""

    name: str
    num_peers: int  # that serve
    idle: tuple[Idle, ...]
    tokens_per_s: float
    bound_tokens_per_s: float  # of the linear program, without steps
    step_s: float  # mean over the run
    work_s: float  # of a step, in which the weakest stage computes or sends boundary tensors
    reduce_s: float  # the longest all-reduce, with nothing else on the lines
    reduce_stage: int
    fill_s: float  # until the pipeline is full, and until it is empty again
    waiting_share: float  # of steps that wait for all steps before them
    is_short_of_bytes: bool  # the weakest stage waits for its lines, not for its processors
    short_stage: int | None  # the weakest; None if every stage is as strong
    days: float  # until all steps are done
    hours_per_day: float  # that a volunteer's machine is there, on average
    num_volunteers: int  # who keep so many machines there at a time
    stages: tuple[StageForecast, ...]
    coordinator_up_bytes_per_day: float
    coordinator_down_bytes_per_day: float

    @property
    def empty_stages(self) -> tuple[int, ...]:
        """Stages that no machine can host."""
        return tuple(stage.stage for stage in self.stages if not stage.num_peers)

    @property
    def share_of_bound(self) -> float:
        """The tokens per second that are left of the bound."""
        return self.tokens_per_s / self.bound_tokens_per_s if self.bound_tokens_per_s else 0.0

    @property
    def waiting_s(self) -> float:
        """Of a step, in which even the weakest stage waits: for an all-reduce, or for the pipeline."""
        return max(0.0, self.step_s - self.work_s)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "empty_stages": self.empty_stages, "share_of_bound": self.share_of_bound}


def default_profiles(workload: Workload) -> list[tuple[PeerProfile, float]]:
    """The default when no machines are given: two per stage of the smallest shipped machine at home that holds it."""
    found: Counter[PeerProfile] = Counter()
    for stage in workload.stages:
        holding = [profile for profile in AT_HOME if profile.way(stage) is not None]
        found[(holding or AT_HOME)[0]] += 2
    return [(profile, float(number)) for profile, number in found.items()]


def forecast(
    workload: Workload, profiles: Sequence[tuple[PeerProfile, float]], hours_per_day: float | None = None
) -> Forecast:
    """What so many machines at a time do. Volunteers are there as long as profiles say, or `hours_per_day`."""
    kinds = _kinds(profiles)
    demands = demands_of(workload)
    placement = place(workload, kinds)
    stages = placement.stages
    capacities = [_capacity(demand, group) for demand, group in zip(demands, stages, strict=True)]
    rate = min(capacities)
    weakest = capacities.index(rate)
    reducing = [
        all_reduce_seconds(workload.all_reduce_bytes(stage, _size(group)), _line_rates(group))
        for stage, group in enumerate(stages)
    ]
    step_s = placement.step_s
    steps_per_s = 1.0 / step_s if step_s else 0.0
    serving: Counter[MachineKind] = Counter()
    for group in stages:
        serving.update(dict(group))
    hours = {kind: hours_per_day or _hours_per_day(kind.profile) for kind in kinds}
    there = sum(hours[kind] * number for kind, number in serving.items()) / (serving.total() or 1)
    return Forecast(
        name=workload.name,
        num_peers=serving.total(),
        idle=_idle(workload, kinds, serving),
        tokens_per_s=workload.batch * workload.tokens * steps_per_s,
        bound_tokens_per_s=_bound(kinds, demands) * workload.tokens,
        step_s=step_s,
        work_s=min(step_s, workload.batch / rate) if rate else 0.0,
        reduce_s=max(reducing),
        reduce_stage=reducing.index(max(reducing)),
        fill_s=placement.fill_s,
        waiting_share=workload.synchronous_share,
        is_short_of_bytes=rate < 0.99 * _computing(demands[weakest], stages[weakest]),
        short_stage=weakest if rate < 0.99 * sorted(capacities)[len(capacities) // 2] else None,
        days=workload.steps * step_s / DAY_S,
        hours_per_day=there,
        num_volunteers=round(sum(24.0 / hours[kind] * number for kind, number in serving.items())),
        stages=tuple(
            _stage_forecast(workload, stage, demands[stage], group, rate, steps_per_s, hours)
            for stage, group in enumerate(stages)
        ),
        coordinator_up_bytes_per_day=DAY_S * steps_per_s * workload.batch * workload.token_bytes,
        coordinator_down_bytes_per_day=(
            DAY_S * steps_per_s * workload.state_bytes / workload.checkpoint_every if workload.checkpoint_every else 0.0
        ),
    )


def _kinds(profiles: Sequence[tuple[PeerProfile, float]]) -> list[MachineKind]:
    counts: Counter[PeerProfile] = Counter()
    for profile, number in profiles:
        if number != int(number):
            raise UsageError(f"{profile.name}: {number:g} is not a whole number of machines")
        if profile.role == "peer":
            counts[profile] += int(number)
    if counts.total() > MAX_MACHINES:
        raise UsageError(f"more than {MAX_MACHINES} machines")
    return [MachineKind.of(profile, count) for profile, count in counts.items()]


def _idle(workload: Workload, kinds: Sequence[MachineKind], serving: Counter[MachineKind]) -> tuple[Idle, ...]:
    return tuple(
        Idle(
            kind.profile.name,
            kind.count - serving[kind],
            kind.count,
            any(kind.profile.way(stage) is not None for stage in workload.stages),
        )
        for kind in kinds
        if kind.count > serving[kind]
    )


def _size(group: Group) -> int:
    return sum(number for _, number in group)


def _line_rates(group: Group) -> list[float]:
    return [kind.line_rate for kind, number in group for _ in range(number)]


def _capacity(demand: Demand, group: Group) -> float:
    return sum(number * demand.rate(kind) for kind, number in group)


def _computing(demand: Demand, group: Group) -> float:
    return sum(number * demand.computing_rate(kind) for kind, number in group)


def _hours_per_day(profile: PeerProfile) -> float:
    return 24.0 * profile.hours_online / (profile.hours_online + profile.hours_away)


def _memory(work: StageWork, group: Group) -> tuple[int, int]:
    """What it takes of its smallest machine; where it has none, the least that would do."""
    ways = [way for kind, _ in group if (way := kind.profile.way(work)) is not None]
    if not ways:
        ways = [(way.device_bytes, way.host_bytes) for way in work.ways[-1:]] or [(0, work.memory_bytes)]
    memory, host = min(ways)
    return (memory, host) if memory else (host, 0)


def _bound(kinds: Sequence[MachineKind], demands: Sequence[Demand]) -> float:
    """Of all machines whose memory holds some stage."""
    fitting = [kind for kind in kinds if any(kind.holds(demand) for demand in demands)]
    mean_tflop = sum(demand.work.tflop for demand in demands) / len(demands)
    machines = [
        machine
        for kind in fitting
        for machine in [Machine(kind.profile.tflops / mean_tflop, kind.up_rate, kind.down_rate)] * kind.count
    ]
    return throughput_bound(
        machines, [StageKind(demand.work.tflop / mean_tflop, demand.bytes_in, demand.bytes_out) for demand in demands]
    )


def _stage_forecast(
    workload: Workload,
    stage: int,
    demand: Demand,
    group: Group,
    rate: float,
    steps_per_s: float,
    hours: dict[MachineKind, float],
) -> StageForecast:
    """Bytes of a volunteer: traffic while the machine is there, and a state for each time that it comes."""
    num_peers, capacity = _size(group), _capacity(demand, group)
    up = down = there = arrivals = 0.0
    if num_peers:
        share = workload.batch / num_peers
        moved = sum(moved_bytes(workload.all_reduce_bytes(stage, num_peers), _line_rates(group))) / num_peers
        up, down = share * demand.bytes_out + moved, share * demand.bytes_in + moved
        down += share * workload.token_bytes if stage == 0 else 0.0
        there = sum(hours[kind] * number for kind, number in group) / num_peers / 24.0
        arrivals = sum(hours[kind] / kind.profile.hours_online * number for kind, number in group) / num_peers
    memory, host = _memory(workload.stages[stage], group)
    # Those who have a state send as much of it as newcomers fetch.
    transfers = arrivals * workload.stages[stage].state_bytes if steps_per_s else 0.0
    return StageForecast(
        stage=stage,
        num_peers=num_peers,
        capacity=capacity,
        busy=rate / capacity if capacity else 0.0,
        memory_bytes=memory,
        host_bytes=host,
        up_bytes_per_day=there * DAY_S * steps_per_s * up + transfers,
        down_bytes_per_day=there * DAY_S * steps_per_s * down + transfers,
    )
