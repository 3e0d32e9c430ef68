"""The two-phase step at a peer: prepare (reconcile the ledger, reduce inside the stage), then apply.

A serving peer must have prepared what it is told to apply. A listener (a newcomer that is still fetching the state)
receives the reduced gradients and the decisions of the steps since its snapshot, and applies them in order as soon as
the snapshot is there: training never waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from swarmtrain.chain.state_transfer import StateSource
from swarmtrain.net.exchange import Exchange
from swarmtrain.observe.faults import Action, Point
from swarmtrain.observe.split import Part as TimePart
from swarmtrain.peer.attempt import Attempt
from swarmtrain.peer.bases import Bases, BasisMissing
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.ledger import Ledger
from swarmtrain.reduce.coding import Reduced, stage_elements
from swarmtrain.reduce.reduction import Lane, ReductionFailed
from swarmtrain.wire.messages import (
    Applied,
    Apply,
    Code,
    Part,
    Prepare,
    Prepared,
    ReducedPart,
    RosterEntry,
    Unprepared,
)

log = logging.getLogger(__name__)

STEP_WAIT_S = 15.0
PART_WAIT_S = 10.0  # how long a share waits for this peer's own prepare
REDUCE_S = 60.0
MAX_BUFFERED_STEPS = 64  # reduced gradients that a listener keeps, if its memory allows; then it needs a newer state
MAX_PAST = 3  # finished reductions that are kept for newcomers who are still receiving them
MAX_SNAPSHOTS = 2  # one for newcomers, one for a checkpoint
SNAPSHOT_LIFE_S = 30.0  # a copy of the state that nobody has fetched from for so long is dropped
_STEP_JOB = -1  # step work has no microbatch
_NO_ATTEMPT = (-1, -1, -1)


@dataclass(frozen=True)
class Ready:
    """A reduced sum waiting for its apply."""

    reduced: Reduced
    digest: str
    counted: frozenset[int]  # this peer's microbatches in it


@dataclass(frozen=True)
class _Hearing:
    """A newcomer's part in one step's reduction."""

    attempt: tuple[int, int]  # term, attempt
    task: asyncio.Task[Prepared | Unprepared]


class Steps:
    """Answers `Prepare`, `Part` and `Apply`."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._attempt = _NO_ATTEMPT  # term, step, attempt
        self._task: asyncio.Task[Prepared | Unprepared] | None = None
        self._beginning = asyncio.Lock()  # held while one attempt replaces another
        self._reducing: Attempt | None = None
        self._past: dict[tuple[int, int, int], Attempt] = {}
        self._hearing: dict[int, _Hearing] = {}  # by step: what a newcomer receives, one after the other
        self._turn = asyncio.Lock()
        self._reduction_changed = asyncio.Condition()
        self.bases = Bases(context)
        self._ready: dict[int, Ready] = {}
        self._decisions: dict[int, Apply] = {}  # a listener's, not yet applied
        self._applying = asyncio.Lock()
        self.last_applied: Applied | None = None
        self._snapshots: dict[int, StateSource] = {}  # by step
        self._fetched_at: dict[int, float] = {}
        gradient_bytes = 4 * context.jobs.worker.state.gradient_size
        self._max_buffered = max(2, min(MAX_BUFFERED_STEPS, context.max_ledger_bytes // gradient_bytes))

    async def prepare(self, prepare: Prepare, exchange: Exchange) -> Prepared | Unprepared:
        """Reduce the stage's gradient with the others of the roster. The same attempt asked again joins the first."""
        context = self._context
        await context.check_coordinator(exchange.peer_id, prepare.run, prepare.term, prepare.stage)
        self._check_roster(prepare)
        if context.state is PeerState.SYNCING:
            task = self._hear(prepare)
        else:
            await context.reach_step(prepare.step, timeout_s=STEP_WAIT_S)
            task = await self._begin(prepare)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise context.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up") from None
            raise

    async def _begin(self, prepare: Prepare) -> asyncio.Task[Prepared | Unprepared]:
        """The attempt that is asked for; the one before is given up. One at a time: ending an attempt takes a while."""
        context, wanted = self._context, (prepare.term, prepare.step, prepare.attempt)
        async with self._beginning:
            if wanted < self._attempt or prepare.step != context.step:
                raise context.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up")
            if context.state is PeerState.SYNCING:
                raise context.refuse(Code.BEHIND, "this peer begins to fetch its state", retry_after_s=0.5)
            if wanted > self._attempt or self._task is None:
                self.drop_receptions()  # it is one of the others now
                await self._give_up(next_step=prepare.step)
                self._attempt = wanted
                self._task = asyncio.create_task(self._prepare(prepare), name=f"prepare step {prepare.step}")
            return self._task

    def _hear(self, prepare: Prepare) -> asyncio.Task[Prepared | Unprepared]:
        """A newcomer receives a step's reduction when it has those before it: the others may be steps ahead."""
        self.drop_receptions(before=self._context.step)
        wanted, known = (prepare.term, prepare.attempt), self._hearing.get(prepare.step)
        if known is not None and known.attempt > wanted:
            raise self._context.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up")
        if known is None or known.attempt < wanted:
            if known is not None:
                known.task.cancel()
            task = asyncio.create_task(self._receive(prepare), name=f"hear step {prepare.step}")
            known = self._hearing[prepare.step] = _Hearing(wanted, task)
        return known.task

    async def _receive(self, prepare: Prepare) -> Prepared | Unprepared:
        async with self._turn:
            answer = await self._prepare(prepare, listens=True)
        if isinstance(answer, Unprepared):  # without this one, those after it are of no use
            for step, item in list(self._hearing.items()):
                if step > prepare.step and item.attempt[0] == prepare.term:
                    self._hearing.pop(step).task.cancel()
        return answer

    def drop_receptions(self, *, before: int | None = None) -> None:
        """What is received of steps before a newer state is of no use. None: of all steps."""
        for step in [step for step in self._hearing if before is None or step < before]:
            self._hearing.pop(step).task.cancel()

    @property
    def is_receiving(self) -> bool:
        """Whether a newcomer is receiving a step's sum."""
        return any(not item.task.done() for item in self._hearing.values())

    async def part(self, part: Part, exchange: Exchange) -> ReducedPart:
        """Another peer's share of a piece that this peer owns."""
        context = self._context
        is_fused = part.lane == Lane.FUSED  # between two stages: the roster says who belongs to it
        await context.check_neighbour(part.run, part.term, context.stage if is_fused else part.stage)
        wanted = (part.term, part.step, part.attempt)
        attempt = self._past.get(wanted)
        if attempt is None:
            try:
                async with asyncio.timeout(PART_WAIT_S), self._reduction_changed:
                    await self._reduction_changed.wait_for(lambda: self._reducing is not None and self._key() >= wanted)
            except TimeoutError:
                raise context.refuse(Code.UNKNOWN, "this peer was not asked to prepare this attempt") from None
            attempt = self._reducing
        if attempt is None or attempt.key != wanted:
            raise context.refuse(Code.AHEAD, f"attempt {part.attempt} was given up")
        try:
            async with asyncio.timeout(REDUCE_S):  # a lane may begin when another one has ended
                reduction = await attempt.lane(Lane(part.lane))
        except TimeoutError:
            raise context.refuse(Code.UNKNOWN, f"this attempt has no lane {part.lane}") from None
        if reduction is None:
            raise context.refuse(Code.UNKNOWN, "this attempt was given up")
        return await reduction.take(part, exchange.peer_id)

    async def apply(self, apply: Apply, exchange: Exchange) -> Applied:
        """Apply the prepared sum and open the next step. Asked again, gives the same answer."""
        context = self._context
        await context.check_coordinator(exchange.peer_id, apply.run, apply.term)
        if (hearing := self._hearing.get(apply.step)) is not None:
            await asyncio.wait([hearing.task])  # a newcomer may serve before it has all of the step under way
        if context.state is PeerState.SYNCING:
            return await self._note_decision(apply)
        async with self._applying:
            if context.step == apply.step + 1 and self.last_applied is not None:
                return self.last_applied
            if context.step != apply.step:
                code = Code.BEHIND if context.step < apply.step else Code.AHEAD
                raise context.refuse(code, f"this peer is at step {context.step}")
            ready = self._ready.get(apply.step)
            if ready is None or ready.digest != apply.digest:
                raise context.refuse(Code.UNPREPARED, f"no prepared sum of step {apply.step} with this digest")
            if context.faults.hit(Point.BEFORE_APPLY) is Action.CORRUPT:
                await context.compute.run(Kind.STEP, _STEP_JOB, context.jobs.damage_state)
            return await self._apply(apply, ready)

    @property
    def is_prepared(self) -> bool:
        """Whether this step's sum is reduced here and its decision is awaited."""
        return self._context.step in self._ready

    async def snapshot_of(self, step: int) -> StateSource | None:
        """A copy of the state of `step`: a kept one, or a new one while that is the current step."""
        async with self._applying:
            if step not in self._snapshots:
                if self.last_applied is None or self._context.step != step:
                    return None
                await self._keep_snapshot()
            self._fetched_at[step] = asyncio.get_running_loop().time()
            return self._snapshots[step]

    async def _keep_snapshot(self) -> None:
        copied = await self._context.compute.run(Kind.STEP, _STEP_JOB, self._context.jobs.copy_state)
        self._snapshots[copied.value.step] = copied.value
        self._fetched_at[copied.value.step] = asyncio.get_running_loop().time()
        for old in sorted(self._snapshots)[:-MAX_SNAPSHOTS]:
            self._drop_snapshot(old)

    def _drop_snapshot(self, step: int) -> None:
        del self._snapshots[step], self._fetched_at[step]

    def _drop_unused_snapshots(self) -> None:
        now = asyncio.get_running_loop().time()
        for step in [step for step, at in self._fetched_at.items() if now - at > SNAPSHOT_LIFE_S]:
            self._drop_snapshot(step)

    async def load(self, source: StateSource) -> None:
        """A fetched state replaces this peer's; the decisions heard since then follow it."""
        context = self._context
        async with self._applying:
            self._ready = {step: item for step, item in self._ready.items() if step >= source.step}
            self._decisions = {step: item for step, item in self._decisions.items() if step >= source.step}
            await context.compute.run(Kind.STEP, _STEP_JOB, lambda: context.jobs.load_state(source))
            digest = (await context.compute.run(Kind.STEP, _STEP_JOB, context.jobs.state_digest)).value
            self.last_applied = Applied(source.step, digest)
            await context.enter_step(source.step)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Apply the decisions that a listener has heard, as far as they follow each other."""
        context = self._context
        async with self._applying:
            while (apply := self._decisions.pop(context.step, None)) is not None:
                await self._apply(apply, self._ready[apply.step])

    async def forget(self) -> None:
        """Another state is coming: what was computed, prepared or decided before does not count."""
        context = self._context
        async with self._beginning:
            await self._give_up()
            self._attempt = _NO_ATTEMPT
        await self._stop_hearing()
        async with self._applying:
            self._ready.clear()
            self._decisions.clear()
            await context.compute.run(Kind.STEP, _STEP_JOB, context.jobs.drop_work)
            await context.enter_step(context.step)

    async def close(self) -> None:
        """Give up what is under way."""
        async with self._beginning:
            await self._give_up()
        await self._stop_hearing()

    async def _stop_hearing(self) -> None:
        tasks = [item.task for item in self._hearing.values()]
        self._hearing.clear()
        self._past.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _note_decision(self, apply: Apply) -> Applied:
        """A listener hears a decision; it follows as soon as the state before it is there."""
        context = self._context
        ready = self._ready.get(apply.step)
        if ready is None or ready.digest != apply.digest:
            raise context.refuse(Code.UNPREPARED, f"the reduction of step {apply.step} was not heard here")
        await self._learn_basis(apply)
        self._decisions[apply.step] = apply
        if context.step == apply.step and self.last_applied is not None:
            await self.catch_up()
        return self.last_applied or Applied(0, "")

    async def _apply(self, apply: Apply, ready: Ready) -> Applied:
        context = self._context
        basis = await self._learn_basis(apply)
        context.is_applying = True  # what arrives from now on belongs to the next step
        try:
            timed = await context.compute.run(
                Kind.STEP,
                _STEP_JOB,
                lambda: context.jobs.apply(
                    ready.reduced, apply.scale, apply.learning_rate, basis, counted=ready.counted
                ),
            )
            if apply.snapshot:
                await self._keep_snapshot()
            self.last_applied = Applied(apply.step + 1, timed.value)
            self._ready = {step: item for step, item in self._ready.items() if step > apply.step}
            self._drop_unused_snapshots()
            await context.enter_step(apply.step + 1)
        finally:
            context.is_applying = False
        context.faults.hit(Point.AFTER_APPLY)
        return self.last_applied

    async def _learn_basis(self, apply: Apply) -> Tensor | None:
        """Where the subspace moves with this step; None if it does not. Without it the step cannot be applied yet."""
        if not apply.basis:
            return None
        try:
            return await self.bases.learn(apply)
        except BasisMissing as error:
            raise self._context.refuse(Code.UNKNOWN, str(error), retry_after_s=1.0) from error

    async def _prepare(self, prepare: Prepare, *, listens: bool = False) -> Prepared | Unprepared:
        context = self._context
        mine = self._my_entry(prepare)
        if mine is None:
            return Unprepared(b"", (), "the roster does not name this incarnation of the peer")
        if listens and len(self._ready) >= self._max_buffered:
            return Unprepared(b"", (), "too many steps behind to keep more of them")
        wanted = set(np.frombuffer(mine.microbatches, dtype="<u4").tolist())
        share = None
        if wanted:
            ledger = context.ledger
            missing = sorted(wanted - ledger.finished())
            if missing:
                return Unprepared(np.array(missing, dtype="<u4").tobytes(), (), "not in this peer's ledger")
            share = await self._share(ledger, wanted, prepare.step)
        context.faults.hit(Point.IN_PREPARE)
        attempt = Attempt(context, prepare, share)
        if not listens:  # who does owns nothing: nobody asks it for parts
            async with self._reduction_changed:
                self._reducing = attempt
                self._reduction_changed.notify_all()
        try:
            with context.compute.split.during(TimePart.REDUCE):
                reduced = await attempt.run(deadline_s=REDUCE_S)
        except ReductionFailed as error:
            log.info("reduction of step %d failed: %s", prepare.step, error)
            return Unprepared(b"", error.suspects, str(error)[:1000])
        attempt.finish()
        finished = await context.compute.run(Kind.STEP, _STEP_JOB, lambda: context.jobs.finish(reduced.gradient))
        squared_norm, digest = finished.value
        self._ready[prepare.step] = Ready(reduced, digest, frozenset(wanted))
        return Prepared(squared_norm, digest, await self.bases.propose(prepare.step, reduced.gradient))

    async def _share(self, ledger: Ledger, wanted: set[int], step: int) -> Tensor:
        context = self._context
        entries = list(ledger)
        timed = await context.compute.run(
            Kind.STEP, _STEP_JOB, lambda: context.jobs.reconciled_share(entries, wanted, step)
        )
        return timed.value

    async def _give_up(self, *, next_step: int = -1) -> None:
        """End the attempt under way. One that is finished, and before `next_step`, stays for who is still receiving."""
        attempt = self._reducing
        if attempt is not None:
            self._reducing = None
            step = attempt.prepare.step
            self._past = {key: item for key, item in self._past.items() if item.prepare.step > step - MAX_PAST}
            if attempt.is_finished and attempt.has_listeners and step < next_step:
                self._past[attempt.key] = attempt
            else:
                await attempt.close()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    def _key(self) -> tuple[int, int, int]:
        assert self._reducing is not None
        return self._reducing.key

    def _check_roster(self, prepare: Prepare) -> None:
        """Refuse a roster whose parts do not add up, before anything is allocated for it."""
        context = self._context
        layout = context.jobs.worker.state.layout
        if sum(entry.owned for entry in prepare.roster) != stage_elements(layout, compress=prepare.compress):
            raise context.refuse(Code.BAD_ROSTER, "the owned parts do not make up this stage's gradient")
        if sum(entry.owned for entry in prepare.fused) != layout.num_fused:
            raise context.refuse(Code.BAD_ROSTER, "the owned parts do not make up what two stages have in common")
        if layout.num_fused and context.node.peer_id not in {entry.peer_id for entry in prepare.fused}:
            raise context.refuse(Code.BAD_ROSTER, "this peer is missing among those of both stages")
        for roster in (prepare.roster, prepare.fused):
            if any(len(entry.microbatches) % 4 for entry in roster):
                raise context.refuse(Code.BAD_ROSTER, "a list of microbatches that is cut off")
            if len({entry.peer_id for entry in roster}) != len(roster):
                raise context.refuse(Code.BAD_ROSTER, "a peer is named twice")

    def _my_entry(self, prepare: Prepare) -> RosterEntry | None:
        context = self._context
        for entry in prepare.roster:
            if entry.peer_id == context.node.peer_id and entry.incarnation == context.incarnation:
                return entry
        return None
