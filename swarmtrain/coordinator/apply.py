"""Apply: all peers carry out the decision in the journal, those that come later included.

The decision is in the journal before any peer hears of it. A coordinator that crashes in between finds it there when it
restarts, and tells each peer at its next heartbeat: the peers still hold the reduced sum that it names.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from swarmtrain.coordinator.admission import StateOffer
from swarmtrain.coordinator.blame import most_common
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.journal import Decision
from swarmtrain.coordinator.members import Member
from swarmtrain.coordinator.prepare import PreparedStage
from swarmtrain.observe.events import PeerDiverged
from swarmtrain.p2p.errors import NetError
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.wire.messages import Acknowledged, Applied, Apply, Code, Prepared, Resync
from swarmtrain.wire.peer_report import HOLDS_STATE, TAKES_NO_WORK

log = logging.getLogger(__name__)

APPLY_S = 120.0
APPLY_GRACE_S = 3.0  # how long all replicas are waited for; after that, one of each stage is enough
RESYNC_S = 5.0
SNAPSHOT_PATIENCE_S = 60.0  # how long newcomers wait for one that is fetching an older snapshot
NUM_KEEPERS = 2  # peers of a stage that keep a copy of the state for a checkpoint
MAX_BASIS_DONORS = 8


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, and which peers of each stage keep a copy of the state after it."""

    decision: Decision
    state_digests: tuple[str, ...]
    keepers: tuple[tuple[str, ...], ...]


class Applies:
    """Carries out the last decision."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._under_way: set[tuple[str, str]] = set()
        self._without_sum: set[tuple[str, str]] = set()  # paused or draining, without the last decision's sum
        self._answers: list[dict[str, Applied]] = [{} for _ in context.stages]  # of peers that prepared
        self._others: list[dict[str, Applied]] = [{} for _ in context.stages]  # of peers that did not
        self._snapshot_at = [float("-inf")] * len(context.stages)

    def tell(self, member: Member) -> None:
        """A peer has sent a heartbeat. If it has not applied the last decision, tell it (again); if it has, note that.

        Its answer may have been lost with its link: then the heartbeat alone says that it has applied. This counts only
        if the peer held the sum: another may be at the same step of a history that was rolled back, in another state.
        """
        decided = self._context.decided
        if decided is None or member.state not in HOLDS_STATE:
            return
        if member.step == decided.step and self._may_hold_sum(member):
            self._context.in_background(self._apply_at(member, decided, keep=False))
        elif (
            member.step == decided.step + 1
            and member.key in self._context.prepared
            and member.peer_id not in self._answers[member.stage]
        ):
            self._note(member, Applied(member.step, member.report.state_digest))

    def _may_hold_sum(self, member: Member) -> bool:
        """False for a peer that was left out or has said that it lacks the sum, and while a call to it is under way."""
        key = member.key
        return member.excluded_at is None and key not in self._without_sum and key not in self._under_way

    def _note(self, member: Member, applied: Applied) -> None:
        context = self._context
        has_vote = not context.prepared or member.key in context.prepared
        (self._answers if has_vote else self._others)[member.stage][member.peer_id] = applied
        agreed = {answer.state_digest for answer in self._answers[member.stage].values()}
        now = asyncio.get_running_loop().time()
        context.members.note_step(member.peer_id, applied.step, applied.state_digest, now)
        if applied.state_digest in agreed:  # whoever did not prepare can write nothing else into the journal
            context.journal.note_replica(
                applied.step, member.stage, member.peer_id, member.report.incarnation, applied.state_digest
            )

    async def carry_out(self, decision: Decision, prepared: list[PreparedStage], *, checkpoint: bool) -> StepResult:
        """Tell all peers. Returns once a peer of every stage has applied and the others have had APPLY_GRACE_S."""
        context = self._context
        self._answers, self._others = [{} for _ in prepared], [{} for _ in prepared]
        self._without_sum.clear()
        snapshot_due = [self._snapshot_due(stage.stage) for stage in prepared]
        keepers: list[list[str]] = [[] for _ in prepared]
        tasks = []
        for stage in prepared:
            for position, member in enumerate(stage.members):
                keep = snapshot_due[stage.stage] or (checkpoint and position < NUM_KEEPERS)
                if keep:
                    keepers[stage.stage].append(member.peer_id)
                tasks.append(context.in_background(self._apply_at(member, decision, keep=keep)))
            for member, listener in stage.listeners:
                context.in_background(self._follow(member, listener, stage, decision))
        await asyncio.wait(tasks, timeout=APPLY_GRACE_S)
        await context.wait_for(lambda: all(map(self._votes, range(len(prepared)))))
        answers = [self._votes(stage) for stage in range(len(prepared))]
        digests = tuple([await self._majority(stage, decision.step, found) for stage, found in enumerate(answers)])
        context.journal.flush()
        held = tuple(tuple(peer for peer in kept if peer in answers[stage]) for stage, kept in enumerate(keepers))
        self._enter_next(decision.step + 1, digests, held, snapshot_due)
        return StepResult(decision, digests, held)

    def _votes(self, stage: int) -> dict[str, Applied]:
        """The answers that say which state a stage has: of peers that prepared; of others if none of those is left."""
        context, found = self._context, self._answers[stage]
        there = (context.members.get(peer_id) for peer_id, _ in context.prepared)
        is_left = any(m is not None and m.stage == stage and m.key in context.prepared for m in there)
        return dict(found if found or is_left else self._others[stage])

    def _enter_next(
        self, step: int, digests: tuple[str, ...], held: tuple[tuple[str, ...], ...], snapshot_due: list[bool]
    ) -> None:
        """The step is applied: newcomers of a stage fetch this state, and listen to every all-reduce from now on."""
        context = self._context
        context.step = step
        for stage, book in enumerate(context.stages):
            book.digest = digests[stage]
            if snapshot_due[stage] and held[stage]:
                book.snapshot = StateOffer(step, digests[stage], held[stage])
                self._snapshot_at[stage] = asyncio.get_running_loop().time()
                context.members.listen(stage, step)

    def _snapshot_due(self, stage: int) -> bool:
        """Whether a newcomer waits for a state of this stage, and none is still fetching the one before."""
        snapshot = self._context.stages[stage].snapshot
        waiting = self._context.members.of_stage(stage, "syncing")
        fetching = snapshot is not None and any(
            m.listening_from is not None and m.step < snapshot.step for m in waiting
        )
        if fetching and asyncio.get_running_loop().time() - self._snapshot_at[stage] < SNAPSHOT_PATIENCE_S:
            return False
        return any(m.listening_from is None for m in waiting)

    async def _follow(
        self, member: Member, listener: asyncio.Task[object], stage: PreparedStage, decision: Decision
    ) -> None:
        """A listener that has the sum is told the decision; one that missed it needs a later state."""
        term = self._context.term
        answer = await listener
        if self._context.term != term:
            return  # the run was rolled back meanwhile
        try:
            if not isinstance(answer, Prepared) or answer.digest != stage.digest:
                raise NetError(f"it did not receive the sum: {answer}")
            applied = await self._call(member, decision, keep=False)
        except NetError as error:
            log.info("newcomer %s fell behind at step %d: %s", member.peer_id[-8:], decision.step, error)
            self._context.members.stop_listening(member.key, decision.step)
            return
        # Its heartbeat may say by now that it serves; it joins the next all-reduce only if its step is known here.
        await self._applied(member, decision, applied)

    async def _apply_at(self, member: Member, decision: Decision, *, keep: bool) -> None:
        self._under_way.add(member.key)
        try:
            applied = await self._call(member, decision, keep=keep)
        except CallRefused as error:
            await self._refused(member, decision, error.code)
            return
        except NetError as error:
            log.info("%s did not apply step %d: %s", member.peer_id[-8:], decision.step, error)
            return  # told again at its next heartbeat, or lost when there is none
        finally:
            self._under_way.discard(member.key)
        await self._applied(member, decision, applied)

    async def _refused(self, member: Member, decision: Decision, code: str) -> None:
        """A peer that cannot apply is lost. A paused or draining peer that the step was done without is not: nothing is
        expected of it until it resumes, and then it fetches what it has missed."""
        context = self._context
        if code == Code.UNPREPARED and member.state in TAKES_NO_WORK and member.key not in context.prepared:
            if context.decided is decision:
                self._without_sum.add(member.key)
        elif code in (Code.UNPREPARED, Code.BEHIND, Code.AHEAD, Code.WRONG_STAGE, Code.NOT_SERVING):
            must_sync = code == Code.UNPREPARED
            await context.lose(member, f"cannot apply step {decision.step}: {code}", must_sync=must_sync)

    async def _applied(self, member: Member, decision: Decision, applied: Applied) -> None:
        """Note a peer's answer. Not if it is a newcomer that has no state yet to apply the decision to."""
        if applied.step == decision.step + 1 and self._context.decided is decision:
            self._note(member, applied)
            await self._context.notify()

    async def _call(self, member: Member, decision: Decision, *, keep: bool) -> Applied:
        context = self._context
        request = Apply(
            run=context.run_id,
            term=context.term,
            step=decision.step,
            digest=decision.stages[member.stage][0],
            scale=decision.scale,
            learning_rate=decision.learning_rate,
            snapshot=keep,
            basis=decision.basis,
            basis_donors=self._basis_donors() if decision.basis else (),
        )
        return await context.node.call(member.peer_id, request, deadline_s=APPLY_S, expect=Applied)

    def _basis_donors(self) -> tuple[str, ...]:
        """Peers of the last stage: they have computed the subspace's new basis."""
        last = self._context.members.of_stage(len(self._context.stages) - 1, *HOLDS_STATE)
        return tuple(member.peer_id for member in last)[:MAX_BASIS_DONORS]

    async def _majority(self, stage: int, step: int, answers: dict[str, Applied]) -> str:
        """The digest that most replicas have; of two, that of those who have done more of the run.

        The others count as lost until they have fetched it.
        """
        found = [(peer_id, answer.state_digest) for peer_id, answer in answers.items()]
        majority = most_common(found, self._context.tally.contributed)
        others = [peer_id for peer_id, answer in answers.items() if answer.state_digest != majority]
        await asyncio.gather(*(self._diverged(peer_id, stage, step) for peer_id in others))
        return majority

    async def turn_away(self, stage: int, step: int, digest: str) -> None:
        """Make the peers of a stage fetch the state with `digest` if theirs at `step` is another one."""
        there = self._context.members.of_stage(stage, *HOLDS_STATE)
        others = [member.peer_id for member in there if member.step == step and member.report.state_digest != digest]
        await asyncio.gather(*(self._diverged(peer_id, stage, step) for peer_id in others))

    async def _diverged(self, peer_id: str, stage: int, step: int) -> None:
        """Nothing of the next step may go through this peer: what it computes would be in other stages' gradients.

        A peer that does not answer is told at its next heartbeat.
        """
        context, reason = self._context, "its state differs from that of its stage's other replicas"
        context.events.emit(PeerDiverged(peer_id, stage, step, context.members.name(peer_id)))
        member = context.members.get(peer_id)
        if member is None:
            return
        await context.lose(member, reason, must_sync=True)
        try:
            request = Resync(context.run_id, context.term, reason)
            await context.node.call(peer_id, request, deadline_s=RESYNC_S, expect=Acknowledged)
        except NetError as error:
            log.info("%s was not told that its state differs: %s", peer_id[-8:], error)
