"""The volunteer's daemon: joining -> syncing -> serving -> draining -> gone.

One process: the event loop owns the network and all state, one compute thread owns the tensors, and the only child is
libp2p's own daemon. What the peer does with a message is in microbatch.py and steps.py, its life with the coordinator
in heartbeats.py; this file is its way in and out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from swarmtrain import world
from swarmtrain.directory.directory import Directory, DirectoryOptions
from swarmtrain.machine import Machine, ThisMachine
from swarmtrain.observe.events import Events, PeerEnded, PhaseReached
from swarmtrain.observe.keeper import StatusKeeper
from swarmtrain.observe.service import peer_routes
from swarmtrain.p2p.network import HostOptions, NetworkHost
from swarmtrain.peer.announcing import Announcing
from swarmtrain.peer.assignment import Assignment
from swarmtrain.peer.building import build_context
from swarmtrain.peer.compute import Stopped
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.control import control_commands
from swarmtrain.peer.coordinator_link import CoordinatorLink, directory_rules
from swarmtrain.peer.heartbeats import HeartbeatLoop
from swarmtrain.peer.microbatch import Microbatches
from swarmtrain.peer.moving import Moving
from swarmtrain.peer.observing import PeerObserver
from swarmtrain.peer.options import AUTO, PeerOptions, check_fit, fitting_stages
from swarmtrain.peer.patience import Patience
from swarmtrain.peer.steps import Steps
from swarmtrain.peer.syncing import Syncing
from swarmtrain.route.moves import Mover
from swarmtrain.rpc.errors import Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.limits import RateLimiter
from swarmtrain.rpc.node import Node
from swarmtrain.run.manifest import Manifest
from swarmtrain.units import show_size
from swarmtrain.wire.messages import (
    MESSAGES,
    Acknowledged,
    Apply,
    Code,
    FetchBasis,
    FetchDigests,
    FetchState,
    Leave,
    Prepare,
    ReduceShare,
    Replay,
    Resync,
    StealRequest,
    Work,
)
from swarmtrain.wire.schema import Message

T = TypeVar("T")


@dataclass(frozen=True)
class _Joined:
    """What stays the same from stage to stage."""

    host: NetworkHost
    node: Node
    directory: Directory
    link: CoordinatorLink
    manifest: Manifest
    limiter: RateLimiter


@dataclass(frozen=True)
class _Settled:
    """What hosts one stage."""

    assignment: Assignment
    heartbeats: HeartbeatLoop
    announcing: Announcing
    observer: PeerObserver


class PeerDaemon:
    """One peer of one run. `run` returns when it has left."""

    def __init__(self, options: PeerOptions, events: Events, machine: Machine | None = None) -> None:
        self.options, self.events, self._machine = options, events, machine or ThisMachine()
        self.keeper = StatusKeeper("peer")
        events.add(self.keeper)
        self.incarnation = world.token_hex(8)
        self._assignment_number = int(1000 * world.wall())  # above those of former lives
        self._target = options.stage
        self._going = asyncio.Event()  # leaves its stage: to go, or to move to another one
        self._leaving = asyncio.Event()
        self._leave_reason = "asked to leave"
        self._handlers: dict[type[Message], Callable[[Any, Exchange], Any]] = {}
        self.settled: PeerContext | None = None  # while it hosts a stage

    async def run(self) -> None:
        """Join, serve until asked to leave or the run ends, drain, go."""
        async with contextlib.AsyncExitStack() as stack:
            joined = await self._unless_leaving(self._join(stack))
            while joined is not None and not self._leaving.is_set():
                await self._take_assignment(joined)
            self._say_phase("gone", self._leave_reason)

    def leave(self, reason: str) -> None:
        """Drain and go. Safe to call from a signal handler on the loop."""
        self._leave_reason = reason
        self._leaving.set()
        self._going.set()

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

    async def _join(self, stack: contextlib.AsyncExitStack) -> _Joined:
        """Network, the run's definition. p2pd first: before the model is allocated."""
        options = self.options
        patience = Patience(options.find_s, lambda text: self._say_phase("waiting", text))
        host = await patience.insist(lambda _: self._start_host(), is_over=lambda: False)
        stack.push_async_callback(host.close)
        self._say_phase("identity", host.peer_id)
        limiter = RateLimiter(
            max_up_bytes_per_s=options.max_up_bytes_per_s or None,
            max_down_bytes_per_s=options.max_down_bytes_per_s or None,
        )
        node = Node(host, MESSAGES, self._handle, limiter=limiter)
        stack.push_async_callback(node.close)
        rules = directory_rules(options.invite)
        directory = await Directory.start(host, options.invite.run_id, DirectoryOptions(rules=rules))
        stack.push_async_callback(directory.close)
        self._say_phase("network", ", ".join(host.addresses()[:2]))
        link = CoordinatorLink(options.invite, host, node, directory)
        self._handlers = self._handlers_between_assignments(link)
        manifest = await patience.insist(link.fetch_run, is_over=lambda: link.is_over)
        self._say_phase("manifest", f"{manifest.run.name} {manifest.digest()[:12]}")
        return _Joined(host, node, directory, link, manifest, limiter)

    async def _start_host(self) -> NetworkHost:
        options = self.options
        return await self._machine.start_host(
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

    async def _take_assignment(self, joined: _Joined) -> None:
        """Host one stage until asked to leave the run, or permitted to move to another stage."""
        async with contextlib.AsyncExitStack() as stack:
            settled = await self._unless_leaving(self._settle(stack, joined))
            if settled is not None:
                await self._serve(joined, settled)
            self._handlers, self.settled = self._handlers_between_assignments(joined.link), None

    async def _settle(self, stack: contextlib.AsyncExitStack, joined: _Joined) -> _Settled:
        """The stage: which one, whether it fits, its tensors, and who answers for it."""
        link, manifest = joined.link, joined.manifest
        if self.options.stage == AUTO:
            stages = fitting_stages(manifest, self.options)
            patience = Patience(self.options.find_s, lambda text: self._say_phase("waiting", text))
            found = await patience.insist(partial(link.seek_stage, stages), is_over=lambda: link.is_over)
            self.options = replace(self.options, stage=found.stage)
            self._say_phase("stage", f"{found.stage}: {found.reason}")
        options = self.options
        fit = check_fit(manifest, options)
        self._say_phase("fit", f"{show_size(fit.needed_bytes)} of {show_size(fit.available_bytes)}")
        context = await build_context(
            stack,
            options,
            self.incarnation,
            manifest,
            fit,
            link=link,
            host=joined.host,
            node=joined.node,
            directory=joined.directory,
        )
        assignment, steps = Assignment(self._assignment_number, context), Steps(context)
        link.on_doubt = assignment.heartbeat_now.set
        syncing = Syncing(context, steps, self.events)
        observer = PeerObserver(context, steps, self.keeper, self.events, joined.limiter)
        heartbeats = HeartbeatLoop(
            assignment, options, link, steps, syncing, observer, leave=self.leave, say_phase=self._say_phase
        )
        announcing = Announcing(assignment, options, joined.directory, joined.host, link)
        microbatches = Microbatches(context)
        stack.push_async_callback(microbatches.thief.close)
        self._handlers = _handlers(microbatches, steps, syncing, heartbeats)
        self.settled = context
        await self._control(stack, assignment, observer)
        heartbeats.metrics_at = await self._serve_metrics(stack, observer)
        return _Settled(assignment, heartbeats, announcing, observer)

    async def _serve(self, joined: _Joined, settled: _Settled) -> None:
        """Be part of the run until asked to leave, or permitted to move."""
        assignment, context = settled.assignment, settled.assignment.context
        second_look_s = joined.link.rules.second_look_s
        mover = Mover(context.node.peer_id, context.stage, assignment.number, world.random(), second_look_s)
        self._going.clear()
        if self._leaving.is_set():
            self._going.set()
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(settled.heartbeats.run()),
                tasks.create_task(settled.announcing.run()),
                tasks.create_task(settled.observer.watch()),
                tasks.create_task(context.device.run(assignment.changed)),
            ]
            if self.options.may_move:
                moving = Moving(context, joined.link, joined.directory, mover, self._move)
                assignment.mover = mover
                helpers.append(tasks.create_task(moving.run()))
            await self._going.wait()
            context.become(PeerState.DRAINING)  # takes no new work
            self._say_phase("draining", self._leave_reason)
            assignment.changed()
            await assignment.drained(self.options.drain_s)
            for helper in helpers:
                helper.cancel()
        await settled.heartbeats.say_goodbye()
        await settled.announcing.withdraw(moves=not self._leaving.is_set())
        self._say_ended(context)
        if not self._leaving.is_set():
            self._assignment_number = max(mover.version, assignment.number) + 1
            self.incarnation = world.token_hex(8)
            self.options = replace(self.options, stage=self._target)

    def _move(self, target: int) -> None:
        """The coordinator permits this peer to go to another stage."""
        self._target = target
        self._say_phase("moving", f"stage {self.options.stage} -> {target}")
        if not self._leaving.is_set():
            self._leave_reason = f"moves to stage {target}"
        self._going.set()

    async def _handle(self, message: Message, exchange: Exchange) -> Message:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise Refusal(Code.NOT_SERVING, "this peer is still joining", 1.0)
        try:
            answer: Message = await handler(message, exchange)
        except Stopped as stopped:  # it waited for another stage while this peer left its own
            raise Refusal(Code.NOT_SERVING, "this peer has left its stage") from stopped
        return answer

    def _handlers_between_assignments(
        self, link: CoordinatorLink
    ) -> dict[type[Message], Callable[[Any, Exchange], Any]]:
        """Who hosts no stage yet, or moves to another one, is still told that the run is complete."""

        async def told_to_leave(message: Leave, exchange: Exchange) -> Acknowledged:
            await link.check_coordinator(exchange.peer_id, message.run, message.term)
            self.leave(message.reason)
            return Acknowledged("")

        return {Leave: told_to_leave}

    async def _control(self, stack: contextlib.AsyncExitStack, assignment: Assignment, observer: PeerObserver) -> None:
        def change(state: PeerState, reason: str) -> None:
            assignment.context.become(state)
            self._say_phase(state.value, reason)
            assignment.changed()

        commands = control_commands(assignment.context, observer.snapshot, self.leave, change)
        door = await self._machine.serve_control(self.options.state_dir, commands)
        stack.push_async_callback(door.close)

    async def _serve_metrics(self, stack: contextlib.AsyncExitStack, observer: PeerObserver) -> str:
        """HOST:PORT under which the metrics can be had; empty if they are not served."""
        if not self.options.metrics:
            return ""
        routes = peer_routes(observer.snapshot, self.events.cost)
        door = await self._machine.serve_http(routes, self.options.metrics, "--metrics")
        stack.push_async_callback(door.close)
        self._say_phase("metrics", f"http://{door.address}/metrics")
        return (self.options.metrics_announce or door.address)[:80]

    def _say_phase(self, phase: str, detail: str) -> None:
        self.events.emit(PhaseReached(phase, detail))

    def _say_ended(self, context: PeerContext) -> None:
        counters, jobs = context.counters, context.jobs
        self.events.emit(
            PeerEnded(
                counters.microbatches, jobs.num_forwards, jobs.num_recomputed, counters.from_ledger, counters.replayed
            )
        )


def _handlers(
    microbatches: Microbatches, steps: Steps, syncing: Syncing, heartbeats: HeartbeatLoop
) -> dict[type[Message], Callable[[Any, Exchange], Any]]:
    """Who answers what."""
    return {
        Work: microbatches.work,
        StealRequest: microbatches.victim.steal,
        Replay: microbatches.replay,
        Prepare: steps.prepare,
        ReduceShare: steps.part,
        Apply: steps.apply,
        FetchBasis: steps.bases.fetch,
        FetchState: syncing.fetch_state,
        FetchDigests: syncing.fetch_digests,
        Leave: heartbeats.told_to_leave,
        Resync: heartbeats.told_to_sync,
    }
