"""Which work is computed a second time, where seals do not meet, and what follows from answers. Pure; `checks.py` asks.

The draws come from the coordinator's own randomness: nobody can know them before a seal is given.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarmtrain.chain.seals import Seal
from swarmtrain.coordinator.books import PeerKey
from swarmtrain.wire.messages import Way

NEW_MICROBATCHES = 64  # decided ones, until which a peer is new
NEW_FACTOR = 5.0  # new peers are checked so much more; all of their first step is
ODD_FACTOR = 5.0  # and so are peers whose routes have odd losses


@dataclass(frozen=True)
class Draws:
    """How often. Half of `share` goes into single microbatches, half into whole sums: those of one peer in one step.

    Only a whole sum shows that a peer has added what it computed: a microbatch's boundary tensors say nothing of it.
    """

    share: float

    def chance(self, num_decided: int, *, is_odd: bool) -> float:
        """Of a microbatch of a peer, and of its sum, to be drawn.

        All work of its first step: so one that always lies never had part in an applied step.
        """
        if self.share and not num_decided:
            return 1.0
        factor = (NEW_FACTOR if num_decided < NEW_MICROBATCHES else 1.0) * (ODD_FACTOR if is_odd else 1.0)
        return min(1.0, 0.5 * self.share * factor)

    def single(self, microbatches: Sequence[int], chance: float, rng: random.Random) -> list[int]:
        """The microbatches that are computed again."""
        return [microbatch for microbatch in microbatches if rng.random() < chance]


@dataclass(frozen=True)
class Break:
    """Two neighbours' seals of a microbatch do not meet. `lower` is the stage of the one before."""

    microbatch: int
    lower: int
    way: Way


def breaks(microbatch: int, seals: Sequence[Seal | None], first: bytes) -> list[Break]:
    """Where a route's seals do not meet. `first` is the seal of the tokens; a peer without a seal is passed over."""
    found = []
    if seals[0] is not None and seals[0].received != first:
        found.append(Break(microbatch, -1, Way.FORWARD))
    for lower, (one, other) in enumerate(itertools.pairwise(seals)):
        if one is None or other is None:
            continue
        if one.sent != other.received:
            found.append(Break(microbatch, lower, Way.FORWARD))
        if one.received_gradient != other.sent_gradient:
            found.append(Break(microbatch, lower, Way.BACKWARD))
    return found


@dataclass(frozen=True)
class Made:
    """What somebody makes of the same cases: a seal for each, and the sum's digest, if it was asked for."""

    seals: tuple[Seal, ...]
    share: str

    def differs(self, other: Made) -> int | None:
        """The first case of which they make something else; -1 if only the sum differs, None if nothing does."""
        for index, (one, another) in enumerate(zip(self.seals, other.seals, strict=True)):
            if one.made != another.made:
                return index
        return -1 if self.share != other.share else None  # also if one of them says nothing of its sum


class Finding(StrEnum):
    """What three computations of the same work say."""

    LIAR_IS_CHECKED = "checked"
    LIAR_IS_CHECKER = "checker"
    UNDECIDED = "undecided"


def judged(checked: Made, checker: Made, third: Made) -> Finding:
    """Who is alone among three of whom the first two differ."""
    agrees_with_checked, agrees_with_checker = third.differs(checked) is None, third.differs(checker) is None
    if agrees_with_checker and not agrees_with_checked:
        return Finding.LIAR_IS_CHECKED
    if agrees_with_checked and not agrees_with_checker:
        return Finding.LIAR_IS_CHECKER
    return Finding.UNDECIDED


def what_differs(checked: Made, right: Made, microbatches: Sequence[int], *, is_last: bool) -> str:
    """For people: `its gradient for microbatch 7`."""
    index = checked.differs(right)
    if index is None or index < 0:
        return f"its sum of {len(microbatches)} microbatches"
    is_output = checked.seals[index].sent != right.seals[index].sent
    what = ("loss" if is_last else "output") if is_output else "gradient"
    return f"its {what} for microbatch {microbatches[index]}"


@dataclass(frozen=True)
class Work:
    """A part of one peer's work of a step that is computed a second time."""

    stage: int
    member: PeerKey
    microbatches: tuple[int, ...]
    adds_up: bool


def members_of(rosters: Mapping[int, Mapping[PeerKey, Sequence[int]]]) -> dict[tuple[int, int], PeerKey]:
    """(stage, microbatch) -> the peer that answers for it."""
    return {
        (stage, microbatch): member
        for stage, shares in rosters.items()
        for member, microbatches in shares.items()
        for microbatch in microbatches
    }
