"""Leases: each microbatch of a step is given to stage 0 with its tokens; lost ones are replayed.

Steps are leased one after the other, without a pause in between if the next one does not need the last decision
(`schedule.delay`): one window limits what is under way of all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from swarmtrain import world
from swarmtrain.coordinator.books import ReplayPlan, StepBooks
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.strikes import Offence
from swarmtrain.errors import DivergedError
from swarmtrain.model.sizes import id_type
from swarmtrain.observe.events import WorkReplayed
from swarmtrain.p2p.errors import HostDownError, NetError
from swarmtrain.route.window import InFlightWindow, LeaseDeadlines, WindowOptions, stepwise
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.schedule import mean_loss
from swarmtrain.wire.messages import Code, Done, Hop, Replay, Work

log = logging.getLogger(__name__)

FIRST_LEASE_S = 120.0  # until enough have come back to know how long one takes
MIN_LEASE_S = 30.0
MIN_IN_FLIGHT = 4
MAX_DIVERGED = 3  # routes over which training diverged until the run ends, if there is more than one
REPAIR_PAUSE_S = 0.3  # between rounds of repair


class ResizableSemaphore:
    """A semaphore whose limit may change while it is held."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size, self._inside, self._changed = size, 0, asyncio.Event()

    async def enter(self) -> None:
        """Wait for a place below the limit, and take it."""
        while self._inside >= self._size():
            self._changed.clear()
            await self._changed.wait()
        self._inside += 1

    def leave(self) -> None:
        """Give the place back."""
        self._inside -= 1
        self._changed.set()


class Leases:
    """Has the microbatches of a step computed, each exactly once on every stage as far as the books say."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._id_type = id_type(context.manifest.model.vocab_size)
        self._deadlines = LeaseDeadlines(initial_s=FIRST_LEASE_S, minimum_s=MIN_LEASE_S)
        batch, delay = context.manifest.batch.microbatches_per_step, context.manifest.schedule.delay
        without_pause = WindowOptions(initial=MIN_IN_FLIGHT, maximum=2 * batch)
        self._in_flight = InFlightWindow(without_pause if delay else stepwise(initial=MIN_IN_FLIGHT, maximum=batch))
        self._rng = world.random()
        self._num_under_way = 0
        self._idle_since = world.monotonic()
        self.newest = -1  # the state that peers have: steps that need a later one are not leased yet

    @property
    def idle_s(self) -> float:
        """For how long no microbatch has been under way."""
        return 0.0 if self._num_under_way else world.monotonic() - self._idle_since

    async def allow(self, newest: int) -> None:
        """Peers of all stages have applied `newest` steps: steps that compute with that state may be leased."""
        self.newest = newest
        await self._context.notify()

    async def fill(self) -> None:
        """Lease the run's steps from its current one to its last; returns when all has been answered."""
        context, manifest = self._context, self._context.manifest
        limit = ResizableSemaphore(self.window)

        async def one(step: int, microbatch: int, books: StepBooks) -> None:
            try:
                await self._lease(step, microbatch, books, ())
            finally:
                limit.leave()

        async with asyncio.TaskGroup() as tasks:
            for step in range(context.step, manifest.schedule.steps):
                await self._is_there(manifest.weights_step(step))
                num_microbatches = manifest.batch.microbatches_per_step
                rounds = {i: context.rounds.of(step, i) for i in range(num_microbatches)}
                books = StepBooks(manifest.stages.count, num_microbatches, rounds)
                context.books[step] = books
                for microbatch in range(books.num_microbatches):
                    await limit.enter()
                    tasks.create_task(one(step, microbatch, books))

    async def _is_there(self, state: int) -> None:
        """Wait until peers have the state after so many steps."""
        await self._context.wait_for(lambda: self.newest >= state)

    async def repair(self, step: int, books: StepBooks) -> None:
        """Replay whatever some stage has lost, again and again; runs until it is cancelled."""
        while True:
            plans = [plan for i in range(books.num_microbatches) if (plan := books.replay_plan(i)) is not None]
            if not plans:
                await self._context.wait_for(lambda: not all(map(books.balances, range(books.num_stages))))
                continue
            for stage in sorted({plan.lowest_missing_stage for plan in plans}):
                count = sum(plan.lowest_missing_stage == stage for plan in plans)
                self._context.events.emit(WorkReplayed(step + 1, stage, count))
            limit = asyncio.Semaphore(self.window())
            async with asyncio.TaskGroup() as tasks:
                for plan in plans:
                    tasks.create_task(self._replay(step, plan, books, limit))
            # A route may lead through a peer that does not count (any more): do not ask it again and again at once.
            await asyncio.sleep(REPAIR_PAUSE_S)

    async def validate(self, count: int) -> float:
        """Mean loss over `count` validation microbatches, which go the same way, forward only."""
        context = self._context
        limit = asyncio.Semaphore(self.window())

        async def one(index: int) -> float:
            async with limit:
                work = self._work(context.step, index, context.sampler.validation(index), evaluate=True)
                while True:
                    done = await self._call(work)
                    assert done is not None
                    if all(context.members.counts(hop) for hop in done.route):
                        return done.loss
                    work = replace(work, hints=self._members_as_hints())  # past peers that are not of the run
                    await asyncio.sleep(REPAIR_PAUSE_S)

        return mean_loss(list(await asyncio.gather(*(one(i) for i in range(count)))))

    async def _lease(self, step: int, microbatch: int, books: StepBooks, hints: tuple[Hop, ...]) -> None:
        tokens, loop = self._context.sampler.microbatch(step, microbatch), asyncio.get_running_loop()
        while True:  # once, unless the microbatch is begun anew meanwhile
            started, round = loop.time(), books.round_of(microbatch)
            work = self._work(step, microbatch, tokens, hints=hints, round=round)
            self._num_under_way += 1
            try:
                done = await self._call(work, is_wanted=partial(_is_current, books, microbatch, round))
            finally:
                self._num_under_way -= 1
                self._idle_since = world.monotonic()
            if done is not None:
                delay_s = loop.time() - started
                self._in_flight.finished(delay_s, min(done.waited_s, delay_s))
                if books.round_of(microbatch) == round:
                    await self._record(step, microbatch, done, books, round)
                    return
            hints = ()

    async def _replay(self, step: int, plan: ReplayPlan, books: StepBooks, limit: asyncio.Semaphore) -> None:
        async with limit:
            if plan.holder is None:
                await self._lease(step, plan.microbatch, books, plan.hints)
                return
            context = self._context
            round = books.round_of(plan.microbatch)
            hints = plan.hints or self._members_as_hints(plan.lowest_missing_stage)
            request = Replay(context.run_id, context.term, step, plan.microbatch, hints, round)
            try:
                done = await context.node.call(
                    plan.holder.peer_id, request, deadline_s=self._deadlines.deadline_s, expect=Done
                )
            except HostDownError as error:
                log.info("replay of (%d, %d) has to wait: %s", step, plan.microbatch, error)
                return
            except NetError as error:
                log.info("replay of (%d, %d) failed: %s", step, plan.microbatch, error)
                books.withdraw(plan.holder.stage, [plan.microbatch], (plan.holder.peer_id, plan.holder.incarnation))
                await context.notify()
                return
            stages = list(range(plan.holder.stage, context.manifest.stages.count))
            if [hop.stage for hop in done.route] != stages or done.route[0] != plan.holder:
                log.info("replay of (%d, %d): its route does not lead to the last stage", step, plan.microbatch)
                books.withdraw(plan.holder.stage, [plan.microbatch], (plan.holder.peer_id, plan.holder.incarnation))
                await context.notify()
                return
            await self._record(step, plan.microbatch, done, books, round)

    async def _record(self, step: int, microbatch: int, done: Done, books: StepBooks, round: int) -> None:
        context = self._context
        context.tally.answered(done.route)
        if any(hop.peer_id in context.bans for hop in done.route) and books.round_of(microbatch) == round:
            # Whatever its neighbours on this route have of it is worth nothing.
            context.rounds.begin([(step, microbatch)])
            books.answered(microbatch)
            books.begin_anew(microbatch, context.rounds.of(step, microbatch))
        else:
            counted = [hop for hop in done.route if context.members.counts(hop)]
            books.record(microbatch, done.loss, counted, round, num_hops=len(done.route))
        await context.notify()

    async def _call(self, work: Work, is_wanted: Callable[[], bool] = lambda: True) -> Done | None:
        """Have `work` done, however long it takes. Only divergence ends it; None if it is not wanted any more.

        Each stage believes two of its peers (`Dispatcher.call`), and both may have it from the same one further down.
        So it is tried over other routes before the run ends.
        """
        disputed: list[str] = []
        num_diverged = 0

        async def check(done: Done) -> None:
            if [hop.stage for hop in done.route] != list(range(self._context.manifest.stages.count)):
                raise ValueError("an answer whose route does not lead through all stages")

        loop = asyncio.get_running_loop()
        while is_wanted():
            started = loop.time()
            try:
                done = await self._context.dispatcher.call(
                    work, deadline_s=self._deadlines.deadline_s, check=check, on_disputed=disputed.append
                )
                self._deadlines.finished(loop.time() - started)
                await self._hold_against(disputed, done)
                return done
            except Refusal as refusal:
                if refusal.code == Code.DIVERGED:
                    num_diverged += 1
                    if num_diverged == MAX_DIVERGED or not self._has_other_routes():
                        raise DivergedError(refusal.text, fix="lower optimizer.learning_rate") from refusal
                    work = replace(work, hints=self._members_as_hints(turn=num_diverged))
                log.info("lease (%d, %d): %s", work.step, work.microbatch, refusal)
                if refusal.code == Code.NOBODY:
                    self._in_flight.lost()
                await self._context.dispatcher.neighbours.wait_for_news(1.0)
        return None

    async def _hold_against(self, disputed: list[str], done: Done) -> None:
        """Those that said that training diverged, although others have done the work. Only who counts disproves it."""
        context = self._context
        if all(context.members.counts(hop) for hop in done.route):
            for peer_id in disputed:
                if (member := context.members.get(peer_id)) is not None:
                    await context.strike(member, Offence.DISPUTED_DIVERGENCE)

    def _has_other_routes(self) -> bool:
        """Whether some stage has more than one peer."""
        context = self._context
        return any(len(context.members.of_stage(s, "serving")) > 1 for s in range(context.manifest.stages.count))

    def _members_as_hints(self, first: int = 0, turn: int | None = None) -> tuple[Hop, ...]:
        """A peer of each stage from `first` on that counts: hints go before what the directory says.

        Any of them, or the one whose `turn` it is.
        """
        context, found = self._context, []
        for stage in range(first, context.manifest.stages.count):
            if there := [m for m in context.members.of_stage(stage, "serving") if m.was_admitted]:
                member = self._rng.choice(there) if turn is None else there[turn % len(there)]
                found.append(Hop(stage, member.peer_id, member.report.incarnation))
        return tuple(found)

    def _work(
        self,
        step: int,
        microbatch: int,
        tokens: object,
        *,
        evaluate: bool = False,
        hints: tuple[Hop, ...] = (),
        round: int = 0,
    ) -> Work:
        context = self._context
        return Work(
            run=context.run_id,
            term=context.term,
            stage=0,
            step=step,
            microbatch=microbatch,
            basis_epoch=context.manifest.basis_epoch(step),
            evaluate=evaluate,
            hints=hints,
            tokens=np.asarray(tokens).astype(self._id_type).tobytes(),
            boundary=b"",
            round=round,
        )

    def window(self) -> int:
        """Microbatches under way at once: two for every peer, one of which waits there; more where links are slow."""
        return max(self._in_flight.size, 2 * len(self._context.members.all()))


def _is_current(books: StepBooks, microbatch: int, round: int) -> bool:
    """Whether a microbatch has not been begun anew since."""
    return books.round_of(microbatch) == round
