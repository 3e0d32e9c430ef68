"""The volunteer's daemon: joining -> syncing -> serving -> draining -> gone.

One process: the event loop owns the network and all state, one compute thread owns the tensors, and the only child is
libp2p's own daemon. What the peer does with a message is in microbatch.py and steps.py; this file is its life.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import torch

from swarmtrain import __version__
from swarmtrain.chain.dispatch import Dispatcher
from swarmtrain.chain.neighbours import RECORD_LIFE_S, Neighbours, PeerRecord, router_options, stage_topic
from swarmtrain.codec.samples import SampleStore
from swarmtrain.errors import SwarmtrainError
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.net.directory import Directory, DirectoryOptions
from swarmtrain.net.errors import NetError, Refusal
from swarmtrain.net.exchange import Exchange
from swarmtrain.net.host import Host
from swarmtrain.net.host_options import HostOptions
from swarmtrain.net.limiter import RateLimiter
from swarmtrain.net.node import Node
from swarmtrain.net.waiting import wait_event
from swarmtrain.observe.control import ControlServer
from swarmtrain.observe.events import Events, PeerEnded, PhaseReached
from swarmtrain.observe.http import HttpServer, parse_address
from swarmtrain.observe.keeper import StatusKeeper
from swarmtrain.observe.service import peer_routes
from swarmtrain.observe.word import understood
from swarmtrain.peer.compute import ComputeThread, Kind
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.control import control_commands
from swarmtrain.peer.coordinator_link import CoordinatorLink, directory_rules
from swarmtrain.peer.jobs import StageJobs
from swarmtrain.peer.microbatch import Microbatches
from swarmtrain.peer.moving import Moving
from swarmtrain.peer.observing import PeerObserver
from swarmtrain.peer.options import AUTO, Fit, PeerOptions, check_fit, fitting_stages
from swarmtrain.peer.steps import Steps
from swarmtrain.peer.syncing import Syncing
from swarmtrain.route.moves import Mover
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import (
    MESSAGES,
    Acknowledged,
    Apply,
    Code,
    Enroll,
    Enrolled,
    FetchBasis,
    FetchDigests,
    FetchState,
    Leave,
    Part,
    Prepare,
    Replay,
    Resync,
    Verdict,
    Work,
)
from swarmtrain.wire.schema import Message

log = logging.getLogger(__name__)

T = TypeVar("T")

ANNOUNCE_S = 15.0
ENROLL_S = 2.0
MAX_LEDGER_BYTES = 4 << 30
GONE_LIFE_S = 5.0
DESERTED_S = 5.0  # a draining peer that does not hear the coordinator for so long need not wait for it


class PeerDaemon:
    """One peer of one run. `run` returns when it has left."""

    def __init__(self, options: PeerOptions, events: Events) -> None:
        self.options, self.events = options, events
        self.keeper = StatusKeeper("peer")
        events.add(self.keeper)
        self._metrics_at = ""
        self.incarnation = secrets.token_hex(8)
        self._seat = int(1000 * time.time())  # above those of former lives
        self._mover: Mover | None = None
        self._target = options.stage
        self._serving_since: float | None = None
        self._syncing_since = 0.0
        self._download_s = 0.0
        self._going = asyncio.Event()  # leaves its stage: to go, or to move to another one
        self._leaving = asyncio.Event()
        self._leave_reason = "asked to leave"
        self._wake = asyncio.Event()  # announce now
        self._hurry = asyncio.Event()  # show a sign of life now
        self._deserted = asyncio.Event()  # the coordinator has not been heard for long
        self.context: PeerContext | None = None
        self.node: Node | None = None
        self._handlers: dict[type[Message], Callable[[Any, Exchange], Any]] = {}

    async def run(self) -> None:
        """Join, serve until asked to leave or the run ends, drain, go."""
        async with contextlib.AsyncExitStack() as stack:
            joined = await self._unless_leaving(self._join(stack))
            while joined is not None and not self._leaving.is_set():
                await self._take_seat(*joined)
            self._phase("gone", self._leave_reason)

    async def _unless_leaving(self, joining: Coroutine[Any, Any, T]) -> T | None:
        """What `joining` comes to; None if this peer is asked to leave before."""
        task, leaving = asyncio.create_task(joining), asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for item in (task, leaving):
                item.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)

    async def _join(self, stack: contextlib.AsyncExitStack) -> tuple[CoordinatorLink, Host, Directory, Manifest]:
        """Network, the run's definition."""
        host, directory, node = await self._connect(stack)
        self.node = node
        link = CoordinatorLink(self.options.invite, host, node, directory)
        link.on_doubt = self._hurry.set
        manifest = await link.fetch_run(timeout_s=self.options.find_s)
        self._phase("manifest", f"{manifest.run.name} {manifest.digest()[:12]}")
        return link, host, directory, manifest

    async def _take_seat(self, link: CoordinatorLink, host: Host, directory: Directory, manifest: Manifest) -> None:
        """Host one stage until asked to leave the run, or permitted to move to another stage."""
        async with contextlib.AsyncExitStack() as stack:
            context = await self._unless_leaving(self._settle(stack, link, host, directory, manifest))
            if context is not None:
                await self._serve(link, host, directory, context)
            self._handlers = {}

    async def _settle(
        self,
        stack: contextlib.AsyncExitStack,
        link: CoordinatorLink,
        host: Host,
        directory: Directory,
        manifest: Manifest,
    ) -> PeerContext:
        """The stage: which one, whether it fits, its tensors."""
        if self.options.stage == AUTO:
            found = await link.seek_stage(fitting_stages(manifest, self.options), timeout_s=self.options.find_s)
            self.options = replace(self.options, stage=found.stage)
            self._phase("stage", f"{found.stage}: {found.reason}")
        fit = check_fit(manifest, self.options)
        self._phase("fit", f"{fit.needed_bytes / 1e6:.0f} MB of {fit.available_bytes / 1e6:.0f} MB")
        assert self.node is not None
        context = self.context = await self._build(stack, manifest, fit, link, host, self.node, directory)
        self._route_messages(context)
        self.observer = PeerObserver(context, self.steps, self.keeper, self.events, self._limiter)
        await self._control(stack, context)
        await self._serve_metrics(stack)
        return context

    async def _serve(self, link: CoordinatorLink, host: Host, directory: Directory, context: PeerContext) -> None:
        """Be part of the run until asked to leave, or permitted to move."""
        mover = Mover(context.node.peer_id, context.stage, self._seat, random.Random(), link.rules.second_look_s)
        self._going.clear()
        if self._leaving.is_set():
            self._going.set()
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._enroll(link, context)),
                tasks.create_task(self._announce(directory, host, link, context)),
                tasks.create_task(self.observer.watch()),
            ]
            if self.options.may_move:
                moving = Moving(context, link, directory, mover, self._move)
                self._mover = mover
                helpers.append(tasks.create_task(moving.run()))
            await self._going.wait()
            await self._drain(context)
            for helper in helpers:
                helper.cancel()
        await self._say_goodbye(link, context)
        await self._withdraw(directory, host, context)
        counters, jobs = context.counters, context.jobs
        self.events.emit(
            PeerEnded(
                counters.microbatches, jobs.num_forwards, jobs.num_recomputed, counters.from_ledger, counters.replayed
            )
        )
        if not self._leaving.is_set():
            self._seat = max(mover.version, self._seat) + 1
            self.incarnation = secrets.token_hex(8)
            self.options = replace(self.options, stage=self._target)

    def _move(self, target: int) -> None:
        """The coordinator permits this peer to go to another stage."""
        assert self.context is not None
        self._target = target
        self._phase("moving", f"stage {self.context.stage} -> {target}")
        if not self._leaving.is_set():
            self._leave_reason = f"moves to stage {target}"
        self._going.set()

    async def _withdraw(self, directory: Directory, host: Host, context: PeerContext) -> None:
        """The record of the stage that this peer hosts no longer: replaced by one that says so and soon expires."""
        directory.withdraw(stage_topic(context.stage))
        if self._leaving.is_set():
            return
        with contextlib.suppress(SwarmtrainError):
            await directory.announce(stage_topic(context.stage), self._record(host, context).as_value(), GONE_LIFE_S)
        directory.withdraw(stage_topic(context.stage))

    async def _say_goodbye(self, link: CoordinatorLink, context: PeerContext) -> None:
        await self.syncing.close()
        await self.steps.close()
        context.become(PeerState.GONE)
        if link.peer_id is not None:
            with contextlib.suppress(NetError):
                await context.node.call(link.peer_id, self._sign_of_life(context), deadline_s=2.0)

    def leave(self, reason: str) -> None:
        """Drain and go. Safe to call from a signal handler on the loop."""
        self._leave_reason = reason
        self._leaving.set()
        self._going.set()

    async def _connect(self, stack: contextlib.AsyncExitStack) -> tuple[Host, Directory, Node]:
        """p2pd first: before the model is allocated."""
        options = self.options
        host = await Host.start(
            HostOptions(
                state_dir=options.state_dir,
                listen=options.listen,
                announce=options.announce,
                bootstrap=options.invite.bootstrap,
                use_relays=options.relays,
                behind_nat=True if options.behind_nat else None,
                relay=options.serve_as_relay,
            )
        )
        stack.push_async_callback(host.close)
        self._phase("identity", host.peer_id)
        limiter = self._limiter = RateLimiter(
            max_up_bytes_per_s=options.max_up_bytes_per_s or None,
            max_down_bytes_per_s=options.max_down_bytes_per_s or None,
        )
        node = Node(host, MESSAGES, self._handle, limiter=limiter)
        stack.push_async_callback(node.close)
        rules = directory_rules(options.invite)
        directory = await Directory.start(host, options.invite.run_id, DirectoryOptions(rules=rules))
        stack.push_async_callback(directory.close)
        self._phase("network", ", ".join(host.addresses()[:2]))
        return host, directory, node

    async def _build(
        self,
        stack: contextlib.AsyncExitStack,
        manifest: Manifest,
        fit: Fit,
        link: CoordinatorLink,
        host: Host,
        node: Node,
        directory: Directory,
    ) -> PeerContext:
        options = self.options
        torch.set_num_threads(options.threads)
        forward_s, backward_s = options.faults.pace_s
        compute = ComputeThread(at_least_s={Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s})
        stack.push_async_callback(compute.stop)
        built = await compute.run(
            Kind.STEP, -1, lambda: StageWorker(StageState(manifest, options.stage, device=options.device))
        )
        dispatcher: Dispatcher | None = None
        if options.stage < manifest.stages.count - 1:
            below = options.stage + 1
            routing = router_options(manifest, below, options.max_up_bytes_per_s)
            neighbours = Neighbours(below, host, node, directory, policy=options.route, options=routing)
            neighbours.start()
            stack.push_async_callback(neighbours.close)
            dispatcher = Dispatcher(node, neighbours)
        return PeerContext(
            run_id=options.invite.run_id,
            manifest=manifest,
            stage=options.stage,
            incarnation=self.incarnation,
            node=node,
            compute=compute,
            jobs=StageJobs(
                manifest,
                built.value,
                graph_budget_bytes=fit.graph_budget_bytes,
                make_store=lambda: SampleStore(options.state_dir, options.max_samples_bytes),
            ),
            authority=link,
            dispatcher=dispatcher,
            max_queue=options.max_queue,
            max_ledger_bytes=min(MAX_LEDGER_BYTES, fit.available_bytes // 4),
            faults=replace(options.faults, cut=node.cut),
        )

    def _route_messages(self, context: PeerContext) -> None:
        microbatches, self.steps = Microbatches(context), Steps(context)
        self.syncing = Syncing(context, self.steps, self.events)
        self._handlers = {
            Work: microbatches.work,
            Replay: microbatches.replay,
            Prepare: self.steps.prepare,
            Part: self.steps.part,
            Apply: self.steps.apply,
            FetchBasis: self.steps.bases.fetch,
            FetchState: self.syncing.fetch_state,
            FetchDigests: self.syncing.fetch_digests,
            Leave: self._told_to_leave,
            Resync: self._told_to_sync,
        }

    async def _handle(self, message: Message, exchange: Exchange) -> Message:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise Refusal(Code.NOT_SERVING, "this peer is still joining", 1.0)
        answer: Message = await handler(message, exchange)
        return answer

    async def _told_to_leave(self, message: Leave, exchange: Exchange) -> Acknowledged:
        assert self.context is not None
        await self.context.check_coordinator(exchange.peer_id, message.run, message.term)
        self.leave(message.reason)
        return Acknowledged("")

    async def _told_to_sync(self, message: Resync, exchange: Exchange) -> Acknowledged:
        """Answered when no more work is taken: the coordinator begins the next step after that."""
        assert self.context is not None
        await self.context.check_coordinator(exchange.peer_id, message.run, message.term)
        await self._stop_serving(message.reason)
        return Acknowledged("")

    async def _stop_serving(self, reason: str) -> None:
        """Fetch the stage's state, if this peer is not at it already."""
        context = self.context
        if context is None or context.state not in (PeerState.JOINING, PeerState.SERVING):
            return
        self._phase("syncing", reason)
        self._serving_since, self._syncing_since = None, asyncio.get_running_loop().time()
        self._wake.set()
        await self.syncing.begin()
        self._hurry.set()

    async def _enroll(self, link: CoordinatorLink, context: PeerContext) -> None:
        """Tell the coordinator that this peer is there, again and again; find it again when it has moved."""
        while True:
            try:
                if link.peer_id is None or link.wants_look:
                    link.wants_look = False
                    await link.look()
                if link.peer_id is not None:
                    await self._show_life(link.peer_id, context)
            except NetError as error:
                log.info("the coordinator does not answer: %s", error)
                if asyncio.get_running_loop().time() - context.contact_at > DESERTED_S:
                    self._deserted.set()
                if await link.look() and link.peer_id is not None:
                    context.node.forgive(link.peer_id)  # it may be back: do not wait out the back-off
                if link.is_over:
                    self.leave("the run is complete")
            await self._pause(ENROLL_S if context.state is not PeerState.SYNCING else ENROLL_S / 4)

    async def _show_life(self, coordinator: str, context: PeerContext) -> None:
        sign = self._sign_of_life(context)
        answer = await context.node.call(coordinator, sign, deadline_s=10.0, expect=Enrolled)
        self._deserted.clear()
        await context.enter_term(answer.term)
        context.word = understood(answer.reason)
        now = self._sign_of_life(context)
        if (sign.state, sign.step, sign.incarnation) != (now.state, now.step, now.incarnation):
            self._hurry.set()  # the answer is about a past state: ask again
        else:
            await self._obey(answer, context)

    async def _obey(self, answer: Enrolled, context: PeerContext) -> None:
        """joining or syncing -> serving when the coordinator says so; anything -> syncing when the state is wanting."""
        if answer.term < context.term:
            return
        self.syncing.check_stuck(answer.step)
        if answer.verdict is Verdict.LEAVE:
            self.leave(answer.reason)
        elif answer.verdict is Verdict.SERVE and context.state in (PeerState.JOINING, PeerState.SYNCING):
            if self.steps.hearing.is_going_on:
                return  # of the step under way: until it has that, it listens, or it would miss the next one
            context.become(PeerState.SERVING)
            now = asyncio.get_running_loop().time()
            self._download_s = now - self._syncing_since if self._syncing_since else 0.0
            self._serving_since, self._syncing_since = now, 0.0
            self._phase("serving", f"stage {context.stage} from step {context.step}")
            self._wake.set()
            self._hurry.set()
        elif answer.verdict in (Verdict.WAIT, Verdict.SYNC):
            await self._stop_serving(answer.reason)
        if answer.verdict is Verdict.SYNC and context.state is PeerState.SYNCING:
            task = await self.syncing.order(answer)
            if task is not None:
                task.add_done_callback(lambda _: self._hurry.set())

    def _sign_of_life(self, context: PeerContext) -> Enroll:
        times = context.compute.times
        digest = self.steps.last_applied.state_digest if self.steps.last_applied is not None else ""
        return Enroll(
            run=context.run_id,
            stage=context.stage,
            state=context.state.value,
            incarnation=context.incarnation,
            step=context.step,
            state_digest=digest,
            forward_ms=1000 * times.typical_s(Kind.FORWARD),
            backward_ms=1000 * times.typical_s(Kind.BACKWARD),
            queue_ms=1000 * context.compute.backlog_s(),
            up_bytes_per_s=self.options.max_up_bytes_per_s,
            name=self.options.name[:64],
            version=__version__,
            metrics=self._metrics_at,
            spent=self.observer.spent(),
            seat=self._seat_now(),
        )

    def _seat_now(self) -> int:
        """A move that was given up raises it, which makes a late permission void."""
        return max(self._seat, self._mover.version) if self._mover is not None else self._seat

    async def _announce(self, directory: Directory, host: Host, link: CoordinatorLink, context: PeerContext) -> None:
        """Keep this peer's record in the directory fresh."""
        while True:
            self._wake.clear()
            try:
                record = self._record(host, context)
                await directory.announce(stage_topic(context.stage), record.as_value(), RECORD_LIFE_S)
            except SwarmtrainError as error:
                log.info("cannot announce this peer: %s", error)
            await wait_event(self._wake, min(ANNOUNCE_S, link.rules.look_s))

    def _record(self, host: Host, context: PeerContext) -> PeerRecord:
        times, now = context.compute.times, asyncio.get_running_loop().time()
        return PeerRecord(
            state=context.state.value,
            step=context.step,
            incarnation=context.incarnation,
            forward_ms=1000 * times.typical_s(Kind.FORWARD),
            backward_ms=1000 * times.typical_s(Kind.BACKWARD),
            queue_ms=1000 * context.compute.backlog_s(),
            up_bytes_per_s=self.options.max_up_bytes_per_s,
            relayed=self.options.behind_nat,
            addresses=host.addresses()[:4],
            pinned=not self.options.may_move,
            seat=self._seat,
            served_s=now - self._serving_since if self._serving_since is not None else 0.0,
            download_s=self._download_s,
        )

    async def _drain(self, context: PeerContext) -> None:
        """Take no new work; wait until what is in the ledger has been applied, within the stated time.

        Not without a coordinator: nobody would apply it, and whoever coordinates later has it computed again.
        """
        context.become(PeerState.DRAINING)
        self._phase("draining", self._leave_reason)
        self._wake.set()
        self._hurry.set()
        if len(context.ledger) == 0:
            return
        if asyncio.get_running_loop().time() - context.contact_at <= DESERTED_S:
            self._deserted.clear()  # it was heard since
        waits = [asyncio.create_task(self._passed(context, context.step)), asyncio.create_task(self._deserted.wait())]
        try:
            await asyncio.wait(waits, timeout=self.options.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _passed(self, context: PeerContext, step: int) -> None:
        async with context.step_changed:
            await context.step_changed.wait_for(lambda: context.step > step)

    async def _control(self, stack: contextlib.AsyncExitStack, context: PeerContext) -> None:
        commands = control_commands(context, self.observer.snapshot, self.leave, self._change)
        server = ControlServer(self.options.state_dir / "control.sock", commands)
        await server.start()
        stack.push_async_callback(server.close)

    async def _serve_metrics(self, stack: contextlib.AsyncExitStack) -> None:
        if not self.options.metrics:
            return
        server = HttpServer(peer_routes(self.observer.snapshot, self.events.cost))
        await server.start(*parse_address(self.options.metrics, "--metrics"))
        stack.push_async_callback(server.close)
        self._metrics_at = (self.options.metrics_announce or server.address)[:80]
        self._phase("metrics", f"http://{server.address}/metrics")

    def _change(self, state: PeerState, reason: str) -> None:
        assert self.context is not None
        self.context.become(state)
        self._phase(state.value, reason)
        self._wake.set()
        self._hurry.set()

    async def _pause(self, seconds: float) -> None:
        self._hurry.clear()
        await wait_event(self._hurry, seconds)

    def _phase(self, phase: str, detail: str = "") -> None:
        self.events.emit(PhaseReached(phase, detail))
