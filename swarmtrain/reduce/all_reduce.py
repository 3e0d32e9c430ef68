"""The all-reduce of a stage's gradient among its peers: one attempt, in one lane.

Every piece of the flat gradient has one owner in each group of peers. Reduce-scatter: every peer sends the owner its
share of the piece, and the owner adds it to an exact total as it arrives. With several groups, their owners of a piece
do the same among themselves: each is the root of a part, and gets the other groups' sums of it. Only a root rounds, to
fp32 and once. All-gather: the sum goes back in the replies to these very calls, the same bytes to every peer, so that
all replicas leave with the same bits. Pieces are independent of each other, so all phases overlap. There is no
matchmaking: the roster is given. Who is in which group is `groups.py`, how sums are made `totals.py`, how they look as
bytes `shares.py`; an attempt may consist of several all-reduces, one per lane.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

from torch import Tensor

from swarmtrain.p2p.errors import HostDownError, NetError
from swarmtrain.reduce.groups import Groups, Part
from swarmtrain.reduce.partition import Piece, cut
from swarmtrain.reduce.shares import EXACT, ShareFormat
from swarmtrain.reduce.totals import BadShare, Buffer, Numbers, Total
from swarmtrain.rpc.errors import CallRefused, Refusal
from swarmtrain.rpc.node import Node
from swarmtrain.wire.messages import Code, Prepare, ReducedPiece, ReduceShare, RosterEntry

IN_FLIGHT = 4  # window: pieces on the way to one owner, in a small group
_GROUP_IN_FLIGHT = 16  # shares on their way to one owner; in a larger group, one piece of every peer
_DAY_S = 86400.0  # a share waits for the slowest peer; links notice by themselves when nothing gets through
_LENGTH = struct.Struct("<I")


class Lane(IntEnum):
    """Which of an attempt's all-reduces a share belongs to."""

    STAGE = 0  # what the peers of the stage have in common
    FUSED = 1  # a tied embedding, over the peers of the first and of the last stage
    LEFT = 2  # PowerSGD's left factors, which come before the rest


class Lacks(IntEnum):
    """What a peer waits for. Whatever comes first here holds up what comes later."""

    NOTHING = 0
    SHARES = 1  # of members of its group, for a piece that it owns
    SUMS = 2  # of other groups, for a part of which it is the root
    ROOTS = 3  # answers of roots that have its group's sum
    OWNERS = 4  # answers of owners that have its share


class AllReduceFailed(Exception):
    """This attempt cannot finish; `suspects` did not deliver, `refused_by` took no share and may have given it up."""

    def __init__(self, reason: str, suspects: Sequence[str], refused_by: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.suspects, self.refused_by = tuple(suspects), tuple(refused_by)


class _Sum:
    """What is added up here: the total so far, whose share or sum is in it, and the answer to all of them."""

    def __init__(self, size: int, expected: Sequence[str]) -> None:
        """`expected`: the other peers that contribute."""
        self.size = size
        self._total: Total | None = None
        self._left = dict.fromkeys(expected)
        self._complete = asyncio.Event()
        if not expected:
            self._complete.set()
        self.answer: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()

    @property
    def total(self) -> Total:
        """The sum; made when the first share comes."""
        if self._total is None:
            self._total = Total(self.size)
        return self._total

    @property
    def missing(self) -> list[str]:
        """Whose contribution is not here."""
        return list(self._left)

    def lacks(self, sender: str) -> bool:
        """Whether a contribution of `sender` is expected: the first one counts, and no other."""
        return sender in self._left and not self.answer.done()

    def added(self, sender: str) -> None:
        """The contribution of `sender` is in the total."""
        del self._left[sender]
        if not self._left:
            self._complete.set()

    async def complete(self) -> Total:
        """Wait for all others; takes the total away."""
        await self._complete.wait()
        total, self._total = self.total, None
        return total

    def give(self, answer: Buffer) -> Buffer:
        """Answer all that wait, unless the attempt was given up meanwhile."""
        if not self.answer.done():
            self.answer.set_result(answer)
        return answer

    async def answered(self) -> Buffer:
        """The answer, for one who waits for it. Refuses when the attempt is given up."""
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            if self.answer.cancelled():
                raise Refusal(Code.UNKNOWN, "this attempt was given up") from None
            raise

    def close(self) -> None:
        """Give up: who waits for the answer is refused."""
        if not self.answer.done():
            self.answer.cancel()


class _OwnedPiece(_Sum):
    """A piece that this peer adds up in its group, and the parts of it of which it is the root."""

    def __init__(self, piece: Piece, parts: Sequence[Part], groups: Groups) -> None:
        others = [peer for peer in groups.contributors if peer != groups.peer_id]
        super().__init__(piece.stop - piece.start, others)
        self.piece, self.parts = piece, parts
        expected = [groups.owner(group) for group in range(groups.count) if group != groups.group]
        expected = [peer for peer in expected if groups.has_sum(groups.group_of(peer))]
        self.roots = {part.index: _Sum(part.stop - part.start, expected) for part in parts if part.root == groups.group}
        self.unanswered: dict[str, None] = {}  # roots that have this group's sum of their part

    def close(self) -> None:
        """See _Sum."""
        super().close()
        for root in self.roots.values():
            root.close()


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

        `roster` and `pieces` default to those of `prepare`. The owners of `pieces` are columns of `Groups`.
        """
        self._node, self.prepare, self.lane, self._form = node, prepare, lane, form
        self.groups = groups = Groups(prepare.roster if roster is None else roster, node.peer_id)
        self.pieces = cut(groups.owned) if pieces is None else pieces
        self._share = share.numpy() if share is not None else None
        self.num_sent = 0  # elements that went to other owners
        self.num_received = 0  # elements that came back from them
        self._num_left = Counter(piece.owner for piece in self.pieces if piece.owner != groups.column)
        self._owned = {
            piece.index: _OwnedPiece(piece, groups.parts(piece, form.unit), groups)
            for piece in self.pieces
            if piece.owner == groups.column
        }

    async def run(self, out: Tensor) -> None:
        """Fill `out` (flat fp32) with the reduced sum, or raise AllReduceFailed.

        It has no deadline: the coordinator, which sees all members, judges whether it still moves.
        """
        # A window per owner: all peers send an owner its pieces in the same order, and it works on them in that order,
        # so the first piece that it still waits for is always on its way from every peer. A window over all owners
        # could deadlock: peers would wait for each other in a circle.
        size = max(1, min(IN_FLIGHT, _GROUP_IN_FLIGHT // self.groups.num_members))
        windows = [asyncio.Semaphore(size) for _ in self.groups.owned]
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
            owned.close()

    def waits(self) -> tuple[Lacks, list[str]]:
        """What this peer waits for most of all, and from whom.

        Of its own pieces the first incomplete one tells: peers send a later one only when earlier ones are answered.
        """
        for owned in self._owned.values():
            if owned.answer.done():
                continue
            if missing := owned.missing:
                return Lacks.SHARES, missing
            missing_sums = dict.fromkeys(peer for root in owned.roots.values() for peer in root.missing)
            if missing_sums:
                return Lacks.SUMS, list(missing_sums)
            if owned.unanswered:
                return Lacks.ROOTS, list(owned.unanswered)
            break
        owners = self.groups.owners
        unanswered = [owners[column] for column, left in sorted(self._num_left.items()) if left]
        return (Lacks.OWNERS if unanswered else Lacks.NOTHING), unanswered

    async def receive_share(
        self, share: ReduceShare, sender: str, on_added: Callable[[], None] = lambda: None
    ) -> ReducedPiece:
        """The owner's side of both phases: add what `sender` has, answer when the sum is complete.

        The bytes are not kept meanwhile: `on_added` is called once they are free.
        """
        owned, groups = self._owned.get(share.piece), self.groups
        target: _Sum | None = owned
        may_send, contributes = sender in groups.members, sender in groups.contributors
        if owned is not None and share.part >= 0:
            target, group = owned.roots.get(share.part), groups.group_of(sender)
            may_send, contributes = group >= 0, group >= 0 and groups.has_sum(group)
        if target is None or not may_send:
            raise Refusal(Code.UNKNOWN, f"piece {share.piece} of attempt {share.attempt} is not this peer's")
        if len(share.values) and not contributes:
            raise Refusal(Code.BAD_TENSOR, "a share of a peer without work in this step")
        if len(share.values) and target.lacks(sender):
            try:
                if share.part < 0:
                    target.total.add(self._form.unpack(share.values, target.size))
                else:
                    target.total.add_packed(share.values)
            except BadShare as error:
                raise Refusal(Code.BAD_TENSOR, str(error)) from error
            target.added(sender)
        _free(share.values)
        on_added()
        return ReducedPiece(await target.answered())

    def _rotated(self) -> list[Piece]:
        """All pieces, beginning with this peer's own: so peers do not all call the same owner first."""
        first = self.groups.next_column
        return [p for p in self.pieces if p.owner >= first] + [p for p in self.pieces if p.owner < first]

    async def _all_reduce(self, piece: Piece, out: Tensor, window: asyncio.Semaphore) -> None:
        size = piece.stop - piece.start
        async with window:
            if piece.owner == self.groups.column:
                raw = await self._sum_of_own(self._owned[piece.index])
            else:
                raw = await self._exchange(piece)
                self.num_received += size
                self._num_left[piece.owner] -= 1
        reduced = out.numpy()[piece.start : piece.stop]
        try:
            self._read(raw, piece, reduced)
        except BadShare as error:
            raise AllReduceFailed(f"a reduced piece: {error}", [self.groups.owners[piece.owner]]) from error
        self._form.settle(reduced, piece.start)

    async def _sum_of_own(self, owned: _OwnedPiece) -> Buffer:
        """The sum of a piece that this peer owns, once all shares, and the sums of other groups, are in."""
        piece = owned.piece
        total = await owned.complete()
        if self._share is not None:
            total.add(self._form.own(self._share[piece.start : piece.stop], piece.start))
        if self.groups.count == 1:
            return owned.give(self._form.answer(total, piece.start))
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(self._sum_of_part(owned, part, total)) for part in owned.parts]
        return owned.give(_joined([part.result() for part in parts]))

    async def _sum_of_part(self, owned: _OwnedPiece, part: Part, total: Total) -> Buffer:
        """The sum of all groups of a part of an own piece. `total` is the sum of this peer's group."""
        groups, before = self.groups, owned.piece.start
        ours = total.packed(part.start - before, part.stop - before) if groups.has_sum(groups.group) else b""
        if part.root == groups.group:
            root = owned.roots[part.index]
            whole = await root.complete()
            if ours:
                whole.add_packed(ours)
            return root.give(self._form.answer(whole, part.start))
        peer = groups.owner(part.root)
        owned.unanswered[peer] = None
        answer = await self._call(peer, owned.piece, ours, part=part.index)
        del owned.unanswered[peer]
        return answer

    async def _exchange(self, piece: Piece) -> Buffer:
        """Reduce-scatter and all-gather in one call: this peer's share goes to the owner, the sum comes back."""
        values: Buffer = b""
        if self._share is not None:
            values = self._form.pack(self._share[piece.start : piece.stop], piece.start)
            self.num_sent += piece.stop - piece.start
        return await self._call(self.groups.owners[piece.owner], piece, values)

    async def _call(self, peer: str, piece: Piece, values: Buffer, *, part: int = -1) -> Buffer:
        prepare = self.prepare
        share = ReduceShare(
            run=prepare.run,
            term=prepare.term,
            stage=prepare.stage,
            step=prepare.step,
            attempt=prepare.attempt,
            piece=piece.index,
            values=values,
            lane=int(self.lane),
            part=part,
        )
        try:
            return (await self._node.call(peer, share, deadline_s=_DAY_S, expect=ReducedPiece)).values
        except CallRefused as error:
            raise AllReduceFailed(f"{peer[-8:]}: {error}", [], [peer]) from error
        except NetError as error:
            suspects = [] if isinstance(error, HostDownError) else [peer]  # this peer's own transport may be down
            raise AllReduceFailed(f"{peer[-8:]}: {error}", suspects) from error

    def _read(self, raw: Buffer, piece: Piece, out: Numbers) -> None:
        """Fill `out` with an owner's answer. Raises BadShare."""
        if self.groups.count == 1:
            out[:] = self._form.result(raw, out.size)
            return
        parts = self.groups.parts(piece, self._form.unit)
        for part, answer in zip(parts, _parted(raw, len(parts)), strict=True):
            where = slice(part.start - piece.start, part.stop - piece.start)
            out[where] = self._form.result(answer, part.stop - part.start)


def _free(values: Buffer) -> None:
    """Callers keep the message until it is answered; only its buffer is large."""
    if isinstance(values, memoryview):
        with suppress(BufferError):  # something still looks at it: then it goes with the message
            values.release()


def _joined(answers: Sequence[Buffer]) -> bytes:
    """The answers of the roots of a piece's parts, in one."""
    return b"".join(item for answer in answers for item in (_LENGTH.pack(len(answer)), answer))


def _parted(raw: Buffer, count: int) -> list[memoryview]:
    """The inverse of `_joined`."""
    view, answers = memoryview(raw), []
    for _ in range(count):
        if len(view) < _LENGTH.size:
            raise BadShare("the answer lacks a part")
        end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
        if len(view) < end:
            raise BadShare("the answer ends within a part")
        answers.append(view[_LENGTH.size : end])
        view = view[end:]
    if len(view):
        raise BadShare("the answer has bytes that belong to no part")
    return answers


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
