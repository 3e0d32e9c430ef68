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
from swarmtrain.observe.faults import Action, Point
from swarmtrain.observe.split import Part as TimePart
from swarmtrain.peer.attempt import Attempt
from swarmtrain.peer.attempts import Attempts
from swarmtrain.peer.bases import Bases, BasisMissing
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.jobs import StaleWork
from swarmtrain.peer.ledger import Ledger
from swarmtrain.peer.listener import Listener
from swarmtrain.peer.roster import entry_of, fault_of
from swarmtrain.peer.snapshots import Snapshots
from swarmtrain.reduce.all_reduce import AllReduceFailed, Lane
from swarmtrain.reduce.coding import Reduced
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import (
    Applied,
    Apply,
    Code,
    Prepare,
    Prepared,
    Preparing,
    ReducedPiece,
    ReduceShare,
    Unprepared,
)

log = logging.getLogger(__name__)

STEP_WAIT_S = 15.0
REPORT_S = 5.0  # how often the coordinator hears how an attempt goes
MAX_BUFFERED_STEPS = 64  # reduced gradients that a listener keeps, if its memory allows; then it needs a newer state
_STEP_JOB = -1  # step work has no microbatch


@dataclass(frozen=True)
class Ready:
    """A reduced sum waiting for its apply."""

    reduced: Reduced
    digest: str
    counted: frozenset[int]  # this peer's microbatches in it


class Steps:
    """Answers `Prepare`, `ReduceShare` and `Apply`."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self.listener = Listener(context)
        self.attempts = Attempts(context, self.listener)
        self.bases = Bases(context)
        self._ready: dict[int, Ready] = {}
        self._reducing: dict[tuple[int, int, int], Attempt] = {}
        self._decisions: dict[int, Apply] = {}  # a listener's, not yet applied
        self._applying = asyncio.Lock()
        self.last_applied: Applied | None = None
        # Whether a listener may apply what it hears to the state that it has. Not to the one with which it began to
        # listen: that may have the right number and be of a history that was taken back.
        self._may_follow = False
        self._snapshots = Snapshots(context)
        gradient_bytes = 4 * context.jobs.worker.state.gradient_size
        self._max_buffered = max(2, min(MAX_BUFFERED_STEPS, context.max_ledger_bytes // gradient_bytes))

    async def prepare(self, prepare: Prepare, exchange: Exchange) -> Prepared | Unprepared:
        """Reduce the stage's gradient with the others of the roster. The same attempt asked again joins the first."""
        context = self._context
        await context.check_coordinator(exchange.peer_id, prepare.run, prepare.term, prepare.stage)
        self._check_roster(prepare)
        if context.shares_work:
            context.siblings = tuple(e.peer_id for e in prepare.roster if e.peer_id != context.node.peer_id)
        if context.state is PeerState.SYNCING:
            task = self.listener.hear(prepare, self._receive)
        else:
            context.device.check()
            await context.reach_step(prepare.step, timeout_s=STEP_WAIT_S)
            task = await self.attempts.begin(prepare, self._prepare)
        return await self._ended(task, prepare, exchange)

    async def _ended(
        self, task: asyncio.Task[Prepared | Unprepared], prepare: Prepare, exchange: Exchange
    ) -> Prepared | Unprepared:
        """What an attempt comes to. Meanwhile the coordinator hears how it goes, and may call it off."""
        context, calling_off = self._context, asyncio.ensure_future(exchange.cancelled.wait())
        try:
            while not task.done():
                await asyncio.wait({task, calling_off}, timeout=REPORT_S, return_when=asyncio.FIRST_COMPLETED)
                if not task.done() and (calling_off.done() or context.device.hangs):
                    self.listener.call_off(prepare)
                    await self.attempts.call_off(prepare)
                    context.device.check()
                    raise context.refuse(Code.AHEAD, f"attempt {prepare.attempt} was called off")
                if not task.done():
                    exchange.progress(self._report(prepare))
        finally:
            calling_off.cancel()
        if task.cancelled():
            raise context.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up")
        return task.result()

    def _report(self, prepare: Prepare) -> Preparing:
        """How an attempt goes: before it reduces, and when it has, it is the device that works."""
        attempt = self._reducing.get((prepare.term, prepare.step, prepare.attempt))
        if attempt is None:
            return Preparing(0, True, (), ())
        return attempt.report(is_computing=attempt.is_finished)

    async def part(self, part: ReduceShare, exchange: Exchange) -> ReducedPiece:
        """Another peer's share of a piece that this peer owns."""
        context = self._context
        is_fused = part.lane == Lane.FUSED  # between two stages: the roster says who belongs to it
        await context.check_neighbour(part.run, part.term, context.stage if is_fused else part.stage)
        attempt = await self.attempts.of(part)
        reduction = await attempt.lane(Lane(part.lane))  # it may begin when another one has ended
        if reduction is None:
            raise context.refuse(Code.UNKNOWN, "this attempt was given up")
        return await reduction.take(part, exchange.peer_id)

    async def apply(self, apply: Apply, exchange: Exchange) -> Applied:
        """Apply the prepared sum and open the next step. Asked again, gives the same answer."""
        context = self._context
        await context.check_coordinator(exchange.peer_id, apply.run, apply.term)
        await self.listener.ended(apply.step)  # a newcomer may serve before it has all of the step under way
        if context.state is PeerState.SYNCING:
            return await self._note_decision(apply)
        if self.is_prepared:
            await self._learn_basis(apply)  # not under the lock: donors may be slow, and others want the state
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
        return self._context.step in self._ready or self._context.is_applying

    async def snapshot_of(self, step: int) -> StateSource | None:
        """A copy of the state of `step`: a kept one, or a new one while that is the current step."""
        async with self._applying:
            if step not in self._snapshots:
                if self.last_applied is None or self._context.step != step:
                    return None
                await self._snapshots.keep()
            return self._snapshots.fetch(step)

    async def load(self, source: StateSource, *, term: int) -> None:
        """A state that was ordered in `term` replaces this peer's; the decisions heard since then follow it."""
        context = self._context
        async with self._applying:
            self._ready = {step: item for step, item in self._ready.items() if step >= source.step}
            self._decisions = {step: item for step, item in self._decisions.items() if step >= source.step}
            await context.compute.run(Kind.STEP, _STEP_JOB, lambda: context.jobs.load_state(source))
            digest = (await context.compute.run(Kind.STEP, _STEP_JOB, context.jobs.state_digest)).value
            self.last_applied = Applied(source.step, digest)
            context.state_term, self._may_follow = term, True
            await context.enter_step(source.step)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Apply the decisions that a listener has heard, as far as they follow each other."""
        context = self._context
        while (apply := self._decisions.get(context.step)) is not None:
            await self._learn_basis(apply)
            async with self._applying:
                if self._decisions.get(context.step) is apply:
                    del self._decisions[apply.step]
                    await self._apply(apply, self._ready[apply.step])

    def drop_taken_back(self, term: int, step: int) -> None:
        """The coordinator of `term` counts `step` steps: what a former one decided beyond them was taken back."""
        for later in [key for key, apply in self._decisions.items() if key >= step and apply.term < term]:
            del self._decisions[later]
            self._ready.pop(later, None)

    async def forget(self) -> None:
        """Another state is coming: what was computed, prepared or decided before does not count."""
        context = self._context
        await self.attempts.forget()
        await self._stop_listener()
        async with self._applying:
            self._may_follow = False
            self._ready.clear()
            self._decisions.clear()
            await context.compute.run(Kind.STEP, _STEP_JOB, context.jobs.drop_work)
            await context.enter_step(context.step)

    async def close(self) -> None:
        """Give up what is under way."""
        await self.attempts.give_up()
        await self._stop_listener()

    async def _stop_listener(self) -> None:
        self.attempts.drop_past()
        await self.listener.stop()

    async def _note_decision(self, apply: Apply) -> Applied:
        """A listener hears a decision; it follows as soon as the state before it is there."""
        context = self._context
        ready = self._ready.get(apply.step)
        if ready is None or ready.digest != apply.digest:
            raise context.refuse(Code.UNPREPARED, f"the reduction of step {apply.step} was not heard here")
        await self._learn_basis(apply)
        self._decisions[apply.step] = apply
        if context.step == apply.step and self._may_follow:
            await self.catch_up()
        return self.last_applied or Applied(0, "")

    async def _apply(self, apply: Apply, ready: Ready) -> Applied:
        context = self._context
        basis = self.bases.known(apply) if apply.basis else None
        if apply.basis and basis is None:
            raise context.refuse(Code.UNKNOWN, f"the basis of step {apply.step} is not here yet", retry_after_s=1.0)
        # Used up: should this fail half-way, being told again must not apply it to what is left. Then the state is
        # fetched again.
        self._ready.pop(apply.step, None)
        context.is_applying = True  # what arrives from now on belongs to the next step
        try:
            timed = await context.compute.run(
                Kind.STEP,
                _STEP_JOB,
                lambda: context.jobs.apply(
                    ready.reduced, apply.scale, apply.learning_rate, basis, counted=ready.counted
                ),
            )
            applied = self.last_applied = Applied(apply.step + 1, timed.value)
            context.state_term = apply.term
            self._ready = {step: item for step, item in self._ready.items() if step > apply.step}
            self._snapshots.drop_unused()
            if apply.snapshot:
                await self._keep_snapshot()
            await context.enter_step(apply.step + 1)
        finally:
            context.is_applying = False
        context.faults.hit(Point.AFTER_APPLY)
        return applied

    async def _keep_snapshot(self) -> None:
        """A copy that cannot be made costs nobody but those who would have fetched it: the step is applied."""
        try:
            await self._snapshots.keep()
        except Exception as error:
            log.warning("no copy of the state after step %d is kept: %r", self._context.step, error)

    async def _learn_basis(self, apply: Apply) -> None:
        """Learn where the subspace moves with this step, if it does: without that the step cannot be applied yet."""
        if not apply.basis:
            return
        try:
            await self.bases.learn(apply)
        except BasisMissing as error:
            raise self._context.refuse(Code.UNKNOWN, str(error), retry_after_s=1.0) from error

    async def _receive(self, prepare: Prepare) -> Prepared | Unprepared:
        return await self._prepare(prepare, listens=True)

    async def _prepare(self, prepare: Prepare, *, listens: bool = False) -> Prepared | Unprepared:
        context = self._context
        mine = entry_of(prepare, context.node.peer_id, context.incarnation)
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
            try:
                share = await self._share(ledger, wanted, prepare.step)
            except StaleWork as error:
                return Unprepared(b"", (), str(error))
        context.faults.hit(Point.IN_PREPARE)
        attempt = Attempt(context, prepare, share)
        if not listens:  # who does owns nothing: nobody asks it for parts
            await self.attempts.reduce_in(attempt)
        self._reducing[attempt.key] = attempt
        try:
            return await self._reduce(attempt, frozenset(wanted))
        finally:
            self._reducing.pop(attempt.key, None)

    async def _reduce(self, attempt: Attempt, counted: frozenset[int]) -> Prepared | Unprepared:
        context, prepare = self._context, attempt.prepare
        try:
            with context.compute.split.during(TimePart.REDUCE):
                reduced = await attempt.run()
        except AllReduceFailed as error:
            log.info("reduction of step %d failed: %s", prepare.step, error)
            return Unprepared(b"", error.suspects, str(error)[:1000])
        attempt.finish()
        finished = await context.compute.run(Kind.STEP, _STEP_JOB, lambda: context.jobs.finish(reduced.gradient))
        squared_norm, digest = finished.value
        self._ready[prepare.step] = Ready(reduced, digest, counted)
        return Prepared(squared_norm, digest, await self.bases.propose(prepare.step, reduced.gradient))

    async def _share(self, ledger: Ledger, wanted: set[int], step: int) -> Tensor:
        context = self._context
        entries = list(ledger)
        timed = await context.compute.run(
            Kind.STEP, _STEP_JOB, lambda: context.jobs.reconciled_share(entries, wanted, step)
        )
        return timed.value

    def _check_roster(self, prepare: Prepare) -> None:
        """Refuse a roster whose parts do not add up, before anything is allocated for it."""
        context = self._context
        fault = fault_of(prepare, context.jobs.worker.state.layout, context.node.peer_id)
        if fault:
            raise context.refuse(Code.BAD_ROSTER, fault)
