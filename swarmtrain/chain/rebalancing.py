"""What peers and coordinator share about moving between stages: the run's rules, and members made from records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from swarmtrain.model.workload import workload_of
from swarmtrain.route.moves import Intent
from swarmtrain.route.rebalance import PeerCapacity, RebalanceOptions
from swarmtrain.route.views import narrower
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.field_types import StageIndex
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.records import parse_record
from swarmtrain.wire.schema import Message, Priority, Range, message

INTENT_TOPIC = "moves"
UNKNOWN_SPEED = 0.0


class RebalanceRule(StrEnum):
    """How peers plan moves."""

    CAPACITY = "capacity"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class MoveRules:
    """How a run rebalances. The coordinator announces it with its own record, so all peers plan alike."""

    rule: RebalanceRule = RebalanceRule.CAPACITY
    min_gain: Annotated[float, Range(0.0, 1e6)] = 0.15
    min_left: Annotated[int, Range(0, 10**6)] = 2
    min_stay_s: Annotated[float, Range(0.0, 1e6)] = 60.0
    look_s: Annotated[float, Range(0.1, 1e6)] = 20.0  # how often a peer reads the directory; it looks twice

    def options(self) -> RebalanceOptions:
        """For the plan."""
        return RebalanceOptions(min_gain=self.min_gain, min_left=self.min_left, min_stay_s=self.min_stay_s)

    @property
    def second_look_s(self) -> tuple[float, float]:
        """Least and most time between the two looks."""
        return 0.25 * self.look_s, 0.5 * self.look_s


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


def with_known_speeds(members: Iterable[PeerCapacity]) -> list[PeerCapacity]:
    """A peer that has not computed yet is taken to be as fast as the others usually are."""
    members = list(members)
    known = [member.speed for member in members if member.speed > UNKNOWN_SPEED]
    usual = statistics.median(known) if known else 1.0
    return [member if member.speed > UNKNOWN_SPEED else replace(member, speed=usual) for member in members]


def members_of(reports: Sequence[Mapping[str, PeerReport]], costs: Costs, now: float) -> list[PeerCapacity]:
    """The peers of all stages, from the reports under each stage's topic; the newer assignment of a peer wins."""
    newest: dict[str, tuple[int, PeerCapacity]] = {}
    for stage, found in enumerate(reports):
        for peer_id, report in found.items():
            known = newest.get(peer_id)
            if known is not None and known[0] >= report.assignment:
                continue
            member = PeerCapacity(
                peer_id=peer_id,
                stage=stage,
                speed=costs.speed(stage, report.forward_ms, report.backward_ms),
                link_rate=costs.link_rate(narrower(report.up_bytes_per_s, report.down_bytes_per_s)),
                state=report.state,
                pinned=report.pinned,
                since=now - report.served_s,
                last_download_s=report.download_s,
            )
            newest[peer_id] = (report.assignment, member)
    return with_known_speeds(member for _, member in newest.values())


@message(kind="move_intent", priority=Priority.CONTROL)
class MoveIntent(Message):
    """Under INTENT_TOPIC: a peer intends to move from `source` to `target`. Both the same: it does not any more."""

    source: StageIndex
    target: StageIndex
    gain: Annotated[float, Range(0.0, 1e9)] = 0.0  # relative, of the run's throughput

    @classmethod
    def of(cls, intent: Intent) -> MoveIntent:
        """For publishing."""
        return cls(intent.source, intent.target, min(intent.gain, 1e9))


def intent_of(peer_id: str, value: object) -> Intent | None:
    """An intent from a directory record; None for anything else, and for one that was withdrawn."""
    found = parse_record(MoveIntent, value)
    if found is None or found.source == found.target:
        return None
    return Intent(peer_id, found.source, found.target, found.gain)
