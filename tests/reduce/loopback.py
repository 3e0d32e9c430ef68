"""All-reduces that call each other directly: every peer of a stage in one process, with its bytes counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.reduce.all_reduce import AllReduce, Lane
from swarmtrain.reduce.coding import FactorRound, Reduced, StageCoder, factor_pieces, left_pieces, stage_elements
from swarmtrain.reduce.groups import Groups, arrange
from swarmtrain.rpc.errors import CallRefused, Refusal
from swarmtrain.wire.messages import Prepare, ReducedPiece, ReduceShare, RosterEntry


class FakeNode:
    """Calls the other peers' all-reduces directly; `dead` ones cannot be reached."""

    def __init__(
        self, peer_id: str, group: dict[str, AllReduce], dead: set[str], sent: Counter[str] | None = None
    ) -> None:
        """`sent` counts the bytes of shares and sums by sender."""
        self.peer_id, self._group, self._dead = peer_id, group, dead
        self._sent: Counter[str] = Counter() if sent is None else sent
        self.called: set[str] = set()

    async def call(
        self, peer_id: str, part: ReduceShare, deadline_s: float, *, expect: type[ReducedPiece]
    ) -> ReducedPiece:
        if peer_id in self._dead or self.peer_id in self._dead:
            raise PeerUnreachable(f"{peer_id} is dead")
        await asyncio.sleep(0)
        self.called.add(peer_id)
        self._sent[self.peer_id] += len(part.values)
        try:
            arrived = replace(part, values=memoryview(bytearray(part.values)))
            answer = await self._group[peer_id].receive_share(arrived, self.peer_id)
        except Refusal as refusal:
            raise CallRefused.of(refusal.payload) from refusal
        self._sent[peer_id] += len(answer.values)
        return answer


def name(index: int) -> str:
    return f"peer{index}"


def entries(num_peers: int, size: int, workers: set[int]) -> tuple[RosterEntry, ...]:
    """The roster of a stage of peers of unknown speed, of which some have work."""
    return tuple(
        RosterEntry(
            name(place.member),
            "life",
            np.array([place.member], "<u4").tobytes() if place.member in workers else b"",
            place.owned,
            place.group,
        )
        for place in arrange(size, [(0.0, 0.0)] * num_peers)
    )


def bounded(work: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(120):
            await work

    asyncio.run(main())


async def reduced_by_all(
    coders: Sequence[StageCoder],
    shares: Sequence[torch.Tensor | None],
    sent: Counter[str] | None = None,
    *,
    has_one_owner: bool = False,
) -> list[Reduced]:
    """What every peer of the stage leaves with. The first peer owns a part, or with `has_one_owner` everything."""
    layout = coders[0].layout
    size = stage_elements(layout, compress=True)
    workers = {i for i, share in enumerate(shares) if share is not None}
    roster = entries(len(coders), size, workers)
    if has_one_owner:
        roster = tuple(replace(entry, owned=0 if index else size) for index, entry in enumerate(roster))
    prepare = Prepare("run", 1, 0, 3, 1, roster, (), True)

    async def one_lane(
        parts: Sequence[torch.Tensor | None], out_size: int, forms: Sequence[Any], **options: Any
    ) -> list[torch.Tensor]:
        group: dict[str, AllReduce] = {}
        for i, (part, form) in enumerate(zip(parts, forms, strict=True)):
            node: Any = FakeNode(name(i), group, set(), sent)
            group[name(i)] = AllReduce(node, prepare, part, form=form, **options)
        outs = [torch.full((out_size,), float("nan")) for _ in parts]
        await asyncio.gather(*(group[name(i)].run(out) for i, out in enumerate(outs)))
        return outs

    if not coders[0].spec.in_factors:
        forms = [coder.sliced(compress=True) for coder in coders]
        outs = await one_lane(shares, layout.gradient_size, [form for form, _ in forms])
        return [Reduced(out, commit) for out, (_, commit) in zip(outs, forms, strict=True)]
    rounds: list[FactorRound] = [coder.factors(share) for coder, share in zip(coders, shares, strict=True)]
    owned = Groups(roster, name(0)).owned
    pieces = left_pieces(layout, owned)
    left_forms = [item.left_form for item in rounds]
    lefts = await one_lane([item.left() for item in rounds], pieces[-1].stop, left_forms, lane=Lane.LEFT, pieces=pieces)
    vectors = [item.vector(left) for item, left in zip(rounds, lefts, strict=True)]
    totals = await one_lane(vectors, size, [item.form for item in rounds], pieces=factor_pieces(layout, owned))
    return [item.reduced(left, total) for item, left, total in zip(rounds, lefts, totals, strict=True)]
