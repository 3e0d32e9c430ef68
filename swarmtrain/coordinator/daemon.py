"""The coordinator's daemon: opens steps and keeps the books. No tensor of the training traffic passes through it.

Its only lasting state is the journal, the checkpoints and the run's key, all in the state directory; everything else is
asked of the peers again after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from swarmtrain import world
from swarmtrain.boundary import codec_pair
from swarmtrain.chain.claim import Claim, CoordinatorRecord
from swarmtrain.chain.dispatch import Dispatcher
from swarmtrain.chain.membership import Membership
from swarmtrain.chain.neighbours import Neighbours, router_options
from swarmtrain.chain.offer import COORDINATOR_TOPIC, make_offer
from swarmtrain.chain.rebalancing import MoveRules
from swarmtrain.checkpoint import other_data
from swarmtrain.codec import Direction, make_encoder
from swarmtrain.codec.spec import CriticalSpec
from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.apply import Applies
from swarmtrain.coordinator.bans import Bans
from swarmtrain.coordinator.checkpointing import Checkpoints
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.curve import PastStep
from swarmtrain.coordinator.dial_back import DialBacks
from swarmtrain.coordinator.downloads import Downloads
from swarmtrain.coordinator.election import elected, electorate
from swarmtrain.coordinator.enrolment import AdmissionRules, Enrolment, run_secret
from swarmtrain.coordinator.heartbeats import Heartbeats
from swarmtrain.coordinator.journal import DATA_DIGEST, Journal
from swarmtrain.coordinator.journal_files import JournalError
from swarmtrain.coordinator.moves import Moves
from swarmtrain.coordinator.observing import RunObserver
from swarmtrain.coordinator.operator import Operator
from swarmtrain.coordinator.owners import KEY as DISOWNED
from swarmtrain.coordinator.receipts import Receipts
from swarmtrain.coordinator.rounds import KEY as ROUNDS
from swarmtrain.coordinator.rounds import Rounds
from swarmtrain.coordinator.run import Run
from swarmtrain.coordinator.split_brain import Known, check_running, next_term
from swarmtrain.coordinator.web import page_routes, public_routes
from swarmtrain.data.files import atomic_write
from swarmtrain.data.sampler import Sampler
from swarmtrain.directory.directory import Directory, DirectoryOptions, TopicRule
from swarmtrain.errors import ManifestError, StorageError, SwarmtrainError
from swarmtrain.machine import Machine, ThisMachine
from swarmtrain.observe.events import Events, PhaseReached, StepApplied
from swarmtrain.observe.faults import Faults
from swarmtrain.observe.http import EVERY_NAME, Handler
from swarmtrain.observe.keeper import StatusKeeper
from swarmtrain.observe.status import MAX_POINTS
from swarmtrain.p2p.errors import NetError
from swarmtrain.p2p.identity import RunKey
from swarmtrain.p2p.network import HostOptions, NetworkHost
from swarmtrain.reduce.coding import gradient_spec
from swarmtrain.rpc.errors import LinkClosed, Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.node import Node
from swarmtrain.run.invite import Invite, run_id_of
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import (
    MAX_REDONE,
    MESSAGES,
    Acknowledged,
    AskMove,
    Code,
    DialBack,
    Enrol,
    FetchDigests,
    FetchReceipt,
    FetchRun,
    FetchState,
    Heartbeat,
    Leave,
    MeasureLine,
    RunProgress,
    SeekStage,
)
from swarmtrain.wire.peer_report import published
from swarmtrain.wire.records import pack_record
from swarmtrain.wire.schema import Message

log = logging.getLogger(__name__)

ANNOUNCE_S = 10.0
RECORD_LIFE_S = 45.0
JOURNAL_S = 2.0  # between checks that the journal's files are in place; each write checks as well
STARTING_S = 0.5  # after which a caller may ask a coordinator again that is still starting
LINGER_S = 5.0  # how long a complete run waits for peers that were lost a moment ago


@dataclass(frozen=True)
class CoordinatorOptions:
    """What `swarmtrain coordinator` was told."""

    manifest: Manifest
    state_dir: Path
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    min_peers: int = 1
    invite_file: Path | None = None  # a further place for the invite
    page: str = "127.0.0.1:0"  # HOST:PORT of the status page and the metrics; empty: none
    public_page: str = ""  # HOST:PORT of the page for everybody; empty: none
    route: str = "finish-time"
    moves: MoveRules = field(default_factory=MoveRules)
    admission: AdmissionRules = field(default_factory=AdmissionRules)
    faults: Faults = field(default_factory=Faults)


class CoordinatorDaemon:
    """One run's coordinator. `run` returns when the run's steps are done or it was asked to stop."""

    def __init__(
        self,
        options: CoordinatorOptions,
        events: Events,
        make_sampler: Callable[[Manifest], Sampler],
        machine: Machine | None = None,
    ) -> None:
        self.options, self.events, self._make_sampler = options, events, make_sampler
        self._machine = machine or ThisMachine()
        self.keeper = StatusKeeper("coordinator", num_steps=options.manifest.schedule.steps)
        events.add(self.keeper)
        self.observer: RunObserver | None = None
        self._stopping = asyncio.Event()
        self.invite: Invite | None = None
        self.refused: Counter[str] = Counter()  # by code
        self._life = world.token_hex(4)
        self._is_open = False  # whether the run is loaded, so that requests can be answered

    def snapshot(self) -> dict[str, Any] | None:
        """Everything, as plain data; None while it is starting."""
        return self.observer.snapshot() if self.observer is not None else None

    def stop(self) -> None:
        """Stop, between two decisions. Peers keep their state and wait for the next coordinator."""
        self._stopping.set()

    async def run(self) -> None:
        """Start or resume the run, and drive it."""
        check_supported(self.options.manifest)
        async with contextlib.AsyncExitStack() as stack:
            self._open(stack)
            host, directory, node = await self._connect(stack)
            await self._take_term(directory, host)
            self._build(stack, host, node, directory)
            await self._control(stack)
            await self._serve_page(stack)
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(self._announce(directory, host)),
                    tasks.create_task(self._watch_journal()),
                    tasks.create_task(self.heartbeats.watch()),
                    tasks.create_task(self._observed.watch()),
                ]
                try:
                    await self._until_stopped(self.progress.drive())
                finally:
                    for helper in helpers:
                        helper.cancel()
            await self._say_goodbye(directory, host)
            await self.context.close()

    def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """The run's data, key and journal; a new run notes them, a resumed one must match them."""
        options = self.options
        self._sampler = self._make_sampler(options.manifest)
        try:
            world.make_directory(options.state_dir)
        except OSError as error:
            raise StorageError(
                f"cannot make {options.state_dir}: {error.strerror}", fix="choose another --state-dir"
            ) from error
        key_path = options.state_dir / "run.key"
        if key_path.exists():
            self._key = RunKey.load(key_path)
        else:
            self._key = RunKey.generate()
            self._key.save(key_path)
        self.journal = stack.enter_context(Journal(options.state_dir / "journal.sqlite"))
        self.bans = Bans(self.journal.exclusions())
        known = self.journal.get("manifest")
        if known is not None and known != options.manifest.canonical():
            raise JournalError(
                f"{options.state_dir} holds another run", fix="use its own manifest, or another --state-dir"
            )
        self._check_data()
        self.journal.set("manifest", options.manifest.canonical())
        self.run_id = run_id_of(options.manifest.digest(), self._key.public_bytes)
        self.journal.set("run_id", self.run_id)

    def _check_data(self) -> None:
        """Refuse other tokens than before: the run would mix two data sets, and its books would not show it."""
        known, found = self.journal.get(DATA_DIGEST), self._sampler.data_digest
        if known is None:
            self.journal.set(DATA_DIGEST, found)
        elif known != found:
            raise other_data(f"the run in {self.options.state_dir}", self.options.manifest.data.source, known, found)

    async def _connect(self, stack: contextlib.AsyncExitStack) -> tuple[NetworkHost, Directory, Node]:
        options = self.options
        host = await self._machine.start_host(
            HostOptions(
                state_dir=options.state_dir,
                listen=options.listen,
                announce=options.announce,
                bootstrap=options.bootstrap,
                require_bootstrap=False,
                relay=True,
            )
        )
        stack.push_async_callback(host.close)
        membership = self._found_membership(host)
        node = Node(
            host,
            MESSAGES,
            self._handle,
            on_link_closed=self._link_closed,
            is_excluded=self.bans.__contains__,
            gate=membership,
        )
        stack.push_async_callback(node.close)
        rules = {COORDINATOR_TOPIC: TopicRule(countersigned_by=self._key.public_bytes)}
        directory = await Directory.start(host, self.run_id, DirectoryOptions(rules=rules, gate=membership))
        stack.push_async_callback(directory.close)
        membership.clock = directory.now
        membership.hold(self.enrolment.own_certificate(host.peer_id))
        self._phase("network", ", ".join(host.addresses()[:2]))
        return host, directory, node

    def _found_membership(self, host: NetworkHost) -> Membership:
        """What admits links and issues certificates, this daemon's own first."""
        invite = Invite(self.run_id, self._key.public_bytes, (), run_secret(self._key))
        membership = self.membership = Membership(invite, self.bans.exclusions)
        membership.peer_id = host.peer_id
        self.enrolment = Enrolment(
            self.options.admission, self._key, self.run_id, self.journal, self.bans, membership, self.events
        )
        membership.hold(self.enrolment.own_certificate(host.peer_id))
        return membership

    async def _take_term(self, directory: Directory, host: NetworkHost) -> None:
        """Take the next term. Noted only if no other process has it or a later one: a failed start changes nothing."""
        known = Known(int(self.journal.get("term") or 0), self.journal.num_steps())
        self.journal_term = known.term
        own = Claim(known.term + 1, known.num_steps, host.peer_id, self._life)
        veterans = self.journal.contributions()
        self.term = await next_term(directory, own, known, self.options.manifest.stages.count, veterans)
        self.journal.set("term", str(self.term))

    def _build(self, stack: contextlib.AsyncExitStack, host: NetworkHost, node: Node, directory: Directory) -> None:
        manifest = self.options.manifest
        routing = router_options(manifest, 0)
        neighbours = Neighbours(0, host, node, directory, policy=self.options.route, options=routing)
        neighbours.start()
        stack.push_async_callback(neighbours.close)
        self.context = RunContext(
            manifest=manifest,
            run_id=self.run_id,
            term=self.term,
            valid_from=self.journal_term,
            node=node,
            dispatcher=Dispatcher(node, neighbours),
            journal=self.journal,
            sampler=self._sampler,
            events=self.events,
            bans=self.bans,
            is_new=self.enrolment.is_on_probation,
            stages=[StageBook() for _ in range(manifest.stages.count)],
            faults=self.options.faults,
            rounds=Rounds(partial(self.journal.set, ROUNDS), self.journal.get(ROUNDS)),
            disowned=dict.fromkeys(json.loads(self.journal.get(DISOWNED) or "[]")),
        )
        self.checkpoints = Checkpoints(
            self.context, self.options.state_dir / "checkpoints", data_digest=self._sampler.data_digest
        )
        self._resume()
        applies = Applies(self.context)
        self.heartbeats = Heartbeats(self.context, applies.tell, self._progress, self.enrolment.renewed)
        self.receipts = Receipts(self.context, self._key)
        self.dial_backs = DialBacks(host, self.run_id)
        self.moves = Moves(self.context, self.options.moves)
        self.progress = Run(self.context, self.checkpoints, applies, min_peers=self.options.min_peers)
        self._offer = make_offer(manifest, self._key)
        self.invite = self.enrolment.own_invite(host.addresses()[:4])
        self.operator = Operator(self.context, self.enrolment, lambda: host.addresses()[:4])
        self.observer = RunObserver(
            self.context,
            self.checkpoints,
            self.keeper,
            invite=self.invite.text(),
            refused=self.refused,
            admission=self.operator.summary,
        )
        text = f"{self.invite.text()}\n"
        atomic_write(self.options.state_dir / "invite", text.encode())
        (self.options.state_dir / "invite").chmod(0o600)  # it holds a secret
        if self.options.invite_file is not None:
            _write(self.options.invite_file, text)
        self._is_open = True
        self._phase("invite", self.invite.text())

    def _resume(self) -> None:
        """Restore where the run stands: at the last decision. Peers that have not applied it are told again."""
        context = self.context
        context.step = self.journal.num_steps()
        context.decided = self.journal.last_decision()
        before, after = (self.journal.replica_digests(step) for step in (context.step - 1, context.step))
        for stage, book in enumerate(context.stages):
            book.checkpoint = self.checkpoints.offer(stage)
            if context.decided is not None:
                book.since = context.decided.term
                book.voters = electorate(before.get(stage, {}), context.decided.entries.get(stage, {}))
                book.votes = after.get(stage, {})
                book.digest = elected(book.votes, book.voters, is_final=False)
            if book.checkpoint is not None and book.checkpoint.step == context.step:
                book.digest = book.checkpoint.digest
        for peer_id in self.journal.peers_since(context.step - 1):
            context.missed(peer_id)
        if context.step:
            context.tally.resume(self.journal.contributions(), context.step)
            context.tally.names = self.journal.names()
            self.keeper.recall(past_step(self.options.manifest, known) for known in self.journal.curve(MAX_POINTS))
            self._phase("resume", f"step {context.step}, newest checkpoint at step {self.checkpoints.step}")

    async def _handle(self, message: Message, exchange: Exchange) -> Message:
        try:
            return await self._answer(message, exchange)
        except Refusal as refusal:
            self.refused[refusal.code] += 1
            raise

    async def _answer(self, message: Message, exchange: Exchange) -> Message:
        if not self._is_open:  # a peer may call the address that it knows from before a restart
            raise Refusal(Code.NOT_SERVING, "this coordinator is still starting", STARTING_S)
        if isinstance(message, Enrol):
            return await self.enrolment.enrol(message, exchange.peer_id)
        if isinstance(message, DialBack):
            return await self.dial_backs.dial(message, exchange.peer_id)
        if isinstance(message, MeasureLine):
            return self.dial_backs.measure(message, exchange.peer_id)
        if not self._is_certified(exchange.peer_id):
            raise Refusal(Code.NOT_ADMITTED)
        if isinstance(message, FetchRun):
            if message.run != self.run_id:
                raise Refusal(Code.WRONG_RUN, f"this is run {self.run_id}")
            return self._offer
        if isinstance(message, Heartbeat):
            return await self.heartbeats.heartbeat(message, exchange.peer_id)
        if isinstance(message, FetchReceipt):
            return self.receipts.fetch(message, exchange.peer_id)
        if isinstance(message, SeekStage):
            return await self.moves.seek(message, exchange.peer_id)
        if isinstance(message, AskMove):
            return await self.moves.ask(message, exchange.peer_id)
        if isinstance(message, FetchDigests):
            return await self.checkpoints.fetch_digests(message)
        if isinstance(message, FetchState):
            return await self.checkpoints.fetch_state(message)
        raise Refusal(Code.UNKNOWN, f"a coordinator does not answer {message.wire.kind}")

    def _is_certified(self, peer_id: str) -> bool:
        return peer_id == self.context.node.peer_id or self.membership.certificate_of(peer_id) is not None

    async def _announce(self, directory: Directory, host: NetworkHost) -> None:
        """Announce this coordinator again and again; end it when another one has superseded it.

        It checks before it announces: of two processes with one identity, the directory shows the latest record only.
        """
        while True:
            await self._announce_once(directory, host)
            await asyncio.sleep(ANNOUNCE_S)
            await check_running(directory, self._claim())

    async def _announce_once(self, directory: Directory, host: NetworkHost) -> None:
        claim = self._claim()
        record = CoordinatorRecord(
            claim.term,
            claim.step,
            claim.life,
            published(host.addresses()),
            self.options.moves,
            self.context.is_over,
        )
        try:
            await directory.announce(COORDINATOR_TOPIC, pack_record(record), RECORD_LIFE_S, signer=self._key.sign)
        except SwarmtrainError as error:
            log.warning("cannot announce the coordinator: %s", error)

    def _progress(self) -> RunProgress:
        status = self.keeper.status
        if status.last is None:
            return RunProgress()
        is_known = status.state == "training"
        left_s = status.seconds_left() or 0.0
        return RunProgress(max(0.0, min(status.last.loss, 1e9)), status.last.tokens_per_s if is_known else 0.0, left_s)

    def _claim(self) -> Claim:
        return Claim(self.context.term, self.context.step, self.context.node.peer_id, self._life)

    async def _watch_journal(self) -> None:
        """A coordinator that has lost its journal ends: its decisions would be lost, too."""
        while True:
            self.journal.check_place()
            await asyncio.sleep(JOURNAL_S)

    async def _until_stopped(self, work: Any) -> None:
        """Run `work` unless asked to stop."""
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for item in (task, stopping):
                item.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def _say_goodbye(self, directory: Directory, host: NetworkHost) -> None:
        """Tell all peers that the run is complete, including those between two stages.

        Wait for their goodbyes, whose answers say what counts as theirs, and for peers that were lost a moment ago: one
        that is alive calls, and later no process could tell it.
        """
        if not self.context.is_over:
            return
        await self._announce_once(directory, host)
        message = Leave(self.context.run_id, self.context.term, "the run is complete")
        told: set[str] = set()

        def all_gone() -> bool:
            here = {member.peer_id for member in self.context.members.all()}
            return not self.context.lately_missed and not told & here

        async def tell(peer_id: str) -> None:
            try:
                await self.context.node.call(peer_id, message, deadline_s=5.0, expect=Acknowledged)
                told.add(peer_id)
            except NetError:
                self.context.missed(peer_id)

        members = (member.peer_id for member in self.context.members.all())
        await asyncio.gather(*map(tell, dict.fromkeys([*members, *self.moves.on_their_way()])))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self.context.wait_for(all_gone)

    async def _control(self, stack: contextlib.AsyncExitStack) -> None:
        commands = {"status": self._status, "stop": self._stop_asked, **self.operator.commands}
        server = await self._machine.serve_control(self.options.state_dir, commands)
        stack.push_async_callback(server.close)

    async def _stop_asked(self, request: dict[str, Any]) -> dict[str, Any]:
        self.stop()
        return {"ok": True}

    async def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._observed.snapshot()

    async def _serve_page(self, stack: contextlib.AsyncExitStack) -> None:
        downloads = Downloads(self.options.state_dir / "checkpoints")
        if self.options.page:
            routes = page_routes(self._observed, downloads)
            self._observed.page_url = await self._serve_http(stack, routes, self.options.page, "page")
        if self.options.public_page:
            routes = public_routes(self._observed, downloads)
            await self._serve_http(stack, routes, self.options.public_page, "public-page", known_as=EVERY_NAME)

    async def _serve_http(
        self,
        stack: contextlib.AsyncExitStack,
        routes: dict[str, Handler],
        address: str,
        name: str,
        *,
        known_as: str = "",
    ) -> str:
        """The address of a page; a file of its name in the state directory has it too."""
        note = self.options.state_dir / name
        server = await self._machine.serve_http(routes, address, f"--{name}", note, known_as=known_as)
        stack.push_async_callback(server.close)
        url = f"http://{server.address}/"
        atomic_write(note, f"{url}\n".encode())
        self._phase(name.replace("-", " "), url)
        return url

    @property
    def _observed(self) -> RunObserver:
        assert self.observer is not None
        return self.observer

    def _link_closed(self, peer_id: str, error: LinkClosed) -> None:
        if self.observer is not None:
            self.observer.link_closed(peer_id, error)
            self.context.members.doubt(peer_id, asyncio.get_running_loop().time())

    def _phase(self, phase: str, detail: str = "") -> None:
        self.events.emit(PhaseReached(phase, detail))


def past_step(manifest: Manifest, known: PastStep) -> StepApplied:
    """A step of the journal as the event that told of it."""
    speed = manifest.tokens_per_step / known.seconds if known.seconds else 0.0
    return StepApplied(
        step=known.step,
        loss=known.loss,
        tokens=known.step * manifest.tokens_per_step,
        tokens_per_s=speed,
        grad_norm=known.grad_norm,
        lr=known.learning_rate,
        val_loss=known.val_loss,
        at=known.at,
    )


def check_supported(manifest: Manifest) -> None:
    """Refuse codecs that do not exist or do not go together, before anything is started."""
    gradient_spec(manifest)
    codec_pair(manifest)
    if manifest.checks.share:
        check_repeatable(manifest)


def check_repeatable(manifest: Manifest) -> None:
    """Refuse checks of what another peer could not compute to the same bits, or take out of a sum again."""
    key, fix = "checks.share", "set checks.share = 0, or choose another codec"
    pair = codec_pair(manifest)
    for spec, way in ((pair.forward, Direction.FORWARD), (pair.backward, Direction.BACKWARD)):
        remembers = make_encoder(spec, boundary=0, direction=way).scope.remembers
        if remembers or isinstance(spec, CriticalSpec):
            raise ManifestError(key, f"{way.name.lower()} tensors depend on more than their microbatch", fix=fix)
    if manifest.batch.accumulate != "exact":
        raise ManifestError(key, "a liar's work can be taken out of exact sums only", fix='use accumulate = "exact"')
    if 2 * manifest.batch.microbatches_per_step > MAX_REDONE:
        raise ManifestError(key, f"a step may have at most {MAX_REDONE // 2} microbatches", fix=fix)


def _write(path: Path, text: str) -> None:
    """Write to a path of the owner's choice. It may be a pipe or a device, which cannot be replaced as files are."""
    try:
        path.write_text(text)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another directory") from error
