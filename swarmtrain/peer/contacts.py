"""Whom a peer finds in the directory: the run's coordinator, and the addresses of peers that it has never met.

The coordinator's record is signed by the run's key. The directory's own contacts cover a few dozen peers; in a larger
stage a roster names strangers, and their addresses are in the records that they announce under the stage's topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from swarmtrain.chain.claim import Claim, CoordinatorRecord
from swarmtrain.chain.neighbours import stage_reports
from swarmtrain.chain.offer import COORDINATOR_TOPIC, RunRefused, checked_offer
from swarmtrain.chain.rebalancing import MoveRules
from swarmtrain.directory.directory import Directory, TopicRule
from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.p2p.errors import NetError
from swarmtrain.p2p.network import NetworkHost
from swarmtrain.rpc.errors import CallRefused, LinkRefused, Refusal
from swarmtrain.rpc.node import Node
from swarmtrain.run.invite import Invite
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.errors import WrongVersion
from swarmtrain.wire.messages import Code, FetchRun, RunOffer, SeekStage, StageFound
from swarmtrain.wire.records import parse_record, version_fault
from swarmtrain.wire.schema import Message

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Message)

LOOK_AGAIN_S = 0.3
STRANGERS_S = 1.0  # the directory is read for strangers so often at most
DOUBT_S = 1.0  # how often strangers that claim to coordinate may make this peer read the directory


class RunUnreachable(SwarmtrainError):
    """The run's coordinator cannot be found."""

    error_id = "ST-RUN-UNREACHABLE"
    exit_code = ExitCode.UNREACHABLE


class NotAdmitted(RunRefused):
    """The run admits nobody with this invite, or its operator has taken the peer's admission back."""

    error_id = "ST-NOT-ADMITTED"


def excluded() -> RunRefused:
    """The coordinator takes no link with this peer."""
    return RunRefused("this peer is excluded from the run", fix="ask the run's operator why")


def directory_rules(invite: Invite) -> Mapping[str, TopicRule]:
    """The coordinator's record must be countersigned by the run's key."""
    return {COORDINATOR_TOPIC: TopicRule(countersigned_by=invite.run_key)}


class CoordinatorLink:
    """Knows which peer coordinates now."""

    def __init__(self, invite: Invite, host: NetworkHost, node: Node, directory: Directory) -> None:
        self._invite, self._host, self._node, self._directory = invite, host, node, directory
        self.peer_id: str | None = None
        self.term = 0
        self.rules = MoveRules()  # how the run rebalances, as its coordinator announces it
        self.is_over = False  # the run is complete, and its coordinator may be gone
        self.wants_look = False
        self.heartbeat_now = asyncio.Event()  # a heartbeat should not wait for its turn
        self._doubting = asyncio.Lock()
        self._doubted_at = -DOUBT_S
        self._version_fault: WrongVersion | None = None  # of the last look

    async def find(self, *, timeout_s: float) -> str:
        """The coordinator's peer id; waits for its record.

        RunUnreachable if there is none in time, WrongVersion if there are only some of another protocol version.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.look():
                    await self._directory_may_change()
        except TimeoutError:
            raise self._version_fault or RunUnreachable(
                f"no coordinator of run {self._invite.run_id} within {timeout_s:.0f} s",
                fix="is the coordinator running, and is this its newest invite?",
            ) from None
        assert self.peer_id is not None
        return self.peer_id

    async def is_coordinator(self, peer_id: str) -> bool:
        """Whether `peer_id` coordinates; another may have taken over, so the directory is asked now and then."""
        if peer_id == self.peer_id:
            return True
        loop = asyncio.get_running_loop()
        async with self._doubting:
            if loop.time() - self._doubted_at >= DOUBT_S:
                await self.look()
                self._doubted_at = loop.time()
        return peer_id == self.peer_id

    async def check_coordinator(self, sender: str, run: str, term: int) -> None:
        """Refuse what is not from the run's coordinator of now."""
        if run != self._invite.run_id:
            raise Refusal(Code.WRONG_RUN, f"this is run {self._invite.run_id}")
        if not await self.is_coordinator(sender):
            raise Refusal(Code.NOT_COORDINATOR, f"{sender[-8:]} does not coordinate this run")
        if term < self.term:
            raise Refusal(Code.OLD_TERM, f"term {term} is over; the coordinator's term is {self.term}")

    def ask_for_news(self) -> None:
        """A neighbour speaks of a newer term."""
        self.wants_look = True
        self.heartbeat_now.set()

    async def _directory_may_change(self) -> None:
        """The directory has no notifications: look again after a moment."""
        await asyncio.sleep(LOOK_AGAIN_S)

    async def look(self) -> bool:
        """Read the directory once; True if a coordinator is listed. The greatest claim counts."""
        try:
            records = await self._directory.lookup(COORDINATOR_TOPIC)
        except SwarmtrainError as error:
            log.debug("cannot read the directory: %s", error)
            return False
        found = {peer_id: parse_record(CoordinatorRecord, record.value) for peer_id, record in records.items()}
        claims = {record.claim(peer_id): record for peer_id, record in found.items() if record is not None}
        faults = [version_fault(CoordinatorRecord, record.value) for record in records.values()]
        self._version_fault = None if claims else next(filter(None, faults), None)
        if claims and (best := max(claims)).term >= self.term:
            self._follow(best, claims[best])
        return bool(claims)

    def _follow(self, claim: Claim, record: CoordinatorRecord) -> None:
        self.term, self.peer_id = claim.term, claim.peer_id
        self.rules, self.is_over = record.rules, record.is_over
        self._host.learn(record.addresses, of=claim.peer_id)

    async def fetch_run(self, timeout_s: float) -> Manifest:
        """The run's manifest, checked against the invite."""
        offer = await self.ask(FetchRun(self._invite.run_id), RunOffer, timeout_s)
        return checked_offer(offer, self._invite)

    async def seek_stage(self, stages: Sequence[int], timeout_s: float) -> StageFound:
        """Which of these stages needs a peer most."""
        return await self.ask(SeekStage(self._invite.run_id, tuple(stages)), StageFound, timeout_s)

    async def ask(self, message: Message, expect: type[T], timeout_s: float) -> T:
        """The coordinator's answer; one that is still starting is asked again when it says."""
        ends_at = asyncio.get_running_loop().time() + timeout_s
        while True:
            peer_id = await self.find(timeout_s=ends_at - asyncio.get_running_loop().time())  # another may take over
            left_s = ends_at - asyncio.get_running_loop().time()
            self._node.forgive(peer_id)  # its record is there: it may be back
            try:
                return await self._node.call(peer_id, message, deadline_s=left_s, expect=expect)
            except LinkRefused as error:
                raise excluded() from error
            except NetError as error:
                if isinstance(error, CallRefused) and error.code == Code.NOT_ADMITTED:
                    raise NotAdmitted(
                        f"the run does not admit this peer: {error.text or 'its certificate does not count'}",
                        fix="ask the run's operator for an invite of your own",
                    ) from error
                if isinstance(error, CallRefused) and error.code == Code.WRONG_RUN:
                    raise RunRefused(f"the coordinator refuses: {error.text}", fix="ask for a new invite") from error
                retry_after_s = error.retry_after_s if isinstance(error, CallRefused) else 0.0
                if not 0.0 < retry_after_s < left_s:
                    raise RunUnreachable(
                        f"the coordinator does not answer: {error}", fix="is it running, and reachable from here?"
                    ) from error
            await asyncio.sleep(retry_after_s)


class Strangers:
    """Reads the records of some stages when a peer in them cannot be reached."""

    def __init__(self, host: NetworkHost, directory: Directory) -> None:
        self._host, self._directory = host, directory
        self._stages: tuple[int, ...] = ()
        self._met: dict[str, tuple[str, ...]] = {}  # addresses, as last announced
        self._looking = asyncio.Lock()
        self._looked_at = -STRANGERS_S

    def expect_from(self, stages: Iterable[int]) -> None:
        """From now on this peer may have to call strangers of these stages."""
        self._stages = tuple(sorted(set(stages)))

    async def meet(self, peer_id: str) -> bool:
        """A peer could not be dialed; whether the directory says something of it that was not known before."""
        known = self._met.get(peer_id)
        async with self._looking:
            loop = asyncio.get_running_loop()
            if self._met.get(peer_id) == known and loop.time() - self._looked_at >= STRANGERS_S:
                self._met = await self._look()
                self._looked_at = loop.time()
        return self._met.get(peer_id, known) != known

    async def _look(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for stage in self._stages:
            try:
                reports = await stage_reports(self._directory, stage)
            except SwarmtrainError as error:
                log.debug("cannot read the directory: %s", error)
                continue
            for peer_id, report in reports.items():
                if peer_id != self._host.peer_id:
                    self._host.learn(report.addresses, of=peer_id)
                    found[peer_id] = report.addresses
        return found
