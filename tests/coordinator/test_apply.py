"""Every peer that sends a heartbeat carries out the decision; a heartbeat makes good a lost answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.apply import Applies, StepResult
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.journal import Decision, Journal
from swarmtrain.coordinator.members import Member
from swarmtrain.coordinator.prepare import PreparedStage
from swarmtrain.observe.events import Event, Events, PeerLost
from swarmtrain.rpc.errors import CallRefused, LinkClosed
from swarmtrain.wire.messages import Applied, Apply, Code, Heartbeat, Prepared

from .contexts import changed, heartbeat

HEARTBEAT = heartbeat(0, "serving", "1", 3, "d3")
DECISION = Decision(3, 1, 1.0, 1.0, 1.0, 0.1, (("sum", 1.0),), {0: {("a", "1"): [0]}}, {0: 1.0})

Answer = Callable[[Apply], Applied]


class Swarm:
    """A coordinator with one stage and one peer, whose answers to `Apply` are given in order."""

    def __init__(self, directory: Path, *answers: Answer) -> None:
        self._answers = list(answers)
        self.num_told = 0
        self._told = asyncio.Event()
        self.happened: list[Event] = []
        nothing = cast(Any, None)
        self.context = RunContext(
            manifest=nothing,
            run_id="run",
            term=1,
            node=cast(Any, self),
            dispatcher=nothing,
            journal=Journal(directory / "journal.sqlite"),
            sampler=nothing,
            events=Events(),
            step=3,
            decided=DECISION,
            stages=[StageBook("d3")],
        )
        self.context.events.add(self.happened.append)
        self.applies = Applies(self.context)
        self.heartbeat(HEARTBEAT)

    async def call(self, peer_id: str, request: Apply, deadline_s: float, *, expect: type[Any]) -> Applied:
        self.num_told += 1
        self._told.set()
        return self._answers.pop(0)(request)

    def heartbeat(self, beat: Heartbeat) -> Member:
        self.context.members.heartbeat("a", beat, 0.0)
        member = self.context.members.get("a")
        assert member is not None
        return member

    async def carry_out(self) -> asyncio.Task[StepResult]:
        member = self.context.members.get("a")
        assert member is not None
        prepared = PreparedStage(0, "sum", 1.0, (member,), {("a", "1"): [0]}, (), cast(Any, None), 0.0)
        self.context.prepared = frozenset({member.key})
        self._told.clear()
        self.context.prepared = frozenset({member.key})
        task = asyncio.create_task(self.applies.carry_out(DECISION, [prepared], checkpoint=False))
        await self._told.wait()
        await asyncio.gather(*self.context.background)
        return task

    async def hear(self, heard: Prepared) -> tuple[int, str]:
        """The decision is carried out with a newcomer that heard this reduction, and then says that it serves."""
        newcomer = self.heartbeat(changed(HEARTBEAT, state="syncing"))
        self.context.decided = DECISION
        listener: asyncio.Task[object] = asyncio.create_task(asyncio.sleep(0, heard))
        other = replace(newcomer, peer_id="b")
        prepared = PreparedStage(
            0, "sum", 1.0, (other,), {("b", "1"): [0]}, ((newcomer, listener),), cast(Any, None), 0.0
        )
        await self.applies.carry_out(DECISION, [prepared], checkpoint=False)
        await asyncio.gather(*self.context.background)
        member = self.heartbeat(HEARTBEAT)  # sent before it applied the step
        return member.step, member.report.state_digest


def cut(request: Apply) -> Applied:
    raise LinkClosed("cut")


def unprepared(request: Apply) -> Applied:
    raise CallRefused(Code.UNPREPARED)


def applied(request: Apply) -> Applied:
    return Applied(request.step + 1, "d4")


async def sends_heartbeat(swarm: Swarm, beat: Heartbeat) -> None:
    swarm.applies.tell(swarm.heartbeat(beat))
    await swarm.context.notify()


def test_an_answer_that_was_lost_is_made_good_by_a_heartbeat(tmp_path: Path) -> None:
    async def main() -> StepResult:
        swarm = Swarm(tmp_path, cut)
        swarm.context.prepared = frozenset({("a", HEARTBEAT.report.incarnation)})
        task = await swarm.carry_out()
        assert not task.done()
        await sends_heartbeat(swarm, changed(HEARTBEAT, step=4, state_digest="d4"))
        return await task

    assert asyncio.run(main()).state_digests == ("d4",)


def test_a_peer_that_has_not_heard_the_decision_is_told_again(tmp_path: Path) -> None:
    async def main() -> tuple[StepResult, int]:
        swarm = Swarm(tmp_path, cut, applied)
        task = await swarm.carry_out()
        await sends_heartbeat(swarm, HEARTBEAT)
        return await task, swarm.num_told

    result, num_told = asyncio.run(main())
    assert (result.state_digests, num_told) == (("d4",), 2)


def test_a_peer_that_was_given_up_meanwhile_is_told_all_the_same(tmp_path: Path) -> None:
    async def main() -> StepResult:
        swarm = Swarm(tmp_path, cut, applied)
        task = await swarm.carry_out()
        swarm.context.members.remove("a")
        await sends_heartbeat(swarm, HEARTBEAT)
        return await task

    assert asyncio.run(main()).state_digests == ("d4",)


def test_a_peer_without_the_sum_must_fetch_the_state_and_is_not_told_again(tmp_path: Path) -> None:
    async def main() -> tuple[bool, int]:
        swarm = Swarm(tmp_path, unprepared)
        task = await swarm.carry_out()
        member = swarm.heartbeat(HEARTBEAT)
        swarm.applies.tell(member)
        task.cancel()
        return member.must_sync, swarm.num_told

    assert asyncio.run(main()) == (True, 1)


def lost(swarm: Swarm) -> list[str]:
    return [event.reason for event in swarm.happened if isinstance(event, PeerLost)]


async def stands_still(swarm: Swarm, beat: Heartbeat, num_heartbeats: int = 3) -> None:
    """The peer shows up again and again; what each heartbeat brings about is over before the next one."""
    for _ in range(num_heartbeats):
        await sends_heartbeat(swarm, beat)
        await asyncio.gather(*swarm.context.background)


@pytest.mark.parametrize("state", ["paused", "draining"])
def test_a_peer_that_takes_no_work_and_that_a_step_was_done_without_is_told_once_and_not_lost(
    tmp_path: Path, state: str
) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path, *[unprepared] * 4)
        await stands_still(swarm, changed(HEARTBEAT, state=state))
        assert swarm.num_told == 1
        assert lost(swarm) == []
        member = swarm.context.members.get("a")
        assert member is not None
        assert member.excluded_at is None  # it may fetch what it has missed as soon as it resumes
        (await swarm.carry_out()).cancel()  # of another decision it may hold the sum
        assert swarm.num_told == 2

    asyncio.run(main())


@pytest.mark.parametrize("state", ["paused", "draining"])
def test_a_peer_that_takes_no_work_and_holds_the_sum_is_told_until_it_has_applied(tmp_path: Path, state: str) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path, cut, applied)
        await stands_still(swarm, changed(HEARTBEAT, state=state), num_heartbeats=2)
        await stands_still(swarm, changed(HEARTBEAT, state=state, step=4, state_digest="d4"))
        assert swarm.num_told == 2
        assert lost(swarm) == []

    asyncio.run(main())


@pytest.mark.parametrize("state", ["serving", "paused", "draining"])
def test_a_peer_of_the_roster_that_has_no_sum_is_lost_and_that_is_told_once(tmp_path: Path, state: str) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path, *[unprepared] * 3)
        swarm.context.prepared = frozenset({("a", HEARTBEAT.report.incarnation)})
        await stands_still(swarm, changed(HEARTBEAT, state=state))
        assert swarm.num_told == 1
        assert lost(swarm) == ["cannot apply step 3: unprepared"]

    asyncio.run(main())


@pytest.mark.parametrize(("heard", "known"), [("sum", (4, "d4")), ("another sum", (3, "d3"))])
def test_a_newcomer_that_followed_is_known_to_be_at_the_next_step(
    tmp_path: Path, heard: str, known: tuple[int, str]
) -> None:
    """Otherwise it begins to serve, is neither a listener nor one of the next roster, and misses that reduction."""

    async def main() -> tuple[int, str]:
        return await Swarm(tmp_path, applied, applied).hear(Prepared(1.0, heard, ""))

    assert asyncio.run(main()) == known


def test_all_answers_to_a_decision_are_one_commit(tmp_path: Path) -> None:
    """A commit waits for the disk: one for every peer and step would be seconds in a large swarm."""
    count = 40

    async def main() -> None:
        swarm = Swarm(tmp_path, *[applied] * count)
        first = swarm.heartbeat(HEARTBEAT)
        members = tuple(replace(first, peer_id=f"peer{number}") for number in range(count))
        statements: list[str] = []
        swarm.context.journal._db.set_trace_callback(statements.append)
        prepared = PreparedStage(0, "sum", 1.0, members, {("peer0", "1"): [0]}, (), cast(Any, None), 0.0)
        result = await swarm.applies.carry_out(DECISION, [prepared], checkpoint=False)
        assert result.state_digests == ("d4",)
        assert swarm.num_told == count
        assert statements.count("COMMIT") == 1
        with Journal(tmp_path / "journal.sqlite", read_only=True) as on_disk:
            assert len(on_disk.replicas()) == count

    asyncio.run(main())
