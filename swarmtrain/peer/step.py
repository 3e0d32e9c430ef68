"""A step at a peer, in the order in which it happens: prepare -> all-reduce -> apply.

    prepare   the coordinator names the roster: the sum is made to hold exactly this peer's microbatches of it,
              and is reduced with the others of the stage
    apply     the coordinator has decided: one optimizer step, and the next step begins

With `schedule.delay` the next step's microbatches are computed meanwhile, with weights of their own (step_clock.py).

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
from swarmtrain.observe.split import Part
from swarmtrain.peer.attempt import Attempt, Attempts, Listener, roster_fault
from swarmtrain.peer.basis import Bases, BasisMissing
from swarmtrain.peer.compute import see_exception
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.jobs import StaleWork
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.reduce.all_reduce import AllReduceFailed, Lane
from swarmtrain.reduce.coding import Reduced
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import (
    Applied,
    Apply,
    Code,
    Prepare,
    Prepared,
    ReducedPiece,
    ReduceShare,
    Unprepared,
)

log = logging.getLogger(__name__)

STEP_WAIT_S = 15.0
REPORT_S = 5.0  # how often the coordinator is told how an attempt goes
MAX_BUFFERED_STEPS = 64  # reduced gradients that a listener keeps, if its memory allows; then it needs a newer state


@dataclass(frozen=True)
class Ready:
    """A reduced sum waiting for its apply."""

    reduced: Reduced
    digest: str
    counted: frozenset[int]  # this peer's microbatches in it


class StepProtocol:
    """Answers `Prepare`, `ReduceShare` and `Apply`."""

    def __init__(self, peer: PeerIdentity, clock: StepClock, stage: Stage) -> None:
        self._peer, self._clock, self._stage = peer, clock, stage
        self.listener = Listener(peer, stage)
        self.attempts = Attempts(peer, stage)
        self.bases = Bases(peer, clock, stage)
        self._ready: dict[int, Ready] = {}  # by step
        self._decisions: dict[int, Apply] = {}  # a listener's, not yet applied
        self._applying = asyncio.Lock()
        self.last_applied: Applied | None = None
        # Whether a listener may apply what it hears to the state that it has. Not to the one with which it began to
        # listen: that may have the right number and be of a history that was taken back.
        self._may_follow = False
        self._max_buffered = max(2, min(MAX_BUFFERED_STEPS, clock.max_ledger_bytes // (4 * stage.layout.gradient_size)))

    # -- prepare

    async def prepare(self, prepare: Prepare, exchange: Exchange) -> Prepared | Unprepared:
        """Reduce the stage's gradient with the others of the roster. The same attempt asked again joins the first."""
        peer = self._peer
        await peer.check_coordinator(exchange.peer_id, prepare.run, prepare.term, prepare.stage)
        fault = roster_fault(prepare, self._stage.layout, peer.peer_id)
        if fault:
            raise peer.refuse(Code.BAD_ROSTER, fault)
        if peer.shares_work:
            peer.siblings = tuple(entry.peer_id for entry in prepare.roster if entry.peer_id != peer.peer_id)
        if peer.state is PeerState.SYNCING:
            attempt = self._listen(prepare)
        else:
            self._stage.device.check()
            await self._clock.reach_current(prepare.step, timeout_s=STEP_WAIT_S)
            attempt = await self._take_part(prepare)
        return await self._ended(attempt, exchange)

    async def _take_part(self, prepare: Prepare) -> Attempt:
        """A serving peer's attempt: the newest that was asked for; the one before is given up."""
        peer, attempts = self._peer, self.attempts
        async with attempts.replacing:
            attempt = attempts.known(prepare)
            if prepare.step != self._clock.step:
                raise peer.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up")
            if peer.state is PeerState.SYNCING:
                raise peer.refuse(Code.BEHIND, "this peer begins to fetch its state", retry_after_s=0.5)
            if attempt is None:
                self.listener.drop()  # it is one of the others now
                attempt = await attempts.open(prepare)
                attempt.start(self._reduce(attempt))
            return attempt

    def _listen(self, prepare: Prepare) -> Attempt:
        """A newcomer's attempt: it owns no pieces, and takes one step after the other."""
        self.listener.drop(before=self._clock.step)
        attempt = self.listener.known(prepare)
        if attempt is None:
            attempt = self.listener.open(prepare)
            attempt.start(self._receive(attempt))
        return attempt

    async def _ended(self, attempt: Attempt, exchange: Exchange) -> Prepared | Unprepared:
        """What an attempt comes to. Meanwhile the coordinator hears how it goes, and may call it off."""
        peer, device, task = self._peer, self._stage.device, attempt.task
        calling_off = asyncio.ensure_future(exchange.cancelled.wait())
        try:
            while not task.done():
                await asyncio.wait({task, calling_off}, timeout=REPORT_S, return_when=asyncio.FIRST_COMPLETED)
                if not task.done() and (calling_off.done() or device.hangs):
                    self.listener.call_off(attempt)
                    await self.attempts.call_off(attempt)
                    device.check()
                    raise peer.refuse(Code.AHEAD, f"attempt {attempt.prepare.attempt} was called off")
                if not task.done():
                    exchange.progress(attempt.report())
        finally:
            calling_off.cancel()
        if task.cancelled():
            raise peer.refuse(Code.AHEAD, f"attempt {attempt.prepare.attempt} was given up")
        return task.result()

    # -- all-reduce

    async def _receive(self, attempt: Attempt) -> Prepared | Unprepared:
        """A listener's part: when the steps before this one are here."""
        async with self.listener.turn:
            if len(self._ready) >= self._max_buffered:
                answer: Prepared | Unprepared = Unprepared(b"", (), "too many steps behind to keep more of them")
            else:
                answer = await self._reduce(attempt)
        if isinstance(answer, Unprepared):
            self.listener.drop_after(attempt.prepare)
        return answer

    async def _reduce(self, attempt: Attempt) -> Prepared | Unprepared:
        """Make the sum hold what the roster says, reduce it with the others, and keep it for the decision."""
        peer, clock, stage, prepare = self._peer, self._clock, self._stage, attempt.prepare
        mine = [e for e in prepare.roster if (e.peer_id, e.incarnation) == (peer.peer_id, peer.incarnation)]
        if not mine:
            return Unprepared(b"", (), "the roster does not name this incarnation of the peer")
        wanted = set(np.frombuffer(mine[0].microbatches, dtype="<u4").tolist())
        share = None
        if wanted:
            if clock.step != prepare.step:
                return Unprepared(b"", (), f"this peer is at step {clock.step}")
            ledger = clock.ledger
            missing = sorted(wanted - ledger.finished())
            if missing:
                return Unprepared(np.array(missing, dtype="<u4").tobytes(), (), "not in this peer's ledger")
            try:
                share = await stage.reconciled_share(ledger, wanted)
            except StaleWork as error:
                return Unprepared(b"", (), str(error))
        peer.faults.hit(Point.IN_PREPARE)
        sealing = self._sealed(share)
        try:
            with stage.split.during(Part.REDUCE):
                reduced = await attempt.all_reduce(share)
        except AllReduceFailed as error:
            log.info("the all-reduce of step %d failed: %s", prepare.step, error)
            return Unprepared(b"", error.suspects, str(error)[:1000], error.refused_by[:16])
        ranges = await self._ranges(attempt, reduced.gradient)
        squared_norm, digest = await stage.finish(reduced.gradient)
        self._ready[prepare.step] = Ready(reduced, digest, frozenset(wanted))
        basis = await self.bases.propose(prepare.step, reduced.gradient)
        return Prepared(squared_norm, digest, basis, share=await sealing, ranges=ranges)

    async def _ranges(self, attempt: Attempt, reduced: Tensor) -> bytes:
        """The digests of what each owner has added up, where its sum came as it is and from it alone."""
        prepare = attempt.prepare
        owned = [entry.owned for entry in prepare.roster if entry.owned]
        is_plain = not prepare.fused and not prepare.compress and not any(entry.group for entry in prepare.roster)
        if not self._clock.manifest.checks.share or not is_plain:
            return b""
        return await self._stage.range_digests(reduced, owned)

    def _sealed(self, share: Tensor | None) -> asyncio.Future[str]:
        """The digest of this peer's own part of the sum, made while it is added to the others'."""
        if share is None or not self._clock.manifest.checks.share:
            empty: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            empty.set_result("")
            return empty
        sealing = asyncio.ensure_future(self._stage.share_digest(share))
        sealing.add_done_callback(see_exception)
        return sealing

    async def reduce_share(self, share: ReduceShare, exchange: Exchange) -> ReducedPiece:
        """Another peer's share of a piece that this peer owns; answered when the piece is complete."""
        peer = self._peer
        is_fused = share.lane == Lane.FUSED  # between two stages: the roster says which peers belong to it
        await peer.check_neighbour(share.run, share.term, peer.stage if is_fused else share.stage)
        attempt = await self.attempts.of(share)
        reduction = await attempt.lane(Lane(share.lane))  # it may begin when another one has ended
        if reduction is None:
            raise peer.refuse(Code.UNKNOWN, "this attempt was given up")
        return await reduction.receive_share(share, exchange.peer_id, exchange.release)

    # -- apply

    async def apply(self, apply: Apply, exchange: Exchange) -> Applied:
        """Apply the prepared sum and open the next step. Asked again, gives the same answer."""
        peer, clock = self._peer, self._clock
        await peer.check_coordinator(exchange.peer_id, apply.run, apply.term)
        await self.listener.ended(apply.step)  # a newcomer may serve before it has all of the step under way
        if peer.state is PeerState.SYNCING:
            return await self._note_decision(apply)
        if self.is_prepared:
            await self._learn_basis(apply)  # not under the lock: donors may be slow, and others want the state
        async with self._applying:
            if clock.step == apply.step + 1 and self.last_applied is not None:
                return self.last_applied
            if clock.step != apply.step:
                code = Code.BEHIND if clock.step < apply.step else Code.AHEAD
                raise peer.refuse(code, f"this peer is at step {clock.step}")
            ready = self._ready.get(apply.step)
            if ready is None or ready.digest != apply.digest:
                raise peer.refuse(Code.UNPREPARED, f"no prepared sum of step {apply.step} with this digest")
            if peer.faults.hit(Point.BEFORE_APPLY) is Action.CORRUPT:
                await self._stage.damage_state()
            return await self._apply(apply, ready)

    async def _apply(self, apply: Apply, ready: Ready) -> Applied:
        """With the lock held."""
        peer, clock, stage = self._peer, self._clock, self._stage
        basis = self.bases.known(apply) if apply.basis else None
        if apply.basis and basis is None:
            raise peer.refuse(Code.UNKNOWN, f"the basis of step {apply.step} is not here yet", retry_after_s=1.0)
        # Used up: should this fail half-way, being told again must not apply it to what is left. Then the state is
        # fetched again.
        self._ready.pop(apply.step, None)
        clock.is_applying = True  # what arrives from now on belongs to later steps
        try:
            digest = await stage.apply(ready.reduced, apply.scale, apply.learning_rate, basis, counted=ready.counted)
            applied = self.last_applied = Applied(apply.step + 1, digest)
            peer.state_term = apply.term
            self._ready = {step: item for step, item in self._ready.items() if step > apply.step}
            stage.snapshots.drop_unused()
            if apply.snapshot:
                await self._keep_snapshot()
            await clock.advance()
        finally:
            clock.is_applying = False
        peer.faults.hit(Point.AFTER_APPLY)
        return applied

    async def _keep_snapshot(self) -> None:
        """A copy that cannot be made costs only those that would have fetched it: the step is applied."""
        try:
            await self._stage.snapshots.keep()
        except Exception as error:
            log.warning("no copy of the state after step %d is kept: %r", self._clock.step, error)

    async def _learn_basis(self, apply: Apply) -> None:
        """Learn where the subspace moves with this step, if it does: without that the step cannot be applied yet."""
        if not apply.basis:
            return
        try:
            await self.bases.learn(apply)
        except BasisMissing as error:
            raise self._peer.refuse(Code.UNKNOWN, str(error), retry_after_s=1.0) from error

    @property
    def is_prepared(self) -> bool:
        """Whether this step's sum is reduced here and its decision is awaited."""
        return self._clock.step in self._ready or self._clock.is_applying

    # -- a listener follows

    async def _note_decision(self, apply: Apply) -> Applied:
        """A listener hears a decision; it follows as soon as the state before it is there."""
        ready = self._ready.get(apply.step)
        if ready is None or ready.digest != apply.digest:
            raise self._peer.refuse(Code.UNPREPARED, f"the all-reduce of step {apply.step} was not heard here")
        await self._learn_basis(apply)
        self._decisions[apply.step] = apply
        if self._clock.step == apply.step and self._may_follow:
            await self.catch_up()
        # The state with which it began to listen may have this number, and be of a history that was taken back.
        return (self.last_applied if self._may_follow else None) or Applied(0, "")

    async def catch_up(self) -> None:
        """Apply the decisions that a listener has heard, as far as they follow each other."""
        clock = self._clock
        while (apply := self._decisions.get(clock.step)) is not None:
            await self._learn_basis(apply)
            async with self._applying:
                if self._decisions.get(clock.step) is apply:
                    del self._decisions[apply.step]
                    await self._apply(apply, self._ready[apply.step])

    def drop_taken_back(self, term: int, step: int) -> None:
        """The coordinator of `term` counts `step` steps: what a former one decided beyond them was taken back."""
        for later in [key for key, apply in self._decisions.items() if key >= step and apply.term < term]:
            del self._decisions[later]
            self._ready.pop(later, None)

    # -- another state

    async def snapshot_of(self, step: int) -> StateSource | None:
        """A copy of the state of `step`: a kept one, or a new one while that is the current step."""
        snapshots = self._stage.snapshots
        async with self._applying:
            if step not in snapshots:
                if self.last_applied is None or self._clock.step != step:
                    return None
                await snapshots.keep()
            return snapshots.fetch(step)

    async def load(self, source: StateSource, *, term: int) -> None:
        """A state that was ordered in `term` replaces this peer's; the decisions heard since then follow it."""
        async with self._applying:
            self._ready = {step: item for step, item in self._ready.items() if step >= source.step}
            self._decisions = {step: item for step, item in self._decisions.items() if step >= source.step}
            digest = await self._stage.load_state(source)
            self.last_applied = Applied(source.step, digest)
            self._peer.state_term, self._may_follow = term, True
            await self._clock.enter(source.step)
        await self.catch_up()

    async def forget(self) -> None:
        """Another state is coming: what was computed, prepared or decided before does not count."""
        await self.attempts.forget()
        await self._stop_listener()
        async with self._applying:
            self._may_follow = False
            self._ready.clear()
            self._decisions.clear()
            await self._stage.drop_work()
            await self._clock.enter(self._clock.step)

    async def close(self) -> None:
        """Give up what is under way."""
        await self.attempts.give_up()
        await self._stop_listener()

    async def _stop_listener(self) -> None:
        self.attempts.drop_past()
        await self.listener.stop()
