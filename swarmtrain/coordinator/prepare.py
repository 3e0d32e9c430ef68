"""Prepare: the peers of each stage all-reduce their gradient; a failed attempt is repeated without the lost peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from swarmtrain.coordinator.admission import MAX_SERVING, servers
from swarmtrain.coordinator.attempt_watch import SILENT_S, AttemptWatch, Pace
from swarmtrain.coordinator.blame import Blame, Known, Reply, accusations, sum_of
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.lacking import withdraw
from swarmtrain.coordinator.members import Member, believable
from swarmtrain.coordinator.strikes import Offence
from swarmtrain.model.buffers import StateLayout
from swarmtrain.model.reduce_bytes import num_groups, reduce_bytes
from swarmtrain.observe.events import PrepareFailed, StagePrepared
from swarmtrain.p2p.errors import HostDownError, NetError
from swarmtrain.reduce.coding import stage_elements
from swarmtrain.reduce.groups import Place, arrange
from swarmtrain.reduce.partition import effective_rates
from swarmtrain.reduce.selective import StageCompression
from swarmtrain.rpc.calls import OnProgress
from swarmtrain.rpc.errors import CallRefused, CallTimeout, LinkClosed, MalformedAnswer, PeerSilent
from swarmtrain.wire.messages import Code, Prepare, Prepared, Preparing, RosterEntry, Unprepared
from swarmtrain.wire.schema import Message

log = logging.getLogger(__name__)

PREPARE_S = 86400.0  # not a deadline: an attempt lasts while it makes progress (attempt_watch.py)
WATCH_S = 1.0
FAILURE_GRACE_S = 1.5  # how long the other members may still answer after a first failure
MAX_LISTENERS = 256  # more would only slow each other down; a newcomer beyond them begins again
MAX_PAUSE_S = 2.0  # between attempts that fail again and again
SURE_S = 2.0  # a peer that answered within this time, and whose link is open, counts as alive

Shares = dict[tuple[str, str], list[int]]


@dataclass(frozen=True)
class PreparedStage:
    """A stage whose peers hold the same reduced gradient."""

    stage: int
    digest: str
    squared_norm: float
    members: tuple[Member, ...]  # peers that hold it
    shares: Shares  # which peer answered for which microbatches
    listeners: tuple[tuple[Member, asyncio.Task[object]], ...]  # newcomers, each with its pending answer
    request: Prepare  # a peer that holds the gradient answers it again with the same digest
    answered_at: float  # on the loop's clock
    basis: str = ""  # on the last stage: the digest of the basis to which the subspace moves
    parts: Mapping[tuple[str, str], str] = field(default_factory=dict)  # the digest of each peer's own part of the sum
    ranges: tuple[bytes, ...] = ()  # what its members say that each range's sum is


@dataclass(frozen=True)
class _Side:
    """One stage in an attempt."""

    stage: int
    shares: Shares
    members: list[Member]
    absent: set[tuple[str, str]]  # peers that are gone although the books name them


class Preparer:
    """Prepares the stages of one run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._layouts = [StateLayout(context.manifest, stage) for stage in range(context.manifest.stages.count)]
        self._compression = StageCompression(context.manifest)
        self._attempts = 0

    def groups(self) -> list[tuple[int, ...]]:
        """The stages, grouped by all-reduce: both ends of the pipeline are one group if they share an embedding."""
        stages = range(len(self._layouts))
        tied = tuple(stage for stage in stages if self._layouts[stage].num_fused)
        return [*([tied] if tied else []), *((stage,) for stage in stages if stage not in tied)]

    async def prepare(
        self, step: int, group: tuple[int, ...], books: StepBooks, *, turn: int = 0
    ) -> list[PreparedStage]:
        """Prepare the stages of a group, in as many attempts as it takes, leaving out peers that make attempts fail.

        With `turn`, each owner has what another one, so many places before it, has without.
        """
        context, blame, num_failed = self._context, Blame(self._known(group)), 0
        loop = asyncio.get_running_loop()
        compressed = self._compression.choose()
        while True:
            await context.wait_for(lambda: all(books.balances(stage) for stage in group))
            sides = [self._side(stage, books.roster(stage)) for stage in group]
            if any(side.absent for side in sides):
                for side in sides:
                    for key in side.absent:
                        books.lose(side.stage, key)
                await context.notify()
                continue
            self._attempts += 1
            started = loop.time()
            requests = self._requests(step, self._attempts, sides, compressed, turn)
            listeners = [self._tell_listeners(side, requests[side.stage]) for side in sides]
            asked = [(member, requests[side.stage]) for side in sides for member in side.members]
            answers = await self._ask_all(asked, self._pace(sides))
            found = [_agreed(answers[where]) for where in _slices(sides)]
            if all(item is not None for item in found):
                for side in sides:
                    seconds, is_compressed = loop.time() - started, side.stage in compressed
                    self._compression.took(side.stage, seconds, compressed=is_compressed)
                    context.events.emit(StagePrepared(step + 1, side.stage, self._attempts, seconds, is_compressed))
                return [
                    PreparedStage(
                        stage=side.stage,
                        digest=good.digest,
                        squared_norm=good.squared_norm,
                        members=tuple(side.members),
                        shares=side.shares,
                        listeners=heard,
                        request=requests[side.stage],
                        answered_at=loop.time(),
                        basis=good.basis,
                        parts=_parts(side.members, answers[where]),
                        ranges=tuple(item.ranges for item in answers[where] if isinstance(item, Prepared)),
                    )
                    for side, good, heard, where in zip(sides, found, listeners, _slices(sides), strict=True)
                    if good is not None
                ]
            for side, where in zip(sides, _slices(sides), strict=True):
                await self._correct(books, requests[side.stage], side, answers[where])
            await self._leave_out(blame, sides, answers)
            num_failed += 1
            await asyncio.sleep(min(MAX_PAUSE_S, 0.05 * 2 ** min(num_failed, 10)))

    async def is_held(self, prepared: PreparedStage) -> bool:
        """Whether a peer that holds this sum is still alive: other stages may have taken long since it was made.

        A peer that answered long ago, or whose link has closed since, is asked again. One that does not answer is lost.
        """
        context = self._context
        there = [member for member in prepared.members if context.is_there(member)]
        is_fresh = asyncio.get_running_loop().time() - prepared.answered_at < SURE_S
        if is_fresh and any(context.node.has_link(member.peer_id) for member in there):
            return True
        answers = await asyncio.gather(*(self._ask(member, prepared.request) for member in there))
        for member, answer in zip(there, answers, strict=True):
            if isinstance(answer, NetError) and not isinstance(answer, CallRefused | HostDownError):
                await context.lose(member, str(answer))
        return any(isinstance(answer, Prepared) and answer.digest == prepared.digest for answer in answers)

    def _side(self, stage: int, shares: Shares) -> _Side:
        members = self._participants(stage, shares)
        return _Side(stage, shares, members, shares.keys() - {member.key for member in members})

    def _participants(self, stage: int, shares: Shares) -> list[Member]:
        """The peers that have work in the step, and every other serving peer as a receiver."""
        answering, step = self._context.members.answering(stage), self._context.step
        found = [m for m in answering if m.key in shares or (m.is_ready and m.step == step)]
        # A roster has a limit: peers without work beyond it are spares, and fetch a state when a place is free.
        return sorted(found, key=lambda m: m.key not in shares)[:MAX_SERVING] if len(found) > MAX_SERVING else found

    def _listeners(self, side: _Side, step: int) -> list[Member]:
        """Newcomers that listen to this step's all-reduce. A peer with work in it is a member already."""
        waiting = [m for m in self._context.members.of_stage(side.stage, "syncing") if m.key not in side.shares]
        found = [m for m in waiting if m.listening_from is not None and m.listening_from <= step]
        return found[:MAX_LISTENERS]

    def _tell_listeners(self, side: _Side, request: Prepare) -> tuple[tuple[Member, asyncio.Task[object]], ...]:
        """Listeners receive the reduced gradient too; no member waits for them."""
        named = {entry.peer_id for entry in request.roster}
        return tuple(
            (member, self._context.in_background(self._ask_listener(member, request)))
            for member in self._listeners(side, request.step)
            if member.peer_id in named
        )

    def _requests(
        self, step: int, attempt: int, sides: list[_Side], compressed: frozenset[int], turn: int
    ) -> dict[int, Prepare]:
        """The request to each stage of a group."""
        num_fused = self._layouts[sides[0].stage].num_fused
        fused = self._roster(sides, step, num_fused) if num_fused else ()
        return {
            side.stage: Prepare(
                run=self._context.run_id,
                term=self._context.term,
                stage=side.stage,
                step=step,
                attempt=attempt,
                roster=self._roster(
                    [side],
                    step,
                    stage_elements(self._layouts[side.stage], compress=side.stage in compressed),
                    turn,
                ),
                fused=fused,
                compress=side.stage in compressed,
            )
            for side in sides
        }

    def _rates(self, members: list[Member]) -> list[tuple[float, float]]:
        """The rates by which a sum is divided: who is on probation owns nothing of it, unless all are."""
        rates = effective_rates(believable([member.rates for member in members]))
        is_new = [self._context.is_on_probation(member.peer_id) for member in members]
        weights = [1e-12 if new and not all(is_new) else 1.0 for new in is_new]
        return [(rate * weight, rate * weight) for rate, weight in zip(rates, weights, strict=True)]

    def _roster(self, sides: list[_Side], step: int, size: int, turn: int = 0) -> tuple[RosterEntry, ...]:
        """The roster that all-reduces `size` elements: all members of these stages, and newcomers as listeners."""
        members = [(member, side.shares) for side in sides for member in side.members]
        listeners = [(member, side.shares) for side in sides for member in self._listeners(side, step)]
        places = arrange(size, self._rates([member for member, _ in members]))
        places = _turned(places, turn, {i for i, (member, _) in enumerate(members) if self._may_not_own(member)})
        count = num_groups(len(members))
        places += [Place(len(members) + index, index % count, 0) for index in range(len(listeners))]
        everybody = [*members, *listeners]
        return tuple(_entry(*everybody[place.member], place) for place in places)

    def _may_not_own(self, member: Member) -> bool:
        return member.peer_id in self._context.disowned

    def _pace(self, sides: list[_Side]) -> Pace:
        """What one member should receive in this attempt, and how fast. Of a group: the least, and the slowest."""
        manifest, received, expected_s = self._context.manifest, [], []
        for side in sides:
            num_peers = len(side.members)
            received.append(reduce_bytes(manifest, self._layouts[side.stage].plan).per_peer(num_peers))
            rates = [min(rate for rate in member.rates if rate) for member in side.members if any(member.rates)]
            expected_s += [self._compression.measured_s(side.stage), *(received[-1] / rate for rate in rates)]
        return Pace(min(received), max(expected_s))

    async def _ask_all(self, asked: list[tuple[Member, Prepare]], pace: Pace) -> list[Reply]:
        """All answers. The first failure ends the attempt, and so does a silent member or a stall.

        After a failure the other members have FAILURE_GRACE_S to answer; a member that was not waited for has None.
        """
        loop = asyncio.get_running_loop()
        watch = AttemptWatch([member.peer_id for member, _ in asked], loop.time(), pace)
        tasks = {
            asyncio.create_task(self._ask(member, request, _listener(watch, member))): member
            for member, request in asked
        }
        try:
            left = set(tasks)
            while left:
                waits_from = loop.time()
                done, left = await asyncio.wait(left, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                waited_s = loop.time() - waits_from
                if not done and (waited_s > 2 * WATCH_S or not await self._context.node.is_up()):
                    watch.excuse(waited_s)
                for task in done:
                    watch.answered(tasks[task].peer_id, loop.time())
                if any(not isinstance(task.result(), Prepared) for task in done) and left:
                    await asyncio.wait(left, timeout=FAILURE_GRACE_S)
                    break
                if watch.silent(loop.time()) or watch.has_stalled(loop.time()):
                    break
            now = loop.time()
            return [task.result() if task.done() else _overdue(watch, tasks[task], now) for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_listener(self, member: Member, request: Prepare) -> Reply:
        """A newcomer's answer. It may be slower than the members, but not silent."""
        loop = asyncio.get_running_loop()
        watch = AttemptWatch([member.peer_id], loop.time())
        task = asyncio.create_task(self._ask(member, request, _listener(watch, member)))
        try:
            while not task.done() and not watch.silent(loop.time()):
                await asyncio.wait({task}, timeout=WATCH_S)
            return task.result() if task.done() else _overdue(watch, member, loop.time())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _ask(
        self, member: Member, request: Prepare, on_progress: OnProgress | None = None
    ) -> Prepared | Unprepared | NetError:
        """One peer's answer. A broken link is dialed again once: a peer gives the same answer to the same attempt."""
        call = self._context.patient_call
        try:
            try:
                answer = await call(member.peer_id, request, deadline_s=PREPARE_S, on_progress=on_progress)
            except PeerSilent:
                raise
            except LinkClosed:
                answer = await call(member.peer_id, request, deadline_s=PREPARE_S, on_progress=on_progress)
        except NetError as error:
            return error
        if isinstance(answer, Prepared | Unprepared):
            return answer
        return MalformedAnswer(f"answered {answer.wire.kind}")

    async def _leave_out(self, blame: Blame, sides: list[_Side], answers: list[Reply]) -> None:
        """Leave out peers that others cannot reduce with. The stages of a group are judged together, as they reduce."""
        context, members = self._context, [member for side in sides for member in side.members]
        if all(isinstance(answer, Prepared) for answer in answers):
            left_out = [
                member
                for side, where in zip(sides, _slices(sides), strict=True)
                if _agreed(answers[where]) is None
                for member in blame.attempt(side.members, answers[where])
            ]
        else:
            left_out = blame.attempt(members, answers)
        for one, other in accusations(members, answers):
            context.strikes.disputed(one, other)
        for member in left_out:
            is_other = all(isinstance(answer, Prepared) for answer in answers)
            await context.strike(member, Offence.DIFFERENT if is_other else Offence.BLAMED)
            await context.lose(member, "other peers of its stage cannot reduce with it", must_sync=True)

    def _known(self, group: tuple[int, ...]) -> Known:
        """What earlier steps say of the peers of these stages."""
        context, now = self._context, asyncio.get_running_loop().time()
        peers = [m.peer_id for stage in group for m in context.members.answering(stage)]
        return Known(
            work=context.tally.contributed,
            strikes={peer_id: context.strikes.score(peer_id, now) for peer_id in peers},
            disputes={peer_id: context.strikes.num_disputes(peer_id) for peer_id in peers},
        )

    async def _lacks(self, books: StepBooks, request: Prepare, side: _Side, member: Member, missing: bytes) -> None:
        """A member says that it lacks microbatches: they are computed again.

        Only those count that the roster says it answers for.
        """
        context, own = self._context, set(side.shares.get(member.key, ()))
        lacks = set(np.frombuffer(missing[: len(missing) // 4 * 4], dtype="<u4").tolist())
        if len(missing) % 4 or not lacks <= own:
            await context.strike(member, Offence.IMPOSSIBLE)
            await context.lose(member, "it lacks microbatches that nobody has asked it for", must_sync=True)
            return
        await withdraw(context, books, request.stage, member, lacks)

    async def _correct(self, books: StepBooks, request: Prepare, side: _Side, answers: Sequence[Reply]) -> None:
        """Correct books and members for another attempt."""
        context, reasons = self._context, []
        for member, answer in zip(side.members, answers, strict=True):
            if answer is None or isinstance(answer, Prepared):
                continue
            reasons.append(f"{member.peer_id[-6:]}: {answer.reason if isinstance(answer, Unprepared) else answer}")
            if isinstance(answer, Unprepared):
                if answer.missing:
                    await self._lacks(books, request, side, member, answer.missing)
                elif not (answer.suspects or answer.refused_by):
                    await context.strike(member, Offence.UNEXPLAINED)
            elif isinstance(answer, CallRefused):
                if answer.code in (Code.BEHIND, Code.AHEAD, Code.WRONG_STAGE, Code.NOT_SERVING):
                    await context.strike(member, Offence.REFUSED_PREPARE)
                    await context.lose(member, f"cannot take part in step {request.step + 1}: {answer.code}")
            elif isinstance(answer, MalformedAnswer):
                await context.strike(member, Offence.IMPOSSIBLE)
                await context.lose(member, str(answer), must_sync=True)
            elif not isinstance(answer, HostDownError):  # that is this host's own fault
                # A peer that is merely silent would be back with its next heartbeat, and cost as much in every step:
                # it must sync first, unless no other peer has the state.
                others = [m for m in servers(context.members, member.stage, context.step) if m.key != member.key]
                must_sync = isinstance(answer, CallTimeout) and bool(others)
                if isinstance(answer, CallTimeout):
                    await context.strike(member, Offence.SILENT)
                await context.lose(member, str(answer), must_sync=must_sync)
        if _agreed(answers) is not None:
            return  # it was the other stage of the group that failed
        reason = "; ".join(reasons)[:500] or "replicas disagree on the reduced gradient"
        context.events.emit(PrepareFailed(request.step + 1, request.stage, request.attempt, reason))
        await context.notify()


def _entry(member: Member, shares: Shares, place: Place) -> RosterEntry:
    return RosterEntry(
        peer_id=member.peer_id,
        incarnation=member.report.incarnation,
        microbatches=np.array(sorted(shares.get(member.key, [])), dtype="<u4").tobytes(),
        owned=place.owned,
        group=place.group,
    )


def _listener(watch: AttemptWatch, member: Member) -> OnProgress:
    def heard(item: Message) -> None:
        if isinstance(item, Preparing):
            watch.heard(member.peer_id, item, asyncio.get_running_loop().time())

    return heard


def _overdue(watch: AttemptWatch, member: Member, now: float) -> Reply:
    """What counts as the answer of a member that had not answered when its attempt ended."""
    if member.peer_id in watch.silent(now):
        return CallTimeout(f"it has not reported on its all-reduce for {SILENT_S:.0f} s")
    if not watch.has_stalled(now):
        return None
    return watch.complaint(member.peer_id) or CallTimeout("its all-reduce stands still, and it waits for no peer")


def _slices(sides: list[_Side]) -> list[slice]:
    """Where the answers of each side lie among all answers."""
    ends = list(accumulate(len(side.members) for side in sides))
    return [slice(end - len(side.members), end) for side, end in zip(sides, ends, strict=True)]


def _turned(places: Sequence[Place], turn: int, without: Collection[int]) -> list[Place]:
    """The same places, with what is owned given to members that are `turn` further, and nothing to those of `without`.

    Only in one group: several own alike, range by range.
    """
    may_own = [index for index, place in enumerate(places) if place.owned and place.member not in without]
    may_own = may_own or [index for index, place in enumerate(places) if place.member not in without]
    if (not turn and not without) or any(place.group for place in places) or not may_own:
        return list(places)
    sizes = [place.owned for place in places if place.owned]
    if len(may_own) < len(sizes):
        sizes = [*sizes[: len(may_own) - 1], sum(sizes[len(may_own) - 1 :])]
    owned = dict(zip(may_own, sizes, strict=False))
    kept = [replace(place, owned=owned.get(index, 0)) for index, place in enumerate(places)]
    names = [kept[index].member for index in owned]
    for position, index in enumerate(owned):
        kept[index] = replace(kept[index], member=names[(position - turn) % len(names)])
    return kept


def _parts(members: Sequence[Member], answers: Sequence[Reply]) -> dict[tuple[str, str], str]:
    """What the members say that their own parts of the sum are."""
    pairs = zip(members, answers, strict=True)
    return {member.key: answer.share for member, answer in pairs if isinstance(answer, Prepared)}


def _agreed(answers: Sequence[Reply]) -> Prepared | None:
    """The answer in which all replicas of a stage agree, with their most common basis; None if they do not."""
    good = [answer for answer in answers if isinstance(answer, Prepared)]
    if len(good) < len(answers) or len({sum_of(answer) for answer in good}) != 1:
        return None
    bases = [answer.basis for answer in good]
    return replace(good[0], basis=max(sorted(set(bases)), key=bases.count))
