"""Links on a healthy stream: calls both ways, progress, refusals, deadlines, cancellation, a graceful end."""

from __future__ import annotations

import asyncio
import logging

import pytest
import uvloop

from swarmtrain.rpc.errors import CallRefused, CallTimeout, LinkClosed, Refusal, RefusalCode
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.limits import Shared
from swarmtrain.rpc.link import LinkOptions
from swarmtrain.wire.errors import TooLong, WireError
from swarmtrain.wire.frames import RefusalPayload
from swarmtrain.wire.schema import Message

from .helpers import MIB, Ask, Reply, State, Tensor, close_both, echo, make_links, next_turn, pattern, run, until
from .transports import memory_pair, socket_pair


def test_calls_are_answered_in_both_directions_over_pipes_and_sockets() -> None:
    async def main() -> None:
        for streams in (memory_pair(), await socket_pair()):
            left, right = make_links(streams=streams)
            assert left.peer_id == "right"
            assert await left.call(Ask(1), deadline_s=10) == Reply(1)
            assert await right.call(Ask(2), deadline_s=10) == Reply(2)
            for num_bytes in (0, 1, 16 << 10, MIB - 1, MIB, 3 * MIB + 7):
                data = pattern(num_bytes)
                answer = await left.call(Tensor(num_bytes, data), deadline_s=10)
                assert isinstance(answer, Tensor)
                assert (answer.number, answer.data) == (num_bytes, data)
            await close_both(left, right)

    run(main())


def test_a_link_works_and_measures_on_uvloop() -> None:
    async def main() -> None:
        left, right = make_links(streams=await socket_pair())
        data = pattern(8 * MIB)
        assert await left.call(Tensor(1, data), deadline_s=30) == Tensor(1, data)
        await until(lambda: left.meter.estimate().num_up_samples == 1, "measured")
        assert (left.meter.estimate().rtt_s or 0) > 0, "the loop's own clock counts in milliseconds"
        await close_both(left, right)

    run(main(), loop_factory=uvloop.new_event_loop)


@pytest.mark.parametrize("piece_bytes", [1, 7, 4099])
def test_frames_survive_any_cutting_of_the_stream(piece_bytes: int) -> None:
    async def main() -> None:
        streams = memory_pair()
        for stream in streams:
            stream.wire_out.faults.piece_bytes = piece_bytes
        left, right = make_links(streams=streams)
        data = pattern(20_000 if piece_bytes == 1 else 300_000)
        answers = await asyncio.gather(
            left.call(Tensor(1, data), deadline_s=30),
            left.call(Ask(2), deadline_s=30),
            right.call(State(3, data), deadline_s=30),
        )
        assert answers == [Tensor(1, data), Reply(2), State(3, data)]
        await close_both(left, right)

    run(main())


def test_many_concurrent_calls_get_each_its_own_answer() -> None:
    async def main() -> None:
        release = asyncio.Event()
        num_running = 0

        async def handler(request: Message, exchange: Exchange) -> Message:
            nonlocal num_running
            num_running += 1
            await release.wait()
            return await echo(request, exchange)

        left, right = make_links(right_handler=handler)
        sizes = [(i * 7919) % 100_000 for i in range(60)]
        calls = [
            asyncio.create_task(left.call(Tensor(i, pattern(size, i)), deadline_s=30)) for i, size in enumerate(sizes)
        ]
        await until(lambda: num_running == 60, "all calls must be under way at once")
        release.set()
        answers = await asyncio.gather(*calls)
        assert answers == [Tensor(i, pattern(size, i)) for i, size in enumerate(sizes)]
        assert left.num_open_calls == right.num_open_calls == 0
        await close_both(left, right)

    run(main())


def test_progress_arrives_in_order_and_before_the_answer() -> None:
    async def handler(request: Message, exchange: Exchange) -> Message:
        for number in range(5):
            # The bulk one is of lower priority than those after it, and must not be overtaken.
            exchange.progress(State(number, pattern(200_000)) if number == 2 else Reply(number))
        return Reply(99)

    async def main() -> None:
        left, right = make_links(right_handler=handler)
        seen: list[Message] = []
        assert await left.call(Ask(1), deadline_s=10, on_progress=seen.append) == Reply(99)
        numbers = [item.number for item in seen if isinstance(item, (Reply, State))]
        assert numbers == [0, 1, 2, 3, 4]
        assert await left.call(Ask(1), deadline_s=10) == Reply(99), "progress without a listener is dropped"
        await close_both(left, right)

    run(main())


def test_of_too_much_progress_the_newest_survives() -> None:
    async def main() -> None:
        streams = memory_pair()

        async def handler(request: Message, exchange: Exchange) -> Message:
            streams[1].stall(True)
            streams[1].wire_out.faults.capacity_bytes = 0
            for number in range(100):
                exchange.progress(Reply(number))
            streams[1].stall(False)
            return Reply(1000)

        left, right = make_links(right_handler=handler, streams=streams)
        seen: list[Message] = []
        await left.call(Ask(1), deadline_s=10, on_progress=seen.append)
        numbers = [item.number for item in seen if isinstance(item, Reply)]
        assert numbers == sorted(numbers)
        assert numbers[-1] == 99
        assert len(numbers) + right.traffic.num_progress_dropped == 100
        assert right.traffic.num_progress_dropped > 0
        await close_both(left, right)

    run(main())


def test_an_error_in_the_progress_callback_is_the_callers_and_cancels_the_call() -> None:
    async def handler(request: Message, exchange: Exchange) -> Message:
        exchange.progress(Reply(1))
        await exchange.cancelled.wait()
        return Reply(2)

    def fail(item: Message) -> None:
        raise KeyError("mine")

    async def main() -> None:
        left, right = make_links(right_handler=handler)
        with pytest.raises(KeyError):
            await left.call(Ask(1), deadline_s=10, on_progress=fail)
        await until(lambda: right.num_open_calls == 0, "the handler must have been told")
        assert left.is_open
        await close_both(left, right)

    run(main())


def test_a_refusal_arrives_with_all_its_facts() -> None:
    async def handler(request: Message, exchange: Exchange) -> Message:
        raise Refusal("wrong-step", "at step 7", retry_after_s=1.5, redirect_to="another peer", stage=0)

    async def main() -> None:
        left, right = make_links(right_handler=handler)
        with pytest.raises(CallRefused, match="wrong-step") as caught:
            await left.call(Ask(1), deadline_s=10)
        assert caught.value.payload == RefusalPayload("wrong-step", "at step 7", 1.5, "another peer", 0)
        assert left.is_open
        assert right.is_open
        await close_both(left, right)

    run(main())


def test_a_failing_handler_is_an_internal_refusal_and_the_link_lives(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: Message, exchange: Exchange) -> Message:
        if isinstance(request, Ask) and request.number == 1:
            raise ZeroDivisionError("secret detail")
        if isinstance(request, Ask) and request.number == 2:
            return Ask(1, "x" * 2000)  # breaks its own schema
        return Reply(3)

    async def main() -> None:
        left, right = make_links(right_handler=handler)
        for number in (1, 2):
            with pytest.raises(CallRefused) as caught:
                await left.call(Ask(number), deadline_s=10)
            assert caught.value.code == RefusalCode.INTERNAL
            assert "secret" not in str(caught.value)
        assert await left.call(Ask(3), deadline_s=10) == Reply(3)
        await close_both(left, right)

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "ZeroDivisionError" in caplog.text


def test_a_request_that_breaks_its_schema_is_not_sent() -> None:
    async def main() -> None:
        left, right = make_links()
        with pytest.raises(TooLong):
            await left.call(Ask(1, "x" * 2000), deadline_s=10)
        assert isinstance(TooLong("x"), WireError)
        assert right.traffic.received.by_kind == {}
        await close_both(left, right)

    run(main())


DEADLINE_S = 0.5  # a busy machine must get the request across in it


def test_a_deadline_ends_the_call_and_tells_the_callee() -> None:
    deadlines: list[float] = []
    ended = []

    async def handler(request: Message, exchange: Exchange) -> Message:
        deadlines.append(exchange.deadline - asyncio.get_running_loop().time())
        await exchange.cancelled.wait()
        ended.append(exchange.caller_gone.is_set())
        return Reply(1)

    async def main() -> None:
        left, right = make_links(right_handler=handler)
        with pytest.raises(CallTimeout, match="ask"):
            await left.call(Ask(1), deadline_s=DEADLINE_S)
        await until(lambda: ended == [True], "the handler must learn of it")
        assert 0 < deadlines[0] <= DEADLINE_S
        await until(lambda: right.num_open_calls == 0, "the call must be forgotten")
        assert left.is_open
        await close_both(left, right)

    run(main())


def test_cancelling_the_awaiting_task_reaches_the_handler_and_its_late_answer_is_dropped() -> None:
    started, cancelled = asyncio.Event(), []

    async def handler(request: Message, exchange: Exchange) -> Message:
        if isinstance(request, Tensor):
            started.set()
            await exchange.cancelled.wait()
            cancelled.append(request.number)
        return await echo(request, exchange)

    async def main() -> None:
        left, right = make_links(right_handler=handler)
        task = asyncio.create_task(left.call(Tensor(5, pattern(300_000)), deadline_s=30))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: cancelled == [5] and right.num_open_calls == 0, "the cancel must arrive")
        assert await left.call(Ask(6), deadline_s=10) == Reply(6)
        assert "tensor" not in right.traffic.sent.by_kind
        await close_both(left, right)

    run(main())


def test_a_call_can_be_cancelled_at_any_moment_and_the_link_stays_in_order() -> None:
    """Cancel after every number of loop turns: while the request is sent, handled, and while the answer arrives."""

    async def main() -> None:
        streams = memory_pair()
        for stream in streams:
            stream.wire_out.faults.capacity_bytes = 50_000
            stream.wire_out.faults.piece_bytes = 40_000
        left, right = make_links(streams=streams, options=LinkOptions(heartbeat_s=1000, chunk_bytes=30_000))
        outcomes = set()
        for turns in range(0, 150, 3):
            task = asyncio.create_task(left.call(Tensor(turns, pattern(1_400_000, turns)), deadline_s=30))
            for _ in range(turns):
                await next_turn()
            outcomes.add((left.traffic.sent.kind("tensor").num_messages, task.done()))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await left.call(Ask(turns), deadline_s=30) == Reply(turns)
        assert left.is_open, left.error
        assert right.is_open, right.error
        await until(lambda: right.num_open_calls == 0, "nothing may be left over")
        data = pattern(3 * MIB)
        assert await left.call(Tensor(1, data), deadline_s=30) == Tensor(1, data)
        assert len(outcomes) > 3, "cancels must have hit different moments"
        await close_both(left, right)

    run(main())


def test_a_lost_caller_does_not_cancel_the_handler() -> None:
    async def main() -> None:
        started, finish, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler(request: Message, exchange: Exchange) -> Message:
            started.set()
            await exchange.caller_gone.wait()
            assert not exchange.cancelled.is_set()
            exchange.progress(Reply(1))
            await finish.wait()
            finished.set()
            return Reply(2)

        streams = memory_pair()
        shared = Shared()
        left, right = make_links(right_handler=handler, streams=streams, right_shared=shared)
        task = asyncio.create_task(left.call(Ask(1), deadline_s=30))
        await started.wait()
        streams[0].abort()
        with pytest.raises(LinkClosed):
            await task
        await until(lambda: right.error is not None, "the other end must notice")
        assert shared.tasks.num_running == 1, "the handler must still be there"
        finish.set()
        await finished.wait()
        await until(lambda: shared.tasks.num_running == 0, "its task must end")

    run(main())


def test_too_many_calls_are_answered_busy_and_the_others_go_on() -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def handler(request: Message, exchange: Exchange) -> Message:
            await release.wait()
            return await echo(request, exchange)

        options = LinkOptions(heartbeat_s=1000, max_inbound_calls=3, busy_retry_s=0.5)
        left, right = make_links(right_handler=handler, options=options)
        calls = [asyncio.create_task(left.call(Tensor(i, pattern(2 * MIB, i)), deadline_s=30)) for i in range(5)]
        await until(lambda: sum(call.done() for call in calls) == 2, "two are too many")
        for call in [call for call in calls if call.done()]:
            error = call.exception()
            assert isinstance(error, CallRefused)
            assert (error.code, error.retry_after_s) == (RefusalCode.BUSY, 0.5)
        release.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(outcome, Tensor) for outcome in outcomes) == 3
        assert await left.call(Ask(1), deadline_s=10) == Reply(1), "places must have been given back"
        assert right.traffic.refusals_sent["busy"] == 2
        await close_both(left, right)

    run(main())
