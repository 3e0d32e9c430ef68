"""Where the run stands at a peer: the step under way, its ledger, and which requests it takes.

Everything that belongs to one step is in its ledger, so that the next step begins with an empty one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.ledger import Ledger
from swarmtrain.wire.messages import Code


@dataclass
class StepClock:
    """Touched on the event loop only."""

    peer: PeerIdentity
    max_ledger_bytes: int
    ledger: Ledger = field(default_factory=lambda: Ledger(0))
    is_applying: bool = False  # the step is over, its state is being changed: no more work for it
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def step(self) -> int:
        """Steps applied so far, which is the step whose microbatches are being computed."""
        return self.ledger.step

    @property
    def is_full(self) -> bool:
        """Whether the ledger holds all that it may."""
        return self.ledger.num_bytes() > self.max_ledger_bytes

    async def reach(self, step: int, *, timeout_s: float) -> None:
        """Return when `step` is the current one. The next step is waited for a while; others are refused.

        A peer that is still fetching its state, or begins to, is not waited for: it is behind for an unknown time.
        """
        if step == self.step + 1 or (step == self.step and self.is_applying):
            try:
                async with asyncio.timeout(timeout_s), self.changed:
                    await self.changed.wait_for(
                        lambda: (self.step >= step and not self.is_applying) or self.peer.state is PeerState.SYNCING
                    )
            except TimeoutError:
                pass
        if step > self.step or (step == self.step and self.is_applying):
            raise self.peer.refuse(Code.BEHIND, f"this peer is at step {self.step}", retry_after_s=0.5)
        if step < self.step:
            raise self.peer.refuse(Code.AHEAD, f"this peer is at step {self.step}")

    async def enter(self, step: int) -> None:
        """A new step begins with an empty ledger."""
        async with self.changed:
            self.ledger = Ledger(step)
            self.is_applying = False
            self.changed.notify_all()

    async def passed(self, step: int) -> None:
        """Wait until `step` is applied here."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.step > step)
