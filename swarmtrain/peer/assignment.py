"""One stay of a peer on one stage: what hosts the stage, since when it serves there, and what ends the stay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

import torch

from swarmtrain import world
from swarmtrain.chain.dispatch import Dispatcher
from swarmtrain.chain.membership import Membership
from swarmtrain.chain.neighbours import Neighbours, router_options
from swarmtrain.codec.samples import SampleStore
from swarmtrain.directory.directory import Directory
from swarmtrain.observe.events import Events, PhaseReached
from swarmtrain.observe.split import TimeSplit
from swarmtrain.p2p.network import NetworkHost
from swarmtrain.peer.compute import ComputeThread, Kind
from swarmtrain.peer.contacts import CoordinatorLink
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.options import Fit, PeerOptions
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.route.moves import Mover
from swarmtrain.route.router import STEALING_POLICIES
from swarmtrain.rpc.node import Node
from swarmtrain.run.manifest import Manifest

DESERTED_S = 5.0  # a draining peer that does not hear the coordinator for so long need not wait for it
MAX_LEDGER_BYTES = 4 << 30


class Departure:
    """Whether a peer goes, and why: to another stage, or out of the run."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.from_stage, self.from_run = asyncio.Event(), asyncio.Event()
        self.dismissed = asyncio.Event()  # the run does not need this peer any more: it is complete
        self.reason = "asked to leave"
        self._stage = -1  # that it hosts
        self.target: int | None = None  # the stage that it moves to

    def leave(self, reason: str) -> None:
        """Drain and go."""
        self.reason = reason
        self.from_run.set()
        self.from_stage.set()

    def dismiss(self, reason: str) -> None:
        """The coordinator says that this peer may go."""
        self.dismissed.set()
        self.leave(reason)

    def move(self, target: int) -> None:
        """Drain and take an assignment on another stage: the coordinator permits it."""
        self.target = target
        self._events.emit(PhaseReached("moving", f"stage {self._stage} -> {target}"))
        if not self.from_run.is_set():
            self.reason = f"moves to stage {target}"
        self.from_stage.set()

    def take_assignment(self, stage: int) -> None:
        """A new stay begins: a former move is over, leaving the run is not."""
        self._stage = stage
        self.from_stage.clear()
        if self.from_run.is_set():
            self.from_stage.set()


class Assignment:
    """The facts of one stay; touched on the event loop only."""

    def __init__(
        self,
        number: int,
        peer: PeerIdentity,
        clock: StepClock,
        stage: Stage,
        dispatcher: Dispatcher | None,
        heartbeat_now: asyncio.Event,
        mover: Mover | None = None,
    ) -> None:
        """`number` rises with every move. `heartbeat_now` makes the peer speak to the coordinator at once.

        `dispatcher` calls the next stage, None on the last one; `mover` belongs to a peer that may move.
        """
        self.number, self.peer, self.clock, self.stage = number, peer, clock, stage
        self.dispatcher, self.heartbeat_now, self.mover = dispatcher, heartbeat_now, mover
        self.announce_now = asyncio.Event()
        self.deserted = asyncio.Event()  # the coordinator has not been heard for long
        self._unneeded = asyncio.Event()  # nothing that this draining peer has computed can count any more
        self.is_only = False  # as the coordinator said last: no other peer that stays has this stage's state
        self._released = asyncio.Event()  # the coordinator has heard that this peer drains, and can do without it
        self._serving_since: float | None = None
        self._syncing_since = 0.0
        self.download_s = 0.0  # what fetching this stage's state took

    @property
    def version(self) -> int:
        """A move that was given up raises it, which makes a late permission void."""
        return max(self.number, self.mover.version) if self.mover is not None else self.number

    @property
    def served_s(self) -> float:
        """For how long this peer has been serving here."""
        return _now() - self._serving_since if self._serving_since is not None else 0.0

    def serves(self) -> None:
        """joining or syncing -> serving."""
        self.peer.become(PeerState.SERVING)
        now = _now()
        self.download_s = now - self._syncing_since if self._syncing_since else 0.0
        self._serving_since, self._syncing_since = now, 0.0
        self.changed()

    def syncs(self) -> None:
        """Its state is being fetched from now on."""
        self._serving_since, self._syncing_since = None, _now()
        self.announce_now.set()

    def changed(self) -> None:
        """The coordinator and the peers upstream should hear of it now."""
        self.announce_now.set()
        self.heartbeat_now.set()

    async def watch_device(self) -> None:
        """Tell at once that the device hangs, or answers again, until cancelled."""
        while True:
            await self.stage.device.next_change()
            self.changed()

    def unheard(self) -> None:
        """The coordinator did not answer."""
        if _now() - self.peer.contact_at > DESERTED_S:
            self.deserted.set()

    def heard_step(self, run_step: int, *, holds_sum: bool) -> None:
        """The coordinator counts `run_step` applied steps, and has heard that this peer drains.

        A peer whose microbatches were recomputed elsewhere is in no roster, and is not told to apply the step: this is
        how it learns that its step is over, or was taken back. A peer that holds the reduced sum is told: a coordinator
        that was restarted counts a step as soon as it is decided, and this peer may be the only one that can apply it.
        """
        clock = self.clock
        may_count = bool(clock.ledgers) and clock.step <= run_step <= clock.step + holds_sum
        if self.peer.state is PeerState.DRAINING and not may_count:
            self._unneeded.set()

    def heard_only(self, is_only: bool) -> None:
        """The coordinator knows this peer's state, and whether the run would lose steps if it went now."""
        self.is_only = is_only
        if self.peer.state is PeerState.DRAINING and not is_only:
            self._released.set()
        else:
            self._released.clear()

    async def drained(self, timeout_s: float, dismissed: asyncio.Event) -> None:
        """Wait until nothing is lost if this peer goes, or it is `dismissed`; within the stated time.

        Its work is applied or was done by others, and its state is at another peer or in a checkpoint.
        """
        began, step = _now(), self.clock.step
        await self._work_counted(timeout_s)
        if self.clock.step != step:
            self._released.clear()  # that was said of the state before
            self.heartbeat_now.set()
        waits = [self._released.wait(), dismissed.wait()]
        if not self.is_only:  # two replicas may drain at once: so it asks, but it need not wait for a dead coordinator
            waits.append(self.deserted.wait())
        await first_of(waits, timeout_s - (_now() - began))

    async def _work_counted(self, timeout_s: float) -> None:
        """Wait until what is in the ledger has been applied, or the step was done without it.

        Not without a coordinator: none would apply it, and the next one has it computed again.
        """
        clock = self.clock
        if not clock.ledgers:
            return
        if _now() - self.peer.contact_at <= DESERTED_S:
            self.deserted.clear()  # it was heard since
        events = (clock.passed(clock.ledgers[-1].step), self.deserted.wait(), self._unneeded.wait())
        await first_of(events, timeout_s)


async def first_of(events: Iterable[Coroutine[Any, Any, object]], timeout_s: float) -> None:
    """Return when one of `events` has come, or the time is over."""
    waits = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(waits, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def open_assignment(
    stack: contextlib.AsyncExitStack,
    number: int,
    options: PeerOptions,
    incarnation: str,
    manifest: Manifest,
    fit: Fit,
    *,
    link: CoordinatorLink,
    host: NetworkHost,
    node: Node,
    directory: Directory,
    membership: Membership,
) -> Assignment:
    """Build the stage that `options` name: its tensors, its compute thread, its way to the next stage.

    `stack` ends what was started for it.
    """
    torch.set_num_threads(options.threads)
    forward_s, backward_s = options.faults.pace_s
    split = TimeSplit(reduces_behind=manifest.schedule.delay > 0)
    compute = steps = ComputeThread(split, at_least_s={Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s})
    stack.push_async_callback(compute.stop)
    if manifest.schedule.delay:
        steps = ComputeThread(name="steps")
        stack.push_async_callback(steps.stop)
    stage = await Stage.build(
        manifest,
        compute,
        steps,
        options.stage,
        options.device,
        fit.way.offload,
        graph_budget_bytes=fit.graph_budget_bytes,
        make_store=lambda: SampleStore(options.state_dir, options.max_samples_bytes),
    )
    dispatcher: Dispatcher | None = None
    if options.stage < manifest.stages.count - 1:
        downstream = options.stage + 1
        routing = router_options(manifest, downstream, options.max_up_bytes_per_s)
        neighbours = Neighbours(downstream, host, node, directory, policy=options.route, options=routing)
        neighbours.start()
        stack.push_async_callback(neighbours.close)
        dispatcher = Dispatcher(node, neighbours)
    peer = PeerIdentity(
        options.invite.run_id,
        options.stage,
        incarnation,
        node,
        authority=link,
        faults=replace(options.faults, cut=node.cut),
        shares_work=options.route in STEALING_POLICIES,
        sign=host.identity.sign if manifest.checks.share else None,
        membership=membership,
    )
    clock = StepClock(peer, manifest, min(MAX_LEDGER_BYTES, fit.available_bytes // 4))
    mover: Mover | None = None
    if options.may_move:
        mover = Mover(node.peer_id, options.stage, number, world.random(), link.rules.second_look_s)
    return Assignment(number, peer, clock, stage, dispatcher, link.heartbeat_now, mover)


def _now() -> float:
    return asyncio.get_running_loop().time()
