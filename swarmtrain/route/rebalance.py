"""Which stage needs help, and which peers should go there.

Everything is computed from the directory's records, so peers with the same view come to the same plan; who of them may
really leave is settled in `moves.py`. The SWARM paper's queue-length rule (appendix D) is here for comparison only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

SERVING = "serving"
# States in which a peer counts for a stage although it does not serve it yet: it has said that it is coming.
ARRIVING = frozenset({"joining", "syncing"})


@dataclass(frozen=True, slots=True)
class PeerCapacity:
    """One peer as rebalancing sees it. `stage` is where it serves, or where it is going to if it is arriving."""

    peer_id: str
    stage: int
    speed: float  # microbatches per second in a stage of cost 1
    link_rate: float = float("inf")  # microbatches per second that its links can carry
    state: str = SERVING
    pinned: bool = False
    since: float = float("-inf")  # when it began to serve this stage
    last_download_s: float = 0.0
    queue_length: int = 0  # microbatches waiting; only the paper's rule reads it

    def rate(self, cost: float) -> float:
        """Microbatches per second in a stage of this cost."""
        return min(self.speed / cost, self.link_rate)


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """`peer_id` should go from `source` to `target`; `gain` is the relative rise of the weaker of the two stages."""

    peer_id: str
    source: int
    target: int
    gain: float


@dataclass(frozen=True, slots=True)
class RebalanceOptions:
    """When a move is worth it. The defaults come from the simulator (docs/simulator.md)."""

    min_gain: float = 0.15  # of one move alone; see `is_worth_it`
    min_left: int = 2  # serving peers that must stay behind in the mover's stage
    min_stay_s: float = 60.0
    stay_per_download: float = 10.0  # minimum stay, in units of the time that the last download took
    stages_per_move: int = 8  # a plan has at most one move per this many stages, and at least one


def stage_capacities(members: Sequence[PeerCapacity], costs: Sequence[float]) -> list[float]:
    """Microbatches per second of each stage, arriving peers included. Members of unknown stages are ignored."""
    capacities = [0.0] * len(costs)
    for member in members:
        if 0 <= member.stage < len(costs) and (member.state == SERVING or member.state in ARRIVING):
            capacities[member.stage] += member.rate(costs[member.stage])
    return capacities


def stage_sizes(members: Sequence[PeerCapacity], num_stages: int) -> list[int]:
    """How many peers each stage has, with those that are arriving."""
    sizes = [0] * num_stages
    for member in members:
        if 0 <= member.stage < num_stages and (member.state == SERVING or member.state in ARRIVING):
            sizes[member.stage] += 1
    return sizes


def is_worth_it(
    capacities: Sequence[float],
    sizes: Sequence[int],
    member: PeerCapacity,
    costs: Sequence[float],
    move: tuple[int, int],
    options: RebalanceOptions,
    *,
    caution: float = 1.0,
) -> bool:
    """Whether `member` should make this move, from the first stage to the second; `caution` scales the thresholds.

    Either the move alone gains more than `min_gain`. Or it is one step towards equal stages: levelling the two of them
    would gain more than what their measured speeds may be wrong by, and at least half of what the mover takes with it
    is gained, so that there is no way back. A stage's measured speed is the surer the more peers it has, by the square
    root of their number. (Of many peers none gains much alone, however much their stage lacks.)
    """
    source, target = move
    gain = gain_of_move(capacities, member, costs, source, target)
    if gain > caution * options.min_gain:
        return True
    before = capacities[target]
    levelled_gain = 0.5 * (capacities[source] - before) / before if before > 0.0 else 0.0
    is_sure = levelled_gain > caution * options.min_gain / math.sqrt(max(1, sizes[target]))
    return is_sure and gain * before > caution * 0.5 * member.rate(costs[target])


def plan_moves(
    members: Sequence[PeerCapacity], costs: Sequence[float], now: float, options: RebalanceOptions | None = None
) -> list[PlannedMove]:
    """The moves that all should agree on, best first; no two of them touch the same stage.

    Each takes a peer to the weakest stage that is left, such that the *weaker of the two stages* ends up above what the
    weakest one has now, by so much that it is worth it: of all such moves the one that raises it most, then the one
    from the stronger stage. So a move never lowers the throughput while the mover
    downloads, and a sequence of moves cannot cycle: the sorted list of capacities only ever rises.
    """
    options = options or RebalanceOptions()
    capacities = stage_capacities(members, costs)
    sizes = stage_sizes(members, len(costs))
    movers = _movable_by_stage(members, len(costs), now, options)
    moves: list[PlannedMove] = []
    touched: set[int] = set()
    for _ in range(max(1, len(costs) // options.stages_per_move)):
        free = [stage for stage in range(len(costs)) if stage not in touched]
        if len(free) < 2:
            break
        target = min(free, key=lambda stage: (capacities[stage], stage))
        best: tuple[float, float, str] | None = None
        for source in free:
            if source == target or capacities[source] <= capacities[target]:
                continue
            for member in movers[source]:
                gain = gain_of_move(capacities, member, costs, source, target)
                order = (-gain, -capacities[source], member.peer_id)
                if (best is None or order < best) and is_worth_it(
                    capacities, sizes, member, costs, (source, target), options
                ):
                    best, move = order, PlannedMove(member.peer_id, source, target, gain)
        if best is None:
            break
        moves.append(move)
        touched |= {move.source, target}
    return moves


def gain_of_move(
    capacities: Sequence[float], member: PeerCapacity, costs: Sequence[float], source: int, target: int
) -> float:
    """By which factor, less one, the weaker of the two stages rises above what `target` has now; infinite from zero."""
    before = capacities[target]
    after = min(capacities[source] - member.rate(costs[source]), before + member.rate(costs[target]))
    if before > 0.0:
        return after / before - 1.0
    return float("inf") if after > 0.0 else 0.0


def _movable_by_stage(
    members: Sequence[PeerCapacity], num_stages: int, now: float, options: RebalanceOptions
) -> list[list[PeerCapacity]]:
    """Per stage, the peers that may leave it; none where too few would stay behind."""
    num_serving = [0] * num_stages
    movable: list[list[PeerCapacity]] = [[] for _ in range(num_stages)]
    for member in members:
        if not 0 <= member.stage < num_stages or member.state != SERVING:
            continue
        num_serving[member.stage] += 1
        stay_s = max(options.min_stay_s, options.stay_per_download * member.last_download_s)
        if not member.pinned and now - member.since >= stay_s:
            movable[member.stage].append(member)
    return [peers if num_serving[stage] > options.min_left else [] for stage, peers in enumerate(movable)]


def choose_stage_for_newcomer(
    members: Sequence[PeerCapacity],
    costs: Sequence[float],
    speed: float,
    rng: random.Random,
    *,
    link_rate: float = float("inf"),
    num_newcomers: int = 1,
) -> int:
    """Where a peer that may go anywhere helps most: the stages that are weakest, filled up to a common level.

    With one newcomer that is the weakest stage (ties at random). If several are known to choose at the same moment,
    the level is that of all of them together and the choice is random in proportion to what a stage lacks, so that
    they spread without talking to one another.
    """
    return newcomer_stage(stage_capacities(members, costs), costs, speed, rng, link_rate, num_newcomers)


def newcomer_stage(
    capacities: Sequence[float],
    costs: Sequence[float],
    speed: float,
    rng: random.Random,
    link_rate: float = float("inf"),
    num_newcomers: int = 1,
) -> int:
    """As `choose_stage_for_newcomer`, from capacities that are known already."""
    rates = [min(speed / cost, link_rate) for cost in costs]
    weakest = min(capacities)
    if num_newcomers <= 1:
        # A stage within a tenth of the newcomer's own rate of the weakest is as good: break such near-ties at random.
        near = [s for s, capacity in enumerate(capacities) if capacity <= weakest + 0.1 * rates[s]]
        return rng.choice(near)
    level = _water_level(sorted(capacities), num_newcomers * max(rates))
    lacking = [max(0.0, level - capacity) for capacity in capacities]
    return rng.choices(range(len(capacities)), lacking)[0] if sum(lacking) > 0.0 else rng.randrange(len(capacities))


def _water_level(ascending: Sequence[float], volume: float) -> float:
    """The level to which `volume` fills vessels that already stand at these heights."""
    filled = 0.0
    for count, height in enumerate(ascending, start=1):
        filled += height
        level = (volume + filled) / count
        if count == len(ascending) or level <= ascending[count]:
            return level
    return 0.0


def plan_move_by_queues(
    members: Sequence[PeerCapacity], num_stages: int, *, keep_one: bool = True
) -> PlannedMove | None:
    """SWARM's rule: the least loaded peer of the least loaded stage goes to the most loaded stage, unconditionally.

    Load is the number of waiting microbatches. `keep_one` is the guard that the published pseudocode lacks.
    """
    loads = [0] * num_stages
    serving: list[list[PeerCapacity]] = [[] for _ in range(num_stages)]
    for member in members:
        if member.state == SERVING and 0 <= member.stage < num_stages:
            loads[member.stage] += member.queue_length
            serving[member.stage].append(member)
    sources = [stage for stage in range(num_stages) if len(serving[stage]) > (1 if keep_one else 0)]
    if not sources:
        return None
    source = min(sources, key=lambda stage: (loads[stage], stage))
    target = max(range(num_stages), key=lambda stage: (loads[stage], -stage))
    if loads[source] >= loads[target]:
        return None
    mover = min((m for m in serving[source] if not m.pinned), key=lambda m: (m.queue_length, m.peer_id), default=None)
    return None if mover is None else PlannedMove(mover.peer_id, source, target, 0.0)


def after_moves(members: Sequence[PeerCapacity], moves: Sequence[PlannedMove], now: float) -> list[PeerCapacity]:
    """The members once these moves are done. For tests and for `plan`."""
    targets = {move.peer_id: move.target for move in moves}
    return [
        replace(member, stage=targets[member.peer_id], since=now) if member.peer_id in targets else member
        for member in members
    ]
