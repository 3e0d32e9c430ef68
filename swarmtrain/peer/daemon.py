"""The volunteer's daemon: joining -> syncing -> serving -> draining -> gone.

One process: the event loop owns the network and all state, one compute thread owns the tensors, and the only child is
libp2p's own daemon. This file is the way in and out, and says which message is answered where. One stay on a stage is
in `assignment.py`, the life with the coordinator in `heartbeats.py`, the work in `microbatch.py` and `step.py`.

A coordinator may be away for minutes, and a daemon that has ended may stay so until its owner looks: so a peer that
cannot find its run waits (`Patience`). What no waiting can mend, as an invite that is not one or a run that does
not want this peer, ends the daemon at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from swarmtrain import world
from swarmtrain.chain.membership import Membership
from swarmtrain.courtesy.settings import Settings, read_settings
from swarmtrain.directory.directory import Directory, DirectoryOptions
from swarmtrain.errors import SwarmtrainError, UsageError
from swarmtrain.machine import Machine, ThisMachine
from swarmtrain.native.bf16 import require_bf16
from swarmtrain.observe.control import Command
from swarmtrain.observe.events import Events, PhaseReached
from swarmtrain.observe.keeper import StatusKeeper
from swarmtrain.observe.service import peer_routes
from swarmtrain.p2p.errors import BootstrapError
from swarmtrain.p2p.network import HostOptions, NetworkHost
from swarmtrain.peer.assignment import Assignment, Departure, open_assignment
from swarmtrain.peer.checking import Checking
from swarmtrain.peer.compute import Stopped
from swarmtrain.peer.contacts import CoordinatorLink, RunUnreachable, Strangers, directory_rules
from swarmtrain.peer.contribution import Contribution
from swarmtrain.peer.courtesy import Courtesy
from swarmtrain.peer.enrolling import Enrolling
from swarmtrain.peer.heartbeats import Announcing, HeartbeatLoop
from swarmtrain.peer.identity import PeerState
from swarmtrain.peer.join import Syncing
from swarmtrain.peer.microbatch import Microbatches
from swarmtrain.peer.moving import Moving
from swarmtrain.peer.observing import PeerObserver
from swarmtrain.peer.options import AUTO, PeerOptions, check_fit, fitting_stages
from swarmtrain.peer.own_page import OwnPage
from swarmtrain.peer.receipts import ReceiptKeeper
from swarmtrain.peer.step import StepProtocol
from swarmtrain.peer.work_stealing import Thief, Victim
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
    Check,
    Code,
    FetchBasis,
    FetchDigests,
    FetchKept,
    FetchProof,
    FetchSeals,
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

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 15.0
ATTEMPT_S = 10.0  # one attempt at finding the coordinator: after that the peer says that it waits
RECORD_S = 15.0  # between two looks at what counts as this peer's
REMIND_S = 60.0  # how often it says so while nothing changes


@dataclass(frozen=True)
class _Joined:
    """What stays the same from stage to stage."""

    host: NetworkHost
    node: Node
    directory: Directory
    link: CoordinatorLink
    manifest: Manifest
    limiter: RateLimiter
    strangers: Strangers
    enrolling: Enrolling


@dataclass(frozen=True)
class _Settled:
    """What hosts one stage."""

    assignment: Assignment
    heartbeats: HeartbeatLoop
    announcing: Announcing
    observer: PeerObserver
    thief: Thief
    receipts: ReceiptKeeper


class PeerDaemon:
    """One peer of one run. `run` returns when it has left."""

    def __init__(self, options: PeerOptions, events: Events, machine: Machine | None = None) -> None:
        self.options, self.events, self._machine = options, events, machine or ThisMachine()
        self.keeper = StatusKeeper("peer")
        events.add(self.keeper)
        self.incarnation = world.token_hex(8)
        self._assignment_number = int(1000 * world.wall())  # above those of former lives
        self.departure = Departure(events)
        self._handlers: dict[type[Message], Callable[[Any, Exchange], Any]] = {}
        self.assignment: Assignment | None = None  # while it hosts a stage
        self.membership = Membership(options.invite)
        self._observer: PeerObserver | None = None
        self._settings = read_settings(options.state_dir)
        up, down = self._settings.rates(options.max_up_bytes_per_s, options.max_down_bytes_per_s)
        self.options = replace(options, max_up_bytes_per_s=up, max_down_bytes_per_s=down)
        rules = self._settings.rules(options.courtesy)
        self.courtesy = Courtesy(rules, self._machine.sensors(options.gpu_index), events, options.traffic_file)
        self.contribution = Contribution(options.state_dir)
        self._page = OwnPage(self._machine, options.state_dir, self.snapshot)

    async def run(self) -> None:
        """Join, serve until asked to leave or the run ends, drain, go."""
        async with contextlib.AsyncExitStack() as stack:
            joined = await self._unless_leaving(self._join(stack))
            while joined is not None and not self.departure.from_run.is_set():
                await self._take_assignment(joined)
            self._say_phase("gone", self.departure.reason)

    def leave(self, reason: str) -> None:
        """Drain and go. Safe to call from a signal handler on the loop."""
        self.departure.leave(reason)

    def snapshot(self) -> dict[str, Any] | None:
        """Everything, as plain data; None while it hosts no stage."""
        return self._observer.snapshot() if self._observer is not None else None

    async def _unless_leaving(self, joining: Coroutine[Any, Any, T]) -> T | None:
        """What `joining` comes to; None if this peer is asked to leave before."""
        task, leaving = asyncio.create_task(joining), asyncio.create_task(self.departure.from_run.wait())
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
        await self.courtesy.check()
        patience = Patience(options.find_s, lambda text: self._say_phase("waiting", text))
        host = await patience.insist(lambda _: self._start_host(), is_over=lambda: False)
        stack.push_async_callback(host.close)
        self._say_phase("identity", host.peer_id)
        self.membership.peer_id = host.peer_id
        stack.push_async_callback(self._page.close)
        limiter = RateLimiter(
            max_up_bytes_per_s=options.max_up_bytes_per_s or None,
            max_down_bytes_per_s=options.max_down_bytes_per_s or None,
        )
        rules = directory_rules(options.invite)
        directory = await Directory.start(
            host, options.invite.run_id, DirectoryOptions(rules=rules, gate=self.membership)
        )
        stack.push_async_callback(directory.close)
        self.membership.clock = directory.now
        strangers = Strangers(host, directory)
        node = Node(
            host,
            MESSAGES,
            self._handle,
            limiter=limiter,
            look_up=strangers.meet,
            is_excluded=self.membership.is_excluded,
            gate=self.membership,
        )
        stack.push_async_callback(node.close)
        self.courtesy.meter(
            lambda: node.traffic().total_bytes, lambda: self.assignment.clock.step if self.assignment is not None else 0
        )
        self._say_phase("network", ", ".join(host.addresses()[:2]))
        link = CoordinatorLink(options.invite, host, node, directory)
        self._handlers = self._handlers_between_assignments(link)
        enrolling = Enrolling(options.invite, self.membership, node, link, options.name)
        await patience.insist(enrolling.enrol, is_over=lambda: link.is_over)
        manifest = await patience.insist(link.fetch_run, is_over=lambda: link.is_over)
        self._say_phase("manifest", f"{manifest.run.name} {options.invite.run_id}")
        return _Joined(host, node, directory, link, manifest, limiter, strangers, enrolling)

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
            self._handlers, self.assignment = self._handlers_between_assignments(joined.link), None
            self._observer = None

    async def _settle(self, stack: contextlib.AsyncExitStack, joined: _Joined) -> _Settled:
        """The stage: which one, whether it fits, its tensors, and what answers its messages."""
        link, manifest = joined.link, joined.manifest
        if manifest.is_rounded:
            await world.in_thread(partial(require_bf16, self.options.device))
        if self.options.stage == AUTO:
            stages = fitting_stages(manifest, self.options)
            patience = Patience(self.options.find_s, lambda text: self._say_phase("waiting", text))
            found = await patience.insist(partial(link.seek_stage, stages), is_over=lambda: link.is_over)
            self.options = replace(self.options, stage=found.stage)
            self._say_phase("stage", f"{found.stage}: {found.reason}")
        options = self.options
        fit = check_fit(manifest, options)
        self._say_phase("fit", f"{show_size(fit.needed_bytes)} of {show_size(fit.available_bytes)}")
        ends = (0, manifest.stages.count - 1) if manifest.model.tie_embeddings else ()
        joined.strangers.expect_from((options.stage, *ends))
        assignment = await open_assignment(
            stack,
            self._assignment_number,
            options,
            self.incarnation,
            manifest,
            fit,
            link=link,
            host=joined.host,
            node=joined.node,
            directory=joined.directory,
            membership=self.membership,
        )
        peer, clock, stage, dispatcher = assignment.peer, assignment.clock, assignment.stage, assignment.dispatcher
        steps = StepProtocol(peer, clock, stage)
        syncing = Syncing(peer, clock, stage, steps, self.events)
        checking = Checking(peer, clock, stage)
        thief, victim = Thief(peer, clock, stage), Victim(peer, clock, stage)
        microbatches = Microbatches(peer, clock, stage, dispatcher, thief, max_queue=options.max_queue)
        observer = PeerObserver(
            peer,
            clock,
            stage,
            steps,
            dispatcher,
            self.keeper,
            self.events,
            joined.limiter,
            self.courtesy,
            name=options.name,
        )
        receipts = ReceiptKeeper(peer, link, options.invite, options.state_dir)
        await self._serve_control(stack, assignment, observer, receipts, joined.limiter)
        heartbeats = HeartbeatLoop(
            assignment,
            options,
            link,
            steps,
            syncing,
            observer,
            self.events,
            self.departure,
            metrics_at=await self._serve_metrics(stack, observer),
            enrol=joined.enrolling.enrol,
        )
        announcing = Announcing(assignment, options, joined.directory, joined.host, link)
        self._handlers = {
            Work: microbatches.work,
            StealRequest: victim.steal,
            Replay: microbatches.replay,
            Prepare: steps.prepare,
            ReduceShare: steps.reduce_share,
            Apply: steps.apply,
            FetchSeals: checking.fetch_seals,
            FetchProof: checking.fetch_proof,
            FetchKept: checking.fetch_kept,
            Check: checking.check,
            FetchBasis: steps.bases.fetch,
            FetchState: syncing.fetch_state,
            FetchDigests: syncing.fetch_digests,
            Leave: heartbeats.told_to_leave,
            Resync: heartbeats.told_to_sync,
        }
        self.assignment, self._observer = assignment, observer
        await self.courtesy.look()
        self.courtesy.apply(assignment)
        return _Settled(assignment, heartbeats, announcing, observer, thief, receipts)

    async def _serve(self, joined: _Joined, settled: _Settled) -> None:
        """Be part of the run until asked to leave, or permitted to move."""
        assignment, peer, departure = settled.assignment, settled.assignment.peer, self.departure
        departure.take_assignment(peer.stage)
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(settled.heartbeats.run()),
                tasks.create_task(settled.announcing.run()),
                tasks.create_task(settled.observer.watch()),
                tasks.create_task(settled.thief.run()),
                tasks.create_task(settled.receipts.run()),
                tasks.create_task(assignment.watch_device()),
                tasks.create_task(self.courtesy.watch()),
                tasks.create_task(self.courtesy.obey(assignment)),
                tasks.create_task(self._record(settled.observer)),
            ]
            if assignment.mover is not None:
                moving = Moving(peer, joined.manifest, joined.link, joined.directory, assignment.mover, departure)
                helpers.append(tasks.create_task(moving.run()))
            await departure.from_stage.wait()
            peer.become(PeerState.DRAINING)  # takes no new work
            self._say_phase("draining", departure.reason)
            assignment.changed()
            await assignment.drained(self.options.drain_s, departure.dismissed)
            for helper in helpers:
                helper.cancel()
        await settled.receipts.fetch_last()
        await settled.heartbeats.say_goodbye()
        await settled.announcing.withdraw(moves=not departure.from_run.is_set())
        self.events.emit(settled.observer.ended())
        if not departure.from_run.is_set():
            assert departure.target is not None
            self._assignment_number = assignment.version + 1
            self.incarnation = world.token_hex(8)
            self.options = replace(self.options, stage=departure.target)

    async def _handle(self, message: Message, exchange: Exchange) -> Message:
        if not self._may_ask(exchange.peer_id):
            raise Refusal(Code.NOT_ADMITTED)
        handler = self._handlers.get(type(message))
        if handler is None:
            raise Refusal(Code.NOT_SERVING, "this peer is still joining", 1.0)
        try:
            answer: Message = await handler(message, exchange)
        except Stopped as stopped:  # it waited for another stage while this peer left its own
            raise Refusal(Code.NOT_SERVING, "this peer has left its stage") from stopped
        return answer

    def _may_ask(self, peer_id: str) -> bool:
        return peer_id == self.membership.peer_id or self.membership.certificate_of(peer_id) is not None

    def _handlers_between_assignments(
        self, link: CoordinatorLink
    ) -> dict[type[Message], Callable[[Any, Exchange], Any]]:
        """A peer that hosts no stage yet, or moves to another one, is still told that the run is complete."""

        async def told_to_leave(message: Leave, exchange: Exchange) -> Acknowledged:
            await link.check_coordinator(exchange.peer_id, message.run, message.term)
            self.departure.dismiss(message.reason)
            return Acknowledged("")

        return {Leave: told_to_leave}

    async def _serve_control(
        self,
        stack: contextlib.AsyncExitStack,
        assignment: Assignment,
        observer: PeerObserver,
        receipts: ReceiptKeeper,
        limiter: RateLimiter,
    ) -> None:
        """What the owner may ask on the local control socket: status, credit, drain, pause, resume; under test, cut."""
        peer = assignment.peer

        async def status(request: dict[str, Any]) -> dict[str, Any]:
            return observer.snapshot()

        async def drain(request: dict[str, Any]) -> dict[str, Any]:
            self.leave("asked to drain")
            return {"ok": True}

        async def pause(request: dict[str, Any]) -> dict[str, Any]:
            """A paused peer takes no new work, answers for its ledger, and takes part in the step's all-reduce."""
            if peer.state not in (PeerState.SERVING, PeerState.PAUSED):
                raise UsageError(f"this peer is {peer.state}; only a serving one can be paused")
            self.courtesy.ask(pause=True)
            self.courtesy.apply(assignment)
            return {"ok": True, "is_only": assignment.is_only}

        async def resume(request: dict[str, Any]) -> dict[str, Any]:
            """Offer itself again; the coordinator says whether the state is still the run's or must be fetched."""
            self.courtesy.ask(pause=False)
            self.courtesy.apply(assignment)
            pause = self.courtesy.pause
            return {"ok": True, "pause": pause.reason if pause is not None else ""}

        async def cut(request: dict[str, Any]) -> dict[str, Any]:
            peer.node.cut()
            return {"ok": True}

        async def credit(request: dict[str, Any]) -> dict[str, Any]:
            await receipts.fetch()
            return {"path": str(receipts.path), "receipt": receipts.held.as_dict() if receipts.held else None}

        async def page(request: dict[str, Any]) -> dict[str, Any]:
            owner = AtThePage(self, assignment, limiter)
            return {"url": await self._page.open(owner, lambda: self.contribution.points)}

        commands: dict[str, Command] = {
            "page": page,
            "status": status,
            "credit": credit,
            "drain": drain,
            "pause": pause,
            "resume": resume,
        }
        if peer.faults.is_enabled:
            commands["cut"] = cut
        door = await self._machine.serve_control(self.options.state_dir, commands)
        stack.push_async_callback(door.close)

    async def _serve_metrics(self, stack: contextlib.AsyncExitStack, observer: PeerObserver) -> str:
        """HOST:PORT under which the metrics can be had; empty if they are not served."""
        if not self.options.metrics:
            return ""
        routes = peer_routes(observer.snapshot, self.events.cost)
        announced = self.options.metrics_announce.rpartition(":")[0]  # Prometheus asks under that name
        door = await self._machine.serve_http(routes, self.options.metrics, "--metrics", known_as=announced)
        stack.push_async_callback(door.close)
        self._say_phase("metrics", f"http://{door.address}/metrics")
        return (self.options.metrics_announce or door.address)[:80]

    async def _record(self, observer: PeerObserver) -> None:
        """Note what counts as this peer's, until cancelled."""
        contribution = self.contribution
        try:
            while True:
                contribution.note(world.wall(), observer.credit()["microbatches"])
                if contribution.needs_writing:
                    await world.in_thread(contribution.write)
                await asyncio.sleep(RECORD_S)
        finally:
            contribution.write()

    def settings(self) -> Settings:
        """What the owner has changed on the page."""
        return self._settings

    async def change(self, settings: Settings, limiter: RateLimiter) -> None:
        """Change them, now and for later starts. The coordinator is told other caps at the next start."""
        merged = replace(self._settings, **{key: value for key, value in asdict(settings).items() if value is not None})
        await world.in_thread(partial(merged.write, self.options.state_dir))
        self._settings = merged
        up, down = merged.rates(self.options.max_up_bytes_per_s, self.options.max_down_bytes_per_s)
        limiter.change(up or None, down or None)
        self.courtesy.change(merged.rules(self.options.courtesy))

    def _say_phase(self, phase: str, detail: str) -> None:
        self.events.emit(PhaseReached(phase, detail))


class AtThePage:
    """What the page of one stay may ask; an `Owner`."""

    def __init__(self, daemon: PeerDaemon, assignment: Assignment, limiter: RateLimiter) -> None:
        self._daemon, self._assignment, self._limiter = daemon, assignment, limiter

    def settings(self) -> Settings:
        """See `Owner`."""
        return self._daemon.settings()

    def in_force(self) -> dict[str, str]:
        """See `Owner`."""
        rules, limiter = self._daemon.courtesy.rules, self._limiter
        up, down = limiter.max_up_bytes_per_s, limiter.max_down_bytes_per_s
        return {
            "hours": str(rules.hours),
            "only_when_idle": f"{rules.idle_s:g}s" if rules.idle_s else "",
            "max_up": f"{8e-6 * up:g}mbit" if up else "",
            "max_down": f"{8e-6 * down:g}mbit" if down else "",
            "max_traffic": f"{rules.traffic.num_bytes / 1e9:g}GB/month" if rules.traffic is not None else "",
        }

    async def change(self, settings: Settings) -> None:
        """See `Owner`."""
        await self._daemon.change(settings, self._limiter)

    async def pause(self, paused: bool) -> None:
        """See `Owner`."""
        courtesy, assignment = self._daemon.courtesy, self._daemon.assignment
        courtesy.ask(pause=paused)
        if assignment is not None:
            courtesy.apply(assignment)


class Patience:
    """Tries until the run is found, says what it waits for, and gives up only when told how long to look."""

    def __init__(self, limit_s: float, say: Callable[[str], None]) -> None:
        """Gives up after `limit_s`; 0: never."""
        self._loop = asyncio.get_running_loop()
        self._say = say
        self._ends_at = self._loop.time() + limit_s if limit_s else float("inf")
        self._pause_s, self._said, self._said_at = FIRST_PAUSE_S, "", 0.0
        self._rng = world.random()

    async def insist(self, attempt: Callable[[float], Awaitable[T]], *, is_over: Callable[[], bool]) -> T:
        """What `attempt(timeout_s)` comes to, made until it finds the run; its error when time or the run is over."""
        while True:
            left_s = self._ends_at - self._loop.time()
            try:
                return await attempt(min(ATTEMPT_S, left_s))
            except (BootstrapError, RunUnreachable) as error:
                if is_over() or self._loop.time() + self._pause_s > self._ends_at:
                    raise
                await self._wait(error)

    async def _wait(self, error: SwarmtrainError) -> None:
        """A while that grows; not the same one for all peers that started together."""
        text, now = str(error), self._loop.time()
        if text != self._said or now - self._said_at > REMIND_S:
            self._said, self._said_at = text, now
            self._say(f"{text}. This peer waits, and tries again. {error.fix}".rstrip())
        await asyncio.sleep(self._pause_s * self._rng.uniform(0.75, 1.0))
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
