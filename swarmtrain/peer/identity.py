"""What a peer is in its run: its life, the term it obeys, and the messages it takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from swarmtrain.chain.membership import Membership
from swarmtrain.chain.signatures import Sign
from swarmtrain.observe.faults import Faults
from swarmtrain.observe.split import MicrobatchTimes
from swarmtrain.rpc.errors import Refusal
from swarmtrain.rpc.node import Node
from swarmtrain.run.invite import Invite
from swarmtrain.wire.messages import Code, Hop, Verdict

CONTACT_S = 10.0  # without a word from the coordinator for so long, a peer's work may not be counted any more
TERM_WAIT_S = 5.0  # how long a neighbour's message of a new term waits for the coordinator's own word


class Authority(Protocol):
    """Which peer coordinates the run."""

    async def is_coordinator(self, peer_id: str) -> bool:
        """Whether the run's key says that this peer coordinates."""

    def ask_for_news(self) -> None:
        """A term was mentioned that is not known here: ask the coordinator soon."""


class PeerState(StrEnum):
    """The life of a peer: joining -> syncing -> serving -> draining -> gone; paused from serving or at the start."""

    JOINING = "joining"
    SYNCING = "syncing"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    GONE = "gone"


# Drawn in docs/protocol.md, and compared with it by a test.
TRANSITIONS: Mapping[PeerState, frozenset[PeerState]] = {
    PeerState.JOINING: frozenset({PeerState.SYNCING, PeerState.SERVING, PeerState.PAUSED, PeerState.DRAINING}),
    PeerState.SYNCING: frozenset({PeerState.SERVING, PeerState.DRAINING}),
    PeerState.SERVING: frozenset({PeerState.SYNCING, PeerState.PAUSED, PeerState.DRAINING}),
    PeerState.PAUSED: frozenset({PeerState.JOINING, PeerState.DRAINING}),
    PeerState.DRAINING: frozenset({PeerState.GONE}),
    PeerState.GONE: frozenset(),
}


@dataclass
class Counters:
    """What this peer has done; for status and metrics."""

    microbatches: int = 0  # finished, first time
    from_ledger: int = 0  # answered again from memory
    joined: int = 0  # requests that joined one under way
    refused: dict[str, int] = field(default_factory=dict)
    replayed: int = 0
    evaluated: int = 0
    times: MicrobatchTimes = field(default_factory=MicrobatchTimes)
    critical: Counter[bool | None] = field(default_factory=Counter)  # gradients: waited for, not, or not known


@dataclass
class PeerIdentity:
    """One incarnation of a peer on one stage; touched on the event loop only."""

    run_id: str
    stage: int
    incarnation: str
    node: Node
    authority: Authority
    faults: Faults = field(default_factory=Faults)
    shares_work: bool = True  # with the others of the stage
    sign: Sign | None = None  # with its key; None where peers do not check each other
    state: PeerState = PeerState.JOINING
    term: int = 0
    state_term: int = 0  # in which it came to its state: no later one has taken that back, as far as this peer knows
    verdict: Verdict | None = None  # the coordinator's last one
    contact_at: float = 0.0  # when the coordinator was last heard, in time of the loop
    siblings: tuple[str, ...] = ()  # the others of the stage, as the last roster named them
    counters: Counters = field(default_factory=Counters)
    term_changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    membership: Membership = field(default_factory=lambda: Membership(Invite("", b"", ())))  # of its whole daemon

    def become(self, state: PeerState) -> None:
        """The only way to another state."""
        assert state is self.state or state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    @property
    def peer_id(self) -> str:
        """Its public key, as libp2p writes it."""
        return self.node.peer_id

    @property
    def hop(self) -> Hop:
        """This peer as a part of a route."""
        return Hop(self.stage, self.peer_id, self.incarnation)

    @property
    def has_contact(self) -> bool:
        """Whether the coordinator was heard lately. If not, it may have given this peer up."""
        return asyncio.get_running_loop().time() - self.contact_at < CONTACT_S

    def refuse(self, code: Code, text: str = "", retry_after_s: float = 0.0, *, redirect_to: str = "") -> Refusal:
        """A counted refusal, to be raised."""
        self.counters.refused[code.value] = self.counters.refused.get(code.value, 0) + 1
        return Refusal(code, text, retry_after_s, redirect_to=redirect_to)

    async def check_coordinator(self, sender: str, run: str, term: int, stage: int | None = None) -> None:
        """Refuse what is not from the run's coordinator; its newer term is obeyed from now on."""
        self._check_run(run, stage)
        if not await self.authority.is_coordinator(sender):
            raise self.refuse(Code.NOT_COORDINATOR, f"{sender[-8:]} does not coordinate this run")
        self._check_term(term)
        await self.enter_term(term)

    async def check_neighbour(self, run: str, term: int, stage: int) -> None:
        """Refuse another run or stage, and another term: a newer one counts when the coordinator itself says so."""
        self._check_run(run, stage)
        if term > self.term:
            self.authority.ask_for_news()
            try:
                async with asyncio.timeout(TERM_WAIT_S), self.term_changed:
                    await self.term_changed.wait_for(lambda: self.term >= term)
            except TimeoutError:
                raise self.refuse(Code.BEHIND, f"term {term} is not known here", retry_after_s=0.5) from None
        self._check_term(term)

    def check_upstream(self, sender: str) -> None:
        """Refuse work that is not from a peer which the coordinator has told to serve the stage before."""
        certificate = self.membership.certificate_of(sender)
        if sender != self.peer_id and (certificate is None or certificate.stage != self.stage - 1):
            raise self.refuse(Code.NOT_ADMITTED, f"{sender[-8:]} does not serve stage {self.stage - 1}")

    def check_sibling(self, run: str, stage: int) -> None:
        """Refuse what does not come from this stage of this run."""
        self._check_run(run, stage)

    async def enter_term(self, term: int) -> None:
        """The coordinator has said that this is its term."""
        self.contact_at = asyncio.get_running_loop().time()
        if term > self.term:
            async with self.term_changed:
                self.term = term
                self.term_changed.notify_all()

    def _check_run(self, run: str, stage: int | None) -> None:
        if run != self.run_id:
            raise self.refuse(Code.WRONG_RUN, f"this peer serves run {self.run_id}")
        if stage is not None and stage != self.stage:
            raise self.refuse(Code.WRONG_STAGE, f"this peer serves stage {self.stage}")

    def _check_term(self, term: int) -> None:
        if term < self.term:
            raise self.refuse(Code.OLD_TERM, f"term {term} is over; the coordinator's term is {self.term}")
