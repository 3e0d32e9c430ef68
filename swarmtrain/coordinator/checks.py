"""Checks: what peers computed in a step is sealed, some of it is computed again, and a liar's work is redone.

`look` begins when a step's answers are in, beside the all-reduce; `passed` ends before the step is decided. So a liar
that is found never had part in an applied step: its microbatches of all open steps are begun anew on every stage, and
the sums are added up again without it. docs/checks.md has the cases.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from swarmtrain import world
from swarmtrain.chain.seals import ABSENT, Seal, digest_of, sealed_loss, unpacked
from swarmtrain.chain.signatures import Parcel
from swarmtrain.coordinator.admission import servers
from swarmtrain.coordinator.books import PeerKey, StepBooks
from swarmtrain.coordinator.check_policy import (
    Break,
    Draws,
    Finding,
    Made,
    Work,
    breaks,
    judged,
    members_of,
    what_differs,
)
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.lacking import withdraw
from swarmtrain.coordinator.members import Member
from swarmtrain.coordinator.prepare import PreparedStage
from swarmtrain.coordinator.strikes import Offence
from swarmtrain.errors import UsageError
from swarmtrain.model.sizes import id_type
from swarmtrain.observe.events import CheckUndecided, WorkBegunAnew, called
from swarmtrain.p2p.errors import HostDownError, NetError
from swarmtrain.rpc.errors import CallTimeout, LinkClosed
from swarmtrain.units import MIB
from swarmtrain.wire.messages import MAX_CHECKED, Case, Check, Checked, FetchProof, FetchSeals, Proof, Seals, Way
from swarmtrain.wire.schema import Message

T = TypeVar("T")

log = logging.getLogger(__name__)

SEAL_S = 20.0  # a peer that has not sealed its work by then counts as lost
CHECK_S = 30.0  # a checker has so long, and some of its own times for both passes more
CHECK_FACTOR = 4.0
MAX_CHECK_S = 120.0  # after that the step is decided without its answer
MAX_AT_ONCE = 64  # calls
MAX_OF_ONE = 2  # checks that one peer is asked for at once: the time of a check does not count what waits before it
MAX_STRANGERS = 3  # rounds of steps; a coordinator that was restarted does not know who died before
MAX_SETTLED = 64  # disputes between neighbours, at once
MAX_TOKEN_BYTES = 16 * MIB

Rosters = Mapping[int, Mapping[PeerKey, Sequence[int]]]
Claim = tuple[int, int, int, PeerKey]  # stage, microbatch, round, peer


@dataclass(frozen=True)
class Liar:
    """A peer that was found out, and the sentence about it."""

    member: PeerKey
    reason: str


class Checks:
    """Of one run. Without `checks.share` it does nothing."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._draws = Draws(context.manifest.checks.share)
        self._rng = world.random()
        self._id_type = id_type(context.manifest.model.vocab_size)
        self._step = -1
        self._seals: dict[Claim, Seal] = {}  # of this step
        self._drawn: set[Claim] = set()
        self._drawn_sums: set[tuple[int, PeerKey, str]] = set()
        self._liars: list[Liar] = []
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        # By receiver: steps and rounds in which somebody unknown signed its tensors, or somebody who is not the sender.
        self._strangers: dict[str, set[tuple[int, int]]] = {}
        self._unsent: set[tuple[str, int]] = set()  # receiver and round, of this step
        self._classes: dict[PeerKey, str] = {}  # of those that have sealed: one that leaves is checked all the same
        self._asked: dict[str, asyncio.Semaphore] = {}  # by checker
        self.odd: set[str] = set()  # peers that are checked more

    @property
    def is_on(self) -> bool:
        """Whether the manifest asks for checks."""
        return self._draws.share > 0.0

    async def look(self, step: int, books: StepBooks) -> None:
        """Seal and check what the books say now."""
        self._enter(step)
        if self.is_on and all(map(books.balances, range(books.num_stages))):
            await self._look(step, books, {stage: books.roster(stage) for stage in range(books.num_stages)})

    async def passed(self, step: int, books: StepBooks, prepared: Sequence[PreparedStage]) -> bool:
        """Whether these sums may be decided. If not, what was wrong is begun anew: then prepare them again."""
        self._enter(step)
        if not self.is_on:
            return True
        rosters = {stage.stage: stage.shares for stage in prepared}
        if not await self._look(step, books, rosters):
            return False
        is_broken = await self._begin_broken(step, books, rosters)
        if not is_broken:
            await self._all(self._check(step, books, work, rosters, prepared) for work in self._sums(books, prepared))
        for liar in self._liars:
            await self._exclude(step, liar)
        is_clean = not self._liars and not is_broken
        self._liars.clear()
        await self._context.notify()
        return is_clean

    def _enter(self, step: int) -> None:
        if step != self._step:
            self._step = step
            for memory in (self._seals, self._drawn, self._drawn_sums, self._liars, self._unsent, self._classes):
                memory.clear()
            self._asked.clear()

    async def _look(self, step: int, books: StepBooks, rosters: Rosters) -> bool:
        """Have what is new in these rosters sealed, then check some of it. False if a peer was lost over it."""
        owing = [
            (stage, member, new)
            for stage, shares in rosters.items()
            for member, microbatches in shares.items()
            if (new := [i for i in microbatches if (stage, i, books.round_of(i), member) not in self._seals])
        ]
        if not all(await self._all(self._seal(step, books, *item) for item in owing)):
            return False
        if not self._broken(step, books, rosters):
            await self._all(self._check(step, books, work, rosters, ()) for work in self._singles(books, rosters))
        return True

    # -- seals

    async def _seal(self, step: int, books: StepBooks, stage: int, key: PeerKey, microbatches: list[int]) -> bool:
        """One peer's seals. A peer that gives none cannot be checked: it is lost, unless it alone has its stage."""
        context = self._context
        rounds = [books.round_of(microbatch) for microbatch in microbatches]
        member = context.members.get(key[0])
        if member is None or member.key != key:
            context.void(stage, key)
            return False
        raw = np.array(microbatches, dtype="<u4").tobytes()
        request = FetchSeals(context.run_id, context.term, stage, step, raw)
        try:
            answer = await self._call(key[0], request, SEAL_S)
            if not isinstance(answer, Seals):
                raise ValueError(f"answered {answer.wire.kind}")
            found = unpacked(answer.seals, len(microbatches))
            losses = _losses(answer, found) if stage == books.num_stages - 1 else []
        except HostDownError:
            return False
        except (NetError, ValueError) as error:
            is_lost = await self._says_nothing(step, member, error)
            context.checks.unanswered += not is_lost
            return not is_lost
        self._classes.setdefault(key, member.numeric_class)
        absent = []
        for index, (microbatch, round) in enumerate(zip(microbatches, rounds, strict=True)):
            if round != books.round_of(microbatch):
                continue
            if found[index] == ABSENT:
                absent.append(microbatch)
                continue
            self._seals[stage, microbatch, round, key] = found[index]
            if losses:
                books.losses[microbatch] = losses[index]
        if absent:
            await withdraw(context, books, stage, member, absent)
        return not absent

    async def _says_nothing(self, step: int, member: Member, error: Exception) -> bool:
        """A peer does not say what it did, or shows no proof: it is lost. False if it alone has its stage.

        This is held against it, unless its link broke: otherwise it could hold up every step for as long as it likes.
        """
        context = self._context
        if not any(peer.key != member.key for peer in servers(context.members, member.stage, context.step)):
            return False
        if not isinstance(error, LinkClosed):
            await context.strike(member, Offence.IMPOSSIBLE if isinstance(error, ValueError) else Offence.UNSEALED)
        await context.lose(member, f"it does not say what it did in step {step + 1}: {error}", must_sync=True)
        return True

    def _broken(self, step: int, books: StepBooks, rosters: Rosters) -> dict[int, list[Break]]:
        """Microbatches whose seals do not meet, and where; nowhere, if only the loss is another one."""
        of = members_of(rosters)
        found = {}
        for microbatch in range(books.num_microbatches):
            round = books.round_of(microbatch)
            route = [(s, microbatch, round, of[s, microbatch]) for s in range(books.num_stages)]
            seals = [self._seals.get(claim) for claim in route]
            where = breaks(microbatch, seals, digest_of(self._tokens(step, microbatch), b""))
            last = seals[-1]
            if where or (last is not None and last.sent != sealed_loss(books.losses[microbatch])):
                found[microbatch] = where
        return found

    async def _begin_broken(self, step: int, books: StepBooks, rosters: Rosters) -> bool:
        """Where two neighbours say different things, one of them may be proven wrong; the work is done again anyway."""
        broken = self._broken(step, books, rosters)
        where = [item for items in broken.values() for item in items][:MAX_SETTLED]
        for liar in await self._all(self._settled(step, books, rosters, item) for item in where):
            if liar is not None and all(known.member != liar.member for known in self._liars):
                self._liars.append(liar)
        if broken:
            self._begin_anew(step, list(broken), "what was sent and what was received differ")
        return bool(broken)

    async def _settled(self, step: int, books: StepBooks, rosters: Rosters, where: Break) -> Liar | None:
        """Who of two neighbours is proven to lie about a tensor between them: the signature that came with it tells."""
        context, of, microbatch = self._context, members_of(rosters), where.microbatch
        is_forward, round = where.way is Way.FORWARD, books.round_of(where.microbatch)
        lower, upper = of.get((where.lower, microbatch)), of[where.lower + 1, microbatch]
        if lower is None:
            return Liar(
                upper, f"it says that it received other tokens for microbatch {microbatch} than were sent to it"
            )
        sender, receiver = (lower, upper) if is_forward else (upper, lower)
        stage = where.lower + (0 if is_forward else 1)  # of the sender
        at = where.lower + (1 if is_forward else 0)
        seal = self._seals[at, microbatch, round, receiver]
        digest = seal.received if is_forward else seal.received_gradient
        parcel = Parcel(context.run_id, stage, where.way, step, microbatch, round, digest)
        request = FetchProof(context.run_id, context.term, at, step, microbatch, where.way)
        try:
            proof = await self._call(receiver[0], request, SEAL_S)
            if not isinstance(proof, Proof):
                raise ValueError(f"answered {proof.wire.kind}")
        except HostDownError:
            return None
        except (NetError, ValueError) as error:  # it may be leaving, or fetching another state: no proof of a lie
            member = context.members.get(receiver[0])
            if member is not None and member.key == receiver:
                await self._says_nothing(step, member, error)
            return None
        what = f"{'output' if is_forward else 'gradient'} for microbatch {microbatch}"
        if not parcel.is_signed(proof.signer, proof.signature):
            return Liar(receiver, f"nobody has signed the {what} that it says it received in step {step + 1}")
        if proof.signer == sender[0]:
            return Liar(sender, f"it has signed another {what} in step {step + 1} than it says it sent")
        if context.members.was_heard(proof.signer) or context.tally.contributed[proof.signer]:
            await self._strike_both(receiver[0], proof.signer, round)
            return None  # from a peer that is gone
        turns = self._strangers.setdefault(receiver[0], set())  # anybody can make a key, and sign with it
        turns.add((step, round))
        is_usual = len(turns) >= MAX_STRANGERS
        return Liar(receiver, f"strangers have signed the {what} in step {step + 1}") if is_usual else None

    async def _strike_both(self, receiver: str, signer: str, round: int) -> None:
        """What a third peer has signed may be honest, or made up by two together: once is nothing, in every round it is
        held against both, or the step would never end."""
        for peer_id in (receiver, signer):
            member = self._context.members.get(peer_id)
            if member is not None and (peer_id, round) not in self._unsent:
                self._unsent.add((peer_id, round))
                await self._context.strike(member, Offence.UNSENT)

    # -- draws

    def _singles(self, books: StepBooks, rosters: Rosters) -> list[Work]:
        """What is drawn of what was not before."""
        found = []
        for stage, shares in rosters.items():
            for key, microbatches in shares.items():
                claims = {i: (stage, i, books.round_of(i), key) for i in microbatches}
                new = [i for i, claim in claims.items() if claim not in self._drawn and claim in self._seals]
                self._drawn.update(claims[i] for i in new)
                for microbatch in self._draws.single(new, self._chance(key), self._rng):
                    found.append(Work(stage, key, (microbatch,), adds_up=False))
        return found

    def _sums(self, books: StepBooks, prepared: Sequence[PreparedStage]) -> list[Work]:
        """Whole sums that are drawn: after their digests are known."""
        found = []
        for stage in prepared:
            for key, microbatches in stage.shares.items():
                drawn = (stage.stage, key, stage.parts.get(key, ""))
                if drawn in self._drawn_sums or not microbatches:
                    continue
                self._drawn_sums.add(drawn)
                claims = [(stage.stage, i, books.round_of(i), key) for i in microbatches]
                if not all(claim in self._seals for claim in claims) or len(microbatches) > MAX_CHECKED:
                    continue
                if self._rng.random() < self._chance(key):
                    found.append(Work(stage.stage, key, tuple(microbatches), adds_up=True))
        return found

    def _chance(self, key: PeerKey) -> float:
        num_decided = self._context.tally.contributed[key[0]]
        return self._draws.chance(num_decided, is_odd=key[0] in self.odd)

    # -- a check

    async def _check(
        self, step: int, books: StepBooks, work: Work, rosters: Rosters, prepared: Sequence[PreparedStage]
    ) -> None:
        """Have a part of a peer's work computed by another one; if they differ, by a third."""
        context, counts = self._context, self._context.checks
        counts.drawn += 1
        checkers = self._checkers(step, work)
        if not checkers:
            counts.without_checker += 1
            return
        request = self._request(step, books, work, rosters)
        parts = next((stage.parts for stage in prepared if stage.stage == work.stage), {})
        seals = [self._seals.get((work.stage, i, books.round_of(i), work.member)) for i in work.microbatches]
        known = tuple(item for item in seals if item is not None)
        if request is None or len(known) < len(seals):
            counts.unanswered += 1
            return
        checked = Made(known, parts.get(work.member, "") if work.adds_up else "")
        first = await self._first_answer(checkers, request)
        if first is None:
            counts.unanswered += 1
            return
        checker, made = first
        counts.done += 1
        if checked.differs(made) is None:
            return
        counts.mismatched += 1
        second = await self._first_answer([peer for peer in checkers if peer.key != checker.key], request)
        finding = Finding.UNDECIDED if second is None else judged(checked, made, second[1])
        if second is None or finding is Finding.UNDECIDED:
            counts.undecided += 1
            peer_id, name = work.member[0], context.members.name(work.member[0])
            context.events.emit(CheckUndecided(step + 1, work.stage, peer_id, checker.peer_id, name))
            return
        third, right = second
        is_last = work.stage == books.num_stages - 1
        if finding is Finding.LIAR_IS_CHECKED:
            what = what_differs(checked, right, work.microbatches, is_last=is_last)
            self._note_liar(step, work.member, what, checker, third)
        else:
            by = context.members.get(work.member[0])
            what = what_differs(made, right, work.microbatches, is_last=is_last)
            witnesses = (*([by] if by is not None else []), third)
            self._note_liar(step, checker.key, f"{what}, computed to check another peer,", *witnesses)

    def _note_liar(self, step: int, key: PeerKey, what: str, *witnesses: Member) -> None:
        names = " and ".join(called(peer.peer_id, peer.name) for peer in witnesses)
        if all(liar.member != key for liar in self._liars):
            self._liars.append(Liar(key, f"{what} in step {step + 1} differs from what {names} computed"))

    def _checkers(self, step: int, work: Work) -> list[Member]:
        """Other peers of the stage that compute the same bits, in a random order; not those found to lie."""
        context = self._context
        numeric_class = self._classes.get(work.member)
        if numeric_class is None:
            return []
        liars = {liar.member for liar in self._liars}
        found = [
            member
            for member in servers(context.members, work.stage, step)
            if member.peer_id != work.member[0] and member.key not in liars and member.numeric_class == numeric_class
        ]
        self._rng.shuffle(found)
        return found

    def _request(self, step: int, books: StepBooks, work: Work, rosters: Rosters) -> Check | None:
        """What the checker needs to know; None if a neighbour of the checked peer has sealed nothing."""
        context, of, cases = self._context, members_of(rosters), []
        for microbatch in work.microbatches:
            round = books.round_of(microbatch)
            before, after = (of.get((stage, microbatch)) for stage in (work.stage - 1, work.stage + 1))
            given = self._seals.get((work.stage - 1, microbatch, round, before)) if before is not None else None
            taken = self._seals.get((work.stage + 1, microbatch, round, after)) if after is not None else None
            if (before is not None and given is None) or (after is not None and taken is None):
                return None
            case = Case(
                microbatch=microbatch,
                round=round,
                before=before[0] if before is not None else "",
                input=given.sent if given is not None else b"",
                after=after[0] if after is not None else "",
                gradient=taken.sent_gradient if taken is not None else b"",
            )
            cases.append(case)
        tokens = b"".join(self._tokens(step, microbatch) for microbatch in work.microbatches)
        if len(tokens) > MAX_TOKEN_BYTES:
            return None
        return Check(context.run_id, context.term, work.stage, step, tuple(cases), tokens, work.adds_up)

    async def _first_answer(self, checkers: Sequence[Member], request: Check) -> tuple[Member, Made] | None:
        """The first of these peers that does it, and what it has computed."""
        for member in checkers[:2]:
            if not self._context.is_there(member):
                continue
            service_s = (member.report.forward_ms + member.report.backward_ms) / 1000
            limit_s = min(MAX_CHECK_S, CHECK_S + CHECK_FACTOR * service_s * len(request.cases))
            try:
                async with self._asked.setdefault(member.peer_id, asyncio.Semaphore(MAX_OF_ONE)):
                    answer = await self._call(member.peer_id, request, limit_s)
                if isinstance(answer, Checked) and bool(answer.share) == request.adds_up:
                    return member, Made(tuple(unpacked(answer.seals, len(request.cases))), answer.share)
            except (NetError, ValueError) as error:
                if isinstance(error, CallTimeout):
                    await self._context.strike(member, Offence.UNCHECKING)
                log.info("%s did not check step %d: %s", member.peer_id[-8:], request.step, error)
        return None

    # -- what follows

    async def _exclude(self, step: int, liar: Liar) -> None:
        """Take a liar out of the run, and whatever has passed through it out of all open steps."""
        context = self._context
        tainted = {open_step: books.touched_by(liar.member[0]) for open_step, books in context.books.items()}
        # First: a coordinator that dies in between must not take from ledgers what the liar had a part in.
        for open_step, microbatches in tainted.items():
            self._begin_anew(open_step, microbatches, "work of an excluded peer")
        context.checks.excluded += 1
        try:
            await context.ban(liar.member[0], liar.reason)
        except UsageError as error:
            log.warning("%s is not excluded: %s", liar.member[0][-8:], error)
        await context.notify()

    def _begin_anew(self, step: int, microbatches: Sequence[int], reason: str) -> None:
        context = self._context
        if not microbatches:
            return
        context.rounds.begin((step, microbatch) for microbatch in microbatches)
        for microbatch in microbatches:
            context.books[step].begin_anew(microbatch, context.rounds.of(step, microbatch))
        context.checks.begun_anew += len(microbatches)
        context.events.emit(WorkBegunAnew(step + 1, len(microbatches), reason))

    # -- calls

    def _tokens(self, step: int, microbatch: int) -> bytes:
        return np.asarray(self._context.sampler.microbatch(step, microbatch)).astype(self._id_type).tobytes()

    async def _call(self, peer_id: str, request: Message, limit_s: float) -> Message:
        async with self._places:
            return await self._context.patient_call(peer_id, request, deadline_s=limit_s)

    async def _all(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run coroutines side by side."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
        return [task.result() for task in tasks]


def _losses(answer: Seals, seals: Sequence[Seal]) -> list[float]:
    """The last stage's losses, one for each seal; ValueError for others than it has sealed."""
    found: list[float] = np.frombuffer(answer.losses, dtype="<f8").tolist()
    if len(found) != len(seals):
        raise ValueError(f"{len(found)} losses for {len(seals)} microbatches")
    if not all(map(math.isfinite, found)):
        raise ValueError("a loss that is not finite")
    pairs = zip(seals, found, strict=True)
    if any(item != ABSENT and item.sent != sealed_loss(loss) for item, loss in pairs):
        raise ValueError("a loss that it has not sealed")
    return found
