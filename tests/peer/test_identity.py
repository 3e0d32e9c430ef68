"""Who is obeyed: only the run's coordinator, and a term only from its own mouth."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from swarmtrain.peer import identity as identity_module
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Code


class Authority:
    """`chief` coordinates; doubts are counted, and `on_doubt` may bring news."""

    def __init__(self) -> None:
        self.num_doubts = 0
        self.on_doubt: Any = None

    async def is_coordinator(self, peer_id: str) -> bool:
        return peer_id == "chief"

    def ask_for_news(self) -> None:
        self.num_doubts += 1
        if self.on_doubt is not None:
            self.on_doubt()


def make() -> tuple[PeerIdentity, Authority]:
    authority, nothing = Authority(), cast(Any, None)
    return PeerIdentity("run", 1, "life", nothing, authority, term=3), authority


def make_clock() -> tuple[PeerIdentity, StepClock]:
    peer, _ = make()
    return peer, StepClock(peer, preset("nano"), 100)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main

    asyncio.run(bounded())


async def code_of(check: Coroutine[Any, Any, None]) -> str:
    with pytest.raises(Refusal) as caught:
        await check
    return caught.value.code


@pytest.mark.parametrize("term", [0, 3, 2**39])
def test_a_stranger_is_not_obeyed_whatever_its_term(term: int) -> None:
    async def main() -> None:
        peer, _ = make()
        assert await code_of(peer.check_coordinator("stranger", "run", term)) == Code.NOT_COORDINATOR
        assert peer.term == 3
        assert peer.counters.refused == {Code.NOT_COORDINATOR: 1}

    run(main())


def test_the_coordinators_newer_term_counts_and_its_older_one_does_not() -> None:
    async def main() -> None:
        peer, _ = make()
        await peer.check_coordinator("chief", "run", 5, 1)
        assert peer.term == 5
        assert await code_of(peer.check_coordinator("chief", "run", 4)) == Code.OLD_TERM
        assert await code_of(peer.check_coordinator("chief", "other", 9)) == Code.WRONG_RUN
        assert await code_of(peer.check_coordinator("chief", "run", 9, 2)) == Code.WRONG_STAGE
        assert peer.term == 5

    run(main())


def test_a_neighbours_newer_term_waits_for_the_coordinators_word() -> None:
    async def main() -> None:
        peer, authority = make()

        def news() -> None:
            tasks.append(asyncio.create_task(peer.enter_term(4)))

        tasks: list[asyncio.Task[None]] = []
        authority.on_doubt = news
        await peer.check_neighbour("run", 4, 1)
        assert peer.term == 4
        assert authority.num_doubts == 1
        assert await code_of(peer.check_neighbour("run", 3, 1)) == Code.OLD_TERM
        assert await code_of(peer.check_neighbour("run", 4, 2)) == Code.WRONG_STAGE

    run(main())


def test_a_neighbours_newer_term_that_nobody_confirms_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "TERM_WAIT_S", 0.05)

    async def main() -> None:
        peer, authority = make()
        assert await code_of(peer.check_neighbour("run", 2**39, 1)) == Code.BEHIND
        assert peer.term == 3
        assert authority.num_doubts == 1

    run(main())


def test_work_of_the_next_step_waits_for_this_ones_end_and_other_steps_are_refused() -> None:
    async def main() -> None:
        _, clock = make_clock()
        waiting = asyncio.create_task(clock.reach(1, timeout_s=10))
        await asyncio.sleep(0)
        await clock.enter(1)
        await waiting
        assert await code_of(clock.reach(0, timeout_s=10)) == Code.AHEAD
        assert await code_of(clock.reach(3, timeout_s=10)) == Code.BEHIND
        assert await code_of(clock.reach(2, timeout_s=0.01)) == Code.BEHIND

    run(main())


def test_work_does_not_wait_at_a_peer_that_begins_to_fetch_its_state() -> None:
    async def main() -> None:
        peer, clock = make_clock()
        waiting = asyncio.create_task(code_of(clock.reach(1, timeout_s=3600)))
        await asyncio.sleep(0)
        peer.become(PeerState.SYNCING)
        await clock.enter(0)  # as it drops its ledger
        assert await waiting == Code.BEHIND
        assert await code_of(clock.reach(1, timeout_s=3600)) == Code.BEHIND

    run(main())


def test_a_state_changes_only_along_the_arrows() -> None:
    async def main() -> None:
        peer, _ = make()
        for state in (PeerState.SYNCING, PeerState.SERVING, PeerState.PAUSED, PeerState.JOINING, PeerState.DRAINING):
            peer.become(state)
        with pytest.raises(AssertionError, match="draining -> serving"):
            peer.become(PeerState.SERVING)

    run(main())
