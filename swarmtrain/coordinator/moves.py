"""Which stage a newcomer hosts, and which peer may move to another stage: the coordinator decides.

Peers plan moves from the directory, which is always a little out of date. Here every permission is counted at once, so
two peers are never sent into the same gap, and no stage is left with too few.
"""

from __future__ import annotations

import asyncio

from swarmtrain.chain.rebalancing import Costs, MoveRules, RebalanceRule, with_known_speeds
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.members import Member
from swarmtrain.observe.events import MoveGranted, MoveRefused
from swarmtrain.route.moves import LeaveRequest, MoveArbiter
from swarmtrain.route.rebalance import PeerCapacity, stage_capacities
from swarmtrain.route.views import narrower
from swarmtrain.rpc.errors import Refusal
from swarmtrain.wire.messages import AskMove, Code, MoveAnswered, SeekStage, StageFound

RESERVED_S = 120.0  # how long a peer that was sent somewhere is counted there before its first heartbeat


class Moves:
    """Answers `SeekStage` and `AskMove`."""

    def __init__(self, context: RunContext, rules: MoveRules) -> None:
        self._context, self._rules = context, rules
        self._costs = Costs.of(context.manifest)
        self._arbiter = MoveArbiter(self._costs.costs, rules.options())
        self._expected: dict[str, tuple[int, float]] = {}  # where a newcomer was sent, and until when it is expected
        self._moving: dict[str, tuple[int, float]] = {}  # where a mover is going, and until when it is expected

    async def seek(self, message: SeekStage, peer_id: str) -> StageFound:
        """The stage that is weakest among those the newcomer can host; every other newcomer on its way counts."""
        self._check_run(message.run)
        count = self._context.manifest.stages.count
        possible = [stage for stage in message.stages if stage < count]
        if not possible:
            raise Refusal(Code.WRONG_STAGE, f"the run has stages 0 to {count - 1}")
        now = asyncio.get_running_loop().time()
        self._expected.pop(peer_id, None)
        members = self._expected_members(now, without=peer_id)
        capacities = stage_capacities(members, self._costs.costs)
        sizes = [sum(member.stage == stage for member in members) for stage in range(count)]
        stage = min(possible, key=lambda index: (capacities[index], sizes[index], index))
        self._expected[peer_id] = (stage, now + RESERVED_S)
        return StageFound(stage, f"its capacity is the smallest: {capacities[stage]:.3g} microbatches/s")

    async def ask(self, message: AskMove, peer_id: str) -> MoveAnswered:
        """Permit or refuse a move."""
        self._check_run(message.run)
        if self._rules.rule is RebalanceRule.NONE:
            return MoveAnswered(False, "this run does not rebalance")
        if self._context.is_over:
            return MoveAnswered(False, "the run is complete")
        now = asyncio.get_running_loop().time()
        self._tell_arbiter(now)
        answer = self._arbiter.request(LeaveRequest(peer_id, message.assignment, message.source, message.target))
        name = self._context.members.name(peer_id)
        if answer.granted:
            self._moving[peer_id] = (message.target, now + RESERVED_S)
            self._context.events.emit(MoveGranted(peer_id, message.source, message.target, name))
        else:
            self._context.events.emit(MoveRefused(peer_id, message.source, message.target, answer.why, name))
        return MoveAnswered(answer.granted, answer.why)

    def on_their_way(self) -> list[str]:
        """Peers that were sent to a stage and have sent no heartbeat from there yet."""
        now = asyncio.get_running_loop().time()
        waiting = {**self._expected, **self._moving}
        return [peer_id for peer_id, (_, until) in waiting.items() if until > now]

    def _check_run(self, run: str) -> None:
        if run != self._context.run_id:
            raise Refusal(Code.WRONG_RUN, f"this is run {self._context.run_id}")

    def _tell_arbiter(self, now: float) -> None:
        """The arbiter learns which peers serve and which are gone; a mover on its way is neither."""
        members = self._context.members
        for member in with_known_speeds(self._as_member(item) for item in members.all()):
            known = members.get(member.peer_id)
            if known is not None and member.state == "serving":
                self._arbiter.serving(member, known.report.assignment)
                if self._moving.get(member.peer_id, (-1, 0.0))[0] == member.stage:
                    self._moving.pop(member.peer_id)
        self._moving = {peer_id: item for peer_id, item in self._moving.items() if item[1] > now}
        for peer_id in self._arbiter.known():
            known = members.get(peer_id)
            is_serving = known is not None and known.state == "serving"
            if not is_serving and peer_id not in self._moving:
                self._arbiter.gone(peer_id)

    def _expected_members(self, now: float, *, without: str) -> list[PeerCapacity]:
        """All that serve, arrive, or have been sent somewhere and are not there yet."""
        members = {item.peer_id: self._as_member(item) for item in self._context.members.all()}
        for waiting in (self._expected, self._moving):
            for peer_id, (stage, until) in list(waiting.items()):
                known = members.get(peer_id)
                if until <= now or (known is not None and known.stage == stage):
                    waiting.pop(peer_id)
                else:
                    members[peer_id] = PeerCapacity(peer_id, stage, known.speed if known else 0.0, state="joining")
        members.pop(without, None)
        return with_known_speeds(members.values())

    def _as_member(self, item: Member) -> PeerCapacity:
        return PeerCapacity(
            peer_id=item.peer_id,
            stage=item.stage,
            speed=self._costs.speed(item.stage, item.report.forward_ms, item.report.backward_ms),
            link_rate=self._costs.link_rate(narrower(*item.rates)),
            state=item.state,
        )
