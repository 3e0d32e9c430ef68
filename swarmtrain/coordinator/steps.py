"""How an optimizer step ends, from the last answer to the last apply. Read `StepDriver.step` first."""

from __future__ import annotations

import asyncio

from swarmtrain import world
from swarmtrain.coordinator.apply import Applies, StepResult
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.checks import Checks
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.journal import Decision
from swarmtrain.coordinator.lease import Leases
from swarmtrain.coordinator.owners import Owners
from swarmtrain.coordinator.prepare import PreparedStage, Preparer
from swarmtrain.observe.events import StepTimed
from swarmtrain.observe.faults import Point
from swarmtrain.run.schedule import check_norm, gradient_scale, learning_rate, mean_loss


class StepDriver:
    """Ends the run's steps one after the other, while `leases` fills the pipeline with what they do not hold up."""

    def __init__(self, context: RunContext, applies: Applies) -> None:
        self._context, self._applies = context, applies
        self.leases = Leases(context)
        self.seconds = 0.0  # what the last step took, as the journal has it: with the apply of the one before
        self._apply_s = 0.0
        self._preparer, self._checks = Preparer(context), Checks(context)
        self._owners = Owners(context, self._preparer)

    async def step(self, *, checkpoint: bool) -> StepResult:
        """Await the leases of the run's step; reduce, decide, apply. With `checkpoint`, a peer of each stage keeps a
        copy of the new state."""
        context, step = self._context, self._context.step
        started = world.monotonic()
        await context.wait_for(lambda: step in context.books and context.books[step].is_answered)
        books = context.books[step]
        leased = world.monotonic()
        prepared = await self._checked(step, books)
        reduced = world.monotonic()
        decision = self._decide(step, books, prepared)
        context.faults.hit(Point.BEFORE_DECISION)
        named = {member.peer_id: member.name for stage in prepared for member in stage.members}
        self.seconds, self._apply_s = reduced - started + self._apply_s, 0.0
        names = context.tally.new_names(named)
        decided_at = context.journal.decide(decision, names, seconds=self.seconds)
        context.decided = decision
        context.prepared = frozenset(member.key for stage in prepared for member in stage.members)
        context.faults.hit(Point.AFTER_DECISION)
        result = await self._applies.carry_out(decision, prepared, checkpoint=checkpoint)
        del context.books[step]
        context.tally.decided(decision, decided_at, self.seconds)
        applied = world.monotonic()
        self._apply_s = applied - reduced
        slowest = max(prepared, key=lambda stage: stage.answered_at).stage
        waited_s = min(self.leases.idle_s, applied - leased)
        context.events.emit(
            StepTimed(step + 1, leased - started, reduced - leased, applied - reduced, waited_s, slowest)
        )
        if context.manifest.schedule.delay:
            await self.leases.allow(context.step)
        context.faults.hit(Point.AFTER_STEP)
        return result

    async def _checked(self, step: int, books: StepBooks) -> list[PreparedStage]:
        """The reduced sums, without the work of peers that were found to lie. Checks go on beside the all-reduce."""
        while True:
            looking = asyncio.create_task(self._checks.look(step, books))
            try:
                prepared = await self._prepared(step, books)
                await looking
            finally:
                looking.cancel()
            if not await self._checks.passed(step, books, prepared):
                continue
            if not self._checks.is_on:
                return prepared
            confirmed = await self._confirmed(step, books, prepared)
            # Checks take their time, in which all peers that hold a sum may have gone.
            if confirmed is not None and await self._are_held(confirmed):
                return confirmed

    async def _confirmed(
        self, step: int, books: StepBooks, prepared: list[PreparedStage]
    ) -> list[PreparedStage] | None:
        async with asyncio.TaskGroup() as tasks:
            repairing = tasks.create_task(self.leases.repair(step, books))
            try:
                return await self._owners.confirmed(step, books, prepared)
            finally:
                repairing.cancel()

    async def _prepared(self, step: int, books: StepBooks) -> list[PreparedStage]:
        """The reduced sums of all stages, each held by a peer that is there now.

        All peers that held a stage's sum may have died while another stage was still reducing. A decision on a sum that
        no peer holds would end in a roll-back of the run: the stage is prepared again instead, and the others keep
        their sums.
        """
        found: dict[tuple[int, ...], list[PreparedStage]] = {}
        async with asyncio.TaskGroup() as tasks:
            repairing = tasks.create_task(self.leases.repair(step, books))
            while lost := [group for group in self._preparer.groups() if not await self._are_held(found.get(group))]:
                preparing = {group: tasks.create_task(self._preparer.prepare(step, group, books)) for group in lost}
                await asyncio.wait(preparing.values())
                found |= {group: task.result() for group, task in preparing.items()}
            repairing.cancel()
        return sorted((stage for group in found.values() for stage in group), key=lambda item: item.stage)

    async def _are_held(self, group: list[PreparedStage] | None) -> bool:
        return group is not None and all([await self._preparer.is_held(stage) for stage in group])

    def _decide(self, step: int, books: StepBooks, prepared: list[PreparedStage]) -> Decision:
        manifest = self._context.manifest
        norm, scale = gradient_scale(manifest, [stage.squared_norm for stage in prepared])
        check_norm(manifest, step, norm, scale)
        return Decision(
            step=step,
            term=self._context.term,
            loss=mean_loss([books.losses[i] for i in range(books.num_microbatches)]),
            grad_norm=norm,
            scale=scale,
            learning_rate=learning_rate(manifest, step),
            stages=tuple((stage.digest, stage.squared_norm) for stage in prepared),
            entries={stage.stage: stage.shares for stage in prepared},
            losses=dict(books.losses),
            basis=prepared[-1].basis,
        )
