"""The all-reduce of a stage's gradient among its peers: one attempt, in one lane.

Every piece of the flat gradient has one owner. Reduce-scatter: every peer sends the owner its share of the piece, and
the owner adds all shares in roster order and rounds the sum to fp32 once. All-gather: the sum goes back in the replies
to these very calls, the same bytes to every peer, so that all replicas leave with the same bits. Pieces are independent
of each other, so both phases overlap. There is no matchmaking: the roster is given. How shares and sums look as bytes
is `shares.py`; an attempt may consist of several all-reduces, one per lane.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from swarmtrain.p2p.errors import HostDownError, NetError
from swarmtrain.reduce.partition import Piece, cut
from swarmtrain.reduce.shares import EXACT, BadShare, Buffer, Share, ShareFormat
from swarmtrain.rpc.errors import CallRefused, Refusal
from swarmtrain.rpc.node import Node
from swarmtrain.wire.messages import Code, Prepare, ReducedPiece, ReduceShare, RosterEntry

IN_FLIGHT = 4  # window: pieces on the way to one owner, in a small group
_GROUP_IN_FLIGHT = 16  # shares that one owner holds at a time; in a larger group, one piece of every peer
_DAY_S = 86400.0  # a share waits for the slowest peer; links notice by themselves when nothing gets through


class Lane(IntEnum):
    """Which of an attempt's all-reduces a share belongs to."""

    STAGE = 0  # what the peers of the stage have in common
    FUSED = 1  # a tied embedding, over the peers of the first and of the last stage
    LEFT = 2  # PowerSGD's left factors, which come before the rest


class AllReduceFailed(Exception):
    """This attempt cannot finish; `suspects` did not deliver."""

    def __init__(self, reason: str, suspects: Sequence[str]) -> None:
        super().__init__(reason)
        self.suspects = tuple(suspects)


@dataclass
class _OwnedPiece:
    """A piece that this peer adds up: the shares so far, and the sum as it goes to every peer."""

    piece: Piece
    shares: dict[int, Share]
    result: asyncio.Future[Buffer]


class AllReduce:
    """One (step, attempt) of one stage, at one peer, in one lane."""

    def __init__(
        self,
        node: Node,
        prepare: Prepare,
        share: Tensor | None,
        *,
        lane: Lane = Lane.STAGE,
        roster: Sequence[RosterEntry] | None = None,
        pieces: list[Piece] | None = None,
        form: ShareFormat = EXACT,
    ) -> None:
        """`share` is this peer's own gradient; None if it has no work in this step.

        `roster` and `pieces` default to those of `prepare`.
        """
        self._node, self.prepare, self.lane, self._form = node, prepare, lane, form
        roster = prepare.roster if roster is None else roster
        self.peers = [entry.peer_id for entry in roster]
        self.contributors = [i for i, entry in enumerate(roster) if entry.microbatches]
        self.position = self.peers.index(node.peer_id)
        self.pieces = cut([entry.owned for entry in roster]) if pieces is None else pieces
        self._share = share.numpy() if share is not None else None
        self.num_sent = 0  # elements that went to other owners
        self.num_received = 0  # elements that came back from them
        self._num_left = Counter(piece.owner for piece in self.pieces if piece.owner != self.position)
        loop = asyncio.get_running_loop()
        self._owned = {
            piece.index: _OwnedPiece(piece, {}, loop.create_future())
            for piece in self.pieces
            if piece.owner == self.position
        }

    async def run(self, out: Tensor) -> None:
        """Fill `out` (flat fp32) with the reduced sum, or raise AllReduceFailed.

        It has no deadline: the coordinator, which sees all members, judges whether it still moves.
        """
        # A window per owner: all peers send an owner its pieces in the same order, so the first piece that it still
        # waits for is always on its way from every peer. A window over all owners could deadlock: peers would wait for
        # each other in a circle.
        size = max(1, min(IN_FLIGHT, _GROUP_IN_FLIGHT // len(self.peers)))
        windows = [asyncio.Semaphore(size) for _ in self.peers]
        try:
            async with asyncio.TaskGroup() as tasks:
                for piece in self._rotated():
                    tasks.create_task(self._all_reduce(piece, out, windows[piece.owner]))
        except ExceptionGroup as group:
            raise _first(group) from group

    def forget_share(self) -> None:
        """This peer has every sum: it only still owes other peers the sums of its own pieces."""
        self._share = None

    def close(self) -> None:
        """Give up: peers that wait for a sum of this one are refused."""
        for owned in self._owned.values():
            if not owned.result.done():
                owned.result.cancel()

    def missing_peers(self) -> list[str]:
        """Contributors whose share of this owner's first incomplete piece has not arrived.

        Later pieces say nothing: peers send one only when earlier ones have been answered.
        """
        for owned in self._owned.values():
            if not owned.result.done():
                return [self.peers[i] for i in self.contributors if i not in owned.shares]
        return []

    def unanswered_owners(self) -> list[str]:
        """Other owners that still owe this peer a sum."""
        return [self.peers[i] for i, left in sorted(self._num_left.items()) if left]

    async def receive_share(self, share: ReduceShare, sender: str) -> ReducedPiece:
        """The owner's side of both phases: add the share of `sender`, answer when the sum is complete."""
        owned = self._owned.get(share.piece)
        if owned is None or sender not in self.peers:
            raise Refusal(Code.UNKNOWN, f"piece {share.piece} of attempt {share.attempt} is not this peer's")
        if len(share.values):
            self._add_share(owned, self.peers.index(sender), share.values)
        try:
            return ReducedPiece(await asyncio.shield(owned.result))
        except asyncio.CancelledError:
            if owned.result.cancelled():
                raise Refusal(Code.UNKNOWN, "this attempt was given up") from None
            raise

    def _rotated(self) -> list[Piece]:
        """All pieces, beginning with this peer's own: so peers do not all call the same owner first."""
        mine = [piece for piece in self.pieces if piece.owner >= self.position]
        return mine + [piece for piece in self.pieces if piece.owner < self.position]

    async def _all_reduce(self, piece: Piece, out: Tensor, window: asyncio.Semaphore) -> None:
        size = piece.stop - piece.start
        if piece.owner == self.position:
            raw = await self._sum_of_own(piece)
        else:
            async with window:
                raw = await self._exchange(piece)
            self.num_received += size
            self._num_left[piece.owner] -= 1
        try:
            out.numpy()[piece.start : piece.stop] = self._form.result(raw, size)
        except BadShare as error:
            raise AllReduceFailed(f"a reduced piece: {error}", [self.peers[piece.owner]]) from error

    async def _sum_of_own(self, piece: Piece) -> Buffer:
        """The sum of a piece that this peer owns, once all shares are in."""
        owned = self._owned[piece.index]
        if self._share is not None:
            own = self._form.own(self._share[piece.start : piece.stop], piece.start)
            self._keep(owned, self.position, own)
        return await asyncio.shield(owned.result)

    async def _exchange(self, piece: Piece) -> Buffer:
        """Reduce-scatter and all-gather in one call: this peer's share goes to the owner, the sum comes back."""
        owner, prepare = self.peers[piece.owner], self.prepare
        values: Buffer = b""
        if self._share is not None:
            values = self._form.pack(self._share[piece.start : piece.stop], piece.start)
            self.num_sent += piece.stop - piece.start
        share = ReduceShare(
            run=prepare.run,
            term=prepare.term,
            stage=prepare.stage,
            step=prepare.step,
            attempt=prepare.attempt,
            piece=piece.index,
            values=values,
            lane=int(self.lane),
        )
        try:
            return (await self._node.call(owner, share, deadline_s=_DAY_S, expect=ReducedPiece)).values
        except CallRefused as error:
            raise AllReduceFailed(f"{owner[-8:]}: {error}", []) from error
        except NetError as error:
            suspects = [] if isinstance(error, HostDownError) else [owner]  # this peer's own transport may be down
            raise AllReduceFailed(f"{owner[-8:]}: {error}", suspects) from error

    def _add_share(self, owned: _OwnedPiece, sender: int, values: Buffer) -> None:
        size = owned.piece.stop - owned.piece.start
        if sender not in self.contributors:
            raise Refusal(Code.BAD_TENSOR, "a share of a peer without work in this step")
        try:
            share = self._form.unpack(values, size)
        except BadShare as error:
            raise Refusal(Code.BAD_TENSOR, str(error)) from error
        self._keep(owned, sender, share)

    def _keep(self, owned: _OwnedPiece, sender: int, share: Share) -> None:
        owned.shares.setdefault(sender, share)
        if len(owned.shares) == len(self.contributors) and not owned.result.done():
            shares = [owned.shares[position] for position in self.contributors]
            owned.result.set_result(self._form.answer(shares, owned.piece))
            owned.shares = dict.fromkeys(owned.shares, Share.empty())


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
