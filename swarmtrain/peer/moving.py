"""How a serving peer finds out that it is needed elsewhere, and leaves only with the coordinator's permission.

    every look: read all stages -> plan -> am I in it? -> publish the intent -> second look agrees -> ask -> go

The decisions are in route/rebalance.py and route/moves.py; here is the reading, publishing and asking.
"""

from __future__ import annotations

import asyncio
import logging

from swarmtrain import world
from swarmtrain.chain.neighbours import stage_reports
from swarmtrain.chain.rebalancing import (
    INTENT_TOPIC,
    Costs,
    MoveIntent,
    MoveRules,
    RebalanceRule,
    intent_of,
    members_of,
)
from swarmtrain.directory.directory import Directory
from swarmtrain.errors import SwarmtrainError
from swarmtrain.p2p.errors import NetError
from swarmtrain.peer.assignment import Departure
from swarmtrain.peer.contacts import CoordinatorLink
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.route.moves import Intent, LeaveAnswer, LeaveRequest, Mover
from swarmtrain.route.rebalance import plan_moves
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import AskMove, MoveAnswered
from swarmtrain.wire.records import pack_record

log = logging.getLogger(__name__)

ASK_S = 20.0
WITHDRAWN = MoveIntent(0, 0)


class Moving:
    """Looks around while the peer serves; the peer departs when it may go."""

    def __init__(
        self,
        peer: PeerIdentity,
        manifest: Manifest,
        link: CoordinatorLink,
        directory: Directory,
        mover: Mover,
        departure: Departure,
    ) -> None:
        self._peer, self._link, self._directory = peer, link, directory
        self._mover, self._departure = mover, departure
        self._rng = world.random()
        self._costs = Costs.of(manifest)
        self._num_stages = manifest.stages.count
        self._published: Intent | str | None = "what a former assignment has said"

    async def run(self) -> None:
        """Look now and then, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            look_s = self._link.rules.look_s
            await asyncio.sleep(self._rng.uniform(0.75, 1.25) * look_s)
            if self._mover.intent is not None:
                await asyncio.sleep(max(0.0, self._mover.look_at - loop.time()))
            rules = self._link.rules
            if rules.rule is RebalanceRule.NONE or self._peer.state is not PeerState.SERVING:
                continue
            try:
                await self._look(rules)
            except SwarmtrainError as error:
                log.info("cannot look for a better stage: %s", error)

    async def _look(self, rules: MoveRules) -> None:
        now = asyncio.get_running_loop().time()
        reports = [await stage_reports(self._directory, stage) for stage in range(self._num_stages)]
        members = members_of(reports, self._costs, now)
        plan = plan_moves(members, self._costs.costs, now, rules.options())
        request = self._mover.look(plan, await self._intents(), now)
        await self._publish()
        if request is not None:
            await self._ask(request)

    async def _intents(self) -> list[Intent]:
        records = await self._directory.lookup(INTENT_TOPIC)
        intents = (intent_of(peer_id, record.value) for peer_id, record in records.items())
        return [intent for intent in intents if intent is not None]

    async def _publish(self) -> None:
        """Say what this peer intends, or that it does not any more."""
        intent = self._mover.intent
        if intent != self._published:
            life_s = max(5.0, min(50.0, 4.0 * self._link.rules.look_s))
            await self._directory.announce(
                INTENT_TOPIC, pack_record(WITHDRAWN if intent is None else MoveIntent.of(intent)), life_s
            )
            self._published = intent

    async def _ask(self, request: LeaveRequest) -> None:
        peer, mover = self._peer, self._mover
        if self._link.peer_id is None:
            mover.arrived(mover.stage)
            return
        message = AskMove(peer.run_id, request.version, request.source, request.target)
        try:
            found = await peer.node.call(self._link.peer_id, message, deadline_s=ASK_S, expect=MoveAnswered)
        except NetError as error:
            log.info("the coordinator did not answer whether to move: %s", error)
            mover.arrived(mover.stage)  # gives up; a permission that was sent and lost is void from now on
            return
        answer = LeaveAnswer(request.peer_id, request.version, request.target, found.granted, found.reason)
        if mover.answered(answer):
            self._departure.move(request.target)
        else:
            log.info("stays in stage %d: %s", mover.stage, found.reason)
            await self._publish()
