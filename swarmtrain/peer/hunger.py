"""A peer that runs out of work tells some of its callers (the rule: `route/hunger.py`)."""

from __future__ import annotations

import asyncio
import logging
import random

from swarmtrain.model.workload import workload_of
from swarmtrain.net.errors import NetError
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.route.hunger import Appetite, is_held_up
from swarmtrain.wire.messages import Acknowledged, Hungry

log = logging.getLogger(__name__)

TELL_S = 2.0  # later the hint is worth nothing


class Hunger:
    """Listens to the compute thread; touched on the event loop only."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._appetite: Appetite[str] = Appetite(random.Random())
        self._message_bytes = workload_of(context.manifest).boundary_bytes
        self._telling: set[asyncio.Task[None]] = set()
        self._is_closed = False
        context.compute.on_running_out = self._tell

    def fed_by(self, caller: str) -> None:
        """A piece of work came from this one."""
        self._appetite.called_by(caller)

    async def close(self) -> None:
        """Say nothing any more."""
        self._is_closed = True
        telling, self._telling = self._telling, set()
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)

    def _tell(self) -> None:
        context, loop = self._context, asyncio.get_running_loop()
        would_take_it = context.state is PeerState.SERVING and context.has_contact and not context.is_applying
        if self._is_closed or not would_take_it or context.ledger.num_bytes() > context.max_ledger_bytes:
            return
        if is_held_up(context.node.backlog_bytes(), self._message_bytes):
            return
        for caller in self._appetite.whom_to_tell(loop.time()):
            task = loop.create_task(self._tell_one(caller), name=f"hungry, to {caller[-8:]}")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_one(self, caller: str) -> None:
        context = self._context
        hint = Hungry(context.run_id, context.stage, context.load_s)
        try:
            await context.node.call(caller, hint, TELL_S, expect=Acknowledged)
        except NetError as error:  # it has gone, or has moved on: somebody else was told as well
            log.debug("%s does not hear that this peer is hungry: %s", caller[-8:], error)
