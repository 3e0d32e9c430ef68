"""Whose leaving would cost the run steps, and from whom a checkpoint is fetched before that happens. Pure.

A stage's state is lost with the last peer that has it: the run would go back to the last checkpoint. So a peer that
leaves or rests, and has no other beside it that stays, is told to keep what it has until a checkpoint is written.
"""

from __future__ import annotations

from swarmtrain.coordinator.admission import StageBook, Standing, has_state
from swarmtrain.coordinator.members import Member, Members
from swarmtrain.wire.peer_report import HOLDS_STATE, SERVING, TAKES_NO_WORK

STAYS = (SERVING, "paused")
FEW = 16  # a serving peer of a stage with more replicas than this is not asked about: each answer reads the whole stage


def is_only_holder(member: Member, members: Members, run: Standing, book: StageBook) -> bool:
    """Whether the run would lose steps if this peer went now: no peer that stays has what it has, nor the disk."""
    is_saved = book.checkpoint is not None and book.checkpoint.step >= run.step
    if run.is_over or (not run.is_applying and (is_saved or run.step == 0)) or not _holds(member, run, book):
        return False
    if member.state not in TAKES_NO_WORK and members.num_admitted(member.stage) > FEW:
        return False
    others = members.of_stage(member.stage, *STAYS)
    return not any(
        other.peer_id != member.peer_id and other.doubted_at is None and _holds(other, run, book) for other in others
    )


def last_holders(members: Members, run: Standing, stages: list[StageBook]) -> list[Member]:
    """The peers that alone have the state of a stage, take no work there, and so may go at any time."""
    if run.is_applying:
        return []
    return [
        member
        for stage, book in enumerate(stages)
        if not any(_holds(one, run, book) for one in members.of_stage(stage, SERVING))
        for member in members.of_stage(stage, *TAKES_NO_WORK)
        if _is_at(member, run, book) and is_only_holder(member, members, run, book)
    ]


def holders(members: Members, run: Standing, stages: list[StageBook]) -> list[list[Member]] | None:
    """Of every stage the peers that have the state at the run's step; None if a stage has none."""
    found = [
        [member for member in members.of_stage(stage, *HOLDS_STATE) if _is_at(member, run, book)]
        for stage, book in enumerate(stages)
    ]
    return found if all(found) else None


def _is_at(member: Member, run: Standing, book: StageBook) -> bool:
    return member.step == run.step and has_state(member, run.step, book)


def _holds(member: Member, run: Standing, book: StageBook) -> bool:
    """As `Standing.holds`; a state of another history does not count."""
    return run.holds(member) and (member.step != run.step or has_state(member, run.step, book))
