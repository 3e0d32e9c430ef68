"""Which machines of a mix serve which stage, and how long a step then takes. More machines are never slower.

Without a delay a step of length T is computing C, a pass F that fills and empties the pipeline, and the all-reduce R,
one after the other. With a delay the all-reduce goes on in the background of the next step, on what boundary traffic
leaves of the lines, and begins when the step's last microbatch is back: F after the next step has begun. A machine that
computes c microbatches per second, whose line carries u bytes per second, b of them for a microbatch, and that moves m
bytes in an all-reduce, then does in a step

    without a delay:  min(c, u / b) C                         microbatches, if m <= u R
    with a delay:     min(c (T - F/4), (u - m / (T - F)) / b (T - F/2))

(for F/4 and F/2 processors and lines run empty: see LINES_EMPTY).

A stage is covered when its machines together do all microbatches of a step. For given F, R and T the machines stand in
a line, and stage after stage takes machines from its front until it is covered. One machine more in the line lets no
stage end later in it, because a stage may leave machines idle and so is not harmed by one more. So the shortest T for
a given F and R is never longer with more machines, nor is the best choice of F and R. F is a pass through the slowest
kind that takes part: the choice of F says who does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from swarmtrain.model.workload import StageWork, Workload
from swarmtrain.sim.all_reduce import equal_share_bytes
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.profiles import PeerProfile

BACKBONE_S = 0.03  # one way between two providers, as in a scenario
DECIDE_S = 4.0 * BACKBONE_S  # prepare, decide, apply
# Of a pass. With a delay two steps are under way, and the older one's microbatches may wait behind the newer one's: on
# lines in the order of sending, at processors less often. For so long machines run empty in every step; fitted to
# simulations with long and with short steps.
LINES_EMPTY, PROCESSORS_EMPTY = 0.5, 0.25
LEAST_SHARE = 0.25  # of its rate: a machine that does less beside the all-reduce is better left out
# Steps are tried on a grid of lengths, each so many times the one before: equal questions have equal answers.
_RATIO = 1.0005
_SHORTEST, _LONGEST = -28_000, 48_000  # powers of it: a microsecond, eight hundred years
_GROUP_SIZES: tuple[int, ...] = (*range(1, 17), 24, 32, 48, 64, 96, 128, 256, 1024, 1_000_000)
_DEADLINE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 1_000_000)
_OFTEN = 0.05  # of steps: where more of them wait, the swarm may be placed as without a delay


@dataclass(frozen=True, slots=True, eq=False)
class MachineKind:
    """Machines that are alike, and how many of them there are."""

    profile: PeerProfile
    count: int
    up_rate: float  # bytes per second, as far as a relay lets them through
    down_rate: float

    @classmethod
    def of(cls, profile: PeerProfile, count: int) -> MachineKind:
        """From a profile."""
        peer = SimPeer(0, profile.spec(1.0), 1.0)
        return cls(profile, count, peer.up_rate, peer.down_rate)

    @property
    def line_rate(self) -> float:
        """For an all-reduce, which moves as many bytes up as down."""
        return min(self.up_rate, self.down_rate)

    def holds(self, demand: Demand) -> bool:
        """Whether the stage fits its memory."""
        return self.profile.way(demand.work) is not None


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What a stage asks of its machines. Stages that ask the same have the same one."""

    work: StageWork
    bytes_out: float  # of a microbatch
    bytes_in: float
    moved: tuple[float, ...]  # bytes in an all-reduce, by each machine of a group of at most each of `_GROUP_SIZES`

    def computing_rate(self, kind: MachineKind) -> float:
        """Microbatches per second."""
        return kind.profile.tflops / self.work.tflop

    def line_rate(self, kind: MachineKind, taken: float = 0.0) -> float:
        """Microbatches per second that the lines carry beside `taken` bytes per second, up and down."""
        up = (kind.up_rate - taken) / self.bytes_out if self.bytes_out else math.inf
        down = (kind.down_rate - taken) / self.bytes_in if self.bytes_in else math.inf
        return max(0.0, min(up, down)) if taken <= kind.line_rate else 0.0

    def rate(self, kind: MachineKind) -> float:
        """Microbatches per second of one machine while nothing is reduced."""
        return min(self.computing_rate(kind), self.line_rate(kind))


Group = tuple[tuple[MachineKind, int], ...]  # the machines of a stage


@dataclass(frozen=True, slots=True)
class Placement:
    """The machines of every stage, and what a step of theirs takes: its mean over the run, in seconds."""

    stages: tuple[Group, ...]
    step_s: float = 0.0  # 0: a stage has no machine
    fill_s: float = 0.0


def place(workload: Workload, kinds: Sequence[MachineKind]) -> Placement:
    """The placement with the shortest steps. Where none covers all stages, one that covers as many as it can."""
    demands = demands_of(workload)
    passes = {kind: pass_s(workload, kind) for kind in kinds}
    best: Placement | None = None
    delays = [workload.delay] if workload.synchronous_share < _OFTEN else range(workload.delay + 1)
    for fill_s in sorted(set(passes.values())):
        for line in _lines([kind for kind in kinds if passes[kind] <= fill_s], demands):
            for delay in delays:
                best = _Search(workload, demands, line, fill_s, delay).improve(best)
    return best or Placement(_one_each(kinds, demands))


def demands_of(workload: Workload) -> tuple[Demand, ...]:
    """Of every stage. Microbatches come from both neighbours and go to both, if it has them."""
    forward, backward = workload.boundary_bytes, workload.backward_bytes
    demands = []
    known: dict[tuple[StageWork, int, int], Demand] = {}
    for stage, work in enumerate(workload.stages):
        has_below, has_above = int(stage > 0), int(stage < len(workload.stages) - 1)
        moved = (equal_share_bytes(work.reduced.of_group(size), size) for size in _GROUP_SIZES)
        demand = Demand(
            work=work,
            bytes_out=has_above * forward + has_below * backward,
            bytes_in=has_below * forward + has_above * backward,
            moved=tuple(accumulate(moved, max)),
        )
        demands.append(known.setdefault((work, has_below, has_above), demand))
    return tuple(demands)


def pass_s(workload: Workload, kind: MachineKind) -> float:
    """Latency of one microbatch, forward and backward, through idle machines of one kind."""
    crossing_s = 2.0 * (2.0 * kind.profile.latency_ms / 1000.0 + BACKBONE_S)
    crossing_s += (workload.boundary_bytes + workload.backward_bytes) / kind.line_rate
    computing_s = sum(stage.tflop for stage in workload.stages) / kind.profile.tflops
    return computing_s + (len(workload.stages) - 1) * crossing_s


def _lines(kinds: Sequence[MachineKind], demands: Sequence[Demand]) -> list[tuple[MachineKind, ...]]:
    """Orders in which the machines may stand. Those that hold more stages come first: nobody else holds these."""
    fitting = {kind: sum(kind.holds(demand) for demand in demands) for kind in kinds}
    line = sorted((kind for kind in kinds if fitting[kind]), key=lambda kind: repr(kind.profile))
    found = []
    for sign in (-1, 1):
        found.append(sorted(line, key=lambda kind: (-fitting[kind], sign * kind.profile.tflops)))
        found.append(sorted(line, key=lambda kind: (-fitting[kind], sign * kind.line_rate)))
    return list(dict.fromkeys(tuple(item) for item in found if item))


def _largest_first(demands: Sequence[Demand]) -> list[int]:
    return sorted(range(len(demands)), key=lambda stage: -demands[stage].work.memory_bytes)


def _one_each(kinds: Sequence[MachineKind], demands: Sequence[Demand]) -> tuple[Group, ...]:
    """For a mix that cannot cover all stages: one machine for as many as it can, largest stages first."""
    left = Counter({kind: kind.count for kind in kinds})
    stages: list[Group] = [()] * len(demands)
    for stage in _largest_first(demands):
        holding = [kind for kind in sorted(left, key=lambda kind: -kind.profile.memory_gb) if left[kind]]
        if holding and holding[0].holds(demands[stage]):
            stages[stage] = ((holding[0], 1),)
            left[holding[0]] -= 1
    return tuple(stages)


class _Search:
    """The shortest steps for one line of machines, one F and one kind of step."""

    def __init__(
        self,
        workload: Workload,
        demands: tuple[Demand, ...],
        line: tuple[MachineKind, ...],
        fill_s: float,
        delay: int,
    ) -> None:
        self._demands = demands
        self._line = line
        self._order = _largest_first(demands)
        self._batch = workload.batch
        self._fill_s = fill_s
        self._delay = delay
        self._waiting_share = workload.synchronous_share if delay else 1.0  # of steps that wait for fill and all-reduce
        self._step_s = 0.0  # what is being tried
        self._reduce_s = 0.0

    def improve(self, best: Placement | None) -> Placement | None:
        """A placement with shorter steps than `best`, if there is one, else `best`."""
        for reduce_s in self._deadlines():
            added_s = self._waiting_share * (self._fill_s + DECIDE_S + reduce_s)
            longest = _LONGEST
            if best is not None:
                if best.step_s <= added_s:
                    break
                longest = math.ceil(math.log(best.step_s - added_s, _RATIO)) - 1
            if longest < _SHORTEST or self._cover(longest, reduce_s) is None:
                continue
            low, high = _SHORTEST, longest
            while low < high:
                middle = (low + high) // 2
                if self._cover(middle, reduce_s) is None:
                    low = middle + 1
                else:
                    high = middle
            stages = self._cover(high, reduce_s)
            assert stages is not None
            best = Placement(stages, math.pow(_RATIO, high) + added_s, self._fill_s)
        return best

    def _deadlines(self) -> list[float]:
        """Times that an all-reduce may take: of groups of one kind of machine, of every size."""
        sizes = [_GROUP_SIZES.index(size) for size in _DEADLINE_SIZES]
        moved = {demand.moved[index] for demand in self._demands for index in sizes}
        return sorted({num_bytes / kind.line_rate for num_bytes in moved for kind in self._line})

    def _cover(self, power: int, reduce_s: float) -> tuple[Group, ...] | None:
        """The machines of every stage with which steps last so long; None if they do not suffice."""
        self._step_s, self._reduce_s = math.pow(_RATIO, power), reduce_s
        if self._delay and self._step_s < self._fill_s + DECIDE_S:
            return None  # a step needs the decision on the step before the last
        place_in_line, left = 0, self._line[0].count
        smallest: dict[tuple[Demand, MachineKind], int | None] = {}
        stages: list[Group] = [()] * len(self._demands)
        for stage in self._order:
            demand = self._demands[stage]
            group: Counter[MachineKind] = Counter()
            while not stages[stage]:
                if not left:
                    place_in_line += 1
                    if place_in_line == len(self._line):
                        return None
                    left = self._line[place_in_line].count
                kind = self._line[place_in_line]
                if not kind.holds(demand):
                    return None
                if not group:
                    if (demand, kind) not in smallest:
                        smallest[demand, kind] = self._smallest(demand, kind)
                    number = smallest[demand, kind]
                    number = number if number is not None and number <= left else None
                else:
                    number = self._smallest_addition(demand, group, kind, left)
                group[kind] += left if number is None else number
                left -= left if number is None else number
                if number is not None:
                    stages[stage] = self._serving(demand, group)
        return tuple(stages)

    def _smallest(self, demand: Demand, kind: MachineKind) -> int | None:
        """How many machines of one kind cover a stage."""
        before = 0
        for index, size in enumerate(_GROUP_SIZES):
            done = self._done(demand, kind, demand.moved[index])
            if done * size >= self._batch:
                number = max(before + 1, math.ceil(self._batch / done))
                return min(number, size)
            before = size
        return None

    def _smallest_addition(
        self, demand: Demand, group: Counter[MachineKind], kind: MachineKind, most: int
    ) -> int | None:
        """How many machines of a further kind cover a stage together with those that it has."""

        def covers(number: int) -> bool:
            return bool(self._serving(demand, group + Counter({kind: number})))

        if not covers(most):
            return None
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if covers(middle) else (middle + 1, high)
        return high

    def _serving(self, demand: Demand, group: Counter[MachineKind]) -> Group:
        """Those of a group that cover the stage, the others idle; none if they cannot."""
        for index, size in enumerate(_GROUP_SIZES):
            done = {kind: self._done(demand, kind, demand.moved[index]) for kind in group}
            chosen: list[tuple[MachineKind, int]] = []
            room, missing = size, float(self._batch)
            for kind in sorted(done, key=lambda kind: -done[kind]):
                number = min(room, group[kind])
                if done[kind] > 0.0:
                    chosen.append((kind, number))
                    room -= number
                    missing -= number * done[kind]
            if missing <= 1e-9 * self._batch:
                return tuple((kind, number) for kind, number in chosen if number)
        return ()

    def _done(self, demand: Demand, kind: MachineKind, moved: float) -> float:
        """Microbatches that a machine does in a step beside its part of the all-reduce; 0 if that takes too long."""
        if moved > kind.line_rate * self._reduce_s * (1.0 + 1e-9):
            return 0.0
        if not self._delay or not moved:
            return self._step_s * demand.rate(kind)
        window_s = self._step_s - self._fill_s - DECIDE_S
        if window_s <= 0.0:
            return 0.0
        computing_s = self._step_s - PROCESSORS_EMPTY * self._fill_s
        sending_s = self._step_s - LINES_EMPTY * self._fill_s
        rate = demand.line_rate(kind, moved / window_s)
        done = min(computing_s * demand.computing_rate(kind), sending_s * rate)
        return done if done > LEAST_SHARE * self._step_s * demand.rate(kind) else 0.0
