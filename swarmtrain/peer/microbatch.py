"""The heart of the peer: one microbatch on one stage.

    receive, compute forward, choose and call the next stage, compute backward, answer

Rules (docs/protocol.md): same id, same answer; whoever calls, replays; a lost caller does not cancel the work.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial

from swarmtrain.chain.dispatch import Sticky
from swarmtrain.codec import Direction
from swarmtrain.codec.errors import NonFiniteTensor
from swarmtrain.codec.policy import SendEstimate, is_critical
from swarmtrain.errors import DivergedError
from swarmtrain.observe.faults import Action, Point, damaged
from swarmtrain.observe.split import Part
from swarmtrain.peer.codecs import BadTensor, WrongPartner
from swarmtrain.peer.compute import Kind, Withdrawn
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.jobs import Outcome, StaleWork
from swarmtrain.peer.ledger import Entry, Raw
from swarmtrain.peer.work_stealing import Thief, Victim
from swarmtrain.rpc.errors import Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import Code, Done, Hop, Progress, Replay, Work

log = logging.getLogger(__name__)

STEP_WAIT_S = 15.0  # how long work of the next step waits for this step's apply
_MIN_CALL_S = 5.0


@dataclass
class _Clock:
    """Where the time of one microbatch went on this stage."""

    queue_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0


class Microbatches:
    """Answers `Work` and `Replay`."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._listeners: dict[int, dict[Exchange, None]] = {}  # in the order in which they came
        self.thief = Thief(context)
        self.victim = Victim(context, self._is_awaited)

    async def work(self, work: Work, exchange: Exchange) -> Done:
        """Have a microbatch done. Asked again for a finished one, answers from the ledger."""
        context = self._context
        await self._admit(work, exchange)
        if work.evaluate:
            return await self._evaluate(work, exchange)
        entry = context.ledger.get(work.microbatch)
        if entry is not None and entry.answer is not None:
            context.counters.from_ledger += 1
            await self._give_up_sticky(entry, exchange.peer_id)
            if self._has_other_mask(entry, work):
                return await self._with_mask(entry, work.step, entry.answer)
            return entry.answer
        is_first = entry is None
        if entry is None:
            context.device.check()
            self._check_room()
            entry = context.ledger.open(work.microbatch, bytes(work.tokens), bytes(work.boundary))
            entry.hops = {hop.stage: hop for hop in work.hints}
            entry.generation = context.jobs.generation
            entry.caller = exchange.peer_id
            entry.was_stolen = work.is_stolen
            if work.is_stolen:
                self.thief.stolen_work_came()
            entry.caller_busy_until = asyncio.get_running_loop().time() + work.backlog_s
            deadline_s = max(_MIN_CALL_S, exchange.deadline - asyncio.get_running_loop().time())
            entry.task = asyncio.create_task(self._serve(entry, work, deadline_s), name=f"microbatch {work.microbatch}")
        else:
            context.counters.joined += 1
            entry.was_stolen = entry.was_stolen or work.is_stolen
        assert entry.task is not None
        listeners = self._listeners.setdefault(work.microbatch, {})
        listeners[exchange] = None
        try:
            answer = await context.device.unless_it_hangs(asyncio.shield(entry.task))
        finally:
            listeners.pop(exchange, None)
        if not is_first and self._has_other_mask(entry, work):
            await self._give_up_sticky(entry, exchange.peer_id)
            return await self._with_mask(entry, work.step, answer)
        if entry.sticky is not None and entry.caller == exchange.peer_id:
            return replace(answer, gradient=entry.sticky.payload)
        return answer

    def _has_other_mask(self, entry: Entry, work: Work) -> bool:
        """Whether this caller has sent other bytes than the first one, and so left out something else.

        A codec that remembers makes other bytes of a microbatch that was given up or whose first sender has died; a
        machine that rounds differently may.
        """
        return self._context.jobs.codecs.sends_masks and bytes(work.boundary) != entry.boundary

    async def _with_mask(self, entry: Entry, step: int, answer: Done) -> Done:
        """The answer, as a caller with another mask can decode it."""
        codecs = self._context.jobs.codecs
        if not entry.with_mask:
            try:
                timed = await self._context.compute.run(
                    Kind.MESSAGE, -1, lambda: codecs.with_mask(entry, step, answer.gradient)
                )
            except BadTensor as error:
                raise self._as_refusal(error) from error
            entry.with_mask = timed.value
        return replace(answer, gradient=entry.with_mask)

    async def _give_up_sticky(self, entry: Entry, caller: str) -> None:
        """The caller asks again: it could not decode the difference, or never got it. The next one goes whole."""
        context, sticky = self._context, entry.sticky
        if sticky is None or entry.caller != caller:
            return
        entry.sticky = None
        await context.compute.run(
            Kind.MESSAGE, -1, lambda: context.jobs.codecs.settle(Direction.BACKWARD, sticky.ticket, delivered=False)
        )

    def _is_awaited(self, microbatch: int) -> bool:
        """Whether a caller of it is still there."""
        return any(not exchange.caller_gone.is_set() for exchange in self._listeners.get(microbatch, ()))

    async def replay(self, replay: Replay, exchange: Exchange) -> Done:
        """Give a finished microbatch to the next stage once more, with the same bytes: somebody there lost it."""
        context = self._context
        await context.check_coordinator(exchange.peer_id, replay.run, replay.term)
        await context.reach_step(replay.step, timeout_s=STEP_WAIT_S)
        entry = context.ledger.get(replay.microbatch)
        if entry is None or entry.answer is None or context.dispatcher is None:
            raise context.refuse(Code.UNKNOWN, f"({replay.step}, {replay.microbatch}) is not finished here")
        context.device.check()
        context.counters.replayed += 1
        work = Work(
            run=replay.run,
            term=replay.term,
            stage=context.stage + 1,
            step=replay.step,
            microbatch=replay.microbatch,
            basis_epoch=context.jobs.worker.state.basis_epoch,
            evaluate=False,
            hints=replay.hints,
            tokens=entry.tokens,
            boundary=entry.output,
        )
        deadline_s = max(_MIN_CALL_S, exchange.deadline - asyncio.get_running_loop().time())
        check = partial(self._check_answer, entry, work, keep=False)
        try:
            with context.compute.split.during(Part.WIRE):
                calling = context.dispatcher.call(work, deadline_s=deadline_s, check=check)
                below = await context.device.unless_it_hangs(calling)
        except StaleWork as error:
            raise self._as_refusal(error) from error
        return Done(below.loss, (context.hop, *below.route), 0.0, 0.0, 0.0, b"", context.load_s)

    async def _serve(self, entry: Entry, work: Work, deadline_s: float) -> Done:
        """The way of one microbatch through this stage. Not cancelled by a lost caller."""
        context, clock = self._context, _Clock()
        ledger, started = context.ledger, asyncio.get_running_loop().time()
        try:
            context.faults.hit(Point.BEFORE_FORWARD)
            if entry.was_stolen:
                context.faults.hit(Point.STOLEN_WORK)
            partner = ""
            if context.dispatcher is not None and context.jobs.codecs.has_sticky_routes:
                partner = context.dispatcher.partner(len(work.tokens))
            if context.jobs.codecs.has_sticky_routes:
                await context.compute.run(
                    Kind.MESSAGE, -1, lambda: context.jobs.codecs.take_boundary(entry, work.step, entry.caller)
                )
            if context.dispatcher is None:
                entry.is_critical = self._is_critical(entry)  # the last stage encodes the gradient in the same job
            timed = await context.compute.run(
                Kind.FORWARD, work.microbatch, lambda: context.jobs.forward(entry, work.step, partner)
            )
            context.faults.hit(Point.AFTER_FORWARD)
            clock.queue_s, clock.forward_s = timed.queue_s, timed.run_s
            if context.dispatcher is None:
                answer = self._answer(clock, timed.value.payload, timed.value.loss)
            else:
                below, gradient = await self._gradient_from_below(entry, work, timed.value, partner, deadline_s)
                context.faults.hit(Point.BEFORE_BACKWARD)
                entry.is_critical = self._is_critical(entry)
                back = await context.compute.run(
                    Kind.BACKWARD, work.microbatch, lambda: context.jobs.backward(entry, work.step, gradient)
                )
                clock.queue_s += back.queue_s
                clock.backward_s = back.run_s
                answer = self._answer(clock, back.value.payload, below.loss, below)
        except Withdrawn as withdrawn:
            ledger.drop(entry)
            raise context.refuse(Code.REDIRECTED, "stolen", redirect_to=entry.stolen_by) from withdrawn
        except BaseException as error:
            if not entry.accumulated:
                ledger.drop(entry)
                context.jobs.forget(entry)
            raise self._as_refusal(error) from error
        entry.answer = answer
        entry.task = None
        self.thief.served(entry, answer)
        context.counters.microbatches += 1
        total_s = asyncio.get_running_loop().time() - started
        context.counters.times.add(clock.queue_s, clock.forward_s + clock.backward_s, total_s)
        if context.faults.hit(Point.BEFORE_ANSWER) is Action.CORRUPT:
            return replace(answer, gradient=damaged(answer.gradient))
        return answer

    def _is_critical(self, entry: Entry) -> bool:
        """Whether the caller would stand idle for the exact gradient, and less for the compressed one.

        An exact one on a line of which nothing is known measures it; a compressed one is often too small for that.
        """
        context = self._context
        if not context.jobs.codecs.compresses_if_critical:
            return True
        critical, rate = None, context.node.estimate(entry.caller).up_bytes_per_s
        if rate:
            other_work_s = max(0.0, entry.caller_busy_until - asyncio.get_running_loop().time())
            critical = is_critical(SendEstimate(other_work_s, *context.jobs.codecs.critical_times(rate)))
        context.counters.critical[critical] += 1
        return critical is True

    async def _gradient_from_below(
        self, entry: Entry, work: Work, outcome: Outcome, partner: str, deadline_s: float
    ) -> tuple[Done, Raw]:
        """The next stage's answer and its gradient. A difference that cannot be decoded is asked for once more."""
        context, ticket = self._context, outcome.ticket
        sticky = Sticky(partner, outcome.sticky) if ticket is not None else None
        try:
            below = await self._call_below(entry, work, outcome.payload, deadline_s, sticky)
        finally:
            if sticky is not None and ticket is not None:
                delivered = sticky.delivered
                await context.compute.run(
                    Kind.MESSAGE, -1, lambda: context.jobs.codecs.settle(Direction.FORWARD, ticket, delivered=delivered)
                )
        try:
            return below, await self._take_gradient(entry, work.step, below)
        except WrongPartner:
            entry.hops[context.stage + 1] = below.route[0]
            below = await self._call_below(entry, work, outcome.payload, deadline_s)
            return below, await self._take_gradient(entry, work.step, below)

    async def _take_gradient(self, entry: Entry, step: int, below: Done) -> Raw:
        context, sender = self._context, below.route[0].peer_id
        if not context.jobs.codecs.has_sticky_answers:
            return below.gradient
        timed = await context.compute.run(
            Kind.MESSAGE, -1, lambda: context.jobs.codecs.take_gradient(entry, step, below.gradient, sender)
        )
        return timed.value

    async def _call_below(
        self, entry: Entry, work: Work, payload: bytes, deadline_s: float, sticky: Sticky | None = None
    ) -> Done:
        context = self._context
        assert context.dispatcher is not None
        request = Work(
            run=work.run,
            term=context.term,
            stage=context.stage + 1,
            step=work.step,
            microbatch=work.microbatch,
            basis_epoch=work.basis_epoch,
            evaluate=work.evaluate,
            hints=tuple(entry.hops.values()),
            tokens=entry.tokens,
            boundary=payload,
            backlog_s=context.compute.backlog_s(),
        )
        self._tell(entry, ())

        def progress(item: Progress) -> None:
            self._tell(entry, item.hops)

        check = partial(self._check_answer, entry, request, keep=True)
        with context.compute.split.during(Part.WIRE):
            return await context.dispatcher.call(
                request, deadline_s=deadline_s, on_progress=progress, check=check, sticky=sticky
            )

    async def _evaluate(self, work: Work, exchange: Exchange) -> Done:
        """A validation microbatch: forward only, touches no ledger."""
        context = self._context
        context.device.check()
        self._check_room()
        try:
            computing = context.compute.run(
                Kind.EVALUATE,
                work.microbatch,
                lambda: context.jobs.evaluate(work.tokens, work.boundary, work.step, work.microbatch),
            )
            timed = await context.device.unless_it_hangs(computing)
            context.counters.evaluated += 1
            if context.dispatcher is None:
                return Done(timed.value.loss, (context.hop,), timed.queue_s, timed.run_s, 0.0, b"", context.load_s)
            entry = Entry(work.microbatch, work.tokens, work.boundary)
            exchange.progress(Progress((context.hop,), context.load_s))
            deadline_s = max(_MIN_CALL_S, exchange.deadline - asyncio.get_running_loop().time())
            below = await self._call_below(entry, work, timed.value.payload, deadline_s)
        except BaseException as error:
            raise self._as_refusal(error) from error
        return Done(below.loss, (context.hop, *below.route), timed.queue_s, timed.run_s, 0.0, b"", context.load_s)

    async def _admit(self, work: Work, exchange: Exchange) -> None:
        context = self._context
        if work.stage == 0:
            await context.check_coordinator(exchange.peer_id, work.run, work.term, work.stage)
        else:
            await context.check_neighbour(work.run, work.term, work.stage)
        if work.step > context.step and context.state in (PeerState.PAUSED, PeerState.DRAINING):
            # It takes nothing of the next step, and may not even see the end of this one: it need not have work in it.
            raise context.refuse(Code.NOT_SERVING, f"this peer is {context.state}")
        await context.reach_step(work.step, timeout_s=STEP_WAIT_S)
        if not context.has_contact:  # its answers would lead through a peer that is not counted
            raise context.refuse(Code.NOT_SERVING, "this peer does not hear the coordinator", retry_after_s=1.0)
        is_known = not work.evaluate and context.ledger.get(work.microbatch) is not None
        if context.state is not PeerState.SERVING and not is_known:
            raise context.refuse(Code.NOT_SERVING, f"this peer is {context.state}")
        if work.basis_epoch != context.jobs.worker.state.basis_epoch:
            raise context.refuse(Code.STALE_BASIS, f"the basis epoch here is {context.jobs.worker.state.basis_epoch}")
        num_microbatches = context.manifest.batch.microbatches_per_step
        if not work.evaluate and work.microbatch >= num_microbatches:
            raise context.refuse(Code.BAD_TENSOR, f"a step has {num_microbatches} microbatches")
        try:
            context.jobs.codecs.check_tokens(work.tokens)
        except BadTensor as error:
            raise context.refuse(Code.BAD_TENSOR, str(error)) from error

    def _check_room(self) -> None:
        context = self._context
        waiting = context.compute.backlog()
        if waiting >= context.max_queue or context.ledger.num_bytes() > context.max_ledger_bytes:
            retry_after_s = 0.05 + 0.5 * context.compute.backlog_s()
            raise context.refuse(Code.BUSY, f"{waiting} jobs wait", retry_after_s)

    async def _check_answer(self, entry: Entry, work: Work, done: Done, *, keep: bool) -> None:
        """Raise ValueError for an answer that cannot be right: then another peer is asked. `keep`: backward follows.

        StaleWork says nothing about the answer: it is this peer that has gone on.
        """
        context = self._context
        if [hop.stage for hop in done.route] != list(range(work.stage, context.manifest.stages.count)):
            raise ValueError("an answer whose route does not lead through all stages")
        if not work.evaluate:
            await context.compute.run(
                Kind.MESSAGE, -1, lambda: context.jobs.check_gradient(entry, work.step, done.gradient, keep=keep)
            )

    def _tell(self, entry: Entry, hops: tuple[Hop, ...]) -> None:
        """Progress flows upstream, so that callers know who has the microbatch when this peer dies."""
        context = self._context
        for hop in hops:
            entry.hops[hop.stage] = hop
        item = Progress((context.hop, *entry.hops.values()), context.load_s)
        for exchange in self._listeners.get(entry.microbatch, ()):
            exchange.progress(item)

    def _answer(self, clock: _Clock, payload: bytes, loss: float, below: Done | None = None) -> Done:
        return Done(
            loss=loss,
            route=(self._context.hop, *(below.route if below is not None else ())),
            queue_s=clock.queue_s,
            forward_s=clock.forward_s,
            backward_s=clock.backward_s,
            gradient=payload,
            load_s=self._context.load_s,
            waited_s=clock.queue_s + (below.waited_s if below is not None else 0.0),
        )

    def _as_refusal(self, error: BaseException) -> BaseException:
        if isinstance(error, BadTensor):
            return self._context.refuse(Code.BAD_TENSOR, str(error))
        if isinstance(error, WrongPartner):
            return self._context.refuse(Code.NEED_KEYFRAME, str(error))
        if isinstance(error, StaleWork):
            return self._context.refuse(Code.AHEAD, str(error))
        if isinstance(error, DivergedError | NonFiniteTensor):
            return self._context.refuse(Code.DIVERGED, str(error))
        if isinstance(error, Refusal):
            return Refusal.of(error.payload)
        return error
