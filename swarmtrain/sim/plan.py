"""Forecast of a run on a given set of machines, before anything is started. Arithmetic only; takes milliseconds.

It uses the simulator's quantities: rates of machines, bytes of stages, the all-reduce's barrier, the bound. A test
compares the forecast with the simulation of the same swarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from swarmtrain.errors import UsageError
from swarmtrain.model.workload import Workload
from swarmtrain.sim.all_reduce import all_reduce_seconds
from swarmtrain.sim.bound import Machine, StageKind, throughput_bound
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.profiles import GAMING_GPU, MAX_MACHINES, PeerProfile

DAY_S = 86400.0
BACKBONE_S = 0.03  # one way between two providers, as in a scenario


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage with the machines that would host it. Rates are microbatches per second, bytes are of one peer."""

    stage: int
    num_peers: int
    capacity: float
    busy: float  # share of its capacity that the weakest stage lets it use
    memory_bytes: int
    up_bytes_per_day: float
    down_bytes_per_day: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The whole run."""

    name: str
    num_peers: int
    left_out: tuple[str, ...]  # profiles whose memory no stage fits
    tokens_per_s: float
    bound_tokens_per_s: float  # of the linear program, without steps
    step_s: float
    reduce_s: float
    reduce_stage: int  # whose all-reduce lasts longest
    fill_s: float  # until the pipeline is full, and until it is empty again
    is_short_of_bytes: bool  # the weakest stage waits for its lines, not for its processors
    short_stage: int | None  # the weakest; None if every stage is as strong
    stages: tuple[StageForecast, ...]
    coordinator_up_bytes_per_day: float
    coordinator_down_bytes_per_day: float

    @property
    def empty_stages(self) -> tuple[int, ...]:
        """Stages that no machine can host."""
        return tuple(stage.stage for stage in self.stages if not stage.num_peers)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "empty_stages": self.empty_stages}


@dataclass(slots=True)
class _Host:
    profile: PeerProfile
    machine: Machine
    latency_s: float

    def rate(self, workload: Workload, stage: int) -> float:
        compute = self.profile.tflops / workload.stages[stage].tflop
        num_bytes = _neighbours(workload, stage) * workload.boundary_bytes
        links = min(self.machine.up_rate, self.machine.down_rate) / num_bytes if num_bytes else float("inf")
        return min(compute, links)


def default_profile(workload: Workload) -> PeerProfile:
    """The default when no machines are given: a gaming GPU at home with memory for any stage."""
    largest_gb = max(stage.memory_bytes for stage in workload.stages) / 1e9
    return replace(GAMING_GPU, memory_gb=max(GAMING_GPU.memory_gb, 1.01 * largest_gb))


def forecast(workload: Workload, profiles: Sequence[tuple[PeerProfile, float]]) -> Forecast:
    """Spread the machines over the stages, fastest first and each to the weakest stage that it fits, and count."""
    hosts, left_out = _hosts(workload, profiles)
    stages = _assign(workload, hosts)
    capacities = [sum(host.rate(workload, index) for host in members) for index, members in enumerate(stages)]
    rate = min(capacities)
    reducing = [
        all_reduce_seconds(
            workload.all_reduce_bytes(index, len(members)),
            [min(host.machine.up_rate, host.machine.down_rate) for host in members],
        )
        for index, members in enumerate(stages)
    ]
    reduce_s = max(reducing)
    # Once per step the pipeline fills and drains, which costs one pass; then comes the all-reduce.
    fill_s = _pass_s(workload, stages)
    step_s = workload.batch / rate + fill_s + reduce_s + 4.0 * BACKBONE_S if rate else 0.0
    steps_per_s = 1.0 / step_s if step_s else 0.0
    return Forecast(
        name=workload.name,
        num_peers=len(hosts),
        left_out=left_out,
        tokens_per_s=workload.batch * workload.tokens * steps_per_s,
        bound_tokens_per_s=_bound(workload, hosts) * workload.tokens,
        step_s=step_s,
        reduce_s=reduce_s,
        reduce_stage=reducing.index(reduce_s),
        fill_s=fill_s,
        is_short_of_bytes=_is_short_of_bytes(workload, stages, capacities),
        short_stage=_short_stage(capacities),
        stages=tuple(
            _stage_forecast(workload, index, members, capacities[index], rate, steps_per_s)
            for index, members in enumerate(stages)
        ),
        coordinator_up_bytes_per_day=DAY_S * steps_per_s * workload.batch * workload.token_bytes,
        coordinator_down_bytes_per_day=(
            DAY_S * steps_per_s * workload.state_bytes / workload.checkpoint_every if workload.checkpoint_every else 0.0
        ),
    )


def _hosts(workload: Workload, profiles: Sequence[tuple[PeerProfile, float]]) -> tuple[list[_Host], tuple[str, ...]]:
    smallest = min(stage.memory_bytes for stage in workload.stages)
    hosts: list[_Host] = []
    left_out: list[str] = []
    for profile, number in profiles:
        if number != int(number):
            raise UsageError(f"{profile.name}: {number:g} is not a whole number of machines")
        if profile.role != "peer":
            continue
        if profile.memory_gb * 1e9 < smallest:
            left_out.append(profile.name)
            continue
        if len(hosts) + number > MAX_MACHINES:
            raise UsageError(f"more than {MAX_MACHINES} machines")
        peer = SimPeer(0, profile.spec(workload.mean_tflop), 1.0)
        machine = Machine(profile.tflops / workload.mean_tflop, peer.up_rate, peer.down_rate)
        hosts += [_Host(profile, machine, peer.latency_s)] * int(number)
    return hosts, tuple(left_out)


def _assign(workload: Workload, hosts: Sequence[_Host]) -> list[list[_Host]]:
    num_stages = len(workload.stages)
    stages: list[list[_Host]] = [[] for _ in range(num_stages)]
    capacities = [0.0] * num_stages
    fitting_of = {
        host.profile.memory_gb: [
            index for index, stage in enumerate(workload.stages) if stage.memory_bytes <= host.profile.memory_gb * 1e9
        ]
        for host in hosts
    }
    # Machines that fit few stages choose first; those that fit all fill up the rest.
    for host in sorted(hosts, key=lambda host: (len(fitting_of[host.profile.memory_gb]), -host.machine.speed)):
        fitting = fitting_of[host.profile.memory_gb]
        needy = max(fitting, key=lambda index: (-capacities[index], workload.stages[index].memory_bytes))
        stages[needy].append(host)
        capacities[needy] += host.rate(workload, needy)
    return stages


def _short_stage(capacities: Sequence[float]) -> int | None:
    weakest = min(range(len(capacities)), key=lambda index: capacities[index])
    usual = sorted(capacities)[len(capacities) // 2]
    return weakest if capacities[weakest] < 0.99 * usual else None


def _is_short_of_bytes(workload: Workload, stages: Sequence[Sequence[_Host]], capacities: Sequence[float]) -> bool:
    weakest = min(range(len(capacities)), key=lambda index: capacities[index])
    computing = sum(host.profile.tflops / workload.stages[weakest].tflop for host in stages[weakest])
    return capacities[weakest] < 0.99 * computing


def _neighbours(workload: Workload, stage: int) -> int:
    return (stage > 0) + (stage < len(workload.stages) - 1)


def _pass_s(workload: Workload, stages: Sequence[Sequence[_Host]]) -> float:
    """Latency of one microbatch, forward and backward, through idle machines of average speed."""
    seconds = 0.0
    for index, members in enumerate(stages):
        if members:
            seconds += len(members) / sum(host.profile.tflops / workload.stages[index].tflop for host in members)
            slowest = min(min(host.machine.up_rate, host.machine.down_rate) for host in members)
            latency_s = 2.0 * max(host.latency_s for host in members) + BACKBONE_S
            seconds += _neighbours(workload, index) * (workload.boundary_bytes / slowest + latency_s)
    return seconds


def _bound(workload: Workload, hosts: Sequence[_Host]) -> float:
    kinds = []
    for index, cost in enumerate(workload.costs):
        num_bytes = _neighbours(workload, index) * workload.boundary_bytes
        kinds.append(StageKind(cost, num_bytes, num_bytes))
    return throughput_bound([host.machine for host in hosts], kinds)


def _stage_forecast(
    workload: Workload, index: int, members: Sequence[_Host], capacity: float, rate: float, steps_per_s: float
) -> StageForecast:
    per_step = 0.0
    if members:
        share = workload.batch / len(members)
        per_step = share * _neighbours(workload, index) * workload.boundary_bytes
        per_step += workload.all_reduce_bytes(index, len(members)) * (1.0 - 1.0 / len(members))
    tokens = workload.batch * workload.token_bytes / max(1, len(members)) if index == 0 else 0.0
    return StageForecast(
        stage=index,
        num_peers=len(members),
        capacity=capacity,
        busy=rate / capacity if capacity else 0.0,
        memory_bytes=workload.stages[index].memory_bytes,
        up_bytes_per_day=DAY_S * steps_per_s * per_step,
        down_bytes_per_day=DAY_S * steps_per_s * (per_step + tokens),
    )
