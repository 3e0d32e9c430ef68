"""How the peers of a stage all-reduce in two levels when they are many. Pure arithmetic.

    group 0    A B C D | z         A E I own the same part of the gradient, each in its group,
    group 1    E F G H             B F J the next one, and so on: they are a column.
    group 2    I J K L             z is left over: it owns nothing.

1. Inside a group every member sends each owner its share, and the owner adds them up.
2. Inside a column the owners add up the sums of their groups: of every piece each group's owner is the root of a part.
3. The roots' answers go back to the owners, and from them to their groups.

So a peer has at most MAX_GROUP + number of groups - 2 partners, and moves about as many bytes as in one group. A column
is made of peers of similar speed. Up to MAX_GROUP peers are one group, and its owners are the roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmtrain.model.reduce_bytes import num_groups
from swarmtrain.reduce.partition import Piece, effective_rates, owned_by_rates, owned_elements
from swarmtrain.wire.messages import RosterEntry


@dataclass(frozen=True, slots=True)
class Place:
    """A member's place in a roster: its index among the members given, its group, and how much it owns there."""

    member: int
    group: int
    owned: int


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a piece, of which one group's owner is the root."""

    index: int
    root: int  # group
    start: int
    stop: int


def arrange(size: int, up_and_down: Sequence[tuple[float, float]]) -> list[Place]:
    """The places of all members, group by group and column by column; rates in bytes per second, 0 if unknown."""
    count = num_groups(len(up_and_down))
    if count == 1:
        return [Place(member, 0, owned) for member, owned in enumerate(owned_elements(size, up_and_down))]
    rates = effective_rates(up_and_down)
    fastest = sorted(range(len(rates)), key=lambda member: (-rates[member], member))
    num_columns = len(rates) // count
    columns = [fastest[column * count : (column + 1) * count] for column in range(num_columns)]
    owned = owned_by_rates(size, [rates[column[-1]] for column in columns])
    left_over = fastest[num_columns * count :]
    places = []
    for group in range(count):
        places += [Place(column[group], group, part) for column, part in zip(columns, owned, strict=True)]
        places += [Place(member, group, 0) for member in left_over[group : group + 1]]
    return places


def fault_of(roster: Sequence[RosterEntry], size: int) -> str:
    """Why a roster cannot be one of a vector of this size; empty if it can."""
    owned: dict[int, list[int]] = {}
    for entry in roster:
        parts = owned.setdefault(entry.group, [])
        if entry.owned:
            parts.append(entry.owned)
    if any(sum(parts) != size for parts in owned.values()) or (size and not owned):
        return "the owned parts do not make up the gradient"
    if len({tuple(parts) for parts in owned.values()}) > 1:
        return "the groups do not own the same parts"
    if owned and sorted(owned) != list(range(len(owned))):
        return "a group is missing"
    return ""


class Groups:
    """A roster's groups, as one of its members sees them. The roster is without fault."""

    def __init__(self, roster: Sequence[RosterEntry], peer_id: str) -> None:
        count = 1 + max(entry.group for entry in roster)
        self._owners: list[list[str]] = [[] for _ in range(count)]  # by group, then by column
        self._contributors: list[list[str]] = [[] for _ in range(count)]
        num_members = [0] * count
        self.owned: list[int] = []  # by column
        self.peer_id, self.group = peer_id, -1
        self.next_column = 0  # its own, or that of the owner that follows it
        for entry in roster:
            num_members[entry.group] += 1
            if entry.owned:
                self._owners[entry.group].append(entry.peer_id)
            if entry.owned and not entry.group:
                self.owned.append(entry.owned)
            if entry.microbatches:
                self._contributors[entry.group].append(entry.peer_id)
            if entry.peer_id == peer_id:
                self.group = entry.group
                self.next_column = len(self._owners[entry.group]) - bool(entry.owned)
        if self.group < 0:
            raise ValueError(f"{peer_id} is not in the roster")
        self.column = self.owners.index(peer_id) if peer_id in self.owners else -1  # -1: it owns nothing
        self.num_members = num_members[self.group]
        self.members = {entry.peer_id for entry in roster if entry.group == self.group}

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self._owners)

    @property
    def owners(self) -> list[str]:
        """The owners of this member's group, by column."""
        return self._owners[self.group]

    @property
    def contributors(self) -> list[str]:
        """Who has a share in this member's group."""
        return self._contributors[self.group]

    def owner(self, group: int) -> str:
        """Who owns in another group what this owner owns in its own."""
        return self._owners[group][self.column]

    def group_of(self, owner: str) -> int:
        """The group of a peer of this owner's column; -1 if it is none."""
        return next((group for group in range(self.count) if self.owner(group) == owner), -1)

    def has_sum(self, group: int) -> bool:
        """Whether anybody has a share in a group."""
        return bool(self._contributors[group])

    def partners(self) -> set[str]:
        """All with whom this member exchanges anything."""
        column = {self.owner(group) for group in range(self.count)} if self.column >= 0 else set()
        return (self.members | column) - {self.peer_id}

    def parts(self, piece: Piece, unit: int) -> list[Part]:
        """How the groups divide a piece, if it may be divided after every `unit` numbers; 0: nowhere."""
        size = piece.stop - piece.start
        num_units = max(1, -(-size // unit)) if unit else 1
        num_parts = min(self.count, num_units)
        ends = [min(size, (index * num_units // num_parts) * unit) for index in range(num_parts)] + [size]
        return [
            Part(index, (index + piece.index) % self.count, piece.start + ends[index], piece.start + ends[index + 1])
            for index in range(num_parts)
        ]
