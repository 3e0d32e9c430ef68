"""The run from its first step to its last: when a step may begin, what is reported, when the run is rolled back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarmtrain.coordinator.admission import has_state, servers
from swarmtrain.coordinator.apply import Applies, StepResult
from swarmtrain.coordinator.checkpointing import Checkpoints, codecs_remember, explained
from swarmtrain.coordinator.context import RunContext, Wait
from swarmtrain.coordinator.election import elected
from swarmtrain.coordinator.keeping import holders, last_holders
from swarmtrain.coordinator.members import Member
from swarmtrain.coordinator.steps import StepDriver
from swarmtrain.errors import StorageError
from swarmtrain.observe.events import (
    CheckpointFailed,
    LastHolder,
    RunEnded,
    RunResumes,
    RunRolledBack,
    RunWaits,
    StepApplied,
)
from swarmtrain.wire.peer_report import TAKES_NO_WORK

T = TypeVar("T")

WATCH_S = 0.5
ELECTION_S = 6.0  # how long a restarted coordinator waits for a majority of the peers that know a stage's state
DOUBT_S = 1.0  # a peer whose link broke may call again for this long before its stage counts as empty
FIRST_RETRY_S = 0.5  # between attempts at the last checkpoint; doubled after each failure, up to one of the next two
MAX_FETCH_RETRY_S = 5.0  # if peers did not send a state
MAX_WRITE_RETRY_S = 60.0  # if it could not be written: every attempt fetches all states, and a full disk stays full
WRITE_PATIENCE_S = 20.0  # how long a roll-back waits for a newer checkpoint that is still being fetched
SHORTEST_S = 1e-6  # of a step: a clock may not tick within it
ROLL_BACK_AFTER_S = 8.0  # a stage whose state no peer holds for this long, although one waits to host it, is lost


class _StageLost(Exception):
    """No peer has the state of a stage; the run must be rolled back."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"stage {stage} lost its state")
        self.stage = stage


class Run:
    """Drives the steps of one run. `drive` returns when they are done."""

    def __init__(self, context: RunContext, checkpoints: Checkpoints, applies: Applies, *, min_peers: int) -> None:
        self._context, self._checkpoints = context, checkpoints
        self._min_peers = min_peers if context.step == 0 else 1  # a resumed run needs one only
        self._applies, self._driver = applies, StepDriver(context, applies)
        self._writing: asyncio.Task[object] | None = None
        self._writing_step, self._was_left_out = 0, False
        # Elsewhere than at a barrier a checkpoint would not restore all that the run goes on with.
        self._only_at_barriers = codecs_remember(context.manifest) or context.manifest.schedule.delay > 0
        self._held_up: Wait | None = None  # what keeps the last checkpoint from being written
        self._saved_at = float("-inf")  # when the last attempt began to save what a leaving peer alone has
        self.last: StepApplied | None = None
        self._val_loss: float | None = None

    async def drive(self) -> None:
        """Step after step until the run's steps are done. Whenever a stage's state is lost, the run is rolled back."""
        while not self._context.is_over:
            try:
                await self._guarded(self._advance())
            except _StageLost as lost:
                await self._roll_back(lost.stage)

    async def _advance(self) -> None:
        """Train from where the run stands to its end."""
        context, schedule = self._context, self._context.manifest.schedule
        await self._validate_if_due()
        leases = self._driver.leases
        leases.newest = -1
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leases.fill())
            while context.step < schedule.steps:
                await self._all_stages_served()
                await leases.allow(context.step)
                due = self._checkpoint_due(context.step + 1)
                result = await self._driver.step(checkpoint=due)
                if due:
                    await self._checkpoint(result)
                await self._report(result, self._driver.seconds)
        await self._final_checkpoint()
        self._end()

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`; raise _StageLost if a stage's state is lost meanwhile."""
        working = asyncio.create_task(work)
        losing = asyncio.create_task(self._lost_stage())
        try:
            await asyncio.wait([working, losing], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise _StageLost(losing.result())
        finally:
            for task in (working, losing):
                task.cancel()
            await asyncio.gather(working, losing, return_exceptions=True)

    async def _lost_stage(self) -> int:
        """Return a stage whose state no peer has held for a while, although a peer is there to host it.

        A roll-back before that would be too early: a peer that was stopped may still return with the state.
        """
        context = self._context
        since: dict[int, float] = {}
        while True:
            await asyncio.sleep(WATCH_S)
            now, run = asyncio.get_running_loop().time(), context.standing
            self._save_before_it_goes(now)
            has_newest = run.step == self._checkpoints.step and not run.is_applying  # a roll-back would lead here
            for stage in range(context.manifest.stages.count):
                serving = context.members.of_stage(stage, "serving")
                paused = context.members.of_stage(stage, *TAKES_NO_WORK)
                is_held = any(run.holds(member) for member in [*serving, *paused])
                reachable = [member for member in serving if not self._is_doubted(member)]
                self._note_stage(stage, empty=not reachable)  # a paused peer keeps the state, and takes no work
                can_return = bool(context.members.of_stage(stage, "serving", "syncing", "joining"))
                if is_held or not can_return or has_newest:
                    since.pop(stage, None)
                elif now - since.setdefault(stage, now) > ROLL_BACK_AFTER_S:
                    return stage

    def _save_before_it_goes(self, now: float) -> None:
        """Begin a checkpoint of the run's step if a peer that leaves or rests alone has the state of its stage.

        At any step, also where `checkpoint.every` would not put one: the alternative is to take steps back. Codecs that
        remember begin anew behind it if it is restored, as they do for every newcomer.
        """
        context, run = self._context, self._context.standing
        is_writing = self._writing is not None and not self._writing.done()
        if is_writing or now - self._saved_at < MAX_FETCH_RETRY_S:
            return
        last = last_holders(context.members, run, context.stages)
        found = holders(context.members, run, context.stages) if last else None
        if found is None:
            return
        self._saved_at = now
        for member in last:
            context.events.emit(LastHolder(member.peer_id, member.stage, run.step, member.state, member.name))
        digests = [book.digest or one[0].report.state_digest for book, one in zip(context.stages, found, strict=True)]
        keepers = [[member.peer_id for member in members] for members in found]
        self._writing_step = run.step
        self._writing = context.in_background(self._checkpoints.write(run.step, digests, keepers))

    def _is_doubted(self, member: Member) -> bool:
        """Whether its link has been broken for a while: it is probably gone, long before it counts as lost."""
        doubted_at = member.doubted_at
        return doubted_at is not None and asyncio.get_running_loop().time() - doubted_at >= DOUBT_S

    async def _roll_back(self, stage: int) -> None:
        """Take all stages back to the last checkpoint, under a new term, so that nothing of the lost steps counts."""
        context = self._context
        if self._writing is not None:  # the newest checkpoint must not be newer than the journal
            if not (await asyncio.wait([self._writing], timeout=WRITE_PATIENCE_S))[0]:
                self._checkpoints.fetching.give_up()
            await asyncio.wait([self._writing])
        step = self._checkpoints.step
        context.events.emit(RunRolledBack(stage, context.step, step))
        context.books.clear()
        context.decided = None
        context.prepared = frozenset()
        context.term = context.valid_from = context.term + 1
        context.journal.set("term", str(context.term))
        context.journal.roll_back(step)
        context.tally.resume(context.journal.contributions(), step)
        context.step = step
        context.members.forget_steps()
        for index, book in enumerate(context.stages):
            book.snapshot = None
            book.checkpoint = self._checkpoints.offer(index)
            book.digest = book.checkpoint.digest if book.checkpoint is not None else ""

    async def _all_stages_served(self) -> None:
        """Wait until every stage has a serving peer at the run's step, and before the first step for enough peers."""
        context, count = self._context, self._context.manifest.stages.count

        def ready() -> bool:
            empty = [stage for stage in range(count) if not servers(context.members, stage, context.step)]
            enough = len(context.members.all()) >= self._min_peers
            self._note_wait(empty, enough)
            return not empty and enough

        while True:
            await context.wait_for(ready)
            self._min_peers = 1
            unknown = [stage for stage in range(count) if context.step and not context.stages[stage].digest]
            if not unknown:
                return
            await self._elect(unknown)

    async def _elect(self, stages: list[int]) -> None:
        """After a restart: elect the digests of these stages' states, which the journal lacks."""
        context = self._context

        def vote(stage: int, *, is_final: bool) -> str:
            book = context.stages[stage]
            there = [m for m in context.members.all() if m.stage == stage and m.answers]
            held = {m.key: m.report.state_digest for m in there if has_state(m, context.step, book)}
            return elected({**book.votes, **held}, book.voters, is_final=is_final) if held else ""

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ELECTION_S):
                await context.wait_for(lambda: all(vote(stage, is_final=False) for stage in stages))
        for stage in stages:
            digest = context.stages[stage].digest = vote(stage, is_final=True)
            if digest:
                await self._applies.turn_away(stage, context.step, digest)

    def _note_wait(self, empty: list[int], enough: bool) -> None:
        wait = self._held_up
        if empty:
            wait = Wait.for_peers(empty)
        elif not enough:
            wait = Wait(f"waiting for {self._min_peers} peers")
        self._say_wait(wait)

    def _note_stage(self, stage: int, *, empty: bool) -> None:
        """During a step: say when a stage has no reachable peer, and when it has one again."""
        wait = Wait.for_peers([stage])
        waits_for = self._context.waits_for
        if empty and waits_for is None:
            self._say_wait(wait)
        elif not empty and waits_for == wait:
            self._say_wait(None)

    def _say_wait(self, wait: Wait | None) -> None:
        context = self._context
        if wait is not None and wait != context.waits_for:
            context.events.emit(RunWaits(wait.reason))
        elif context.waits_for is not None and wait is None:
            context.events.emit(RunResumes())
        context.waits_for = wait

    def _checkpoint_due(self, step: int) -> bool:
        """Whether to write one after `step` steps: at the end, where the manifest says, and at once if the last failed.

        Codecs that remember, and a delay, forbid the latter: a run that is restored there would not go on as this one
        does. Training
        does not wait for a slow checkpoint: one that falls due meanwhile is left out, and made up for afterwards.
        """
        manifest = self._context.manifest
        if step == manifest.schedule.steps:
            return True
        if self._writing is not None and not self._writing.done():
            if manifest.is_checkpoint(step):
                self._was_left_out = True
                reason = f"left out, since the one before is still being written (step {self._writing_step})"
                self._context.events.emit(CheckpointFailed(step, reason))
            return False
        return manifest.is_checkpoint(step) or (self._owes_checkpoint() and not self._only_at_barriers)

    def _owes_checkpoint(self) -> bool:
        """Whether the last checkpoint failed (dead keepers, a full disk), or one was left out while it was written."""
        writing = self._writing
        if writing is None or not writing.done():
            return False
        return self._was_left_out or writing.cancelled() or writing.exception() is not None or writing.result() is False

    async def _checkpoint(self, result: StepResult) -> None:
        """Write a checkpoint while training goes on; one at a time, so the last one waits for the one before."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self._was_left_out, self._writing_step = False, result.decision.step + 1
        self._writing = self._context.in_background(
            self._checkpoints.write(result.decision.step + 1, result.state_digests, result.keepers)
        )

    async def _final_checkpoint(self) -> None:
        """The run does not end without its last state on disk: the peers that have it are asked until it is there."""
        context = self._context
        if self._writing is not None:
            await asyncio.wait([self._writing])
        pause_s = FIRST_RETRY_S
        try:
            while self._checkpoints.step < context.step and not await self._write_last():
                failure = self._checkpoints.failure
                self._held_up = Wait(f"the last checkpoint waits: {explained(failure)}")
                self._say_wait(self._held_up)
                await asyncio.sleep(pause_s)
                is_disk = isinstance(failure, StorageError)
                pause_s = min(2.0 * pause_s, MAX_WRITE_RETRY_S if is_disk else MAX_FETCH_RETRY_S)
        finally:
            self._held_up = None
        self._say_wait(None)

    async def _write_last(self) -> bool:
        """One attempt to write a checkpoint of the run's step, from all peers that have the state."""
        context = self._context
        await self._all_stages_served()
        keepers = tuple(
            tuple(member.peer_id for member in servers(context.members, stage, context.step))
            for stage in range(context.manifest.stages.count)
        )
        digests = tuple(book.digest for book in context.stages)
        return await self._checkpoints.write(context.step, digests, keepers)

    def _end(self) -> None:
        context, newest = self._context, self._checkpoints.newest
        context.is_over = True
        path = str(newest.path) if newest is not None else ""
        context.events.emit(RunEnded("all steps are done", checkpoint=path, val_loss=self._val_loss))

    async def _validate_if_due(self) -> None:
        """The validation loss of the current step, if it is due and the journal does not have it yet."""
        context, validation = self._context, self._context.manifest.validation
        is_last = context.step == context.manifest.schedule.steps
        count = min(validation.microbatches, context.sampler.num_validation_microbatches)
        is_due = is_last or bool(validation.every and context.step % validation.every == 0)
        self._val_loss = None
        if not count or not is_due or context.step == 0:
            return
        self._val_loss = context.journal.validation(context.step)
        if self._val_loss is None:
            await self._all_stages_served()
            self._val_loss = await self._driver.leases.validate(count)
            context.journal.note_validation(context.step, self._val_loss)

    async def _report(self, result: StepResult, seconds: float) -> None:
        context, manifest, decision = self._context, self._context.manifest, result.decision
        await self._validate_if_due()
        self.last = StepApplied(
            step=context.step,
            loss=decision.loss,
            tokens=context.step * manifest.tokens_per_step,
            tokens_per_s=manifest.tokens_per_step / max(seconds, SHORTEST_S),
            grad_norm=decision.grad_norm,
            lr=decision.learning_rate,
            val_loss=self._val_loss,
        )
        context.events.emit(self.last)
