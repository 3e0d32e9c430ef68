"""What is simulated: the swarm, its links, its churn, and which policies run in it. Plain data, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from swarmtrain.errors import UsageError
from swarmtrain.model.reduce_bytes import ReduceBytes
from swarmtrain.route.rebalance import RebalanceOptions
from swarmtrain.route.router import POLICIES
from swarmtrain.route.work_stealing import NUM_ASKED
from swarmtrain.units import MBIT

REBALANCE_RULES = ("none", "queue", "capacity")
CHURN_KINDS = ("none", "exponential", "trace")
PLACEMENTS = ("even", "random")
JOB_ORDERS = ("backward-first", "oldest-first", "fifo")
_EVER_S, _MANY, _HUGE_BYTES = 1e10, 10**9, 1e15  # larger values change nothing, except that arithmetic fails
_RANGES: dict[str, tuple[float, float]] = {
    "seed": (-(2**63), 2**63),
    "speed_spread": (0.0, 10.0),
    "compute_jitter": (0.0, 10.0),
    "backbone_latency_s": (0.0, 60.0),
    "boundary_bytes": (0.0, _HUGE_BYTES),
    "backward_bytes": (0.0, _HUGE_BYTES),
    "batch": (0, _MANY),
    "delay": (0, 1),
    "delay_from": (0, _MANY),
    "checkpoint_every": (0, _MANY),
    "moves_every": (0, _MANY),
    "queue_limit": (1, _MANY),
    "num_asked": (0, _MANY),
    "window_maximum": (0, _MANY),
    "mean_life_s": (1.0, _EVER_S),
    "mean_absence_s": (1.0, _EVER_S),
    "download_s": (0.0, _EVER_S),
    "detect_s": (0.0, _EVER_S),
    "rebalance_period_s": (0.1, _EVER_S),
    "random_newcomers": (0, 1),
    "fetch_first": (0, 1),
    "directory_period_s": (0.1, _EVER_S),
    "record_life_s": (0.1, _EVER_S),
}
_REBALANCE_RANGES: dict[str, tuple[float, float]] = {
    "min_gain": (0.0, 10.0),
    "min_left": (0, _MANY),
    "min_stay_s": (0.0, _EVER_S),
    "stay_per_download": (0.0, 1e6),
    "stages_per_move": (1, _MANY),
}


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One machine. `speed`: microbatches per second, forward and backward, in a stage of cost 1."""

    speed: float = 0.2
    up_bytes_per_s: float = 100 * MBIT
    down_bytes_per_s: float = 100 * MBIT
    latency_s: float = 0.02  # from the machine to the backbone
    relayed: bool = False
    stage: int | None = None  # pinned, if given
    weight: float = 1.0  # how often it occurs in a mix


@dataclass(frozen=True, slots=True)
class ChurnEvent:
    """One line of a trace: at `time_s`, `change` peers join (positive) or vanish (negative)."""

    time_s: float
    change: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """All parameters of one simulation; two runs of equal scenarios give the same trace."""

    num_peers: int = 64
    num_stages: int = 4
    minutes: float = 60.0
    warmup_minutes: float = 10.0
    seed: int = 0

    # Machines: drawn from `mix`, their speed spread log-normally around the profile's; or exactly `layout`.
    mix: tuple[PeerSpec, ...] = (PeerSpec(),)
    layout: tuple[PeerSpec, ...] = ()
    speed_spread: float = 0.5
    compute_jitter: float = 0.05
    backbone_latency_s: float = 0.03
    placement: str = "even"

    # Work. Stage costs are relative; a boundary tensor crosses every boundary once in each direction.
    stage_costs: tuple[float, ...] = ()
    boundary_bytes: float = 2.7e6
    backward_bytes: float = 0.0  # on its way back; 0: as many
    batch: int = 0  # microbatches per optimizer step; 0: no steps, an endless stream
    # What every peer sends, and receives, in a step's all-reduce: one value per stage, or one for all.
    gradient_bytes: tuple[float, ...] = ()
    gradient_bytes_between: tuple[float, ...] = ()  # between the groups of a large stage, if one peer did it all
    # As in a manifest: 1 hides the all-reduce behind the next step, from step `delay_from` on. The step of a checkpoint
    # waits for it all the same, and the step after a move of the subspace.
    delay: int = 0
    delay_from: int = 0
    checkpoint_every: int = 0
    moves_every: int = 0
    queue_limit: int = 64  # forward jobs a peer accepts before it says BUSY, as the daemons
    job_order: str = (
        "backward-first"  # of a peer's processor, as in the daemons; or by microbatch, or first in, first out
    )
    num_asked: int = NUM_ASKED  # work stealing: victims that a peer asks when it runs out of work; 0: off
    window_maximum: int = 0  # limit of microbatches in flight; 0: see `window_limit`

    # Coming and going.
    churn: str = "exponential"
    mean_life_s: float = 7200.0
    mean_absence_s: float = 1800.0
    trace: tuple[ChurnEvent, ...] = ()
    download_s: float = 90.0  # time in which a joining or moving peer fetches a stage's state
    detect_s: float = 6.0  # three missed heartbeats

    # Policies.
    routing: str = "finish-time"
    rebalance: str = "capacity"
    rebalance_period_s: float = 300.0  # of the queue rule
    random_newcomers: int = 0  # 1: the queue rule moves only serving peers, newcomers choose a random stage
    fetch_first: int = 0  # 1: a moving peer serves its old stage until it has the new state; daemons leave first
    rebalance_options: RebalanceOptions = field(default_factory=RebalanceOptions)
    directory_period_s: float = 20.0
    record_life_s: float = 50.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def costs(self) -> tuple[float, ...]:
        """One relative cost per stage."""
        return self.stage_costs or (1.0,) * self.num_stages

    @property
    def bytes_back(self) -> float:
        """Of a boundary tensor on its way back."""
        return self.backward_bytes or self.boundary_bytes

    def gradient_bytes_of(self, stage: int, num_peers: int) -> float:
        """What a peer of one stage sends, and receives, less its own part, when so many reduce."""
        between = _of_stage(self.gradient_bytes_between, stage)
        return ReduceBytes(_of_stage(self.gradient_bytes, stage), between).of_group(num_peers)

    def weights_step(self, step: int) -> int:
        """How many steps must be applied before the microbatches of `step` can be leased: see Manifest.weights_step."""
        if step < self.delay_from:
            return step
        barriers = [step - step % every for every in (self.checkpoint_every, self.moves_every) if every]
        return max(step - self.delay, *barriers, 0)

    @property
    def window_limit(self) -> int:
        """Limit of microbatches in flight: a whole step, or without steps eight per peer."""
        return self.window_maximum or self.batch or 8 * self.num_peers

    def with_(self, **changes: object) -> Scenario:
        """A copy with some parameters changed."""
        known = {entry.name for entry in fields(self)}
        for name in changes:
            if name not in known:
                raise UsageError(f"a scenario has no parameter {name!r}")
        return replace(self, **changes)  # type: ignore[arg-type]


def _check(scenario: Scenario) -> None:
    """Refuse what cannot be simulated, naming the parameter."""
    _require(1 <= scenario.num_stages <= 4096, "num_stages", "from 1 to 4096")
    _require(scenario.num_peers >= scenario.num_stages, "num_peers", "at least one per stage")
    _require(scenario.num_peers <= 1_000_000, "num_peers", "at most 1,000,000")
    _require(0.0 <= scenario.warmup_minutes < scenario.minutes, "warmup_minutes", "less than minutes")
    _require(scenario.minutes <= 60.0 * 24 * 365, "minutes", "at most a year")
    _require(scenario.routing in POLICIES, "routing", f"one of {', '.join(POLICIES)}")
    _require(scenario.rebalance in REBALANCE_RULES, "rebalance", f"one of {', '.join(REBALANCE_RULES)}")
    _require(scenario.churn in CHURN_KINDS, "churn", f"one of {', '.join(CHURN_KINDS)}")
    _require(scenario.placement in PLACEMENTS, "placement", f"one of {', '.join(PLACEMENTS)}")
    _require(scenario.job_order in JOB_ORDERS, "job_order", f"one of {', '.join(JOB_ORDERS)}")
    _require(len(scenario.costs) == scenario.num_stages, "stage_costs", "one per stage")
    _require(
        not scenario.layout or len(scenario.layout) == scenario.num_peers, "num_peers", "as many as the layout has"
    )
    _require(bool(scenario.layout or scenario.mix), "mix", "at least one profile")
    for name, (low, high) in _RANGES.items():
        _require(low <= getattr(scenario, name) <= high, name, f"from {low:g} to {high:g}")
    for name, (low, high) in _REBALANCE_RANGES.items():
        value = getattr(scenario.rebalance_options, name)
        _require(low <= value <= high, f"rebalance.{name}", f"from {low:g} to {high:g}")
    for name in ("gradient_bytes", "gradient_bytes_between"):
        sizes: tuple[float, ...] = getattr(scenario, name)
        _require(len(sizes) in (0, 1, scenario.num_stages), name, "one, or one per stage")
        for num_bytes in sizes:
            _require(0.0 <= num_bytes <= _HUGE_BYTES, name, f"from 0 to {_HUGE_BYTES:g}")
    for cost in scenario.costs:
        _require(1e-9 <= cost <= 1e9, "stage_costs", "from 1e-09 to 1e+09")
    for spec in scenario.layout or scenario.mix:
        _check_spec(spec, scenario.num_stages)


def _of_stage(values: tuple[float, ...], stage: int) -> float:
    return values[stage if len(values) > 1 else 0] if values else 0.0


def _check_spec(spec: PeerSpec, num_stages: int) -> None:
    for name in ("speed", "up_bytes_per_s", "down_bytes_per_s"):
        _require(0.0 < getattr(spec, name) < math.inf, f"peer {name}", "positive")
    _require(0.0 <= spec.latency_s < 60.0, "peer latency_s", "from 0 to 60")
    _require(spec.stage is None or 0 <= spec.stage < num_stages, "peer stage", f"from 0 to {num_stages - 1}")


def _require(condition: bool, name: str, allowed: str) -> None:
    if not condition:
        raise UsageError(f"{name} must be {allowed}")
