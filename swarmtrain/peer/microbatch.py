"""The heart of the peer: one microbatch on one stage.

    receive, compute forward, choose and call a peer downstream, compute backward, answer

Rules (docs/protocol.md): same id, same answer; the caller replays what a lost peer had; a lost caller does not cancel
the work.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial

from swarmtrain.chain.dispatch import Dispatcher, Sticky
from swarmtrain.codec import Direction
from swarmtrain.codec.errors import NonFiniteTensor
from swarmtrain.codec.policy import SendEstimate, is_critical
from swarmtrain.errors import DivergedError
from swarmtrain.observe.faults import Action, Point, damaged
from swarmtrain.observe.split import Part
from swarmtrain.peer.codecs import BadTensor, WrongPartner
from swarmtrain.peer.compute import Withdrawn
from swarmtrain.peer.divergences import Divergences
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.jobs import Outcome, StaleWork
from swarmtrain.peer.ledger import Entry, Ledger, Raw
from swarmtrain.peer.parcels import Parcels
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.peer.work_stealing import Thief
from swarmtrain.rpc.errors import Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import Code, Done, Hop, Progress, Replay, Work

log = logging.getLogger(__name__)

STEP_WAIT_S = 15.0  # how long work of the next step waits for this step's apply
ROUND_WAIT_S = 5.0  # how long work of a round waits for the coordinator's word that it has begun
_MIN_CALL_S = 5.0


@dataclass
class _Spent:
    """Where the time of one microbatch went on this stage."""

    queue_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0


class Microbatches:
    """Answers `Work` and `Replay`."""

    def __init__(
        self,
        peer: PeerIdentity,
        clock: StepClock,
        stage: Stage,
        dispatcher: Dispatcher | None,
        thief: Thief,
        *,
        max_queue: int,
    ) -> None:
        """`dispatcher` calls the next stage; None on the last one. A queue of `max_queue` jobs is full."""
        self._peer, self._clock, self._stage = peer, clock, stage
        self._dispatcher, self._thief, self._max_queue = dispatcher, thief, max_queue
        self._parcels = Parcels(peer.run_id, peer.stage, peer.sign)
        self._divergences = Divergences()

    async def work(self, work: Work, exchange: Exchange) -> Done:
        """Have a microbatch done. Asked again for a finished one, answers from the ledger."""
        peer, clock = self._peer, self._clock
        await self._admit(work, exchange)
        if work.evaluate:
            self._check_diverged(work)
            return await self._evaluate(work, exchange)
        await self._enter_round(work)
        self._check_diverged(work)
        ledger = clock.ledger_of(work.step)
        entry = ledger.get(work.microbatch)
        if entry is not None and entry.answer is not None:
            peer.counters.from_ledger += 1
            await self._give_up_sticky(entry, exchange.peer_id)
            if self._has_other_mask(entry, work):
                return await self._with_mask(entry, work.step, entry.answer)
            return entry.answer
        is_first = entry is None
        if entry is None:
            if not self._parcels.is_from(work, exchange.peer_id):
                raise peer.refuse(Code.BAD_TENSOR, "its sender has not signed it")
            entry = self._open(ledger, work, exchange)
            serving = self._serve(ledger, entry, work, _left_s(exchange))
            entry.task = asyncio.create_task(serving, name=f"microbatch {work.microbatch}")
        else:
            peer.counters.joined += 1
            entry.was_stolen = entry.was_stolen or work.is_stolen
        assert entry.task is not None
        entry.callers[exchange] = None
        try:
            answer = await self._stage.device.unless_it_hangs(asyncio.shield(entry.task))
        finally:
            entry.callers.pop(exchange, None)
        if not is_first and self._has_other_mask(entry, work):
            await self._give_up_sticky(entry, exchange.peer_id)
            return await self._with_mask(entry, work.step, answer)
        if entry.sticky is not None and entry.caller == exchange.peer_id:
            return replace(answer, gradient=entry.sticky.payload)
        return answer

    async def _enter_round(self, work: Work) -> None:
        """Refuse what was computed from work that does not count any more. Only the coordinator begins a round.

        One that a neighbour names must have been heard from the coordinator itself.
        """
        peer, clock = self._peer, self._clock
        if work.stage == 0:
            await clock.begin_anew(work.step, work.microbatch, work.round)
        elif work.round > clock.round_of(work.step, work.microbatch):
            peer.authority.ask_for_news()
            if not await clock.reach_round(work.step, work.microbatch, work.round, timeout_s=ROUND_WAIT_S):
                raise peer.refuse(Code.BEHIND, f"round {work.round} is not known here", retry_after_s=0.5)
        if work.step < clock.step or work.round < clock.round_of(work.step, work.microbatch):
            raise peer.refuse(Code.AHEAD, f"({work.step}, {work.microbatch}) was begun anew")

    def _open(self, ledger: Ledger, work: Work, exchange: Exchange) -> Entry:
        """Take a microbatch into its step's ledger, if there is room."""
        self._stage.device.check()
        self._check_room(work.step)
        entry = ledger.open(work.microbatch, bytes(work.tokens), bytes(work.boundary), round=work.round)
        entry.hops = {hop.stage: hop for hop in work.hints}
        entry.generation = self._stage.jobs.generation
        entry.caller, entry.signature = exchange.peer_id, bytes(work.signature)
        entry.was_stolen = work.is_stolen
        if work.is_stolen:
            self._thief.stolen_work_came()
        entry.caller_busy_until = asyncio.get_running_loop().time() + work.backlog_s
        return entry

    def _has_other_mask(self, entry: Entry, work: Work) -> bool:
        """Whether this caller has sent other bytes than the first one, and so left out something else.

        A codec that remembers makes other bytes of a microbatch that was given up or whose first sender has died; a
        machine that rounds differently may.
        """
        return self._stage.codecs.sends_masks and bytes(work.boundary) != entry.boundary

    async def _with_mask(self, entry: Entry, step: int, answer: Done) -> Done:
        """The answer, as a caller with another mask can decode it."""
        if not entry.with_mask:
            try:
                entry.with_mask = await self._stage.with_mask(entry, step, answer.gradient)
            except BadTensor as error:
                raise self._as_refusal(error) from error
        signature = self._parcels.signed_gradient(entry, entry.with_mask)
        return replace(answer, gradient=entry.with_mask, signature=signature)

    async def _give_up_sticky(self, entry: Entry, caller: str) -> None:
        """The caller asks again: it could not decode the difference, or never got it. The next one goes whole."""
        sticky = entry.sticky
        if sticky is None or entry.caller != caller:
            return
        entry.sticky = None
        await self._stage.settle(Direction.BACKWARD, sticky.ticket, delivered=False)

    async def replay(self, replay: Replay, exchange: Exchange) -> Done:
        """Give a finished microbatch to the next stage once more, with the same bytes: a peer there lost it."""
        peer, clock, stage = self._peer, self._clock, self._stage
        await peer.check_coordinator(exchange.peer_id, replay.run, replay.term)
        await clock.reach(replay.step, timeout_s=STEP_WAIT_S)
        entry = clock.ledger_of(replay.step).get(replay.microbatch)
        if entry is None or entry.answer is None or entry.round != replay.round or self._dispatcher is None:
            raise peer.refuse(Code.UNKNOWN, f"({replay.step}, {replay.microbatch}) is not finished here")
        stage.device.check()
        peer.counters.replayed += 1
        work = Work(
            run=replay.run,
            term=replay.term,
            stage=peer.stage + 1,
            step=replay.step,
            microbatch=replay.microbatch,
            basis_epoch=stage.state.basis_epoch,
            evaluate=False,
            hints=replay.hints,
            tokens=entry.tokens,
            boundary=entry.output,
            round=entry.round,
        )
        work = replace(work, signature=self._parcels.signed_output(work))
        check = partial(self._check_answer, entry, work, keep=False)
        try:
            with stage.split.during(Part.WIRE):
                calling = self._dispatcher.call(work, deadline_s=_left_s(exchange), check=check)
                downstream = await stage.device.unless_it_hangs(calling)
        except StaleWork as error:
            raise self._as_refusal(error) from error
        return Done(downstream.loss, (peer.hop, *downstream.route), 0.0, 0.0, 0.0, b"", self._load_s)

    async def _serve(self, ledger: Ledger, entry: Entry, work: Work, deadline_s: float) -> Done:
        """The way of one microbatch through this stage. Not cancelled by a lost caller."""
        peer, stage = self._peer, self._stage
        spent, started = _Spent(), asyncio.get_running_loop().time()
        try:
            peer.faults.hit(Point.BEFORE_FORWARD)
            if entry.was_stolen:
                peer.faults.hit(Point.STOLEN_WORK)
            partner = ""
            if self._dispatcher is not None and stage.codecs.has_sticky_routes:
                partner = self._dispatcher.partner(len(work.tokens))
            if stage.codecs.has_sticky_routes:
                await stage.take_boundary(entry, work.step, entry.caller)
            if self._dispatcher is None:
                entry.is_critical = self._is_critical(entry)  # the last stage encodes the gradient in the same job
            timed = await stage.forward(entry, work.step, partner)
            peer.faults.hit(Point.AFTER_FORWARD)
            spent.queue_s, spent.forward_s = timed.queue_s, timed.run_s
            if self._dispatcher is None:
                answer = self._answer(entry, spent, timed.value.payload, timed.value.loss)
            else:
                downstream, gradient = await self._downstream_gradient(entry, work, timed.value, partner, deadline_s)
                peer.faults.hit(Point.BEFORE_BACKWARD)
                entry.is_critical = self._is_critical(entry)
                back = await stage.backward(entry, work.step, gradient)
                spent.queue_s += back.queue_s
                spent.backward_s = back.run_s
                entry.callee, entry.callee_signature = downstream.route[0].peer_id, bytes(downstream.signature)
                answer = self._answer(entry, spent, back.value.payload, downstream.loss, downstream)
        except Withdrawn as withdrawn:
            ledger.drop(entry)
            raise peer.refuse(Code.REDIRECTED, "stolen", redirect_to=entry.stolen_by) from withdrawn
        except BaseException as error:
            if not entry.accumulated:
                ledger.drop(entry)
                stage.jobs.forget(entry)
            raise self._noted(work, self._as_refusal(error)) from error
        entry.answer = answer
        entry.task = None
        self._thief.served(entry, answer)
        peer.counters.microbatches += 1
        total_s = asyncio.get_running_loop().time() - started
        peer.counters.times.add(spent.queue_s, spent.forward_s + spent.backward_s, total_s)
        if peer.faults.hit(Point.BEFORE_ANSWER) is Action.CORRUPT:
            return replace(answer, gradient=damaged(answer.gradient))
        return answer

    def _check_diverged(self, work: Work) -> None:
        text = self._divergences.of(work)
        if text is not None:
            raise self._peer.refuse(Code.DIVERGED, text)

    def _noted(self, work: Work, error: BaseException) -> BaseException:
        """The error; if training diverged, the same work is refused from now on without computing it again."""
        if isinstance(error, Refusal) and error.code == Code.DIVERGED:
            self._divergences.note(work, error.text)
        return error

    def _is_critical(self, entry: Entry) -> bool:
        """Whether the caller would stand idle for the exact gradient, and less for the compressed one.

        An exact one on a line of which nothing is known measures it; a compressed one is often too small for that.
        """
        peer, stage = self._peer, self._stage
        if not stage.codecs.compresses_if_critical:
            return True
        critical, rate = None, peer.node.estimate(entry.caller).up_bytes_per_s
        if rate:
            other_work_s = max(0.0, entry.caller_busy_until - asyncio.get_running_loop().time())
            critical = is_critical(SendEstimate(other_work_s, *stage.codecs.critical_times(rate)))
        peer.counters.critical[critical] += 1
        return critical is True

    async def _downstream_gradient(
        self, entry: Entry, work: Work, outcome: Outcome, partner: str, deadline_s: float
    ) -> tuple[Done, Raw]:
        """The next stage's answer and its gradient. A difference that cannot be decoded is asked for once more."""
        ticket = outcome.ticket
        sticky = Sticky(partner, outcome.sticky) if ticket is not None else None
        try:
            downstream = await self._call_downstream(entry, work, outcome.payload, deadline_s, sticky)
        finally:
            if sticky is not None and ticket is not None:
                await self._stage.settle(Direction.FORWARD, ticket, delivered=sticky.delivered)
        try:
            return downstream, await self._take_gradient(entry, work.step, downstream)
        except WrongPartner:
            entry.hops[self._peer.stage + 1] = downstream.route[0]
            downstream = await self._call_downstream(entry, work, outcome.payload, deadline_s)
            return downstream, await self._take_gradient(entry, work.step, downstream)

    async def _take_gradient(self, entry: Entry, step: int, downstream: Done) -> Raw:
        if not self._stage.codecs.has_sticky_answers:
            return downstream.gradient
        return await self._stage.take_gradient(entry, step, downstream.gradient, downstream.route[0].peer_id)

    async def _call_downstream(
        self, entry: Entry, work: Work, payload: bytes, deadline_s: float, sticky: Sticky | None = None
    ) -> Done:
        peer, stage = self._peer, self._stage
        assert self._dispatcher is not None
        request = Work(
            run=work.run,
            term=peer.term,
            stage=peer.stage + 1,
            step=work.step,
            microbatch=work.microbatch,
            basis_epoch=work.basis_epoch,
            evaluate=work.evaluate,
            hints=tuple(entry.hops.values()),
            tokens=entry.tokens,
            boundary=payload,
            backlog_s=stage.compute.backlog_s(),
            round=work.round,
        )
        if not work.evaluate:
            request = replace(request, signature=self._parcels.signed_output(request))
        self._tell(entry, ())

        def progress(item: Progress) -> None:
            self._tell(entry, item.hops)

        check = partial(self._check_answer, entry, request, keep=True)
        with stage.split.during(Part.WIRE):
            return await self._dispatcher.call(
                request, deadline_s=deadline_s, on_progress=progress, check=check, sticky=sticky
            )

    async def _evaluate(self, work: Work, exchange: Exchange) -> Done:
        """A validation microbatch: forward only, touches no ledger."""
        peer, stage = self._peer, self._stage
        stage.device.check()
        self._check_room(work.step)
        try:
            computing = stage.evaluate(work.tokens, work.boundary, work.step, work.microbatch)
            timed = await stage.device.unless_it_hangs(computing)
            peer.counters.evaluated += 1
            if self._dispatcher is None:
                return Done(timed.value.loss, (peer.hop,), timed.queue_s, timed.run_s, 0.0, b"", self._load_s)
            entry = Entry(work.step, work.microbatch, work.tokens, work.boundary)
            exchange.progress(Progress((peer.hop,), self._load_s))
            downstream = await self._call_downstream(entry, work, timed.value.payload, _left_s(exchange))
        except BaseException as error:
            raise self._noted(work, self._as_refusal(error)) from error
        return Done(downstream.loss, (peer.hop, *downstream.route), timed.queue_s, timed.run_s, 0.0, b"", self._load_s)

    async def _admit(self, work: Work, exchange: Exchange) -> None:
        peer, clock, stage = self._peer, self._clock, self._stage
        if work.stage == 0:
            await peer.check_coordinator(exchange.peer_id, work.run, work.term, work.stage)
        else:
            await peer.check_neighbour(work.run, work.term, work.stage)
            peer.check_upstream(exchange.peer_id)
        is_later = work.step > clock.step and not clock.is_open(work.step)
        if is_later and peer.state in (PeerState.PAUSED, PeerState.DRAINING):
            # It takes nothing of a later step, and may not even see it: it need not have work in this one.
            raise peer.refuse(Code.NOT_SERVING, f"this peer is {peer.state}")
        if work.evaluate:
            await clock.reach_current(work.step, timeout_s=STEP_WAIT_S)
        else:
            await clock.reach(work.step, timeout_s=STEP_WAIT_S)
        if not peer.has_contact:  # its answers would lead through a peer that is not counted
            raise peer.refuse(Code.NOT_SERVING, "this peer does not hear the coordinator", retry_after_s=1.0)
        is_known = not work.evaluate and clock.ledger_of(work.step).get(work.microbatch) is not None
        if peer.state is not PeerState.SERVING and not is_known:
            raise peer.refuse(Code.NOT_SERVING, f"this peer is {peer.state}")
        if work.basis_epoch != stage.state.basis_epoch:
            raise peer.refuse(Code.STALE_BASIS, f"the basis epoch here is {stage.state.basis_epoch}")
        num_microbatches = stage.manifest.batch.microbatches_per_step
        if not work.evaluate and work.microbatch >= num_microbatches:
            raise peer.refuse(Code.BAD_TENSOR, f"a step has {num_microbatches} microbatches")
        try:
            stage.codecs.check_tokens(work.tokens)
        except BadTensor as error:
            raise peer.refuse(Code.BAD_TENSOR, str(error)) from error

    def _check_room(self, step: int) -> None:
        compute = self._stage.compute
        waiting = compute.backlog()
        if waiting >= self._max_queue or self._clock.is_full(step):
            retry_after_s = 0.05 + 0.5 * compute.backlog_s()
            raise self._peer.refuse(Code.BUSY, f"{waiting} jobs wait", retry_after_s)

    async def _check_answer(self, entry: Entry, work: Work, done: Done, *, keep: bool) -> None:
        """Raise ValueError for an answer that cannot be right: then another peer is asked. `keep`: backward follows.

        StaleWork says nothing about the answer: it is this peer that has gone on.
        """
        if [hop.stage for hop in done.route] != list(range(work.stage, self._stage.manifest.stages.count)):
            raise ValueError("an answer whose route does not lead through all stages")
        if not work.evaluate:
            if not self._parcels.is_answer_of(entry, done):
                raise ValueError("an answer that is not signed by the peer that its route names")
            await self._stage.check_gradient(entry, work.step, done.gradient, keep=keep)

    def _tell(self, entry: Entry, hops: tuple[Hop, ...]) -> None:
        """Progress flows upstream, so that callers know which peer has the microbatch when this one dies."""
        for hop in hops:
            entry.hops[hop.stage] = hop
        item = Progress((self._peer.hop, *entry.hops.values()), self._load_s)
        for exchange in entry.callers:
            exchange.progress(item)

    def _answer(self, entry: Entry, spent: _Spent, payload: bytes, loss: float, downstream: Done | None = None) -> Done:
        return Done(
            loss=loss,
            route=(self._peer.hop, *(downstream.route if downstream is not None else ())),
            queue_s=spent.queue_s,
            forward_s=spent.forward_s,
            backward_s=spent.backward_s,
            gradient=payload,
            load_s=self._load_s,
            waited_s=spent.queue_s + (downstream.waited_s if downstream is not None else 0.0),
            signature=self._parcels.signed_gradient(entry, payload),
        )

    @property
    def _load_s(self) -> float:
        return self._stage.load_s(self._clock.num_open)

    def _as_refusal(self, error: BaseException) -> BaseException:
        if isinstance(error, BadTensor):
            return self._peer.refuse(Code.BAD_TENSOR, str(error))
        if isinstance(error, WrongPartner):
            return self._peer.refuse(Code.NEED_KEYFRAME, str(error))
        if isinstance(error, StaleWork):
            return self._peer.refuse(Code.AHEAD, str(error))
        if isinstance(error, DivergedError | NonFiniteTensor):
            return self._peer.refuse(Code.DIVERGED, str(error))
        if isinstance(error, Refusal):
            return Refusal.of(error.payload)
        return error


def _left_s(exchange: Exchange) -> float:
    """For how long the caller waits; long enough for a call downstream in any case."""
    return max(_MIN_CALL_S, exchange.deadline - asyncio.get_running_loop().time())
