"""A peer whose compute thread runs out of work asks others of its stage; who is asked gives what waits longest."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rpc.helpers import until

from swarmtrain.peer.compute import ComputeThread, Kind
from swarmtrain.peer.identity import PeerState
from swarmtrain.peer.ledger import Entry
from swarmtrain.peer.microbatch import Microbatches
from swarmtrain.peer.work_stealing import Thief, Victim
from swarmtrain.route.work_stealing import NUM_ASKED
from swarmtrain.rpc.errors import LinkClosed, Refusal
from swarmtrain.rpc.meter import LinkEstimate
from swarmtrain.run.manifest import Manifest
from swarmtrain.wire.messages import Code, Done, Hop, StealReply, StealRequest, Work

from .parts import Parts, parts_of
from .test_room import unmeasured
from .test_stage_jobs import jobs_of, manifest, tokens

__all__ = ["manifest"]  # a fixture

OTHERS = tuple(f"sibling {number}" for number in range(NUM_ASKED))


async def nothing() -> None:
    await asyncio.sleep(0)


class Wire:
    """As much of a node as asking needs."""

    peer_id = "p"

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.rates: dict[str, float] = {}
        self.is_broken = False
        self.giver = -1  # the how manieth that is asked gives
        self.on_call: Callable[[], Awaitable[None]] = nothing
        self.asked: list[tuple[str, StealRequest]] = []
        self.running: asyncio.Task[None]  # the thief

    def estimate(self, peer_id: str) -> LinkEstimate:
        return replace(unmeasured(peer_id), up_bytes_per_s=self.rates.get(peer_id))

    def backlog_bytes(self) -> int:
        return self.waiting_bytes

    async def call(self, peer_id: str, request: StealRequest, deadline_s: float, *, expect: type) -> StealReply:
        self.asked.append((peer_id, request))
        await self.on_call()
        if self.is_broken:
            raise LinkClosed("it died")
        return StealReply(len(self.asked) - 1 == self.giver)


def parts(manifest: Manifest, compute: ComputeThread, wire: Wire) -> Parts:
    made = parts_of(manifest, 1, wire, compute)
    made.peer.contact_at = asyncio.get_running_loop().time() + 3600.0  # however long a loaded machine takes
    made.peer.siblings = OTHERS
    return made


def with_thief(manifest: Manifest, main: Callable[[ComputeThread, Wire, Thief], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            compute, wire = ComputeThread(), Wire()
            thief = Thief(*parts(manifest, compute, wire).all)
            one_round(thief)
            wire.running = asyncio.create_task(thief.run())
            try:
                await main(compute, wire, thief)
            finally:
                wire.running.cancel()
                await asyncio.gather(wire.running, return_exceptions=True)
                await compute.stop()

    asyncio.run(bounded())


def one_round(thief: Thief) -> None:
    """May begin at once, and no other one follows, however long a loaded machine takes between two looks."""
    thief._policy._next_at, thief._policy._pause_s = 0.0, 3600.0


async def asked_all(thief: Thief) -> None:
    await until(lambda: not thief._stage.compute.ran_out.is_set(), "the round is over")


# -- asking


def test_the_last_piece_of_work_makes_it_ask_one_after_the_other(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        await compute.run(Kind.FORWARD, (0, 0), lambda: None)
        await until(lambda: len(wire.asked) == NUM_ASKED, "nobody gives: some are asked")
        await asked_all(thief)
        assert {(request.run, request.stage, request.load_s) for _, request in wire.asked} == {("run", 1, 0.0)}
        assert len({peer for peer, _ in wire.asked}) == NUM_ASKED  # its end, just afterwards, is no new round

    with_thief(manifest, main)


def test_nobody_is_asked_after_one_has_given(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        wire.giver = 2
        await compute.run(Kind.BACKWARD, (0, 0), lambda: None)
        await until(lambda: len(wire.asked) == 3, "the third one gives")
        await asked_all(thief)
        assert len(wire.asked) == 3

    with_thief(manifest, main)


def test_what_is_on_its_way_counts_as_held(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        compute.times.add(Kind.BACKWARD, 4.0)  # so long do they take here
        loop = asyncio.get_running_loop()

        async def told_load_s() -> float:
            """Of the next round, whose first one gives."""
            wire.giver = len(wire.asked)
            one_round(thief)
            await compute.run(Kind.FORWARD, (0, 0), lambda: None)
            await until(lambda: len(wire.asked) > wire.giver, "somebody is asked")
            await asked_all(thief)
            return wire.asked[-1][1].load_s

        assert [round(await told_load_s()) for _ in range(3)] == [0, 4, 8]
        thief.stolen_work_came()
        assert round(await told_load_s()) == 8
        thief._promised = deque([loop.time() - 1.0, loop.time() + 60.0])
        assert round(await told_load_s()) == 4  # what did not come in time will not
        thief._promised.clear()

        async def comes() -> None:
            thief.stolen_work_came()

        wire.on_call = comes  # sooner than the word that it will
        assert [round(await told_load_s()) for _ in range(2)] == [0, 0]

    with_thief(manifest, main)


def test_nobody_is_asked_when_work_has_come_by_itself(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        go = threading.Event()
        later: list[asyncio.Task[Any]] = []

        async def more_comes() -> None:  # one that runs and one that waits
            for number in (1, 2):
                later.append(asyncio.create_task(compute.run(Kind.FORWARD, (0, number), lambda: go.wait(20))))
            await until(lambda: compute.backlog() == 1, "one waits")

        wire.on_call = more_comes
        await compute.run(Kind.FORWARD, (0, 0), lambda: None)
        await until(lambda: bool(wire.asked), "the first one is asked")
        await asked_all(thief)
        assert len(wire.asked) == 1
        go.set()
        await asyncio.gather(*later)

    with_thief(manifest, main)


def test_step_work_and_messages_are_not_what_it_hungers_for(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        for kind in (Kind.STEP, Kind.MESSAGE, Kind.EVALUATE):
            await compute.run(kind, (0, 0), lambda: None)
        assert wire.asked == []
        await compute.run(Kind.FORWARD, (0, 0), lambda: None)
        await until(lambda: bool(wire.asked), "a forward is")

    with_thief(manifest, main)


def test_who_cannot_do_what_it_has_asks_for_more_when_it_can_again(manifest: Manifest) -> None:
    """It is done with everything at once: it would get all that waits in its stage, and spoil it."""

    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        peer, siblings = thief._peer, thief._peer.siblings
        peer.siblings = ()  # nobody knows yet that it is broken: of this one time it would ask
        for number in range(3):
            with pytest.raises(ZeroDivisionError):
                await compute.run(Kind.FORWARD, (0, number), lambda: 1 / 0)
            peer.siblings = siblings
        await compute.run(Kind.MESSAGE, (0, 0), lambda: None)  # what the thread said before has been heard by now
        assert wire.asked == []
        await compute.run(Kind.FORWARD, (0, 3), lambda: None)
        await until(lambda: bool(wire.asked), "its end makes it ask")

    with_thief(manifest, main)


@pytest.mark.parametrize("why", ["paused", "uplink", "no contact", "applying", "ledger", "alone"])
def test_who_could_not_do_more_asks_nobody(manifest: Manifest, why: str) -> None:
    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        peer, clock = thief._peer, thief._clock
        match why:
            case "paused":
                peer.become(PeerState.PAUSED)
            case "uplink":
                wire.waiting_bytes = 1 << 40
            case "no contact":
                peer.contact_at = -1e9
            case "applying":
                clock.is_applying = True
            case "alone":
                peer.siblings = ()
            case _:
                clock.max_ledger_bytes = -1
        await compute.run(Kind.FORWARD, (0, 0), lambda: None)
        await compute.run(Kind.MESSAGE, (0, 0), lambda: None)  # what the thread said before has been heard by now
        assert wire.asked == []

    with_thief(manifest, main)


@pytest.mark.parametrize(("rate", "asks"), [(1e4, False), (1e5, True), (None, True)])
def test_who_lacks_a_faster_line_asks_nobody(manifest: Manifest, rate: float | None, asks: bool) -> None:
    """What a microbatch makes, 10 kB for each neighbour, takes 2 s on the slow line; computing it takes 1 s."""

    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        if rate is not None:
            wire.rates = {"caller": rate, "below": rate}
        for _ in range(64):
            compute.times.add(Kind.FORWARD, 1.0)
        entry = Entry(0, 0, b"", b"", output=bytes(10_000), caller="caller")
        route = (Hop(0, "p", "life"), Hop(1, "below", "life"))
        for _ in range(20):
            thief.served(entry, Done(1.0, route, 0.0, 1.0, 0.0, bytes(10_000)))
        await compute.run(Kind.BACKWARD, (0, 0), lambda: None)
        await compute.run(Kind.MESSAGE, (0, 0), lambda: None)  # what the thread said before has been heard by now
        assert bool(wire.asked) is asks

    with_thief(manifest, main)


def test_nobody_is_asked_after_the_end(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        async def ends() -> None:
            wire.running.cancel()
            await nothing()

        wire.on_call = ends
        await compute.run(Kind.FORWARD, (0, 0), lambda: None)
        await asyncio.wait([wire.running])
        assert len(wire.asked) == 1
        compute.ran_out.clear()
        await compute.run(Kind.FORWARD, (0, 1), lambda: None)
        await compute.run(Kind.MESSAGE, (0, 0), lambda: None)
        assert compute.ran_out.is_set()  # it has run out again, and nobody listens
        assert len(wire.asked) == 1

    with_thief(manifest, main)


def test_one_that_is_gone_disturbs_nobody(manifest: Manifest) -> None:
    async def main(compute: ComputeThread, wire: Wire, thief: Thief) -> None:
        wire.is_broken = True
        await compute.run(Kind.FORWARD, (0, 0), lambda: None)
        await until(lambda: len(wire.asked) == NUM_ASKED, "the next one is asked")
        await asked_all(thief)
        one_round(thief)
        await compute.run(Kind.FORWARD, (0, 1), lambda: None)
        await until(lambda: len(wire.asked) > NUM_ASKED, "they are asked again")

    with_thief(manifest, main)


# -- giving


class Caller:
    """As much of an exchange as a microbatch needs."""

    peer_id = "caller"

    def __init__(self) -> None:
        self.deadline = asyncio.get_running_loop().time() + 60.0
        self.caller_gone = asyncio.Event()

    def progress(self, item: object) -> None:
        return None


class Busy:
    """A peer of the last stage whose processor is taken, so that what comes waits."""

    def __init__(self, manifest: Manifest, compute: ComputeThread) -> None:
        self.parts = parts(manifest, compute, Wire())
        thief = Thief(*self.parts.all)
        self.microbatches = Microbatches(*self.parts.all, None, thief, max_queue=64)
        self.victim = Victim(*self.parts.all)
        self.go = threading.Event()
        self._manifest, self._upstream = manifest, jobs_of(manifest, 0)
        self.callers: list[Caller] = []
        self._is_occupied = threading.Event()
        self.occupied = asyncio.create_task(compute.run(Kind.STEP, (-1, -1), self._occupy))
        compute.times.add(Kind.FORWARD, 2.0)  # so long do forwards take here

    def _occupy(self) -> bool:
        self._is_occupied.set()
        return self.go.wait(20)

    async def take(self, microbatch: int, *, is_stolen: bool = False) -> asyncio.Task[Done]:
        """Asked for a microbatch; returns when that waits."""
        await until(self._is_occupied.is_set, "the processor is taken: the job that takes it waits no more")
        ids = tokens(self._manifest, microbatch)
        boundary = self._upstream.forward(Entry(0, microbatch, ids, b""), 0).payload
        work = Work("run", 0, 1, 0, microbatch, 0, False, (), ids, boundary, is_stolen=is_stolen)
        self.callers.append(Caller())
        compute, counters = self.parts.compute, self.parts.peer.counters
        before = compute.backlog() + counters.joined
        task = asyncio.create_task(self.microbatches.work(work, cast(Any, self.callers[-1])))
        await until(lambda: compute.backlog() + counters.joined > before, "it waits")
        return task

    async def asked(self, request: StealRequest | None = None, by: str = OTHERS[0]) -> bool:
        exchange = cast(Any, SimpleNamespace(peer_id=by))
        return (await self.victim.steal(request or StealRequest("run", 1, 0.0, 2.0), exchange)).is_stolen


def with_busy_peer(manifest: Manifest, main: Callable[[Busy], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            compute = ComputeThread()
            busy = Busy(manifest, compute)
            try:
                await main(busy)
            finally:
                busy.go.set()
                await busy.occupied
                await compute.stop()

    asyncio.run(bounded())


def test_what_would_be_done_last_goes_to_the_one_that_asks_and_the_rest_is_done(manifest: Manifest) -> None:
    async def main(busy: Busy) -> None:
        tasks = [await busy.take(number) for number in (2, 0, 1)]
        assert await busy.asked()
        with pytest.raises(Refusal) as caught:
            await tasks[0]
        assert (caught.value.code, caught.value.redirect_to) == (Code.REDIRECTED, OTHERS[0])
        assert {entry.microbatch for entry in busy.parts.ledger} == {0, 1}
        busy.go.set()
        assert [len((await task).route) for task in tasks[1:]] == [1, 1]
        assert busy.parts.ledger.accumulated() == {0, 1}
        assert busy.parts.peer.counters.refused == {Code.REDIRECTED: 1}

    with_busy_peer(manifest, main)


def test_a_piece_that_went_comes_back_as_any_other(manifest: Manifest) -> None:
    async def main(busy: Busy) -> None:
        await busy.take(0)
        gone = await busy.take(1)
        assert await busy.asked()
        with pytest.raises(Refusal):
            await gone
        again = await busy.take(1)
        busy.go.set()
        await again
        assert busy.parts.ledger.accumulated() >= {1}

    with_busy_peer(manifest, main)


def test_what_two_have_sent_goes_if_one_of_them_still_waits(manifest: Manifest) -> None:
    async def main(busy: Busy) -> None:
        tasks = [await busy.take(number) for number in (0, 1, 1)]
        busy.callers[1].caller_gone.set()
        assert await busy.asked()
        for task in tasks[1:]:
            with pytest.raises(Refusal) as caught:
                await task
            assert (caught.value.code, caught.value.redirect_to) == (Code.REDIRECTED, OTHERS[0])
        busy.go.set()
        await tasks[0]
        assert busy.parts.ledger.accumulated() == {0}

    with_busy_peer(manifest, main)


@pytest.mark.parametrize(
    "why",
    [
        "given before",
        "given before, to its second caller",
        "nobody waits",
        "asker holds more",
        "stranger",
        "nothing waits",
        "leaves",
        "pauses",
    ],
)
def test_what_stays(manifest: Manifest, why: str) -> None:
    async def main(busy: Busy) -> None:
        tasks = []
        if why != "nothing waits":
            tasks = [await busy.take(number, is_stolen=why == "given before") for number in (0, 1)]
        match why:
            case "given before, to its second caller":
                tasks += [await busy.take(number, is_stolen=True) for number in (0, 1)]
            case "nobody waits":  # their links broke: what they asked for is done all the same
                for caller in busy.callers:
                    caller.caller_gone.set()
            case "leaves":
                busy.parts.peer.become(PeerState.DRAINING)
            case "pauses":
                busy.parts.peer.become(PeerState.PAUSED)
        load_s = 1e3 if why == "asker holds more" else 0.0
        assert not await busy.asked(
            StealRequest("run", 1, load_s, 2.0), by="stranger" if why == "stranger" else OTHERS[0]
        )
        busy.go.set()
        await asyncio.gather(*tasks)
        await until(lambda: len(busy.parts.ledger.accumulated()) == (0 if why == "nothing waits" else 2), "done here")

    with_busy_peer(manifest, main)


def test_other_runs_and_stages_are_refused(manifest: Manifest) -> None:
    async def main(busy: Busy) -> None:
        task = await busy.take(0)
        for request, code in (
            (StealRequest("other", 1, 0.0, 0.0), Code.WRONG_RUN),
            (StealRequest("run", 0, 0.0, 0.0), Code.WRONG_STAGE),
        ):
            with pytest.raises(Refusal) as caught:
                await busy.asked(request)
            assert caught.value.code == code
        busy.go.set()
        await task

    with_busy_peer(manifest, main)
