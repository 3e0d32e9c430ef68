"""All reductions of one attempt at one peer: its stage's gradient, in the lanes that the run needs.

Other peers' parts may arrive for a lane before this peer has begun it; `lane` waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmtrain.peer.compute import Kind
from swarmtrain.peer.context import PeerContext
from swarmtrain.reduce.all_reduce import AllReduce, Lane
from swarmtrain.reduce.coding import Reduced, factor_pieces, left_pieces
from swarmtrain.wire.messages import Prepare, Preparing, RosterEntry

MAX_NAMED = 16  # peers in one report: more is no news
_STEP_JOB = -1


class Attempt:
    """One (term, step, attempt). `share` is the whole flat sum of this peer; None if it has no work in the step."""

    def __init__(self, context: PeerContext, prepare: Prepare, share: Tensor | None) -> None:
        self._context, self.prepare, self._share = context, prepare, share
        self._lanes: dict[Lane, AllReduce] = {}
        self._changed = asyncio.Condition()
        self._is_closed = False
        self.is_finished = False
        self._others = {entry.peer_id for entry in (*prepare.roster, *prepare.fused)} - {context.node.peer_id}
        self._received_before = self._received_bytes()
        coder = context.jobs.coder
        self._num_fused = coder.layout.num_fused if prepare.fused else 0
        self._factors = coder.spec.kind == "powersgd" and prepare.compress and bool(coder.layout.factored)

    @property
    def key(self) -> tuple[int, int, int]:
        """What orders attempts."""
        return (self.prepare.term, self.prepare.step, self.prepare.attempt)

    @property
    def has_listeners(self) -> bool:
        """Whether there may be somebody who only receives, and takes longer than the others."""
        return any(not entry.owned for entry in (*self.prepare.roster, *self.prepare.fused))

    def report(self, *, is_computing: bool) -> Preparing:
        """How it goes."""
        lanes = list(self._lanes.values())
        missing = dict.fromkeys(peer for lane in lanes for peer in lane.missing_peers())
        unanswered = dict.fromkeys(peer for lane in lanes for peer in lane.unanswered_owners())
        return Preparing(
            moved_bytes=max(0, self._received_bytes() - self._received_before),
            is_computing=is_computing,
            missing=tuple(missing)[:MAX_NAMED],
            unanswered=tuple(unanswered)[:MAX_NAMED],
        )

    def _received_bytes(self) -> int:
        return sum(self._context.node.received_bytes(peer_id) for peer_id in self._others)

    async def lane(self, lane: Lane) -> AllReduce | None:
        """The reduction of a lane, as soon as this peer has begun it; None if it never will."""
        async with self._changed:
            await self._changed.wait_for(lambda: lane in self._lanes or self._is_closed)
        return self._lanes.get(lane)

    def finish(self) -> None:
        """This peer has the whole sum. What it owns of it can still be asked for; its own share is not needed again."""
        self.is_finished = True
        self._share = None
        for reduction in self._lanes.values():
            reduction.forget_share()

    async def close(self) -> None:
        """Give up: whoever waits for something of this peer is told so."""
        self._is_closed = True
        for reduction in self._lanes.values():
            reduction.close()
        async with self._changed:
            self._changed.notify_all()

    async def run(self) -> Reduced:
        """The stage's reduced gradient. Raises AllReduceFailed."""
        layout, own_start = self._context.jobs.coder.layout, self._num_fused
        gradient = torch.empty(layout.gradient_size, dtype=torch.float32)
        own = None if self._share is None else self._share[own_start:]
        stage = self._run_factors(own) if self._factors else self._run_stage(own, gradient)
        if not self._num_fused:
            return await stage
        both = None if self._share is None else self._share[:own_start]
        fused = self._run_fused(both, gradient[:own_start])
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fused)
                staged = tasks.create_task(stage)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        found = staged.result()
        gradient[own_start:] = found.gradient[-(gradient.numel() - own_start) :]
        return Reduced(gradient, found.commit)

    async def _run_stage(self, own: Tensor | None, gradient: Tensor) -> Reduced:
        form, commit = self._context.jobs.coder.sliced(compress=self.prepare.compress)
        reduction = AllReduce(self._context.node, self.prepare, own, form=form)
        await self._begin(reduction)
        await reduction.run(gradient[self._num_fused :])
        return Reduced(gradient, commit)

    async def _run_fused(self, both: Tensor | None, out: Tensor) -> None:
        roster: Sequence[RosterEntry] = self.prepare.fused
        reduction = AllReduce(self._context.node, self.prepare, both, lane=Lane.FUSED, roster=roster)
        await self._begin(reduction)
        await reduction.run(out)

    async def _run_factors(self, own: Tensor | None) -> Reduced:
        """PowerSGD: left factors first, everything else once they are known."""
        context, node = self._context, self._context.node
        coder = context.jobs.coder
        factors = (await context.compute.run(Kind.STEP, _STEP_JOB, lambda: coder.factors(own))).value
        share = (await context.compute.run(Kind.STEP, _STEP_JOB, factors.left)).value
        owned = [entry.owned for entry in self.prepare.roster]
        pieces = left_pieces(coder.layout, owned)
        first = AllReduce(node, self.prepare, share, lane=Lane.LEFT, pieces=pieces, form=factors.left_form)
        await self._begin(first)
        left = torch.empty(pieces[-1].stop)
        await first.run(left)
        vector = (await context.compute.run(Kind.STEP, _STEP_JOB, lambda: factors.vector(left))).value
        pieces = factor_pieces(coder.layout, owned)
        second = AllReduce(node, self.prepare, vector, pieces=pieces, form=factors.form)
        await self._begin(second)
        total = torch.empty(second.pieces[-1].stop)
        await second.run(total)
        return (await context.compute.run(Kind.STEP, _STEP_JOB, lambda: factors.reduced(left, total))).value

    async def _begin(self, reduction: AllReduce) -> None:
        async with self._changed:
            self._lanes[reduction.lane] = reduction
            self._changed.notify_all()
