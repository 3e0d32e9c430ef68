"""A peer that runs out of work asks others of its stage (the rule: `route/hunger.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from swarmtrain import world
from swarmtrain.model.workload import workload_of
from swarmtrain.net.errors import NetError
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.ledger import Entry
from swarmtrain.route.estimate import moved
from swarmtrain.route.hunger import Appetite, is_held_up, is_line_bound
from swarmtrain.wire.messages import Done, Hungry, Spared

log = logging.getLogger(__name__)

ASK_S = 2.0  # who does not answer by then is not waited for
NEW_WEIGHT = 0.2  # of the last microbatch, in what its lines usually take
PROMISE_S = 10.0  # what was given and has not come by then goes another way


class Hunger:
    """Listens to the compute thread; touched on the event loop only."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._appetite: Appetite[str] = Appetite(world.random())
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

    def given_work_came(self) -> None:
        """From its caller, which was told to send it here."""
        if self._promised:
            self._promised.popleft()
        else:
            self._came_early = True

    def _runs_out(self) -> None:
        context, loop = self._context, asyncio.get_running_loop()
        if self._is_closed or self._asking is not None or not self._would_take_it():
            return
        asked = self._appetite.whom_to_ask(context.siblings, loop.time())
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
                request = Hungry(context.run_id, context.stage, self._load_s(), context.service_s)
                self._came_early = False
                try:
                    if (await context.node.call(other, request, ASK_S, expect=Spared)).is_given:
                        self._appetite.gave(other)
                        if not self._came_early:
                            self._promised.append(loop.time() + PROMISE_S)
                        return
                except NetError as error:  # it has gone, or has moved on
                    log.debug("%s was asked for work: %s", other[-8:], error)
            self._appetite.nobody_gave()
        finally:
            self._asking = None

    def _load_s(self) -> float:
        """What this peer holds and what is on its way: else it would ask for more with every pass until that comes."""
        while self._promised and self._promised[0] < asyncio.get_running_loop().time():
            self._promised.popleft()
        return self._context.load_s + len(self._promised) * self._context.service_s
