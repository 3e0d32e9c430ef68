"""What the parts of the coordinator share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.chain.dispatch import Dispatcher
from swarmtrain.chain.exclusions import MAX_EXCLUDED
from swarmtrain.coordinator.admission import StageBook, Standing, servers
from swarmtrain.coordinator.bans import Bans
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.journal import Decision, Journal
from swarmtrain.coordinator.members import Member, Members
from swarmtrain.coordinator.rounds import Rounds
from swarmtrain.coordinator.split_brain import Known
from swarmtrain.coordinator.strikes import Offence, Strikes
from swarmtrain.coordinator.tally import Tally
from swarmtrain.data.sampler import Sampler
from swarmtrain.errors import UsageError
from swarmtrain.observe.events import Events, PeerExcluded, PeerLeft, PeerLost, PeerReadmitted, PeerSuspended
from swarmtrain.observe.faults import Faults
from swarmtrain.p2p.errors import HostDownError
from swarmtrain.rpc.calls import OnProgress
from swarmtrain.rpc.node import Node
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import MAX_EMPTY_STAGES
from swarmtrain.wire.schema import Message

log = logging.getLogger(__name__)

OWN_OUTAGE_S = 0.25  # between attempts while this host's own transport is away
MAX_REASON = 500  # characters of why a peer is excluded
MISSED_S = 30.0  # a peer that has been silent for longer is not expected any more


@dataclass(frozen=True)
class Wait:
    """Why training stands still. `reason` is for people."""

    reason: str
    empty_stages: tuple[int, ...] = ()  # the first stages that lack peers

    @classmethod
    def for_peers(cls, stages: Sequence[int]) -> Wait:
        """For peers of these stages, in their order. Bounded, however many there are."""
        named, num_more = tuple(stages[:MAX_EMPTY_STAGES]), len(stages) - MAX_EMPTY_STAGES
        *others, last = [*map(str, named), *([f"{num_more} more"] if num_more > 0 else [])]
        if not others:
            return cls(f"stage {last} has no peers", named)
        return cls(f"stages {', '.join(others)} and {last} have no peers", named)


@dataclass
class CheckCounts:
    """What has become of checks, since this coordinator began."""

    drawn: int = 0
    done: int = 0  # a second peer has computed it
    mismatched: int = 0  # and came to something else
    undecided: int = 0  # nobody could say who of the two is right
    unanswered: int = 0
    without_checker: int = 0  # no other peer of the stage computes the same bits
    excluded: int = 0  # peers
    added_again: int = 0  # sums, by other owners
    disowned: int = 0  # peers whose sums differed from those of others
    begun_anew: int = 0  # microbatches


@dataclass
class RunContext:
    """One run at its coordinator; touched on the event loop only."""

    manifest: Manifest
    run_id: str
    term: int
    node: Node
    dispatcher: Dispatcher  # calls stage 0
    journal: Journal
    sampler: Sampler
    events: Events
    valid_from: int = 0  # the term of the last roll-back, as far as the journal knows
    step: int = 0  # applied steps
    decided: Decision | None = None  # the last decision; being carried out while its step is `step`
    prepared: frozenset[tuple[str, str]] = frozenset()  # peers that hold the sums of the last decision
    is_over: bool = False
    members: Members = field(default_factory=Members)
    books: dict[int, StepBooks] = field(default_factory=dict)  # of the open steps
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    stages: list[StageBook] = field(default_factory=list)
    background: set[asyncio.Task[object]] = field(default_factory=set)
    faults: Faults = field(default_factory=Faults)
    tally: Tally = field(default_factory=Tally)
    bans: Bans = field(default_factory=Bans)
    is_new: Callable[[str, int], bool] = lambda peer_id, num_decided: False  # see Enrolment.is_on_probation
    waits_for: Wait | None = None
    rounds: Rounds = field(default_factory=Rounds)
    checks: CheckCounts = field(default_factory=CheckCounts)
    strikes: Strikes = field(default_factory=Strikes)
    disowned: dict[str, None] = field(default_factory=dict)  # peers that own no part of any sum
    _missed: dict[str, float] = field(default_factory=dict)  # peer: when

    @property
    def standing(self) -> Standing:
        """Where the run stands, for judging peers."""
        decided = self.decided.step if self.decided is not None else None
        now = asyncio.get_running_loop().time()
        return Standing(self.step, decided, self.prepared, self.is_over, self.strikes.suspended(now))

    @property
    def known(self) -> Known:
        """What the journal holds."""
        decided = self.decided.step + 1 if self.decided is not None else 0
        return Known(self.valid_from, max(self.step, decided))

    def in_background(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Start `work` as a task. It may be awaited; its errors are logged in any case."""
        task: asyncio.Task[object] = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[object]) -> None:
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)

    async def close(self) -> None:
        """Cancel all background tasks."""
        for task in self.background:
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; it is checked whenever members or books change."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def notify(self) -> None:
        """Members or books have changed."""
        async with self.changed:
            self.changed.notify_all()

    async def patient_call(
        self, peer_id: str, request: Message, *, deadline_s: float, on_progress: OnProgress | None = None
    ) -> Message:
        """The node's `call`, for requests that may be repeated: repeated while this host's own transport is down."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        while True:
            try:
                return await self.node.call(peer_id, request, ends_at - loop.time(), on_progress)
            except HostDownError:
                if loop.time() + OWN_OUTAGE_S > ends_at:
                    raise
                await asyncio.sleep(OWN_OUTAGE_S)

    def is_there(self, member: Member) -> bool:
        """Whether this incarnation of a peer still counts as one of the run's."""
        current = self.members.get(member.peer_id)
        return current is not None and current.key == member.key and current.answers

    async def lose(self, member: Member, reason: str, *, must_sync: bool = False, has_left: bool = False) -> None:
        """Forget a peer and void its claims. `has_left`: it has said goodbye. `must_sync`: it may be alive, and must
        sync before it serves again."""
        current = self.members.get(member.peer_id)
        if current is not None and current.key == member.key:
            self.members.remove(member.peer_id, excluded_at=self.step if must_sync else None)
            if has_left:
                count = self.tally.contributed[member.peer_id]
                self.events.emit(PeerLeft(member.peer_id, member.stage, count, member.name))
            else:
                self.events.emit(PeerLost(member.peer_id, member.stage, reason, member.name))
                self.missed(member.peer_id)
        self.void_claims(member)
        await self.notify()

    async def ban(self, peer_id: str, reason: str) -> None:
        """Exclude a peer for good, whatever its incarnation; `reason` is one clause for people.

        It is in the journal before anything else happens, so it outlives all restarts. The peer's links end and new
        ones are refused, here at once and at every other peer after its next heartbeat. What it claims of the open
        steps is void and is computed again by others. Work that others have computed from its answers stays where it
        is: who knows that those were wrong has it redone. UsageError if the list is full.
        """
        if peer_id in self.bans:
            return
        if len(self.bans.exclusions) >= MAX_EXCLUDED:
            raise UsageError(f"{MAX_EXCLUDED} peers are excluded already")
        member = self.members.get(peer_id)
        name = member.name if member is not None else self.tally.names.get(peer_id, "")
        self.bans.note(self.journal.exclude(self.step, peer_id, name, reason[:MAX_REASON]))
        self.events.emit(PeerExcluded(peer_id, self.step + 1, reason[:MAX_REASON], name))
        self.members.remove(peer_id)
        for books in self.books.values():
            books.lose_peer(peer_id)
        self.heard(peer_id)  # nobody waits for its goodbye
        self.node.drop(peer_id)
        await self.notify()

    async def unban(self, peer_id: str) -> None:
        """A peer may take part again, as any newcomer. UsageError if it is not excluded."""
        row = self.bans.get(peer_id)
        if row is None:
            raise UsageError(f"{peer_id[:64]} is not excluded", fix="see `swarmtrain members list`")
        self.bans.note(self.journal.exclude(self.step, peer_id, row.name, "", is_lifted=True))
        self.events.emit(PeerReadmitted(peer_id, row.name))
        await self.notify()

    def void(self, stage: int, key: tuple[str, str]) -> None:
        """A peer that is gone does not answer for anything on this stage."""
        for books in self.books.values():
            books.lose(stage, key)

    async def strike(self, member: Member, offence: Offence) -> None:
        """Hold something against a peer. With too much of it the peer is left out, unless its stage has no other."""
        now = asyncio.get_running_loop().time()
        is_out = self.strikes.note(member.peer_id, offence, now)
        others = [m for m in servers(self.members, member.stage, self.step) if m.peer_id != member.peer_id]
        if is_out and others:
            seconds = self.strikes.out_s(member.peer_id, now)
            self.events.emit(PeerSuspended(member.peer_id, member.stage, offence.text, seconds, member.name))
            await self.lose(member, f"it is left out: {offence.text}", must_sync=True)

    def is_on_probation(self, peer_id: str) -> bool:
        """Whether a peer came to an open run by its own work, and has done little so far.

        It owns nothing of a sum as long as its stage has other peers, and is checked more often than they are.
        """
        return self.is_new(peer_id, self.tally.contributed[peer_id])

    def void_claims(self, member: Member) -> None:
        """A peer's ledgers are gone or out of reach: what it had of the open steps must be computed again."""
        for books in self.books.values():
            books.lose(member.stage, member.key)

    def missed(self, peer_id: str) -> None:
        """A peer could not be reached, or was given up: it may not know how the run stands."""
        now = asyncio.get_running_loop().time()
        self._missed = {peer: at for peer, at in self._missed.items() if now - at < MISSED_S}
        self._missed[peer_id] = now

    def heard(self, peer_id: str) -> None:
        """A peer is told how the run stands, or has left."""
        self._missed.pop(peer_id, None)

    @property
    def lately_missed(self) -> set[str]:
        """Peers that were lost a moment ago, and may call again."""
        now = asyncio.get_running_loop().time()
        return {peer_id for peer_id, at in self._missed.items() if now - at < MISSED_S}
