"""What a peer tells of itself, and obeying what it is told.

`HeartbeatLoop` sends heartbeats to the coordinator and obeys its verdicts. `Announcing` keeps the peer's record in the
directory, under its stage: callers of that stage find it there. Both say the same of the peer, a `PeerReport`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from swarmtrain.chain.neighbours import RECORD_LIFE_S, stage_topic
from swarmtrain.directory.directory import Directory
from swarmtrain.errors import SwarmtrainError
from swarmtrain.observe.events import Events, PhaseReached
from swarmtrain.p2p.errors import NetError
from swarmtrain.p2p.network import NetworkHost
from swarmtrain.peer.assignment import Assignment, Departure
from swarmtrain.peer.contacts import CoordinatorLink, RunUnreachable, excluded
from swarmtrain.peer.identity import PeerState
from swarmtrain.peer.join import Syncing
from swarmtrain.peer.observing import PeerObserver
from swarmtrain.peer.options import PeerOptions
from swarmtrain.peer.step import StepProtocol
from swarmtrain.rpc.errors import CallRefused, LinkRefused
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.waiting import wait_event
from swarmtrain.wire.messages import (
    MAX_EXCLUSIONS_TOLD,
    REDONE,
    Acknowledged,
    Code,
    Directive,
    Heartbeat,
    Leave,
    Resync,
    Verdict,
)
from swarmtrain.wire.peer_report import STALLED, PeerReport, published
from swarmtrain.wire.records import pack_record

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
ANNOUNCE_S = 15.0
ENROL_S = 10.0
GONE_LIFE_S = 5.0  # of the record of a peer that has moved
_ACTIVE = (PeerState.JOINING, PeerState.SYNCING, PeerState.SERVING)


def peer_report(
    assignment: Assignment,
    options: PeerOptions,
    state: str,
    *,
    state_digest: str = "",
    addresses: tuple[str, ...] = (),
) -> PeerReport:
    """How things stand now."""
    peer, stage = assignment.peer, assignment.stage
    return PeerReport(
        stage=peer.stage,
        state=state,
        incarnation=peer.incarnation,
        step=assignment.clock.step,
        state_digest=state_digest,
        state_term=peer.state_term,
        assignment=assignment.version,
        forward_ms=1000 * stage.forward_s,
        backward_ms=1000 * stage.backward_s,
        queue_ms=1000 * stage.compute.backlog_s(),
        up_bytes_per_s=options.max_up_bytes_per_s,
        down_bytes_per_s=options.max_down_bytes_per_s,
        relayed=options.behind_nat,
        pinned=not options.may_move,
        served_s=assignment.served_s,
        download_s=assignment.download_s,
        addresses=published(addresses),
    )


class HeartbeatLoop:
    """Sends `Heartbeat` and obeys the directives; answers `Leave` and `Resync`."""

    def __init__(
        self,
        assignment: Assignment,
        options: PeerOptions,
        link: CoordinatorLink,
        steps: StepProtocol,
        syncing: Syncing,
        observer: PeerObserver,
        events: Events,
        departure: Departure,
        *,
        metrics_at: str,
        enrol: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        """`metrics_at` (HOST:PORT) is told to the coordinator; `enrol` gets a certificate in place of one that does not
        count any more."""
        self._enrol = enrol
        self._assignment, self._options, self._link = assignment, options, link
        self._peer, self._clock, self._stage = assignment.peer, assignment.clock, assignment.stage
        self._metrics_at = metrics_at
        self._steps, self._syncing, self._observer = steps, syncing, observer
        self._events, self._departure = events, departure
        self._looking: asyncio.Task[bool] | None = None
        self._stopping: asyncio.Task[None] | None = None  # dropping what does not count any more

    async def run(self) -> None:
        """Tell the coordinator that this peer is there, again and again; find it again when it has moved."""
        link, assignment, peer = self._link, self._assignment, self._peer
        while True:
            assignment.heartbeat_now.clear()  # before the sign: what changes while it is answered is told at once
            pause_s = HEARTBEAT_S
            try:
                if link.peer_id is None or link.wants_look:
                    link.wants_look = False
                    await link.look()
                if link.peer_id is not None:
                    await self._show_life(link.peer_id)
            except LinkRefused as error:
                raise excluded() from error
            except NetError as error:
                log.info("the coordinator does not answer: %s", error)
                if isinstance(error, CallRefused) and error.code == Code.NOT_SERVING:
                    pause_s = min(HEARTBEAT_S, max(0.1, error.retry_after_s))  # it is still starting
                if isinstance(error, CallRefused) and error.code == Code.NOT_ADMITTED and self._enrol is not None:
                    with contextlib.suppress(RunUnreachable):
                        await self._enrol(ENROL_S)
                assignment.unheard()
                await self._look_for_it()
                if link.peer_id is not None:
                    peer.node.forgive(link.peer_id)  # it may be back: do not wait out the back-off
                if link.is_over:
                    self._departure.dismiss("the run is complete")
            is_syncing = peer.state is PeerState.SYNCING
            is_held = peer.state is PeerState.DRAINING and assignment.is_only
            await wait_event(
                assignment.heartbeat_now, min(pause_s, HEARTBEAT_S / 4) if is_syncing or is_held else pause_s
            )

    async def _look_for_it(self) -> None:
        """Read the directory; after an outage that can take long, and meanwhile the coordinator may be back where it
        was: so it is waited for a moment only, and goes on by itself."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._link.look(), name="look for the coordinator")
        await asyncio.wait([self._looking], timeout=HEARTBEAT_S)

    async def told_to_leave(self, message: Leave, exchange: Exchange) -> Acknowledged:
        """Answer `Leave`."""
        await self._peer.check_coordinator(exchange.peer_id, message.run, message.term)
        self._departure.dismiss(message.reason)
        return Acknowledged("")

    async def told_to_sync(self, message: Resync, exchange: Exchange) -> Acknowledged:
        """Answered when no more work is taken: the coordinator begins the next step after that."""
        await self._peer.check_coordinator(exchange.peer_id, message.run, message.term)
        await self._stop_serving(message.reason)
        return Acknowledged("")

    async def say_goodbye(self) -> None:
        """End what is under way, and tell the coordinator that this peer is gone."""
        for task in (self._looking, self._stopping):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._syncing.close()
        await self._steps.close()
        self._peer.become(PeerState.GONE)
        if self._link.peer_id is not None:
            with contextlib.suppress(NetError):
                coordinator = self._link.peer_id
                self._peer.verdict = await self._peer.node.call(
                    coordinator, self._heartbeat(), deadline_s=2.0, expect=Verdict
                )

    async def _show_life(self, coordinator: str) -> None:
        assignment, peer, heartbeat = self._assignment, self._peer, self._heartbeat()
        answer = await peer.node.call(coordinator, heartbeat, deadline_s=10.0, expect=Verdict)
        assignment.deserted.clear()
        self._heed(answer)
        await peer.enter_term(answer.term)
        peer.verdict = answer
        if answer.term >= peer.term:
            for step, microbatch, round in REDONE.iter_unpack(
                answer.redone[: len(answer.redone) // REDONE.size * REDONE.size]
            ):
                await self._clock.begin_anew(step, microbatch, round)
        said, now = heartbeat.report, self._heartbeat().report
        # An answer about a past state does not count. Whatever changed the state asks again; a step that was applied
        # meanwhile does not, or peers whose steps are shorter than their way to the coordinator would never pause.
        if (said.state, said.step, said.incarnation) == (now.state, now.step, now.incarnation):
            await self._obey(answer)

    def _heed(self, answer: Verdict) -> None:
        """Keep to the run's list of excluded peers, the rest of which is asked for at once; take a new certificate."""
        exclusions = self._peer.membership.exclusions
        exclusions.enter_term(answer.term)
        for peer_id in exclusions.hear(answer.exclusions):
            self._peer.node.drop(peer_id)
        if answer.certificate and self._peer.membership.hold(answer.certificate) is not None:
            self._peer.node.show_certificate()  # before any work that it entitles to
            self._assignment.announce_now.set()
        if len(answer.exclusions) == MAX_EXCLUSIONS_TOLD:
            self._assignment.heartbeat_now.set()

    async def _obey(self, answer: Verdict) -> None:
        """joining or syncing -> serving when the coordinator says so; anything -> syncing when the state is wanting."""
        assignment, peer = self._assignment, self._peer
        if answer.term < peer.term:
            return
        self._steps.drop_taken_back(answer.term, answer.step)
        self._syncing.check_stuck(answer.step)
        assignment.heard_step(answer.step, holds_sum=self._steps.is_prepared)
        assignment.heard_only(answer.is_only)
        if answer.directive is Directive.LEAVE:
            self._departure.dismiss(answer.reason)
        elif self._is_stalled:
            if answer.directive is Directive.WAIT:
                await self._stop_serving(answer.reason)
        elif answer.directive is Directive.SERVE and peer.state in (PeerState.JOINING, PeerState.SYNCING):
            if self._steps.listener.is_going_on:
                return  # of the step under way: until it has that, it listens, or it would miss the next one
            if not await self._syncing.stop():
                return  # asked again when the state is loaded
            if peer.state not in (PeerState.JOINING, PeerState.SYNCING):
                return  # it was told to leave meanwhile
            assignment.serves()
            self._events.emit(PhaseReached("serving", f"stage {peer.stage} from step {self._clock.step + 1} on"))
        elif answer.directive in (Directive.WAIT, Directive.SYNC):
            await self._stop_serving(answer.reason)
        if answer.directive is Directive.SYNC and peer.state is PeerState.SYNCING:
            task = await self._syncing.order(answer)
            if task is not None:
                task.add_done_callback(lambda _: assignment.heartbeat_now.set())

    async def _stop_serving(self, reason: str) -> None:
        """Fetch the stage's state, if this peer is not at it already."""
        if self._peer.state not in (PeerState.JOINING, PeerState.SERVING):
            return
        self._peer.become(PeerState.SYNCING)  # at once: its owner may pause it while the task below waits for its turn
        self._events.emit(PhaseReached("syncing", reason))
        self._assignment.syncs()
        stopping = asyncio.create_task(self._syncing.begin(), name="stop serving")
        stopping.add_done_callback(lambda _: self._assignment.heartbeat_now.set())
        try:
            if await self._stage.device.ends(stopping):
                await stopping
            else:  # it ends when the device answers again, which is the proof that it does
                self._stopping = stopping
        except asyncio.CancelledError:
            stopping.cancel()
            raise

    @property
    def _is_stalled(self) -> bool:
        """Whether nothing can be had of the device; to the end of what was begun because of that."""
        is_stopping = self._stopping is not None and not self._stopping.done()
        return self._stage.device.hangs or is_stopping

    def _heartbeat(self) -> Heartbeat:
        peer, options = self._peer, self._options
        applied = self._steps.last_applied
        state = STALLED if self._is_stalled and peer.state in _ACTIVE else peer.state.value
        digest = applied.state_digest if applied is not None else ""
        return Heartbeat(
            run=peer.run_id,
            report=peer_report(self._assignment, options, state, state_digest=digest),
            name=options.name[:64],
            metrics=self._metrics_at,
            spent=self._observer.spent(),
            exclusions=peer.membership.exclusions.head,
            numeric_class=self._stage.numeric_class,
        )


class Announcing:
    """Keeps the record of one assignment fresh."""

    def __init__(
        self,
        assignment: Assignment,
        options: PeerOptions,
        directory: Directory,
        host: NetworkHost,
        link: CoordinatorLink,
    ) -> None:
        self._assignment, self._options = assignment, options
        self._directory, self._host, self._link = directory, host, link
        self._topic = stage_topic(assignment.peer.stage)

    async def run(self) -> None:
        """Announce now and then, and whenever something has changed, until it is cancelled."""
        assignment = self._assignment
        while True:
            assignment.announce_now.clear()
            try:
                await self._directory.announce(self._topic, self._record(), RECORD_LIFE_S)
            except SwarmtrainError as error:
                log.info("cannot announce this peer: %s", error)
            await wait_event(assignment.announce_now, min(ANNOUNCE_S, self._link.rules.look_s))

    async def withdraw(self, *, moves: bool) -> None:
        """This peer does not host the stage any more. Of one that moves, a record says so, and soon expires."""
        self._directory.withdraw(self._topic)
        if not moves:
            return
        with contextlib.suppress(SwarmtrainError):
            await self._directory.announce(self._topic, self._record(), GONE_LIFE_S)
        self._directory.withdraw(self._topic)

    def _record(self) -> bytes:
        assignment = self._assignment
        state = STALLED if assignment.stage.device.hangs else assignment.peer.state.value
        return pack_record(peer_report(assignment, self._options, state, addresses=self._host.addresses()))
