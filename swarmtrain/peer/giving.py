"""A peer that is asked by another one of its stage gives work that waits here (the rule: `route/hunger.py`)."""

from __future__ import annotations

from collections.abc import Callable

from swarmtrain.net.exchange import Exchange
from swarmtrain.observe.faults import Point
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.route.hunger import gives
from swarmtrain.wire.messages import Hungry, Spared


class Giving:
    """Answers `Hungry`. What is given away ends with `Withdrawn` for whoever serves it, who refuses its callers."""

    def __init__(self, context: PeerContext, is_awaited: Callable[[int], bool]) -> None:
        """`is_awaited`: whether somebody still waits for a microbatch, and so can send it elsewhere."""
        self._context = context
        self._is_awaited = is_awaited

    async def hungry(self, hungry: Hungry, exchange: Exchange) -> Spared:
        """Another peer of the stage runs out of work: a forward that waits here may go there, through its caller."""
        context = self._context
        context.check_sibling(hungry.run, hungry.stage)
        if exchange.peer_id not in context.siblings or not self._would_give(hungry):
            return Spared(False)
        microbatch = context.compute.withdraw(Kind.FORWARD, self._may_go)
        entry = context.ledger.get(microbatch) if microbatch is not None else None
        if entry is None:
            return Spared(False)
        entry.given_to = exchange.peer_id
        context.faults.hit(Point.IN_GIFT)
        return Spared(True)

    def _would_give(self, hungry: Hungry) -> bool:
        """Not who rests or leaves: it answers for what it has."""
        context, codecs = self._context, self._context.jobs.codecs
        is_sticky = codecs.has_sticky_routes or codecs.has_sticky_answers
        if is_sticky or context.state is not PeerState.SERVING:
            return False
        return gives(
            waiting_s=context.compute.backlog_s(),
            load_s=context.load_s,
            asker_load_s=hungry.load_s,
            asker_service_s=hungry.service_s,
        )

    def _may_go(self, microbatch: int) -> bool:
        entry = self._context.ledger.get(microbatch)
        return entry is not None and not entry.was_given and self._is_awaited(microbatch)
