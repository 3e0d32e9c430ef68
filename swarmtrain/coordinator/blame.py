"""Which peer is excluded when an all-reduce fails although all its members are alive. Pure.

Two peers that cannot reach each other may both reach the coordinator: without blame, their stage would retry for ever.
A failed attempt gives a strike to the peer with the most complaints, made by it or against it; or, if every member has
a sum but the sums differ, to the minority. An honest "I do not have these microbatches" is not a complaint.

An accusation is free, so it proves nothing: of two peers with as many complaints, the one is at fault that could not
reduce with more different peers before, in any step; then the one with more strikes; then the one that has done less of
the run; and with nothing else to go by, the accuser. Two sums that as many peers have are told apart by the work of
those who have them. A peer that does not reduce and gives no reason is at fault itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarmtrain.coordinator.members import Member
from swarmtrain.p2p.errors import NetError
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.wire.messages import Prepared, Unprepared

T = TypeVar("T", str, tuple[str, str])
MAX_STRIKES = 2

Reply = Prepared | Unprepared | NetError | None  # None: not waited for


@dataclass(frozen=True)
class Known:
    """What is known of peers from before, by peer id."""

    work: Mapping[str, int] = field(default_factory=dict)  # decided microbatches
    strikes: Mapping[str, float] = field(default_factory=dict)
    disputes: Mapping[str, int] = field(default_factory=dict)  # with how many different peers


class Blame:
    """The failed attempts of one stage in one step."""

    def __init__(self, known: Known | None = None) -> None:
        self._known = known or Known()
        self._strikes: Counter[tuple[str, str]] = Counter()
        self._complaints: Counter[str] = Counter()  # of all attempts, made by a peer or against it

    def attempt(self, members: Sequence[Member], replies: Sequence[Reply]) -> list[Member]:
        """Note an attempt that failed with these replies; returns the peers to leave out from now on."""
        if all(isinstance(reply, Prepared) for reply in replies):
            blamed = minority(members, replies, self._known.work)
        else:
            blamed = (
                _most_complained_of(members, replies, self._complaints, self._known)
                or _most_complained_of(members, replies, self._complaints, self._known, of_refusals=True)
                or _unexplained(members, replies)
            )
        for member in blamed:
            self._strikes[member.key] += 1
        return [member for member in blamed if self._strikes[member.key] >= MAX_STRIKES]


def sum_of(prepared: Prepared) -> tuple[str, str]:
    """What replicas must agree on: the digest of the sum and its squared norm, which follows from it."""
    return prepared.digest, prepared.squared_norm.hex()


def most_common(found: Sequence[tuple[str, T]], work: Mapping[str, int]) -> T:
    """What most peers have; of two that as many have, what those have who have done more of the run."""
    count = Counter(item for _, item in found)
    done: Counter[T] = Counter()
    for peer_id, item in found:
        done[item] += work.get(peer_id, 0)
    return max(sorted(count), key=lambda item: (count[item], done[item]))


def minority(members: Sequence[Member], replies: Sequence[Reply], work: Mapping[str, int]) -> list[Member]:
    """The peers whose sum differs from the most common one."""
    pairs = [(m, r) for m, r in zip(members, replies, strict=True) if isinstance(r, Prepared)]
    majority = most_common([(member.peer_id, sum_of(reply)) for member, reply in pairs], work)
    return [member for member, reply in pairs if sum_of(reply) != majority]


def _explained(members: Sequence[Member], replies: Sequence[Reply]) -> set[str]:
    """Peers that say themselves what keeps them from reducing."""
    return {
        member.peer_id
        for member, reply in zip(members, replies, strict=True)
        if isinstance(reply, Unprepared) and (reply.missing or reply.suspects)
    }


def _unexplained(members: Sequence[Member], replies: Sequence[Reply]) -> list[Member]:
    """Peers that do not reduce and say neither what they lack nor whom they wait for."""
    return [
        member
        for member, reply in zip(members, replies, strict=True)
        if isinstance(reply, Unprepared) and not (reply.missing or reply.suspects or reply.refused_by)
    ]


def accusations(members: Sequence[Member], replies: Sequence[Reply]) -> list[tuple[str, str]]:
    """Accuser and accused, of all members that accuse another one."""
    here = {member.peer_id for member in members}
    return [
        (member.peer_id, suspect)
        for member, reply in zip(members, replies, strict=True)
        if isinstance(reply, Unprepared) and not reply.missing
        for suspect in set(reply.suspects)
        if suspect in here and suspect != member.peer_id
    ]


def _most_complained_of(
    members: Sequence[Member],
    replies: Sequence[Reply],
    before: Counter[str],
    known: Known,
    *,
    of_refusals: bool = False,
) -> list[Member]:
    """The peer with the most complaints; of two that accuse each other, see the module.

    `of_refusals`: the complaints of peers whose shares were refused. A peer that gives an attempt up refuses what still
    comes, so these count only where nothing else explains the failure, and not against a peer that explains its own.
    """
    by_peer = {member.peer_id: member for member in members}
    excused = _explained(members, replies) if of_refusals else set()
    against: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for member, reply in zip(members, replies, strict=True):
        if isinstance(reply, CallRefused) or (isinstance(reply, Unprepared) and not reply.missing):
            named: set[str] = set()
            if isinstance(reply, Unprepared):
                named = set(reply.refused_by if of_refusals else reply.suspects)
            accused = [peer for peer in named if peer in by_peer and peer != member.peer_id and peer not in excused]
            against.update(accused)
            made[member.peer_id] += len(accused)
            if isinstance(reply, CallRefused):
                against[member.peer_id] += 1
    total = against + made
    if not total:
        return []
    most = max(total.values())
    done = {member.peer_id for member, reply in zip(members, replies, strict=True) if isinstance(reply, Prepared)}
    silent = {member.peer_id for member in _unexplained(members, replies)}
    worst = sorted(
        (peer for peer in total if total[peer] == most),
        key=lambda peer: (
            peer in done,
            peer not in silent,  # accused, and it says nothing itself
            -against[peer] if against[peer] > 1 else 0,  # several accusers are evidence
            -before[peer],
            -known.disputes.get(peer, 0),
            -known.strikes.get(peer, 0.0),
            known.work.get(peer, 0),
            -made[peer],
            peer,
        ),
    )
    before.update(total)
    return [by_peer[worst[0]]]
