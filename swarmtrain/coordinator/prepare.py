"""Prepare: every stage reduces its gradient among its peers; a failed attempt is made again without whom it lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmtrain.coordinator.blame import Blame, Reply
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.members import Member
from swarmtrain.model.buffers import StateLayout
from swarmtrain.net.errors import CallRefused, LinkClosed, NetError, PeerSilent
from swarmtrain.observe.events import PrepareFailed, StagePrepared
from swarmtrain.reduce.partition import owned_elements
from swarmtrain.wire.messages import Code, Prepare, Prepared, RosterEntry, Unprepared

log = logging.getLogger(__name__)

PREPARE_S = 120.0
FAILURE_GRACE_S = 1.5  # after a first failure: how long the others may still say what they have seen
MAX_PAUSE_S = 2.0  # between attempts that fail again and again

Shares = dict[tuple[str, str], list[int]]


@dataclass(frozen=True)
class PreparedStage:
    """A stage whose peers hold the same reduced gradient."""

    stage: int
    digest: str
    squared_norm: float
    members: tuple[Member, ...]  # who holds it
    shares: Shares  # who answered for which microbatches
    listeners: tuple[tuple[Member, asyncio.Task[object]], ...]  # newcomers, and whether they have heard it


class Preparer:
    """Prepares the stages of one run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        layouts = [StateLayout(context.manifest, stage) for stage in range(context.manifest.stages.count)]
        self._sizes = [
            layout.buffers[0].num_elements + (layout.buffers[4].num_elements if layout.tracks else 0)
            for layout in layouts
        ]
        self._attempts = 0

    async def prepare(self, step: int, stage: int, books: StepBooks) -> PreparedStage:
        """Prepare one stage, with as many attempts as it takes. Whom attempts fail on repeatedly is left out."""
        context, blame, num_failed = self._context, Blame(), 0
        loop = asyncio.get_running_loop()
        while True:
            await context.wait_for(lambda: books.balances(stage))
            shares = books.roster(stage)
            members = self._participants(stage, shares)
            if absent := shares.keys() - {member.key for member in members}:
                for key in absent:
                    books.lose(stage, key)
                await context.notify()
                continue
            self._attempts += 1
            started = loop.time()
            request = self._request(step, stage, self._attempts, members, shares)
            listeners = self._tell_listeners(stage, request)
            answers = await self._ask_all(members, request)
            good = [answer for answer in answers if isinstance(answer, Prepared)]
            if len(good) == len(members) and len({answer.digest for answer in good}) == 1:
                context.events.emit(StagePrepared(step, stage, request.attempt, loop.time() - started))
                return PreparedStage(stage, good[0].digest, good[0].squared_norm, tuple(members), shares, listeners)
            await self._correct(books, request, members, answers, blame)
            num_failed += 1
            await asyncio.sleep(min(MAX_PAUSE_S, 0.05 * 2 ** min(num_failed, 10)))

    def _participants(self, stage: int, shares: Shares) -> list[Member]:
        """Whoever has work in the step, and every other serving peer as a receiver."""
        everybody = self._context.members.of_stage(stage, "serving", "draining", "paused")
        step = self._context.step
        return [m for m in everybody if m.key in shares or (m.state == "serving" and m.step == step)]

    def _listeners(self, stage: int, step: int) -> list[Member]:
        """Newcomers that hear this step's reduction."""
        waiting = self._context.members.of_stage(stage, "syncing")
        return [m for m in waiting if m.listening_from is not None and m.listening_from <= step]

    def _tell_listeners(self, stage: int, request: Prepare) -> tuple[tuple[Member, asyncio.Task[object]], ...]:
        """Newcomers receive the reduced gradient, too; nobody waits for them."""
        named = {entry.peer_id for entry in request.roster}
        return tuple(
            (member, self._context.in_background(self._ask(member, request)))
            for member in self._listeners(stage, request.step)
            if member.peer_id in named
        )

    def _request(self, step: int, stage: int, attempt: int, members: list[Member], shares: Shares) -> Prepare:
        owned = owned_elements(self._sizes[stage], [member.up_bytes_per_s for member in members])
        listeners = self._listeners(stage, step)
        roster = tuple(
            RosterEntry(
                peer_id=member.peer_id,
                incarnation=member.incarnation,
                microbatches=np.array(sorted(shares.get(member.key, [])), dtype="<u4").tobytes(),
                owned=elements,
            )
            for member, elements in zip([*members, *listeners], [*owned, *[0] * len(listeners)], strict=True)
        )
        return Prepare(self._context.run_id, self._context.term, stage, step, attempt, roster)

    async def _ask_all(self, members: list[Member], request: Prepare) -> list[Reply]:
        """Everybody's answer. The first failure ends the attempt: who has not answered soon after is not waited for."""
        tasks = [asyncio.create_task(self._ask(member, request)) for member in members]
        try:
            left = set(tasks)
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if any(not isinstance(task.result(), Prepared) for task in done) and left:
                    await asyncio.wait(left, timeout=FAILURE_GRACE_S)
                    break
            return [task.result() if task.done() else None for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, member: Member, request: Prepare) -> Prepared | Unprepared | NetError:
        """One peer's answer. A broken link is dialed again once: the same attempt asked again gives the same answer."""
        node = self._context.node
        try:
            try:
                answer = await node.call(member.peer_id, request, deadline_s=PREPARE_S)
            except PeerSilent:
                raise
            except LinkClosed:
                answer = await node.call(member.peer_id, request, deadline_s=PREPARE_S)
        except NetError as error:
            return error
        if isinstance(answer, Prepared | Unprepared):
            return answer
        return NetError(f"answered {answer.wire.kind}")

    async def _correct(
        self, books: StepBooks, request: Prepare, members: list[Member], answers: Sequence[Reply], blame: Blame
    ) -> None:
        """Correct books and members for another attempt."""
        context, reasons = self._context, []
        for member, answer in zip(members, answers, strict=True):
            if answer is None or isinstance(answer, Prepared):
                continue
            reasons.append(f"{member.peer_id[-6:]}: {answer.reason if isinstance(answer, Unprepared) else answer}")
            if isinstance(answer, Unprepared):
                missing = np.frombuffer(answer.missing[: len(answer.missing) // 4 * 4], dtype="<u4").tolist()
                books.withdraw(request.stage, [i for i in missing if i < books.num_microbatches], member.key)
            elif isinstance(answer, CallRefused):
                if answer.code in (Code.BEHIND, Code.AHEAD, Code.WRONG_STAGE, Code.NOT_SERVING):
                    await context.lose(member, f"cannot take part in step {request.step}: {answer.code}")
            else:
                await context.lose(member, str(answer))
        for member in blame.attempt(members, answers):
            await context.lose(member, "the others of its stage cannot reduce with it", must_sync=True)
        reason = "; ".join(reasons)[:500] or "replicas disagree on the reduced gradient"
        context.events.emit(PrepareFailed(request.step, request.stage, request.attempt, reason))
        await context.notify()
