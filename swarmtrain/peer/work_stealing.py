"""A peer that runs out of work asks others of its stage (the rule: `route/work_stealing.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from swarmtrain import world
from swarmtrain.model.workload import workload_of
from swarmtrain.observe.faults import Point
from swarmtrain.p2p.errors import NetError
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.ledger import Entry
from swarmtrain.route.estimate import moved
from swarmtrain.route.work_stealing import StealPolicy, gives, is_held_up, is_line_bound
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import Done, StealReply, StealRequest

log = logging.getLogger(__name__)

ASK_S = 2.0  # who does not answer by then is not waited for
NEW_WEIGHT = 0.2  # of the last microbatch, in what its lines usually take
PROMISE_S = 10.0  # what was given and has not come by then goes another way


class Thief:
    """Listens to the compute thread; touched on the event loop only."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._policy: StealPolicy[str] = StealPolicy(world.random())
        self._message_bytes = workload_of(context.manifest).boundary_bytes
        self._asking: asyncio.Task[None] | None = None
        self._promised: deque[float] = deque()  # until when what was given to this peer may still come
        self._came_early = False  # what is given, before the word that it is
        self._wire_s = 0.0  # what sending a microbatch's tensors takes, as far as lines were measured
        self._is_closed = False
        context.compute.on_running_out = self._runs_out

    async def close(self) -> None:
        """Ask nobody any more."""
        self._is_closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def served(self, entry: Entry, answer: Done) -> None:
        """A microbatch is done here: how long do the lines take for what it made?"""
        sent = [(entry.caller, len(answer.gradient))]
        if len(answer.route) > 1:
            sent.append((answer.route[1].peer_id, len(entry.output)))
        wire_s = 0.0
        for peer_id, num_bytes in sent:
            if rate := self._context.node.estimate(peer_id).up_bytes_per_s:
                wire_s += num_bytes / rate
        self._wire_s = moved(self._wire_s, wire_s, NEW_WEIGHT)

    def stolen_work_came(self) -> None:
        """From its caller, which was told to send it here."""
        if self._promised:
            self._promised.popleft()
        else:
            self._came_early = True

    def _runs_out(self) -> None:
        context, loop = self._context, asyncio.get_running_loop()
        if self._is_closed or self._asking is not None or not self._would_take_it():
            return
        asked = self._policy.whom_to_ask(context.siblings, loop.time())
        if others := [other for other in asked if other in context.siblings]:
            self._asking = loop.create_task(self._ask(others), name="ask for work")

    def _would_take_it(self) -> bool:
        context = self._context
        if context.state is not PeerState.SERVING or context.is_applying or not context.has_contact:
            return False
        if context.ledger.num_bytes() > context.max_ledger_bytes:
            return False
        if is_line_bound(self._wire_s, context.service_s):
            return False
        return not is_held_up(context.node.backlog_bytes(), self._message_bytes)

    async def _ask(self, others: Sequence[str]) -> None:
        """One after the other, until one gives or work has come by itself."""
        context, loop = self._context, asyncio.get_running_loop()
        try:
            for other in others:
                if context.compute.backlog() or not self._would_take_it():
                    return
                request = StealRequest(context.run_id, context.stage, self._load_s(), context.service_s)
                self._came_early = False
                try:
                    if (await context.node.call(other, request, ASK_S, expect=StealReply)).is_stolen:
                        self._policy.gave(other)
                        if not self._came_early:
                            self._promised.append(loop.time() + PROMISE_S)
                        return
                except NetError as error:  # it has gone, or has moved on
                    log.debug("%s was asked for work: %s", other[-8:], error)
            self._policy.nobody_gave()
        finally:
            self._asking = None

    def _load_s(self) -> float:
        """What this peer holds and what is on its way: else it would ask for more with every pass until that comes."""
        while self._promised and self._promised[0] < asyncio.get_running_loop().time():
            self._promised.popleft()
        return self._context.load_s + len(self._promised) * self._context.service_s


class Victim:
    """Answers `StealRequest`. Stolen work ends with `Withdrawn` for its server here, which redirects the callers."""

    def __init__(self, context: PeerContext, is_awaited: Callable[[int], bool]) -> None:
        """`is_awaited`: whether somebody still waits for a microbatch, and so can send it elsewhere."""
        self._context = context
        self._is_awaited = is_awaited

    async def steal(self, request: StealRequest, exchange: Exchange) -> StealReply:
        """Another peer of the stage runs out of work: a forward that waits here may go there, through its caller."""
        context = self._context
        context.check_sibling(request.run, request.stage)
        if exchange.peer_id not in context.siblings or not self._would_give(request):
            return StealReply(False)
        microbatch = context.compute.withdraw(Kind.FORWARD, self._may_go)
        entry = context.ledger.get(microbatch) if microbatch is not None else None
        if entry is None:
            return StealReply(False)
        entry.stolen_by = exchange.peer_id
        context.faults.hit(Point.IN_STEAL)
        return StealReply(True)

    def _would_give(self, request: StealRequest) -> bool:
        """Not who rests or leaves: it answers for what it has."""
        context, codecs = self._context, self._context.jobs.codecs
        is_sticky = codecs.has_sticky_routes or codecs.has_sticky_answers
        if is_sticky or context.state is not PeerState.SERVING:
            return False
        return gives(
            waiting_s=context.compute.backlog_s(),
            load_s=context.load_s,
            asker_load_s=request.load_s,
            asker_service_s=request.service_s,
        )

    def _may_go(self, microbatch: int) -> bool:
        entry = self._context.ledger.get(microbatch)
        return entry is not None and not entry.was_stolen and self._is_awaited(microbatch)
