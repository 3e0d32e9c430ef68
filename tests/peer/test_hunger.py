"""A peer whose compute thread runs out of work tells those who called it, and a caller that is told sends there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from net.helpers import until

from swarmtrain.net.errors import LinkClosed, Refusal
from swarmtrain.peer.compute import ComputeThread, Kind
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.hunger import Hunger
from swarmtrain.peer.microbatch import Microbatches
from swarmtrain.route.hunger import MIN_PAUSE_S
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import Acknowledged, Code, Hungry

from .test_stage_jobs import jobs_of, manifest

__all__ = ["manifest"]  # a fixture


CALLERS = [f"caller {number}" for number in range(6)]  # of fewer nobody is told


def fed_by_many(hunger: Hunger) -> None:
    for caller in CALLERS:
        hunger.fed_by(caller)


class Wire:
    """As much of a node as hints need."""

    peer_id = "p"

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.is_broken = False
        self.heard: list[tuple[str, Hungry]] = []

    def backlog_bytes(self) -> int:
        return self.waiting_bytes

    async def call(self, peer_id: str, hint: Hungry, deadline_s: float, *, expect: type) -> Acknowledged:
        self.heard.append((peer_id, hint))
        if self.is_broken:
            raise LinkClosed("it died")
        return Acknowledged("")


def context_of(manifest: Manifest, compute: ComputeThread, wire: Wire, dispatcher: object = None) -> PeerContext:
    stage = 0 if dispatcher else 1
    nothing = cast(Any, None)
    jobs = jobs_of(manifest, stage)
    context = PeerContext(
        "run", manifest, stage, "life", cast(Any, wire), compute, jobs, nothing, cast(Any, dispatcher), 64, 1 << 40
    )
    context.state = PeerState.SERVING
    context.contact_at = asyncio.get_running_loop().time()
    return context


def with_hunger(manifest: Manifest, main: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            compute, wire = ComputeThread(), Wire()
            hunger = Hunger(context_of(manifest, compute, wire))
            try:
                await main(compute, wire, hunger)
            finally:
                await hunger.close()
                await compute.stop()

    asyncio.run(bounded())


def test_the_last_piece_of_work_makes_it_say_so_once_to_a_caller(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, hunger: Hunger) -> None:
        await compute.run(Kind.FORWARD, 0, lambda: None)
        assert wire.heard == []  # nobody has called yet
        fed_by_many(hunger)
        await compute.run(Kind.BACKWARD, 0, lambda: None)
        await compute.run(Kind.MESSAGE, 0, lambda: None)  # what the thread said before has been heard by now
        await until(lambda: bool(wire.heard), "the caller hears it")
        ((caller, hint),) = wire.heard
        assert caller in CALLERS
        assert hint == Hungry("run", 1, 0.0)  # its end, just afterwards, is not worth another

    with_hunger(manifest, main)


def test_step_work_and_messages_are_not_what_it_hungers_for(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, hunger: Hunger) -> None:
        fed_by_many(hunger)
        for kind in (Kind.STEP, Kind.MESSAGE, Kind.EVALUATE):
            await compute.run(kind, 0, lambda: None)
        assert wire.heard == []
        await compute.run(Kind.FORWARD, 0, lambda: None)
        await until(lambda: bool(wire.heard), "a forward is")

    with_hunger(manifest, main)


@pytest.mark.parametrize("why", ["paused", "uplink", "no contact", "applying", "ledger"])
def test_who_could_not_do_more_says_nothing(manifest: Manifest, why: str) -> None:
    async def main(compute: ComputeThread, wire: Wire, hunger: Hunger) -> None:
        context = hunger._context
        fed_by_many(hunger)
        match why:
            case "paused":
                context.become(PeerState.PAUSED)
            case "uplink":
                wire.waiting_bytes = 1 << 40
            case "no contact":
                context.contact_at = -1e9
            case "applying":
                context.is_applying = True
            case _:
                context.max_ledger_bytes = -1
        await compute.run(Kind.FORWARD, 0, lambda: None)
        await compute.run(Kind.MESSAGE, 0, lambda: None)  # what the thread said before has been heard by now
        assert wire.heard == []

    with_hunger(manifest, main)


def test_nothing_is_said_after_the_end(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, hunger: Hunger) -> None:
        fed_by_many(hunger)
        await hunger.close()
        await compute.run(Kind.FORWARD, 0, lambda: None)
        await compute.run(Kind.MESSAGE, 0, lambda: None)
        assert wire.heard == []
        assert not hunger._telling

    with_hunger(manifest, main)


def test_a_caller_that_is_gone_disturbs_nobody(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, hunger: Hunger) -> None:
        fed_by_many(hunger)
        wire.is_broken = True
        await compute.run(Kind.FORWARD, 0, lambda: None)
        await until(lambda: len(wire.heard) == 1, "it is told")
        loop = asyncio.get_running_loop()
        again_at = loop.time() + MIN_PAUSE_S
        await until(lambda: loop.time() > again_at, "the pause is over")
        await compute.run(Kind.FORWARD, 1, lambda: None)
        await until(lambda: len(wire.heard) == 2, "it is told again")
        await until(lambda: not hunger._telling, "nothing is left behind")

    with_hunger(manifest, main)


def test_a_hint_of_the_next_stage_reaches_the_router_and_others_are_refused(manifest: Manifest) -> None:
    async def main() -> None:
        told: list[tuple[str, float]] = []
        router = SimpleNamespace(hungry=lambda peer_id, load_s: told.append((peer_id, load_s)))
        dispatcher = SimpleNamespace(neighbours=SimpleNamespace(router=router))
        exchange = cast(Any, SimpleNamespace(peer_id="below"))
        compute = ComputeThread()
        try:
            first = Microbatches(context_of(manifest, compute, Wire(), dispatcher))
            await first.hungry(Hungry("run", 1, 2.5), exchange)
            assert told == [("below", 2.5)]
            for hint, code in (
                (Hungry("other", 1, 0.0), Code.WRONG_RUN),
                (Hungry("run", 0, 0.0), Code.WRONG_STAGE),
                (Hungry("run", 2, 0.0), Code.WRONG_STAGE),
            ):
                with pytest.raises(Refusal) as caught:
                    await first.hungry(hint, exchange)
                assert caught.value.code == code
            last = Microbatches(context_of(manifest, compute, Wire()))
            with pytest.raises(Refusal) as caught:  # the last stage sends nothing on
                await last.hungry(Hungry("run", 2, 0.0), exchange)
            assert caught.value.code == Code.WRONG_STAGE
            assert told == [("below", 2.5)]
        finally:
            await compute.stop()

    asyncio.run(main())
