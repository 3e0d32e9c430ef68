"""Whoever calls, replays: the same bytes to another peer, hints to those who have it, final refusals upwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from rpc.helpers import until

from swarmtrain.chain.dispatch import BACK_OFF_S, MAX_STOLEN, Dispatcher, _Watch
from swarmtrain.chain.neighbours import router_options
from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.route.router import Router
from swarmtrain.route.views import PeerView, Pick, StageSnapshot
from swarmtrain.rpc.errors import CallRefused, CallTimeout, LinkClosed, Refusal
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Code, Done, Hop, Progress, Work
from swarmtrain.wire.peer_report import PeerReport

WORK = Work("run", 1, 2, 7, 3, 0, False, (), b"tokens", b"boundary")
DONE = Done(1.5, (Hop(2, "b", "life"), Hop(3, "z", "life")), 0.0, 0.1, 0.2, b"gradient")
Answer = Callable[[Work, Any], Done]


class FakeRouter:
    """Offers peers in order, the preferred ones first; keeps what it is told."""

    def __init__(self, peers: list[str]) -> None:
        self._peers = peers
        self.told: list[tuple[str, str]] = []
        self.loads: list[float] = []
        self.rests: list[float] = []

    def busy(self, peer: str, retry_after_s: float) -> None:
        self.told.append(("busy", peer))
        self.rests.append(retry_after_s)

    def pick(self, num_bytes: int, *, exclude: set[str], prefer: tuple[str, ...]) -> Pick | None:
        known = [peer for peer in prefer if peer in self._peers] + self._peers
        for peer in known:
            if peer not in exclude:
                return Pick(peer_id=peer, predicted_s=0.0, timeout_s=30.0, why="test")
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(peer: str, *_: object, load_s: float | None = None, **__: object) -> None:
            self.told.append((name, peer))
            if load_s is not None:
                self.loads.append(load_s)

        return tell


class FakeNeighbours:
    def __init__(self, peers: list[str]) -> None:
        self.router = FakeRouter(peers)
        self.num_waits = 0

    async def wait_for_news(self, timeout_s: float) -> None:
        self.num_waits += 1
        await asyncio.sleep(min(timeout_s, 0.001))

    def observe_link(self, peer_id: str) -> None:
        pass


class FakeNode:
    """Answers by `answers`, by peer; an exception among the answers is raised."""

    def __init__(self, answers: dict[str, Answer | Exception]) -> None:
        self._answers = answers
        self.calls: list[tuple[str, Work]] = []

    async def call(self, peer_id: str, work: Work, deadline_s: float, on_progress: Any, *, expect: type[Done]) -> Done:
        self.calls.append((peer_id, work))
        answer = self._answers[peer_id]
        if isinstance(answer, Exception):
            raise answer
        done = answer(work, on_progress)
        return replace(done, route=good_of(peer_id).route) if done.route is DONE.route else done


def good_of(peer_id: str) -> Done:
    """The good answer, as this peer gives it."""
    return replace(DONE, route=(Hop(2, peer_id, "life"), *DONE.route[1:]))


def good(work: Work, on_progress: Any) -> Done:
    return DONE


def dispatch(
    answers: dict[str, Answer | Exception], peers: list[str] | None = None
) -> tuple[Dispatcher, FakeNode, Any]:
    node, neighbours = FakeNode(answers), FakeNeighbours(peers or sorted(answers))
    made: Any = Dispatcher(node, neighbours)  # type: ignore[arg-type]
    return made, node, neighbours


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main

    asyncio.run(bounded())


async def accept(done: Done) -> None:
    return None


def but_for_waits(done: Done) -> Done:
    """The same, as if it had come at once, from whom it came."""
    return replace(done, waited_s=0.0, route=DONE.route)


@pytest.mark.parametrize(
    "failure",
    [
        LinkClosed("it died"),
        PeerUnreachable("not there"),
        CallRefused(Code.NOT_SERVING),
        CallRefused(Code.BAD_TENSOR),
        CallRefused(Code.BEHIND),
        CallRefused("internal"),
    ],
)
def test_a_failed_call_is_repeated_elsewhere_with_the_same_bytes(failure: Exception) -> None:
    async def main() -> None:
        dispatcher, node, _ = dispatch({"a": failure, "b": good})
        assert but_for_waits(await dispatcher.call(WORK, deadline_s=10, check=accept)) == DONE
        assert [peer for peer, _ in node.calls] == ["a", "b"]
        assert node.calls[0][1] == node.calls[1][1] == WORK
        assert sum(dispatcher.counters.rerouted.values()) == 1

    run(main())


def redirected(thief: str, retry_after_s: float = 0.0) -> CallRefused:
    return CallRefused(Code.REDIRECTED, redirect_to=thief, retry_after_s=retry_after_s)


def test_what_is_given_away_goes_to_the_one_that_takes_it_once_and_for_all() -> None:
    async def main() -> None:
        dispatcher, node, neighbours = dispatch({"a": redirected("c"), "b": good, "c": good})
        assert but_for_waits(await dispatcher.call(WORK, deadline_s=10, check=accept)) == DONE
        assert node.calls == [("a", WORK), ("c", replace(WORK, is_stolen=True))]
        assert ("busy", "a") in neighbours.router.told
        assert dispatcher.counters.rerouted == {Code.REDIRECTED: 1}

    run(main())


def test_a_taker_that_does_not_exist_or_fails_is_done_without() -> None:
    async def main() -> None:
        for taker, expected in (("nobody", ["a", "a"]), ("c", ["a", "c", "a"])):
            replies = [redirected(taker)]

            def once(*_: object, replies: list[CallRefused] = replies) -> Done:
                if replies:
                    raise replies.pop()
                return DONE

            dispatcher, node, _ = dispatch({"a": once, "c": LinkClosed("it died")})
            assert but_for_waits(await dispatcher.call(WORK, deadline_s=10, check=accept)) == DONE
            assert [peer for peer, _ in node.calls] == expected

    run(main())


@pytest.mark.parametrize("waited", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("is_stolen", [False, True])
def test_what_went_by_at_a_giver_was_waited_and_nobody_has_waited_longer_than_it_took(
    is_stolen: bool, waited: float
) -> None:
    """`waited`: of the time that the answer took, as its sender says."""

    async def main() -> None:
        dispatcher, node, _ = dispatch({}, ["a", "b"])
        loop = asyncio.get_running_loop()
        took_s: list[float] = []

        async def call(peer: str, work: Work, deadline_s: float, on_progress: Any, *, expect: type[Done]) -> Done:
            began = loop.time()
            await asyncio.sleep(0.01)  # a machine that is slow
            took_s.append(loop.time() - began)
            if is_stolen and peer == "a":
                raise redirected("b")
            return replace(good_of(peer), waited_s=min(waited * took_s[-1], 1e9))

        node.call = call  # type: ignore[method-assign]
        began = loop.time()
        done = await dispatcher.call(WORK, deadline_s=10, check=accept)
        total_s = loop.time() - began
        assert len(took_s) == 1 + is_stolen
        in_others_s = min(waited, 1.0) * took_s[-1]
        assert sum(took_s[:-1]) + in_others_s <= done.waited_s <= total_s
        if not is_stolen and waited < 1.0:
            assert done.waited_s == pytest.approx(in_others_s)

    run(main())


@pytest.mark.parametrize("waited", [0.0, 1e9])
def test_what_went_by_because_everybody_was_busy_was_waited(waited: float) -> None:
    """`waited`: as the one that has room at last says of itself, whom nobody believes more than it took."""

    async def main() -> None:
        dispatcher, node, neighbours = dispatch({})
        loop = asyncio.get_running_loop()
        neighbours.router = Router(clock=loop.time, rng=random.Random(0))
        neighbours.router.update_peers([PeerView(name, PeerReport(2)) for name in "ab"])
        asked_s, paused_s = list[float](), list[float]()

        async def call(peer: str, work: Work, deadline_s: float, on_progress: Any, *, expect: type[Done]) -> Done:
            began = loop.time()
            await asyncio.sleep(0.01)  # the way there and back
            asked_s.append(loop.time() - began)
            if len(asked_s) < 5:
                raise CallRefused(Code.BUSY, retry_after_s=0.05)
            return replace(DONE, waited_s=waited)

        async def wait_for_news(timeout_s: float) -> None:
            began = loop.time()
            await asyncio.sleep(timeout_s)
            paused_s.append(loop.time() - began)

        node.call, neighbours.wait_for_news = call, wait_for_news  # type: ignore[method-assign]
        began = loop.time()
        done = await dispatcher.call(WORK, deadline_s=10, check=accept)
        total_s = loop.time() - began
        assert len(asked_s) == 5
        assert paused_s
        in_vain_s = sum(asked_s[:-1]) + sum(paused_s)
        if waited:
            assert in_vain_s + asked_s[-1] <= done.waited_s <= total_s
        else:
            assert in_vain_s <= done.waited_s <= total_s - asked_s[-1]

    run(main())


def test_what_went_by_because_nobody_was_there_or_somebody_failed_was_not_waited() -> None:
    """More under way would do no harm there."""

    async def main() -> None:
        peers = list[str]()
        dispatcher, node, neighbours = dispatch({"a": LinkClosed("it died"), "b": good}, peers)
        neighbours.router = FakeRouter(peers)

        async def wait_for_news(timeout_s: float) -> None:
            await asyncio.sleep(0.01)
            peers.extend(["a", "b"])

        neighbours.wait_for_news = wait_for_news
        assert (await dispatcher.call(WORK, deadline_s=10, check=accept)).waited_s == 0.0
        assert [peer for peer, _ in node.calls] == ["a", "b"]

    run(main())


@pytest.mark.parametrize("does_its_forward", [False, True])
def test_a_taker_that_does_nothing_does_not_get_everything(does_its_forward: bool) -> None:
    async def main() -> None:
        dispatcher, node, _ = dispatch({"a": redirected("hog"), "b": good}, ["a", "b", "hog"])
        took, ended, answer_of = list[Work](), asyncio.Event(), node.call

        async def call(peer: str, work: Work, deadline_s: float, on_progress: Any, *, expect: type[Done]) -> Done:
            if peer != "hog":
                if work.is_stolen and peer == "a":
                    raise CallRefused(Code.NOT_SERVING)
                return await answer_of(peer, work, deadline_s, on_progress, expect=expect)
            took.append(work)
            if does_its_forward:
                on_progress(Progress((Hop(2, "hog", "life"),)))
            await ended.wait()
            return DONE

        node.call = call  # type: ignore[method-assign]
        calls = list[asyncio.Task[Done]]()
        for _ in range(6):
            calls.append(asyncio.create_task(dispatcher.call(WORK, deadline_s=10, check=accept)))
            await until(lambda: len(took) + sum(call.done() for call in calls) == len(calls), "it has gone somewhere")
        assert len(took) == (6 if does_its_forward else MAX_STOLEN)
        ended.set()
        await asyncio.gather(*calls)
        assert dispatcher._stolen == {}

    run(main())


def test_who_gives_away_what_was_given_is_not_asked_again() -> None:
    """It may name itself, or a friend that does the same."""

    async def main() -> None:
        for names in ({"a": "a"}, {"a": "b", "b": "a"}, {"a": "nobody"}):
            liars = {liar: redirected(taker, 0.001) for liar, taker in names.items()}
            dispatcher, node, neighbours = dispatch({**liars, "c": good})
            assert but_for_waits(await dispatcher.call(WORK, deadline_s=5, check=accept)) == DONE
            assert [peer for peer, _ in node.calls][-1] == "c"
            assert len(node.calls) <= len(liars) + 2
            assert set(neighbours.router.rests) == {BACK_OFF_S}  # whatever they say themselves

    run(main())


def test_an_answer_that_cannot_be_right_is_asked_for_elsewhere() -> None:
    async def main() -> None:
        bad = Done(0.0, (), 0.0, 0.0, 0.0, b"")
        dispatcher, node, neighbours = dispatch({"a": lambda *_: bad, "b": good})

        async def check(done: Done) -> None:
            if done is bad:
                raise ValueError("no")

        assert but_for_waits(await dispatcher.call(WORK, deadline_s=10, check=check)) == DONE
        assert ("failed", "a") in neighbours.router.told
        assert [peer for peer, _ in node.calls] == ["a", "b"]

    run(main())


@pytest.mark.parametrize("code", [Code.AHEAD, Code.OLD_TERM, Code.WRONG_RUN, Code.STALE_BASIS])
def test_what_everybody_would_refuse_goes_up_at_once(code: Code) -> None:
    async def main() -> None:
        dispatcher, node, _ = dispatch({"a": CallRefused(code, "so it is"), "b": good})
        with pytest.raises(Refusal) as caught:
            await dispatcher.call(WORK, deadline_s=10, check=accept)
        assert caught.value.code == code
        assert len(node.calls) == 1

    run(main())


def diverges(work: Work, on_progress: Any) -> Done:
    on_progress(Progress((Hop(2, "a", "life"), Hop(3, "z", "life"))))
    raise CallRefused(Code.DIVERGED, "not finite")


def test_one_peer_that_says_that_training_diverged_is_not_believed_when_another_does_the_work() -> None:
    async def main() -> None:
        dispatcher, node, _ = dispatch({"a": diverges, "b": good})
        disputed: list[str] = []
        done = await dispatcher.call(WORK, deadline_s=10, check=accept, on_disputed=disputed.append)
        assert done == DONE
        assert [peer for peer, _ in node.calls] == ["a", "b"]
        assert node.calls[1][1].hints == WORK.hints  # not where the first one has led it
        assert disputed == ["a"]

    run(main())


def test_two_peers_that_say_that_training_diverged_are_believed_and_so_is_the_only_one() -> None:
    async def main() -> None:
        for peers in ("abc", "a"):
            dispatcher, node, _ = dispatch(dict.fromkeys(peers, diverges))
            with pytest.raises(Refusal) as caught:
                await dispatcher.call(WORK, deadline_s=10, check=accept)
            assert caught.value.code == Code.DIVERGED
            assert [peer for peer, _ in node.calls] == list(peers[:2])

    run(main())


def test_hints_lead_to_who_has_it_and_progress_makes_new_hints() -> None:
    async def main() -> None:
        below = Hop(3, "z", "life")

        def dies_after_forwarding(work: Work, on_progress: Any) -> Done:
            on_progress(Progress((Hop(2, "b", "life"), below)))
            raise LinkClosed("it died")

        dispatcher, node, _ = dispatch({"a": good, "b": dies_after_forwarding})
        hinted = Work("run", 1, 2, 7, 3, 0, False, (Hop(2, "b", "life"),), b"tokens", b"boundary")
        seen: list[Progress] = []
        await dispatcher.call(hinted, deadline_s=10, on_progress=seen.append, check=accept)
        assert [peer for peer, _ in node.calls] == ["b", "a"]  # the hinted one first
        assert node.calls[1][1].hints == (below,)  # and the second one learns who has it further down
        assert len(seen) == 1

    run(main())


def test_an_answer_in_the_name_of_another_peer_is_not_taken() -> None:
    """Its caller would keep a signature of somebody that nobody knows, and be blamed for it."""

    def in_another_name(work: Work, on_progress: Any) -> Done:
        return replace(DONE, route=(Hop(2, "nobody", "life"), *DONE.route[1:]))

    async def main() -> None:
        dispatcher, node, neighbours = dispatch({"a": in_another_name, "b": good})
        done = await dispatcher.call(WORK, deadline_s=10, check=accept)
        assert done.route[0].peer_id == "b"
        assert [peer for peer, _ in node.calls] == ["a", "b"]
        assert ("failed", "a") in neighbours.router.told

    run(main())


def test_the_router_hears_how_much_the_callee_holds() -> None:
    async def main() -> None:
        def tells(work: Work, on_progress: Any) -> Done:
            on_progress(Progress((Hop(2, "a", "life"),), load_s=1.25))
            return replace(DONE, load_s=0.5)

        dispatcher, _, neighbours = dispatch({"a": tells})
        await dispatcher.call(WORK, deadline_s=10, check=accept)
        assert neighbours.router.loads == [1.25, 0.5]

    run(main())


def test_a_peer_on_a_slow_link_is_rated_by_its_link() -> None:
    manifest = preset("nano", ["boundary.kind=dense", "stages.count=4"])
    inner, last = router_options(manifest, 1, 1e6), router_options(manifest, 3)
    assert inner.my_up_bytes_per_s == 1e6
    assert inner.bytes_out == 2 * last.bytes_out > 0.0  # two neighbours instead of one
    views = [
        PeerView("wide", PeerReport(1, forward_ms=10.0)),
        PeerView("up", PeerReport(1, forward_ms=10.0, up_bytes_per_s=inner.bytes_out)),
        PeerView("down", PeerReport(1, forward_ms=10.0, down_bytes_per_s=inner.bytes_in)),
    ]
    wide, *narrow = StageSnapshot(views, bytes_in=inner.bytes_in, bytes_out=inner.bytes_out).offers
    for offer in narrow:  # its link takes a second for what it sends, or receives, per microbatch
        assert offer.announced_s == pytest.approx(1.0)
    assert wide.announced_s == pytest.approx(0.03)
    lossy = preset("nano", ["boundary.kind=dense", "stages.count=4", "wire.forward=quant8"])
    assert router_options(lossy, 1).bytes_out == 0.0


def test_a_stage_that_cannot_go_on_says_which_stage_downstream_lacks_peers() -> None:
    async def main() -> None:
        dispatcher, _, _ = dispatch({"a": CallRefused(Code.NOBODY, stage=WORK.stage + 3)})
        with pytest.raises(Refusal) as caught:
            await dispatcher.call(WORK, deadline_s=1.0, check=accept)
        assert (caught.value.code, caught.value.stage) == (Code.NOBODY, WORK.stage + 3)

    asyncio.run(main())


def test_nobody_is_waited_for_until_the_deadline_and_then_said() -> None:
    async def main() -> None:
        dispatcher, node, neighbours = dispatch({"a": PeerUnreachable("gone for good")})
        with pytest.raises(Refusal) as caught:
            await dispatcher.call(WORK, deadline_s=1.0, check=accept)
        assert (caught.value.code, caught.value.stage) == (Code.NOBODY, WORK.stage)
        assert "gone for good" in caught.value.text
        assert len(node.calls) > 1  # it is tried again: it may have come back
        assert neighbours.num_waits > 0

    run(main())


def test_a_busy_peer_is_not_given_up() -> None:
    async def main() -> None:
        replies = [CallRefused(Code.BUSY, retry_after_s=0.5), None]

        def busy_once(work: Work, on_progress: Any) -> Done:
            reply = replies.pop(0)
            if reply is not None:
                raise reply
            return DONE

        dispatcher, node, neighbours = dispatch({"a": busy_once})
        assert but_for_waits(await dispatcher.call(WORK, deadline_s=10, check=accept)) == DONE
        assert [peer for peer, _ in node.calls] == ["a", "a"]
        assert ("busy", "a") in neighbours.router.told

    run(main())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_cancellation_that_meets_the_end_of_the_callees_time_is_not_lost(is_cancelled: bool) -> None:
    """Whoever leases would begin anew, for ever, although it was told to end."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        asked, watch = asyncio.Event(), _Watch(1000.0)

        async def stalls() -> Done:
            asked.set()
            await loop.create_future()
            return DONE

        call = asyncio.ensure_future(stalls())
        calling = asyncio.create_task(watch.run(call))
        await asked.wait()
        watch._expire(call)  # as the timer does, in the instant in which the caller is told to end
        if is_cancelled:
            calling.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else CallTimeout):
            await calling

    run(main())
