"""Who is asked to prepare: whose work is in the books takes part, whatever it has said of itself so far."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from swarmtrain.coordinator.admission import MAX_SERVING, StageBook
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.heartbeats import Heartbeats
from swarmtrain.coordinator.prepare import MAX_LISTENERS, PreparedStage, Preparer
from swarmtrain.model.buffers import StateLayout
from swarmtrain.reduce.coding import stage_elements
from swarmtrain.reduce.groups import fault_of
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Directive, Hop, Prepare, Prepared
from swarmtrain.wire.schema import encode

from .contexts import bare_context, changed, heartbeat

STAGE = 1


class Peers:
    """The peers of one stage, all of which can prepare what they are asked."""

    def __init__(self, *, step: int) -> None:
        self.asked: list[tuple[str, Prepare]] = []
        manifest = preset("nano", ["stages.count=3"])
        stages = [StageBook("digest") for _ in range(3)]
        self.context: RunContext = bare_context(manifest, node=cast(Any, self), step=step, stages=stages)
        self.books = StepBooks(3, 4)
        self.context.books[step] = self.books

    async def call(self, peer_id: str, request: Prepare, deadline_s: float, on_progress: Any = None) -> Prepared:
        self.asked.append((peer_id, request))
        return Prepared(1.0, "sum", "")

    async def heartbeat(self, peer_id: str, state: str, **changes: Any) -> Directive:
        beat = heartbeat(STAGE, state, "1", self.context.step, "digest")
        beat = changed(beat, **changes)
        return (await Heartbeats(self.context, lambda member: None).heartbeat(beat, peer_id)).directive

    def answer(self, peer_id: str, *microbatches: int) -> None:
        """These came back, and their routes led through the peer."""
        hop = Hop(STAGE, peer_id, "1")
        for microbatch in microbatches:
            self.books.record(microbatch, 1.0, [hop] if self.context.members.counts(hop) else [])

    async def prepare(self) -> PreparedStage:
        """Fails where the books have lost something, since no peer computes it again here."""
        async with asyncio.timeout(60.0):
            (stage,) = await Preparer(self.context).prepare(self.context.step, (STAGE,), self.books)
        await self.context.close()
        return stage


def work_in(request: Prepare) -> list[tuple[str, list[int], bool]]:
    """Who is named, with which microbatches, and whether it owns a piece of the sum."""
    return [
        (entry.peer_id, np.frombuffer(entry.microbatches, dtype="<u4").tolist(), entry.owned > 0)
        for entry in request.roster
    ]


@pytest.mark.parametrize(("state", "step"), [("joining", 0), ("joining", 3), ("syncing", 3)])
def test_a_peer_that_was_told_to_serve_takes_part_with_its_work_before_it_has_said_that_it_serves(
    state: str, step: int
) -> None:
    """Otherwise what it has computed counts as lost and is replayed, again and again, until its next heartbeat."""

    async def main() -> None:
        peers = Peers(step=step)
        await peers.heartbeat("old", "serving")
        assert await peers.heartbeat("new", state) is Directive.SERVE
        peers.context.members.listen(STAGE, step)  # as one that fetched its state did
        peers.answer("old", 0, 1)
        peers.answer("new", 2, 3)
        prepared = await peers.prepare()
        assert prepared.shares == {("old", "1"): [0, 1], ("new", "1"): [2, 3]}
        assert [member.peer_id for member in prepared.members] == ["new", "old"]
        assert not prepared.listeners
        assert [peer for peer, _ in peers.asked] == ["new", "old"]
        assert work_in(peers.asked[0][1]) == [("new", [2, 3], True), ("old", [0, 1], True)]

    asyncio.run(main())


@pytest.mark.parametrize("line", ["up_bytes_per_s", "down_bytes_per_s"])
def test_a_peer_that_announces_a_narrow_line_adds_up_less(line: str) -> None:
    async def main() -> None:
        peers = Peers(step=3)
        for name, rate in (("a", 1e6), ("b", 1e6), ("narrow", 2e5)):
            await peers.heartbeat(name, "serving", **{line: rate})
        peers.answer("a", 0, 1, 2, 3)
        await peers.prepare()
        owned = {entry.peer_id: entry.owned for entry in peers.asked[0][1].roster}
        assert owned["a"] > 2 * owned["narrow"]
        assert owned["b"] > 2 * owned["narrow"]

    asyncio.run(main())


@pytest.mark.parametrize(("state", "owns"), [("joining", True), ("syncing", False)])
def test_without_work_a_joining_peer_receives_as_a_member_and_a_syncing_one_as_a_listener(
    state: str, *, owns: bool
) -> None:
    """A listener may still be fetching, although it was told to serve: no member may wait for its part."""

    async def main() -> None:
        peers = Peers(step=3)
        await peers.heartbeat("old", "serving")
        assert await peers.heartbeat("new", state) is Directive.SERVE
        peers.context.members.listen(STAGE, 3)
        peers.answer("old", 0, 1, 2, 3)
        prepared = await peers.prepare()
        assert {member.peer_id for member in prepared.members} == ({"old", "new"} if owns else {"old"})
        assert [member.peer_id for member, _ in prepared.listeners] == ([] if owns else ["new"])
        assert ("new", [], owns) in work_in(peers.asked[0][1])

    asyncio.run(main())


def test_the_work_of_a_peer_that_was_not_told_to_serve_does_not_count() -> None:
    async def main() -> None:
        peers = Peers(step=3)
        await peers.heartbeat("old", "serving")
        beat = heartbeat(STAGE, "joining", "1", 0, "")
        answer = await Heartbeats(peers.context, lambda member: None).heartbeat(beat, "new")
        assert answer.directive is not Directive.SERVE
        peers.answer("new", 0, 1)
        peers.answer("old", 2, 3)
        assert peers.books.missing(STAGE) == [0, 1]

    asyncio.run(main())


def test_a_stage_with_more_peers_than_a_roster_holds_reduces_without_the_spares() -> None:
    async def main() -> None:
        peers = Peers(step=3)
        worker = "zz-worker"  # last in the fixed order
        for name in [worker, *(f"p{i:04}" for i in range(MAX_SERVING + 300))]:
            await peers.heartbeat(name, "serving")
        peers.answer(worker, 0, 1, 2, 3)
        for index in range(MAX_LISTENERS + 50):
            await peers.heartbeat(f"q{index:04}", "syncing", step=0)
        peers.context.members.listen(STAGE, 3)
        prepared = await peers.prepare()
        encode(peers.asked[0][1])
        assert len(prepared.members) == MAX_SERVING
        assert len(prepared.listeners) == MAX_LISTENERS
        assert worker in {member.peer_id for member in prepared.members}

    asyncio.run(main())


def test_a_large_stage_is_told_its_groups_and_listeners_are_spread_over_them() -> None:
    async def main() -> None:
        peers = Peers(step=3)
        for index in range(70):
            await peers.heartbeat(f"p{index:02}", "serving", up_bytes_per_s=1e6 + index)
        peers.answer("p07", 0, 1, 2, 3)
        for index in range(9):
            await peers.heartbeat(f"q{index}", "syncing", step=0)
        peers.context.members.listen(STAGE, 3)
        await peers.prepare()
        roster = peers.asked[0][1].roster
        size = stage_elements(StateLayout(peers.context.manifest, STAGE), compress=False)
        assert fault_of(roster, size) == ""
        groups = [[entry for entry in roster if entry.group == group] for group in range(3)]
        assert [sum(entry.peer_id.startswith("q") for entry in group) for group in groups] == [3, 3, 3]
        assert sorted(len(group) - 3 for group in groups) == [23, 23, 24]
        assert [entry.owned for entry in roster if entry.peer_id == "p00"] == [0]  # the slowest, which is left over
        assert not any(entry.owned for entry in roster if entry.peer_id.startswith("q"))

    asyncio.run(main())


def test_the_next_peer_of_a_full_stage_waits_until_there_is_room() -> None:
    async def main() -> None:
        peers = Peers(step=3)
        for index in range(MAX_SERVING):
            assert await peers.heartbeat(f"p{index:04}", "serving") is Directive.SERVE
        assert await peers.heartbeat("p0000", "serving") is Directive.SERVE  # again: it is one of them
        assert await peers.heartbeat("spare", "syncing") is Directive.WAIT
        peers.context.members.remove("p0007")
        assert await peers.heartbeat("spare", "syncing") is Directive.SERVE

    asyncio.run(main())
