"""Attempts at a step's all-reduce at one peer: which one counts, its lanes, and where the shares of others go.

Attempt    one (term, step, attempt): a task of its own, and the lanes in which the gradient is reduced
Attempts   of a serving peer: one at a time, the newest; finished ones stay while listeners may still receive them
Listener   of a newcomer: it owns no pieces, and receives the sums of steps in order while it fetches its state
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmtrain.model.buffers import StateLayout
from swarmtrain.peer.identity import PeerIdentity
from swarmtrain.peer.stage import Stage
from swarmtrain.reduce.all_reduce import AllReduce, Lacks, Lane
from swarmtrain.reduce.coding import Reduced, factor_pieces, left_pieces, stage_elements
from swarmtrain.reduce.groups import Groups, fault_of
from swarmtrain.wire.messages import Code, Prepare, Prepared, Preparing, ReduceShare, RosterEntry, Unprepared

SHARE_WAIT_S = 30.0  # how long another peer's share waits for this peer's own prepare; then for its own share
MAX_PAST = 3  # finished attempts that are kept for newcomers that are still receiving them
MAX_NAMED = 16  # peers in one report: more is no news

Key = tuple[int, int, int]  # term, step, attempt: what orders attempts
_NO_ATTEMPT: Key = (-1, -1, -1)


def key_of(message: Prepare | ReduceShare) -> Key:
    """The attempt that a message belongs to."""
    return (message.term, message.step, message.attempt)


def roster_fault(prepare: Prepare, layout: StateLayout, peer_id: str) -> str:
    """Why the rosters cannot be those of this stage and peer; empty if they can. Nothing is allocated before."""
    if fault := fault_of(prepare.roster, stage_elements(layout, compress=prepare.compress)):
        return fault
    if fault := fault_of(prepare.fused, layout.num_fused):
        return f"of what two stages have in common: {fault}"
    if layout.num_fused and peer_id not in {entry.peer_id for entry in prepare.fused}:
        return "this peer is missing among those of both stages"
    for roster in (prepare.roster, prepare.fused):
        if any(len(entry.microbatches) % 4 for entry in roster):
            return "a list of microbatches that is cut off"
        if len({entry.peer_id for entry in roster}) != len(roster):
            return "a peer is named twice"
    return ""


class Attempt:
    """One (term, step, attempt) at one peer. Shares of others may arrive for a lane before this peer has begun it."""

    def __init__(self, prepare: Prepare, peer: PeerIdentity, stage: Stage) -> None:
        self.prepare, self.key = prepare, key_of(prepare)
        self._node, self._stage = peer.node, stage
        self._task: asyncio.Task[Prepared | Unprepared] | None = None
        self._share: Tensor | None = None
        self._lanes: dict[Lane, AllReduce] = {}
        self._changed = asyncio.Condition()
        self._is_closed = self._is_reducing = self.is_finished = False
        self._partners: set[str] = set()  # with whom this peer exchanges anything
        for roster in (prepare.roster, prepare.fused):
            if peer.peer_id in {entry.peer_id for entry in roster}:
                self._partners |= Groups(roster, peer.peer_id).partners()
        self._received_before = 0
        layout, spec = stage.layout, stage.coder.spec
        self._num_fused = layout.num_fused if prepare.fused else 0
        self._factors = spec.in_factors and prepare.compress and bool(layout.factored)

    def start(self, work: Coroutine[Any, Any, Prepared | Unprepared]) -> None:
        """Its way through prepare, as a task: callers come and go."""
        self._task = asyncio.create_task(work, name=f"prepare step {self.prepare.step}")

    @property
    def task(self) -> asyncio.Task[Prepared | Unprepared]:
        """What it comes to."""
        assert self._task is not None
        return self._task

    @property
    def has_listeners(self) -> bool:
        """Whether there may be a peer that only receives, and takes longer than the others."""
        return any(not entry.owned for entry in (*self.prepare.roster, *self.prepare.fused))

    def report(self) -> Preparing:
        """How it goes: before it reduces, and when it has, it is the device that works."""
        if not self._is_reducing:
            return Preparing(0, True)
        lanes = [reduction.waits() for reduction in self._lanes.values()]
        lacks = min((lacks for lacks, _ in lanes if lacks), default=Lacks.NOTHING)
        waits_for = dict.fromkeys(peer for kind, peers in lanes if kind is lacks for peer in peers)
        return Preparing(
            moved_bytes=max(0, self._received_bytes() - self._received_before),
            is_computing=self.is_finished,
            waits_for=tuple(waits_for)[:MAX_NAMED],
            lacks=int(lacks),
        )

    def _received_bytes(self) -> int:
        return sum(self._node.received_bytes(peer_id) for peer_id in self._partners)

    async def lane(self, lane: Lane) -> AllReduce | None:
        """The all-reduce of a lane, as soon as this peer has begun it; None if it never will."""
        async with self._changed:
            await self._changed.wait_for(lambda: lane in self._lanes or self._is_closed)
        return self._lanes.get(lane)

    async def close(self) -> None:
        """Give up: peers that wait for something of this one are told so."""
        self._is_closed = True
        for reduction in self._lanes.values():
            reduction.close()
        async with self._changed:
            self._changed.notify_all()

    async def cancel(self) -> None:
        """End its task."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def all_reduce(self, share: Tensor | None) -> Reduced:
        """The stage's reduced gradient; `share` is this peer's flat sum, None without work. Raises AllReduceFailed."""
        self._share, self._is_reducing, self._received_before = share, True, self._received_bytes()
        layout, own_start = self._stage.layout, self._num_fused
        gradient = torch.empty(layout.gradient_size, dtype=torch.float32)
        own = None if share is None else share[own_start:]
        both = None if share is None else share[:own_start]
        stage = self._reduce_factors(own) if self._factors else self._reduce_stage(own, gradient)
        if self._num_fused:
            fused = self._reduce_fused(both, gradient[:own_start])
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(fused)
                    staged = tasks.create_task(stage)
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
            found = staged.result()
            gradient[own_start:] = found.gradient[-(gradient.numel() - own_start) :]
            found = Reduced(gradient, found.commit)
        else:
            found = await stage
        self._finish()
        return found

    def _finish(self) -> None:
        """What this peer owns of the sum can still be asked for; its own share is not needed again."""
        self.is_finished = True
        self._share = None
        for reduction in self._lanes.values():
            reduction.forget_share()

    async def _reduce_stage(self, own: Tensor | None, gradient: Tensor) -> Reduced:
        form, commit = self._stage.coder.sliced(compress=self.prepare.compress)
        reduction = AllReduce(self._node, self.prepare, own, form=form)
        await self._begin(reduction)
        await reduction.run(gradient[self._num_fused :])
        return Reduced(gradient, commit)

    async def _reduce_fused(self, both: Tensor | None, out: Tensor) -> None:
        roster: Sequence[RosterEntry] = self.prepare.fused
        reduction = AllReduce(self._node, self.prepare, both, lane=Lane.FUSED, roster=roster)
        await self._begin(reduction)
        await reduction.run(out)

    async def _reduce_factors(self, own: Tensor | None) -> Reduced:
        """In factors: left ones first, everything else once they are known."""
        node, stage = self._node, self._stage
        factors = await stage.factors(own)
        share = await stage.left_factors(factors)
        owned = Groups(self.prepare.roster, node.peer_id).owned
        pieces = left_pieces(stage.layout, owned)
        first = AllReduce(node, self.prepare, share, lane=Lane.LEFT, pieces=pieces, form=factors.left_form)
        await self._begin(first)
        left = torch.empty(pieces[-1].stop)
        await first.run(left)
        vector = await stage.factor_vector(factors, left)
        pieces = factor_pieces(stage.layout, owned)
        second = AllReduce(node, self.prepare, vector, pieces=pieces, form=factors.form)
        await self._begin(second)
        total = torch.empty(second.pieces[-1].stop)
        await second.run(total)
        return await stage.from_factors(factors, left, total)

    async def _begin(self, reduction: AllReduce) -> None:
        async with self._changed:
            self._lanes[reduction.lane] = reduction
            self._changed.notify_all()


class Attempts:
    """Of a serving peer: the attempt under way, and finished ones that listeners may still be receiving."""

    def __init__(self, peer: PeerIdentity, stage: Stage) -> None:
        self._peer, self._stage = peer, stage
        self.replacing = asyncio.Lock()  # held while one attempt replaces another: ending one takes a while
        self._newest = _NO_ATTEMPT
        self._current: Attempt | None = None
        self._past: dict[Key, Attempt] = {}
        self._changed = asyncio.Condition()

    def known(self, prepare: Prepare) -> Attempt | None:
        """The attempt that is asked for, if it is under way; None if it is to be opened. Refuses an older one."""
        wanted = key_of(prepare)
        if wanted < self._newest:
            raise self._peer.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up")
        return self._current if wanted == self._newest else None

    async def open(self, prepare: Prepare) -> Attempt:
        """A new attempt takes the place of the one before. With `replacing` held."""
        await self._end(next_step=prepare.step)
        async with self._changed:
            self._current = Attempt(prepare, self._peer, self._stage)
            self._newest = self._current.key
            self._changed.notify_all()
        return self._current

    async def of(self, share: ReduceShare) -> Attempt:
        """The attempt that another peer's share belongs to: a kept one, or the one that begins soon. Refuses others."""
        peer, wanted = self._peer, key_of(share)
        attempt = self._past.get(wanted)
        if attempt is None:
            try:
                await self._begins(wanted)
            except TimeoutError:
                raise peer.refuse(Code.UNKNOWN, "this peer was not asked to prepare this attempt") from None
            attempt = self._current
        if attempt is None or attempt.key != wanted:
            raise peer.refuse(Code.AHEAD, f"attempt {share.attempt} was given up")
        return attempt

    async def _begins(self, wanted: Key) -> None:
        """Wait until this attempt is open, or a later one was asked for. TimeoutError if it is not asked for at all."""
        async with asyncio.timeout(SHARE_WAIT_S) as patience, self._changed:
            while self._newest <= wanted and (self._current is None or self._current.key < wanted):
                if self._newest == wanted and patience.when() is not None:
                    patience.reschedule(None)  # it was called off, and may be asked for again
                await self._changed.wait()

    async def call_off(self, attempt: Attempt) -> None:
        """The coordinator does not want this attempt any more."""
        async with self.replacing:
            if self._newest == attempt.key:
                await self._end()

    async def give_up(self) -> None:
        """End what is under way."""
        async with self.replacing:
            await self._end()

    async def forget(self) -> None:
        """End what is under way; whatever is asked for next counts, were it older."""
        async with self.replacing:
            await self._end()
            self._newest = _NO_ATTEMPT

    def drop_past(self) -> None:
        """No peer gets anything of former steps here any more."""
        self._past.clear()

    async def _end(self, *, next_step: int = -1) -> None:
        """End the attempt under way. One that is finished, and before `next_step`, stays while it has listeners."""
        attempt, self._current = self._current, None
        if attempt is None:
            return
        step = attempt.prepare.step
        self._past = {key: item for key, item in self._past.items() if item.prepare.step > step - MAX_PAST}
        if attempt.is_finished and attempt.has_listeners and step < next_step:
            self._past[attempt.key] = attempt
        else:
            await attempt.close()
        await attempt.cancel()


class Listener:
    """Of a newcomer: what it receives, by step. Nothing waits for it: others may be steps ahead of it."""

    def __init__(self, peer: PeerIdentity, stage: Stage) -> None:
        self._peer, self._stage = peer, stage
        self._attempts: dict[int, Attempt] = {}  # by step
        self.turn = asyncio.Lock()  # steps are received one after the other

    def known(self, prepare: Prepare) -> Attempt | None:
        """What is received of this step, if it is the attempt that is asked for. Refuses an older one."""
        known = self._attempts.get(prepare.step)
        if known is not None and _order(known.prepare) > _order(prepare):
            raise self._peer.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up")
        return known if known is not None and _order(known.prepare) == _order(prepare) else None

    def open(self, prepare: Prepare) -> Attempt:
        """Receive a step; a newer attempt replaces the one before."""
        if (former := self._attempts.get(prepare.step)) is not None:
            former.task.cancel()
        attempt = self._attempts[prepare.step] = Attempt(prepare, self._peer, self._stage)
        return attempt

    async def ended(self, step: int) -> None:
        """Wait until what is received of `step` is here, or given up."""
        if (attempt := self._attempts.get(step)) is not None:
            await asyncio.wait([attempt.task])

    @property
    def is_going_on(self) -> bool:
        """Whether a step's sum is being received."""
        return any(not attempt.task.done() for attempt in self._attempts.values())

    def call_off(self, attempt: Attempt) -> None:
        """The coordinator does not want this attempt any more."""
        if self._attempts.get(attempt.prepare.step) is attempt:
            attempt.task.cancel()

    def drop(self, *, before: int | None = None) -> None:
        """What is received of steps before a newer state is of no use. None: of all steps."""
        for step in [step for step in self._attempts if before is None or step < before]:
            self._attempts.pop(step).task.cancel()

    def drop_after(self, prepare: Prepare) -> None:
        """Without this step, those after it are of no use."""
        for step, attempt in list(self._attempts.items()):
            if step > prepare.step and attempt.prepare.term == prepare.term:
                self._attempts.pop(step).task.cancel()

    async def stop(self) -> None:
        """Give everything up, and wait for its end."""
        tasks = [attempt.task for attempt in self._attempts.values()]
        self._attempts.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _order(prepare: Prepare) -> tuple[int, int]:
    return (prepare.term, prepare.attempt)
