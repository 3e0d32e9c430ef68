"""Owners of sums are checked by others that add up the same: see docs/checks.md.

A sum that was drawn is prepared a second time, with the same ranges and other owners. If both agree, the second one is
decided. If they do not, a third decides, range by range: who is alone with an answer owns nothing from now on. Honest
shares may reach an honest owner changed by their sender; so an owner that is alone loses ownership and not its place.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarmtrain import world
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.prepare import PreparedStage, Preparer
from swarmtrain.observe.events import OwnerDisowned

log = logging.getLogger(__name__)

KEY = "disowned"  # in the journal
MIN_OWNERS = 3  # with two nobody could say which is right


@dataclass(frozen=True)
class Added:
    """One way in which a stage's sum was added up: who owned each range, and what that range's sum is."""

    owners: tuple[str, ...]
    digests: tuple[bytes, ...]

    def is_comparable(self, other: Added) -> bool:
        """Whether both cut the sum alike."""
        return len(self.owners) == len(self.digests) == len(other.owners) == len(other.digests)


def odd_owners(ways: Sequence[Added]) -> set[str]:
    """Owners that are alone with their sum of a range, while the others agree about it."""
    odd = set()
    for index in range(len(ways[0].owners)):
        counts = Counter(way.digests[index] for way in ways)
        usual, count = counts.most_common(1)[0]
        if count >= 2:
            odd |= {way.owners[index] for way in ways if way.digests[index] != usual}
    return odd


class Owners:
    """Of one run."""

    def __init__(self, context: RunContext, preparer: Preparer) -> None:
        self._context, self._preparer = context, preparer
        self._rng = world.random()
        self._drawn: set[tuple[int, int]] = set()  # step and stage

    async def confirmed(self, step: int, books: StepBooks, prepared: list[PreparedStage]) -> list[PreparedStage] | None:
        """The same sums, some of them added up by others. None if they have to be prepared again."""
        found = []
        for stage in prepared:
            now = stage
            if self._is_drawn(step, stage):
                again = await self._again(step, books, stage, 1)
                if again is None or not await self._agree(step, books, stage, again):
                    return None
                now = again
            found.append(now)
        return found

    def _is_drawn(self, step: int, stage: PreparedStage) -> bool:
        """With the chance of all work; every sum of an owner's first step."""
        way = added(stage)
        if (step, stage.stage) in self._drawn or way is None or len(way.owners) < MIN_OWNERS:
            return False
        self._drawn = {key for key in self._drawn if key[0] == step} | {(step, stage.stage)}
        is_first = any(not self._context.tally.contributed[owner] for owner in way.owners)
        return is_first or self._rng.random() < self._context.manifest.checks.share

    async def _again(self, step: int, books: StepBooks, stage: PreparedStage, turn: int) -> PreparedStage | None:
        """The stage prepared again, by owners that are `turn` places further; None if its peers have changed."""
        self._context.checks.added_again += 1
        (again,) = await self._preparer.prepare(step, (stage.stage,), books, turn=turn)
        one, other = added(stage), added(again)
        is_same = one is not None and other is not None and one.is_comparable(other) and again.shares == stage.shares
        return again if is_same else None

    async def _agree(self, step: int, books: StepBooks, first: PreparedStage, second: PreparedStage) -> bool:
        if first.digest == second.digest:
            return True
        third = await self._again(step, books, first, 2)
        ways = [way for stage in (first, second, third) if stage is not None and (way := added(stage)) is not None]
        odd = odd_owners(ways) if len(ways) == 3 else set()
        self._context.disowned |= dict.fromkeys(sorted(odd))
        if odd:
            self._context.journal.set(KEY, json.dumps(list(self._context.disowned)))
        for owner in sorted(odd):
            self._context.events.emit(
                OwnerDisowned(step + 1, first.stage, owner, peer_name=self._context.members.name(owner))
            )
        self._context.checks.disowned += len(odd)
        if odd:
            self._drawn.discard((step, first.stage))  # without them it is looked at again
        return False  # if nobody is odd, who sends shares may change them each time: a step must not hang on that


def added(stage: PreparedStage) -> Added | None:
    """How a stage's sum was added up, if its peers say the same of it and one owner has each range."""
    if len(set(stage.ranges)) != 1:
        return None
    raw = stage.ranges[0]
    owners = tuple(entry.peer_id for entry in stage.request.roster if entry.owned and not entry.group)
    if not raw or len(raw) != 16 * len(owners):
        return None
    return Added(owners, tuple(raw[start : start + 16] for start in range(0, len(raw), 16)))
