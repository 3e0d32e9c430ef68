"""Work stealing within a stage (the rules: `route/work_stealing.py`).

The thief is a peer that runs out of work: it asks others of its stage, one after the other. The victim gives the
forward that would wait longest, and its caller is redirected to the thief.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from swarmtrain import world
from swarmtrain.model.workload import workload_of
from swarmtrain.observe.faults import Point
from swarmtrain.p2p.errors import NetError
from swarmtrain.peer.compute import Key
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.ledger import Entry
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.route.estimate import moved
from swarmtrain.route.work_stealing import StealPolicy, is_held_up, is_line_bound, is_worth_stealing
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import Done, StealReply, StealRequest

log = logging.getLogger(__name__)

ASK_S = 2.0  # a victim that does not answer by then is not waited for
NEW_WEIGHT = 0.2  # of the last microbatch, in what its lines usually take
PROMISE_S = 10.0  # what was given and has not come by then goes another way


class Thief:
    """Asks for work; touched on the event loop only."""

    def __init__(self, peer: PeerIdentity, clock: StepClock, stage: Stage) -> None:
        self._peer, self._clock, self._stage = peer, clock, stage
        self._policy: StealPolicy[str] = StealPolicy(world.random())
        self._message_bytes = workload_of(stage.manifest).boundary_bytes
        self._promised: deque[float] = deque()  # until when what was given to this peer may still come
        self._came_early = False  # what is given, before the word that it is
        self._wire_s = 0.0  # what sending a microbatch's tensors takes, as far as lines were measured

    async def run(self) -> None:
        """Ask whenever the compute thread runs out of work, until it is cancelled."""
        ran_out = self._stage.compute.ran_out
        while True:
            await ran_out.wait()
            if self._would_take_it():
                asked = self._policy.victims(self._peer.siblings, asyncio.get_running_loop().time())
                if others := [other for other in asked if other in self._peer.siblings]:
                    await self._ask(others)
            ran_out.clear()  # a round answers all that happened meanwhile

    def served(self, entry: Entry, answer: Done) -> None:
        """A microbatch is done here: how long do the lines take for what it made?"""
        sent = [(entry.caller, len(answer.gradient))]
        if len(answer.route) > 1:
            sent.append((answer.route[1].peer_id, len(entry.output)))
        wire_s = 0.0
        for peer_id, num_bytes in sent:
            if rate := self._peer.node.estimate(peer_id).up_bytes_per_s:
                wire_s += num_bytes / rate
        self._wire_s = moved(self._wire_s, wire_s, NEW_WEIGHT)

    def stolen_work_came(self) -> None:
        """From its caller, which was told to send it here."""
        if self._promised:
            self._promised.popleft()
        else:
            self._came_early = True

    def _would_take_it(self) -> bool:
        peer, clock = self._peer, self._clock
        if peer.state is not PeerState.SERVING or not clock.takes_work or not peer.has_contact:
            return False
        if clock.is_full(clock.step):
            return False
        if is_line_bound(self._wire_s, self._stage.service_s):
            return False
        return not is_held_up(peer.node.backlog_bytes(), self._message_bytes)

    async def _ask(self, others: Sequence[str]) -> None:
        """One after the other, until one gives or work has come by itself."""
        peer, stage, loop = self._peer, self._stage, asyncio.get_running_loop()
        for other in others:
            if stage.compute.backlog() or not self._would_take_it():
                return
            request = StealRequest(peer.run_id, peer.stage, self._load_s(), stage.service_s)
            self._came_early = False
            try:
                if (await peer.node.call(other, request, ASK_S, expect=StealReply)).is_stolen:
                    self._policy.stole(other)
                    if not self._came_early:
                        self._promised.append(loop.time() + PROMISE_S)
                    return
            except NetError as error:  # it has gone, or has moved on
                log.debug("%s was asked for work: %s", other[-8:], error)
        self._policy.failed()

    def _load_s(self) -> float:
        """What this peer holds and what is on its way: else it would ask for more with every pass until that comes."""
        while self._promised and self._promised[0] < asyncio.get_running_loop().time():
            self._promised.popleft()
        return self._stage.load_s(self._clock.num_open) + len(self._promised) * self._stage.service_s


class Victim:
    """Answers `StealRequest`. Stolen work ends with `Withdrawn` for its server here, which redirects the callers."""

    def __init__(self, peer: PeerIdentity, clock: StepClock, stage: Stage) -> None:
        self._peer, self._clock, self._stage = peer, clock, stage

    async def steal(self, request: StealRequest, exchange: Exchange) -> StealReply:
        """Another peer of the stage runs out of work: a forward that waits here may go there, through its caller."""
        peer = self._peer
        peer.check_sibling(request.run, request.stage)
        if exchange.peer_id not in peer.siblings or not self._would_give(request):
            return StealReply(False)
        withdrawn = self._stage.withdraw_forward(self._may_go)
        entry = self._entry(withdrawn) if withdrawn is not None else None
        if entry is None:
            return StealReply(False)
        entry.stolen_by = exchange.peer_id
        peer.faults.hit(Point.IN_STEAL)
        return StealReply(True)

    def _would_give(self, request: StealRequest) -> bool:
        """A paused or draining peer gives nothing: it answers for what it has."""
        stage = self._stage
        is_sticky = stage.codecs.has_sticky_routes or stage.codecs.has_sticky_answers
        if is_sticky or self._peer.state is not PeerState.SERVING:
            return False
        return is_worth_stealing(
            waiting_s=stage.compute.backlog_s(),
            victim_load_s=stage.load_s(self._clock.num_open),
            thief_load_s=request.load_s,
            thief_service_s=request.service_s,
        )

    def _may_go(self, of: Key) -> bool:
        entry = self._entry(of)
        return entry is not None and not entry.was_stolen and entry.is_awaited

    def _entry(self, of: Key) -> Entry | None:
        step, microbatch = of
        return self._clock.ledger_of(step).get(microbatch) if self._clock.is_open(step) else None
