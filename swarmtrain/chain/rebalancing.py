"""What peers and coordinator share about moving between stages: the run's rules, and members made from records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarmtrain.chain.neighbours import PeerRecord
from swarmtrain.model.workload import workload_of
from swarmtrain.route.moves import Intent
from swarmtrain.route.rebalance import Member, RebalanceOptions
from swarmtrain.route.views import narrower
from swarmtrain.run.manifest import Manifest

INTENT_TOPIC = "moves"
RULES = ("capacity", "none")
UNKNOWN_SPEED = 0.0


@dataclass(frozen=True, slots=True)
class MoveRules:
    """How a run rebalances. The coordinator announces it with its own record, so all peers plan alike."""

    rule: str = "capacity"
    min_gain: float = 0.15
    min_left: int = 2
    min_stay_s: float = 60.0
    look_s: float = 20.0  # how often a peer looks at the directory; its second look follows after a part of it

    def options(self) -> RebalanceOptions:
        """For the plan."""
        return RebalanceOptions(min_gain=self.min_gain, min_left=self.min_left, min_stay_s=self.min_stay_s)

    @property
    def second_look_s(self) -> tuple[float, float]:
        """Least and most time between the two looks."""
        return 0.25 * self.look_s, 0.5 * self.look_s

    def as_value(self) -> list[Any]:
        """For a directory record."""
        return [self.rule, self.min_gain, self.min_left, self.min_stay_s, self.look_s]

    @classmethod
    def from_value(cls, value: object) -> MoveRules | None:
        """None for anything that is not of this form."""
        if not isinstance(value, list | tuple) or len(value) != 5:
            return None
        rule, min_gain, min_left, min_stay_s, look_s = value
        numbers = (min_gain, min_left, min_stay_s, look_s)
        if rule not in RULES or not all(isinstance(n, int | float) and 0 <= n < 1e6 for n in numbers):
            return None
        return cls(rule, float(min_gain), int(min_left), float(min_stay_s), max(0.1, float(look_s)))


@dataclass(frozen=True, slots=True)
class Costs:
    """The run's stages as rebalancing sees them."""

    costs: tuple[float, ...]
    boundary_bytes: float

    @classmethod
    def of(cls, manifest: Manifest) -> Costs:
        """From the manifest, by counting multiplications."""
        workload = workload_of(manifest)
        return cls(workload.costs, workload.boundary_bytes)

    def speed(self, stage: int, forward_ms: float, backward_ms: float) -> float:
        """Microbatches per second in a stage of cost 1, from the times in this one; 0 if nothing was measured yet."""
        milliseconds = forward_ms + backward_ms
        if not 0.0 < milliseconds < math.inf or not 0 <= stage < len(self.costs):
            return UNKNOWN_SPEED
        return 1000.0 * self.costs[stage] / milliseconds

    def link_rate(self, bytes_per_s: float) -> float:
        """Microbatches per second that an announced link carries in an inner stage, each way."""
        num_bytes = 2.0 * self.boundary_bytes
        return bytes_per_s / num_bytes if num_bytes and 0.0 < bytes_per_s < math.inf else math.inf


def with_known_speeds(members: Iterable[Member]) -> list[Member]:
    """A peer that has not computed yet is taken to be as fast as the others usually are."""
    members = list(members)
    known = [member.speed for member in members if member.speed > UNKNOWN_SPEED]
    usual = statistics.median(known) if known else 1.0
    return [member if member.speed > UNKNOWN_SPEED else replace(member, speed=usual) for member in members]


def members_of(records: Sequence[Mapping[str, PeerRecord]], costs: Costs, now: float) -> list[Member]:
    """The peers of all stages, from the records under each stage's topic; the newer assignment of a peer wins."""
    newest: dict[str, tuple[int, Member]] = {}
    for stage, found in enumerate(records):
        for peer_id, record in found.items():
            known = newest.get(peer_id)
            if known is not None and known[0] >= record.assignment:
                continue
            member = Member(
                peer_id=peer_id,
                stage=stage,
                speed=costs.speed(stage, record.forward_ms, record.backward_ms),
                link_rate=costs.link_rate(narrower(record.up_bytes_per_s, record.down_bytes_per_s)),
                state=record.state,
                pinned=record.pinned,
                since=now - record.served_s,
                last_download_s=record.download_s,
            )
            newest[peer_id] = (record.assignment, member)
    return with_known_speeds(member for _, member in newest.values())


def intent_value(intent: Intent) -> dict[str, Any]:
    """An intent as a directory record."""
    return {"f": intent.source, "t": intent.target, "g": min(intent.gain, 1e9)}


def intent_of(peer_id: str, value: object) -> Intent | None:
    """An intent from a directory record; None for anything else, and for one that was withdrawn."""
    if not isinstance(value, Mapping):
        return None
    source, target, gain = value.get("f"), value.get("t"), value.get("g")
    if not isinstance(source, int) or not isinstance(target, int) or not isinstance(gain, int | float):
        return None
    return Intent(peer_id, source, target, float(gain)) if math.isfinite(gain) and source != target else None
