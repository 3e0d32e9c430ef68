"""A peer says that it does not have microbatches that the books name it for: who is at fault, and what follows."""

from __future__ import annotations

from collections.abc import Collection

from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.members import Member
from swarmtrain.coordinator.strikes import Offence


async def withdraw(
    context: RunContext, books: StepBooks, stage: int, member: Member, microbatches: Collection[int]
) -> None:
    """They are computed again. The peer may be right: a route is what the peers before it say.

    So the peer that gave it the microbatch is in the dispute, and of the two the one with more of them is at fault.
    """
    at_fault = member
    for microbatch in sorted(microbatches) if stage else ():
        giver = books.holder(stage - 1, microbatch)
        upstream = context.members.get(giver.peer_id) if giver is not None else None
        if upstream is not None and upstream.peer_id != member.peer_id:
            context.strikes.disputed(member.peer_id, upstream.peer_id)
            if context.strikes.num_disputes(upstream.peer_id) > context.strikes.num_disputes(at_fault.peer_id):
                at_fault = upstream
    books.withdraw(stage, sorted(microbatches), member.key)
    await context.strike(at_fault, Offence.FALSE_MISSING)
