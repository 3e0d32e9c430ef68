"""Which peer is excluded when an all-reduce fails although all its members are alive. Pure.

Two peers that cannot reach each other may both reach the coordinator: without blame, their stage would retry for ever.
A failed attempt gives a strike to the peer with the most complaints, made by it or against it; or, if every member has
a sum but the sums differ, to the minority. An honest "I do not have these microbatches" is not a complaint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swarmtrain.coordinator.members import Member
from swarmtrain.p2p.errors import NetError
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.wire.messages import Prepared, Unprepared

MAX_STRIKES = 2

Reply = Prepared | Unprepared | NetError | None  # None: not waited for


class Blame:
    """The failed attempts of one stage in one step."""

    def __init__(self) -> None:
        self._strikes: Counter[tuple[str, str]] = Counter()
        self._complaints: Counter[str] = Counter()  # of all attempts, made by a peer or against it

    def attempt(self, members: Sequence[Member], replies: Sequence[Reply]) -> list[Member]:
        """Note an attempt that failed with these replies; returns the peers to leave out from now on."""
        if all(isinstance(reply, Prepared) for reply in replies):
            blamed = _minority(members, replies)
        else:
            blamed = _most_complained_of(members, replies, self._complaints)
        for member in blamed:
            self._strikes[member.key] += 1
        return [member for member in blamed if self._strikes[member.key] >= MAX_STRIKES]


def _minority(members: Sequence[Member], replies: Sequence[Reply]) -> list[Member]:
    """The peers whose sum differs from the most common one."""
    digests = [reply.digest if isinstance(reply, Prepared) else "" for reply in replies]
    majority = max(sorted(set(digests)), key=digests.count)
    return [member for member, digest in zip(members, digests, strict=True) if digest != majority]


def _most_complained_of(members: Sequence[Member], replies: Sequence[Reply], before: Counter[str]) -> list[Member]:
    """The peer with the most complaints; of two that accuse each other, the one with more in attempts `before`."""
    by_peer = {member.peer_id: member for member in members}
    against: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for member, reply in zip(members, replies, strict=True):
        if isinstance(reply, CallRefused) or (isinstance(reply, Unprepared) and not reply.missing):
            suspects = set(reply.suspects) if isinstance(reply, Unprepared) else set()
            known = [peer for peer in suspects if peer in by_peer and peer != member.peer_id]
            against.update(known)
            made[member.peer_id] += len(known)
            if isinstance(reply, CallRefused):
                against[member.peer_id] += 1
    total = against + made
    if not total:
        return []
    most = max(total.values())
    done = {member.peer_id for member, reply in zip(members, replies, strict=True) if isinstance(reply, Prepared)}
    worst = sorted(
        (peer for peer in total if total[peer] == most),
        key=lambda peer: (peer in done, -against[peer], -before[peer], peer),
    )
    before.update(total)
    return [by_peer[worst[0]]]
