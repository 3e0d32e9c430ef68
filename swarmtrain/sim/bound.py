"""An upper bound on the throughput of any assignment of machines to stages and any routing: a linear program.

    maximise T   subject to, with y[p,s] microbatches per second that machine p serves in stage s:
    sum over p of y[p,s]  >= T                      for every stage s
    sum over s of y[p,s] * cost[s] / speed[p] <= 1   for every machine p (its processor)
    sum over s of y[p,s] * bytes_out[s] <= up[p],    and the same for bytes_in and its downlink

A machine may split itself between stages, which no real assignment can: the true optimum is a little lower.
Stages of the same cost and traffic are interchangeable, so they share one variable per machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarmtrain.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Machine:
    """What the bound needs to know of one machine."""

    speed: float
    up_rate: float
    down_rate: float


@dataclass(frozen=True, slots=True)
class StageKind:
    """Stages that cost the same."""

    cost: float
    bytes_in: float
    bytes_out: float


def throughput_bound(machines: Sequence[Machine], stages: Sequence[StageKind]) -> float:
    """Microbatches per second. Needs scipy only where some link may be slower than its machine's processor."""
    if not machines or not stages:
        return 0.0
    if not any(_link_may_bind(machine, kind) for machine in set(machines) for kind in set(stages)):
        # Only processors count; then the program has this closed solution.
        return sum(machine.speed for machine in machines) / sum(kind.cost for kind in stages)
    return _solve(Counter(machines), Counter(stages))


def _link_may_bind(machine: Machine, kind: StageKind) -> bool:
    seconds = kind.cost / machine.speed
    return kind.bytes_out > machine.up_rate * seconds or kind.bytes_in > machine.down_rate * seconds


def _solve(machines: Counter[Machine], stages: Counter[StageKind]) -> float:
    """Equal machines share their variables, too: only their number matters."""
    try:
        import numpy as np
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ImportError as error:
        raise MissingExtraError("scipy", "study") from error

    kinds = list(stages)
    num_kinds, num_variables = len(kinds), len(machines) * len(kinds) + 1
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits: list[float] = []
    for kind_number, kind in enumerate(kinds):  # count * T - sum of y <= 0
        rows.append(kind_number)
        columns.append(num_variables - 1)
        values.append(float(stages[kind]))
        limits.append(0.0)
    for machine_number, (machine, count) in enumerate(machines.items()):
        uses = [(kind.cost / machine.speed, kind.bytes_out, kind.bytes_in) for kind in kinds]
        for resource, capacity in enumerate((1.0, machine.up_rate, machine.down_rate)):
            limits.append(float(count))
            for kind_number in range(num_kinds):
                rows.append(len(limits) - 1)
                columns.append(machine_number * num_kinds + kind_number)
                values.append(uses[kind_number][resource] / capacity)
        for kind_number in range(num_kinds):
            rows.append(kind_number)
            columns.append(machine_number * num_kinds + kind_number)
            values.append(-1.0)
    matrix = coo_array((values, (rows, columns)), shape=(len(limits), num_variables)).tocsr()
    goal = np.zeros(num_variables)
    goal[-1] = -1.0
    solution = linprog(goal, A_ub=matrix, b_ub=np.array(limits), bounds=(0, None), method="highs")
    if not solution.success:
        raise RuntimeError(f"the bound's linear program failed: {solution.message}")
    return float(-solution.fun)
