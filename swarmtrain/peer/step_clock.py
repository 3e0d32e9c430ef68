"""Where the run stands at a peer: the steps under way, their ledgers, and which requests it takes.

Everything that belongs to one step is in its ledger, so that the next step begins with an empty one. With
`schedule.delay` the step after the one that is being reduced and applied is open, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmtrain.peer.compute import Key
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.ledger import Ledger
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import Code


@dataclass
class StepClock:
    """Touched on the event loop only."""

    peer: PeerIdentity
    manifest: Manifest
    max_ledger_bytes: int
    step: int = 0  # steps applied so far, which is the oldest one whose microbatches are being computed
    is_applying: bool = False  # this step is over, the state is being changed: no more work for it
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _ledgers: dict[int, Ledger] = field(default_factory=dict)  # by step, from the current one on
    _rounds: dict[Key, int] = field(default_factory=dict)  # of microbatches of open steps that were begun anew

    @property
    def ledger(self) -> Ledger:
        """The current step's."""
        return self.ledger_of(self.step)

    def ledger_of(self, step: int) -> Ledger:
        """An open step's."""
        assert step >= self.step
        return self._ledgers.setdefault(step, Ledger(step))

    @property
    def ledgers(self) -> list[Ledger]:
        """Of all open steps that this peer has work of, the oldest first."""
        return [self._ledgers[step] for step in sorted(self._ledgers) if len(self._ledgers[step])]

    def known_ledger(self, step: int) -> Ledger | None:
        """A step's, if there is one: for requests whose step may be any."""
        return self._ledgers.get(step)

    def round_of(self, step: int, microbatch: int) -> int:
        """How often a microbatch of an open step was begun anew, as far as the coordinator has said."""
        return self._rounds.get((step, microbatch), 0)

    async def begin_anew(self, step: int, microbatch: int, round: int) -> None:
        """The coordinator says that what was computed of a microbatch before this round does not count."""
        if not self.step <= step <= self.step + 1 or round <= self.round_of(step, microbatch):
            return
        async with self.changed:
            self._rounds[step, microbatch] = round
            self.ledger_of(step).discard(microbatch, before=round)
            self.changed.notify_all()

    async def reach_round(self, step: int, microbatch: int, round: int, *, timeout_s: float) -> bool:
        """Wait until the coordinator has said that this round has begun; whether it has."""
        await self._wait_until(lambda: self.round_of(step, microbatch) >= round or step < self.step, timeout_s)
        return step >= self.step and self.round_of(step, microbatch) >= round

    @property
    def num_open(self) -> int:
        """Microbatches that are not answered yet."""
        return sum(ledger.num_open for ledger in self._ledgers.values())

    @property
    def ledger_bytes(self) -> int:
        """What all ledgers hold."""
        return sum(ledger.num_bytes() for ledger in self._ledgers.values())

    def is_full(self, step: int) -> bool:
        """Whether a step's ledger holds all that it may. Each has its share, so a later step never blocks replays."""
        share = self.max_ledger_bytes // (self.manifest.schedule.delay + 1)
        return self._ledgers.get(step, Ledger(step)).num_bytes() > share

    def is_open(self, step: int) -> bool:
        """Whether microbatches of `step` are computed now: the weights that they see are here."""
        is_over = step < self.step or (step == self.step and self.is_applying)
        return not is_over and self.manifest.weights_step(step) <= self.step

    @property
    def takes_work(self) -> bool:
        """Whether any step is open."""
        return self.is_open(self.step) or self.is_open(self.step + 1)

    async def reach(self, step: int, *, timeout_s: float) -> None:
        """Return when `step` is open. One that the next apply opens is waited for a while; others are refused.

        A peer that is still fetching its state, or begins to, is not waited for: it is behind for an unknown time.
        """
        if not self.is_open(step) and self.manifest.weights_step(step) <= self.step + 1:
            await self._wait_until(lambda: self.is_open(step) or step < self.step, timeout_s)
        if not self.is_open(step):
            raise self._refusal(step)

    async def reach_current(self, step: int, *, timeout_s: float) -> None:
        """The same for what needs the state before `step` itself: its all-reduce, and validation."""
        if step == self.step + 1 or (step == self.step and self.is_applying):
            await self._wait_until(lambda: self.step >= step and not self.is_applying, timeout_s)
        if step != self.step or self.is_applying:
            raise self._refusal(step)

    async def enter(self, step: int) -> None:
        """Another state, or another life: whatever was computed does not count."""
        async with self.changed:
            self._ledgers.clear()
            self._rounds.clear()
            self.step, self.is_applying = step, False
            self.changed.notify_all()

    async def advance(self) -> None:
        """This step is applied. Its ledger goes, that of the next one stays."""
        async with self.changed:
            self._ledgers.pop(self.step, None)
            self._rounds = {key: round for key, round in self._rounds.items() if key[0] > self.step}
            self.step, self.is_applying = self.step + 1, False
            self.changed.notify_all()

    async def passed(self, step: int) -> None:
        """Wait until `step` is applied here."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.step > step)

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self.changed:
                await self.changed.wait_for(lambda: condition() or self.peer.state is PeerState.SYNCING)
        except TimeoutError:
            pass

    def _refusal(self, step: int) -> Refusal:
        if step < self.step:
            return self.peer.refuse(Code.AHEAD, f"this peer is at step {self.step}")
        return self.peer.refuse(Code.BEHIND, f"this peer is at step {self.step}", retry_after_s=0.5)
