"""Peers join, send heartbeats and leave: the coordinator's verdicts, and which peers count as lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from swarmtrain import world
from swarmtrain.coordinator.admission import judge, some_donors
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.keeping import is_only_holder
from swarmtrain.coordinator.members import Member
from swarmtrain.coordinator.split_brain import check_peers
from swarmtrain.observe.events import PeerJoined, PeerLost
from swarmtrain.rpc.errors import Refusal
from swarmtrain.wire.messages import Code, Directive, Heartbeat, RunProgress, Verdict
from swarmtrain.wire.peer_report import HOLDS_STATE, STALLED, PeerReport

WATCH_S = 1.0
FURTHER_S = 4.0  # how long other peers may report before the journal is judged to be old
MAX_FURTHER = 4096


class Heartbeats:
    """Answers `Heartbeat`, and notices peers that fall silent."""

    def __init__(
        self,
        context: RunContext,
        tell_decision: Callable[[Member], None],
        progress: Callable[[], RunProgress] = RunProgress,
        renewed: Callable[[str, int | None], bytes] = lambda peer_id, stage: b"",
    ) -> None:
        """`tell_decision` is called with every peer that may not have heard of the last decision.

        What `progress` says of the run is told to every peer, so that its owner can see it. `renewed` makes the
        certificate that a peer needs in place of its own.
        """
        self._context, self._tell_decision, self._progress = context, tell_decision, progress
        self._renewed = renewed
        self._rng = world.random()
        self._further: dict[str, tuple[int, int]] = {}  # term and step of peers that are further than the journal
        self._further_since = 0.0

    async def heartbeat(self, beat: Heartbeat, peer_id: str) -> Verdict:
        """Note a heartbeat; tell the peer what to do."""
        context, report = self._context, beat.report
        if beat.run != context.run_id:
            raise Refusal(Code.WRONG_RUN, f"this is run {context.run_id}")
        if report.stage >= context.manifest.stages.count:
            raise Refusal(Code.WRONG_STAGE, f"the run has stages 0 to {context.manifest.stages.count - 1}")
        context.heard(peer_id)
        if report.state == "gone":
            await self._left(peer_id)
            verdict = Verdict(context.term, context.step, Directive.LEAVE, "", 0, "", ())
            return self._with_progress(verdict, peer_id)
        self._check_not_further(report, peer_id)
        former = context.members.get(peer_id)
        restarted = context.members.heartbeat(peer_id, beat, asyncio.get_running_loop().time())
        if restarted is not None:
            context.events.emit(PeerLost(restarted.peer_id, restarted.stage, "it has restarted", restarted.name))
            context.void_claims(restarted)
        member = context.members.get(peer_id)
        assert member is not None
        if report.state == STALLED and former is not None and former.state == "serving":
            context.events.emit(PeerLost(member.peer_id, member.stage, "its device does not answer", member.name))
        if report.state in ("syncing", STALLED):
            context.void_claims(member)  # its ledgers are dropped, or out of reach
        self._tell_decision(member)
        answer = judge(member, context.members, context.standing, context.stages[report.stage])
        if answer.directive is not Directive.SERVE:
            context.members.refuse(peer_id)
        elif member.state != STALLED:
            context.members.admit(peer_id)
            if member.state == "serving" and (former is None or former.state != "serving"):
                context.events.emit(PeerJoined(member.peer_id, member.stage, member.step, member.name))
        await context.notify()
        offer = answer.offer
        verdict = Verdict(
            term=context.term,
            step=context.step,
            directive=answer.directive,
            reason=answer.reason,
            sync_step=offer.step if offer else 0,
            sync_digest=offer.digest if offer else "",
            donors=some_donors(offer.donors, self._rng) if offer else (),
            exclusions=context.bans.exclusions.after(beat.exclusions),
            redone=context.rounds.packed(context.books.keys()),
            is_only=is_only_holder(member, context.members, context.standing, context.stages[report.stage]),
            certificate=self._renewed(peer_id, report.stage if answer.directive is Directive.SERVE else None),
        )
        verdict = self._with_progress(verdict, peer_id)
        return verdict if verdict.reason else self._explained(verdict, member)

    def _with_progress(self, verdict: Verdict, peer_id: str) -> Verdict:
        known = self._context.tally.contributions.get(peer_id)
        told = replace(verdict, progress=self._progress())
        return told if known is None else replace(told, credit=known.microbatches, credit_s=min(known.seconds, 1e9))

    def _check_not_further(self, report: PeerReport, peer_id: str) -> None:
        """Refuse a peer that has applied steps which the journal lacks: a verdict would make it discard them."""
        known = self._context.known
        if report.state not in HOLDS_STATE or not known.is_behind(report.state_term, report.step):
            self._further.pop(peer_id, None)
            return
        veterans = self._context.tally.contributed
        if not self._further:
            self._further_since = asyncio.get_running_loop().time()
        if len(self._further) < MAX_FURTHER and (not veterans or peer_id in veterans):
            self._further[peer_id] = (report.state_term, report.step)
        raise Refusal(Code.NOT_SERVING, f"the journal here ends at step {known.num_steps}: it is an old copy", 1.0)

    def _check_journal(self) -> None:
        """StaleJournal if most of the peers that have called, of those that have done some of the run, are further."""
        if self._further and asyncio.get_running_loop().time() - self._further_since > FURTHER_S:
            here = {m.peer_id: (0, m.step) for m in self._context.members.all() if m.state in HOLDS_STATE}
            check_peers(self._context.known, here | self._further, self._context.tally.contributed)

    def _explained(self, verdict: Verdict, member: Member) -> Verdict:
        """A serving peer's verdict, with the reason for which it gets no work, as far as that is known here."""
        context, wait = self._context, self._context.waits_for
        if member.stage == 0 and context.dispatcher.neighbours.router.is_banned(member.peer_id):
            reason = "calls to it failed, so the coordinator gives it no work for a while"
            return replace(verdict, reason=reason, is_banned=True)
        return replace(verdict, reason=wait.reason[:1000], empty_stages=wait.empty_stages) if wait else verdict

    async def watch(self) -> None:
        """Peers without a heartbeat are lost. Runs until it is cancelled."""
        loop, members = asyncio.get_running_loop(), self._context.members
        while True:
            self._check_journal()
            looked_at = loop.time()
            await asyncio.sleep(WATCH_S)
            asleep_s = loop.time() - looked_at - WATCH_S
            if not await self._context.node.is_up():  # without this host's own transport no peer can be heard
                members.excuse(loop.time() - looked_at)
            elif asleep_s > WATCH_S:  # nor while this process stood still
                members.excuse(asleep_s)
            for member in members.silent(loop.time()):
                await self._context.lose(member, "no heartbeat")

    async def _left(self, peer_id: str) -> None:
        member = self._context.members.get(peer_id)
        if member is not None:
            await self._context.lose(member, "it has left", has_left=True)
        else:
            await self._context.notify()
