"""Attempts at one step's reduction that cross each other at a peer. The reductions themselves stand still here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.codec.gradient import GradientSpec
from swarmtrain.peer.attempt import Attempt
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.step import Ready, StepProtocol
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Applied, Apply, Code, Prepare, Prepared, RosterEntry, Unprepared

ENDED = Prepared(1.0, "sum", "")
ROSTER = (RosterEntry("p", "life", b"", 1),)


async def nothing() -> None:
    return None


class Still(StepProtocol):
    """An attempt lasts until `finish`, and takes until `let_go` to end when it is given up."""

    def __init__(self) -> None:
        layout = SimpleNamespace(gradient_size=1, num_fused=0, factored=())
        coder = SimpleNamespace(spec=GradientSpec("none"))
        device = SimpleNamespace(check=lambda: None, hangs=False)
        stage = SimpleNamespace(layout=layout, coder=coder, device=device, drop_work=nothing)
        self.identity = PeerIdentity("run", 0, "life", cast(Any, self), self, state=PeerState.SERVING)
        super().__init__(self.identity, StepClock(self.identity, preset("nano"), 100), cast(Any, stage))
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.given_up: asyncio.Queue[int] = asyncio.Queue()
        self.called_off: dict[int, asyncio.Event] = {}
        self.reports: list[Any] = []
        self.let_go, self.finish = asyncio.Event(), asyncio.Event()

    peer_id = "p"

    async def is_coordinator(self, peer_id: str) -> bool:
        return True

    def ask_for_news(self) -> None:
        raise AssertionError

    async def _reduce(self, attempt: Attempt) -> Prepared | Unprepared:
        number = attempt.prepare.attempt
        self.begun.put_nowait(number)
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            self.given_up.put_nowait(number)
            await self.let_go.wait()
            raise
        return ENDED

    def ask(self, attempt: int) -> asyncio.Task[Prepared | Unprepared]:
        request = Prepare("run", 1, 0, 0, attempt, ROSTER, (), False)
        return asyncio.create_task(self.prepare(request, cast(Any, self.exchange(attempt))))

    def exchange(self, attempt: int) -> Any:
        self.called_off.setdefault(attempt, asyncio.Event())
        return SimpleNamespace(peer_id="chief", cancelled=self.called_off[attempt], progress=self.reports.append)


async def refusal_of(task: asyncio.Task[Prepared | Unprepared]) -> str:
    with pytest.raises(Refusal) as caught:
        await task
    return caught.value.code


async def turn(times: int = 10) -> None:
    """Let everybody go as far as they get."""
    for _ in range(times):
        await asyncio.sleep(0)


def test_of_two_attempts_that_wait_for_the_end_of_a_third_the_newest_counts() -> None:
    async def main() -> None:
        steps = Still()
        first = steps.ask(1)
        assert await steps.begun.get() == 1
        newest, late = steps.ask(3), steps.ask(2)
        assert await steps.given_up.get() == 1
        await turn()
        steps.let_go.set()
        assert await steps.begun.get() == 3
        assert await refusal_of(late) == Code.AHEAD
        steps.finish.set()
        assert await newest is ENDED
        assert await refusal_of(first) == Code.AHEAD
        assert await steps.ask(3) is ENDED  # asked again, it is the same attempt
        assert steps.begun.empty()

    asyncio.run(asyncio.wait_for(main(), 20.0))


def test_a_peer_that_begins_to_fetch_its_state_begins_no_attempt_of_its_former_life() -> None:
    async def main() -> None:
        steps = Still()
        first = steps.ask(1)
        assert await steps.begun.get() == 1
        second = steps.ask(2)
        assert await steps.given_up.get() == 1
        steps.identity.become(PeerState.SYNCING)
        forgetting = asyncio.create_task(steps.forget())
        third = steps.ask(3)  # heard as by any newcomer
        await turn()
        steps.let_go.set()
        await forgetting
        assert await refusal_of(first) == await refusal_of(second) == await refusal_of(third) == Code.AHEAD
        assert steps.attempts._current is None

    asyncio.run(asyncio.wait_for(main(), 20.0))


def test_a_newcomer_says_nothing_of_the_state_with_which_it_began_to_listen() -> None:
    """That one may have the number to which a decision leads, and be of a history that was taken back."""

    async def main() -> None:
        steps = Still()
        steps.identity.become(PeerState.SYNCING)
        await steps._clock.enter(3)
        steps.last_applied = Applied(3, "taken back")
        steps._ready[2] = Ready(cast(Any, None), "sum", frozenset())
        told = Apply("run", 1, 2, "sum", 1.0, 0.1, snapshot=False, basis="", basis_donors=())
        assert await steps.apply(told, cast(Any, steps.exchange(1))) == Applied(0, "")
        steps._may_follow = True  # a state was fetched since
        assert await steps.apply(told, cast(Any, steps.exchange(1))) == steps.last_applied

    asyncio.run(asyncio.wait_for(main(), 20.0))
