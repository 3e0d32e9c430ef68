"""How links share the wire and memory: priorities, back-pressure, budgets, counters, caps."""

from __future__ import annotations

import asyncio
import gc
import math
import tracemalloc

import pytest

from swarmtrain.rpc.calls import OutgoingCall
from swarmtrain.rpc.errors import CallTimeout, ProtocolViolation, Violation
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.inbound import InboundMessage
from swarmtrain.rpc.limits import Budget, RateLimiter, Reservation, Shared
from swarmtrain.rpc.link import Link, LinkOptions
from swarmtrain.rpc.outbound import OutboundMessage
from swarmtrain.wire import frames
from swarmtrain.wire.schema import Message, Priority

from .helpers import MIB, Ask, Reply, State, Tensor, close_both, make_links, next_turn, pattern, run, until
from .transports import memory_pair, socket_pair


def test_a_control_call_overtakes_a_large_answer_and_an_equal_one_does_not() -> None:
    data = pattern(32 * MIB)

    async def handler(request: Message, exchange: Exchange) -> Message:
        if isinstance(request, Ask):
            return State(request.number, data) if request.number == 1 else Reply(request.number)
        return request

    async def main() -> None:
        events: list[str] = []
        streams = await socket_pair()
        left, right = make_links(right_handler=handler, streams=streams)

        async def call(name: str, request: Message) -> None:
            await left.call(request, deadline_s=50)
            events.append(name)

        bulk = asyncio.create_task(call("bulk", Ask(1)))
        await until(lambda: left.traffic.received.kind("state").body_bytes > 0, "the bulk must be under way")
        first_bytes = left.traffic.received.kind("state").body_bytes
        await asyncio.gather(
            bulk,
            call("control", Ask(2)),
            call("boundary", Tensor(3, data[:300_000])),
            call("state", State(4, data[:300_000])),
        )
        assert first_bytes < len(data) // 2
        assert events == ["control", "boundary", "bulk", "state"]
        await close_both(left, right)

    run(main())


def test_a_control_request_overtakes_a_large_request() -> None:
    async def main() -> None:
        streams = memory_pair()
        streams[0].wire_out.faults.capacity_bytes = 200_000
        left, right = make_links(streams=streams)
        data = pattern(16 * MIB)
        bulk = asyncio.create_task(left.call(State(1, data), deadline_s=50))
        await until(lambda: left.traffic.sent.kind("state").body_bytes > 0, "the bulk must be under way")
        assert await left.call(Ask(2), deadline_s=50) == Reply(2)
        assert left.traffic.sent.kind("state").num_messages == 0, "the bulk must not have been sent yet"
        assert await bulk == State(1, data)
        await close_both(left, right)

    run(main())


def test_a_download_goes_on_while_more_urgent_messages_always_wait() -> None:
    async def main() -> None:
        streams = memory_pair()
        streams[0].wire_out.faults.capacity_bytes = 200_000
        left, right = make_links(streams=streams, options=LinkOptions(heartbeat_s=1000, chunk_bytes=16 << 10))
        data = pattern(500_000)
        download = asyncio.create_task(left.call(State(0, data), deadline_s=50))

        async def always_busy() -> None:
            while not download.done():
                await left.call(Tensor(1, data), deadline_s=50)

        await asyncio.gather(*(always_busy() for _ in range(3)))
        assert await download == State(0, data)
        boundary_bytes = left.traffic.sent.kind("tensor").body_bytes
        assert boundary_bytes > 5 * len(data), "the urgent messages got most of the wire meanwhile"
        await close_both(left, right)

    run(main())


@pytest.mark.parametrize(("bytes_per_s", "chunk"), [(1e5, 16 << 10), (5e6, 25_000), (1e9, 64 << 10)])
def test_chunks_fit_the_wire(bytes_per_s: float, chunk: int) -> None:
    """A chunk is as long as the wire takes 5 ms for, within one to four times the least."""

    async def main() -> None:
        left, right = make_links(options=LinkOptions(heartbeat_s=0.05, chunk_bytes=16 << 10))
        left.meter.up.set_prior(bytes_per_s)
        await asyncio.sleep(0.15)  # a keepalive
        data = pattern(640_000)
        before = left.traffic.sent.kind("state").frame_bytes
        assert await left.call(State(1, data), deadline_s=50) == State(1, data)
        heads = left.traffic.sent.kind("state").frame_bytes - before
        assert heads // frames.HEADER_BYTES == pytest.approx(math.ceil(len(data) / chunk), abs=2)
        await close_both(left, right)

    run(main())


def test_a_slow_reader_bounds_the_senders_memory() -> None:
    async def main() -> None:
        streams = memory_pair()
        streams[0].stall(True)
        options = LinkOptions(heartbeat_s=1000, chunk_bytes=64 << 10, outbound_bytes=2 * MIB)
        left, right = make_links(streams=streams, options=options)
        data = pattern(500_000)
        calls = [asyncio.create_task(left.call(Tensor(i, data), deadline_s=50)) for i in range(40)]
        for _ in range(50):
            await next_turn()
        wire = streams[0].wire_out
        assert wire.most_buffered <= wire.faults.capacity_bytes + options.chunk_bytes + 100
        assert 0 < left.backlog_bytes <= options.outbound_bytes + len(data) + 100
        # Control is not held up behind the full queue of another priority: only the stream itself is.
        asking = asyncio.create_task(left.call(Ask(7), deadline_s=50))
        streams[0].stall(False)
        assert await asking == Reply(7)
        assert sum(call.done() for call in calls) < 40
        answers = await asyncio.gather(*calls)
        assert all(answer == Tensor(i, data) for i, answer in enumerate(answers))
        await close_both(left, right)

    run(main())


def test_a_call_that_waits_for_room_can_time_out_and_leaves_its_place() -> None:
    async def main() -> None:
        streams = memory_pair()
        streams[0].stall(True)
        left, right = make_links(streams=streams, options=LinkOptions(heartbeat_s=1000, outbound_bytes=MIB))
        data = pattern(3 * MIB)
        first = asyncio.create_task(left.call(Tensor(1, data), deadline_s=50))
        await until(lambda: left.backlog_bytes > MIB, "the queue must be full")
        waiting = [asyncio.create_task(left.call(Tensor(i, data[:10]), deadline_s=0.03)) for i in (2, 3)]
        last = asyncio.create_task(left.call(Tensor(4, data[:10]), deadline_s=50))
        for call in waiting:
            with pytest.raises(CallTimeout):
                await call
        streams[0].stall(False)
        assert await first == Tensor(1, data)
        assert await last == Tensor(4, data[:10])
        assert right.traffic.received.kind("tensor").num_messages == 2, "what timed out before it was sent is not sent"
        await close_both(left, right)

    run(main())


def test_requests_wait_for_the_receivers_memory_and_small_ones_do_not() -> None:
    async def main() -> None:
        release = asyncio.Event()
        handled: list[int] = []

        async def handler(request: Message, exchange: Exchange) -> Message:
            if isinstance(request, Tensor):
                handled.append(request.number)
                await release.wait()
            return Reply(1)

        shared = Shared(request_budget=Budget(10 * MIB))
        left, right = make_links(right_handler=handler, right_shared=shared)
        data = pattern(4 * MIB)
        calls = [asyncio.create_task(left.call(Tensor(i, data), deadline_s=50)) for i in range(12)]
        await until(lambda: handled == [0, 1], "two fit")
        assert await left.call(Ask(1), deadline_s=10) == Reply(1)
        for _ in range(100):
            await next_turn()
        assert handled == [0, 1], "the third must wait"
        assert shared.request_budget.used_bytes <= 10 * MIB
        received = right.traffic.received.kind("tensor").body_bytes
        assert received <= 2 * (4 * MIB + 100) + frames.LINK_WINDOW_BYTES
        release.set()
        await asyncio.gather(*calls)
        assert handled == list(range(12)), "first come, first served"
        assert shared.request_budget.used_bytes == 0
        await close_both(left, right)

    run(main())


def test_release_frees_the_memory_of_a_request_before_its_answer() -> None:
    async def main() -> None:
        finish = asyncio.Event()
        num_running = 0

        async def handler(request: Message, exchange: Exchange) -> Message:
            nonlocal num_running
            num_running += 1
            exchange.release()
            await finish.wait()
            return Reply(1)

        shared = Shared(request_budget=Budget(3 * MIB))
        left, right = make_links(right_handler=handler, right_shared=shared)
        calls = [asyncio.create_task(left.call(Tensor(i, pattern(2 * MIB)), deadline_s=50)) for i in range(5)]
        await until(lambda: num_running == 5, "all run although only one fits at a time")
        finish.set()
        await asyncio.gather(*calls)
        assert shared.request_budget.used_bytes == 0
        await close_both(left, right)

    run(main())


def test_answers_come_while_requests_have_taken_all_their_memory() -> None:
    """A handler that waits for an answer over the same link must get it, or a pipeline could lock up."""

    async def main() -> None:
        data = pattern(2 * MIB)
        budget = Budget(2 * MIB + 1000)

        async def relay(request: Message, exchange: Exchange) -> Message:
            return await right.call(State(2, data), deadline_s=20)

        left, right = make_links(right_handler=relay, right_shared=Shared(request_budget=budget))
        calls = [asyncio.create_task(left.call(Tensor(1, data), deadline_s=20)) for _ in range(12)]
        for answer in await asyncio.gather(*calls):
            assert answer == State(2, data)
        await close_both(left, right)

    run(main())


def test_a_message_above_the_receivers_whole_memory_breaks_the_link_instead_of_waiting_for_ever() -> None:
    async def main() -> None:
        left, right = make_links(right_shared=Shared(request_budget=Budget(MIB)))
        with pytest.raises(Exception, match="too-large"):
            await left.call(Tensor(1, pattern(2 * MIB)), deadline_s=20)
        assert isinstance(right.error, ProtocolViolation)
        assert right.error.violation is Violation.TOO_LARGE

    run(main())


def test_receiving_allocates_one_buffer_of_the_declared_size() -> None:
    async def main() -> None:
        left, right = make_links(streams=await socket_pair())
        data = pattern(16 * MIB)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        answer = await left.call(Tensor(1, data), deadline_s=30)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        assert isinstance(answer, Tensor)
        assert answer.data == data
        assert peak < 2 * (16 * MIB) + 4 * MIB, "one buffer for the request and one for the answer"
        await close_both(left, right)

    run(main())


def test_counters_add_up_to_the_bytes_of_the_stream_and_framing_is_small() -> None:
    async def main() -> None:
        streams = memory_pair()
        left, right = make_links(streams=streams)
        data = pattern(327_680)
        for _ in range(5):
            await left.call(Tensor(1, data), deadline_s=30)
        await left.call(Ask(1), deadline_s=30)
        for link, stream in ((left, streams[0]), (right, streams[1])):
            assert link.traffic.sent.total_bytes == stream.wire_out.num_written
        await until(lambda: streams[0].other.num_waiting == streams[1].other.num_waiting == 0, "all delivered")
        assert right.traffic.received.total_bytes == left.traffic.sent.total_bytes
        assert left.traffic.received.total_bytes == right.traffic.sent.total_bytes
        sent, received = left.traffic.sent.kind("tensor"), right.traffic.received.kind("tensor")
        assert sent == received
        assert sent.num_messages == 5
        assert sent.blob_bytes == 5 * len(data)
        assert 0 < sent.body_bytes + sent.frame_bytes - sent.blob_bytes < 0.002 * sent.blob_bytes
        control = left.traffic.sent.control_bytes + right.traffic.sent.control_bytes
        assert 0 < control < 0.005 * sent.blob_bytes
        await close_both(left, right)

    run(main())


def test_both_ends_learn_the_goodput_that_the_receiver_measured() -> None:
    async def main() -> None:
        streams = memory_pair()
        left, right = make_links(streams=streams)
        assert left.meter.estimate().up_bytes_per_s is None
        await left.call(Tensor(1, pattern(2 * MIB)), deadline_s=30)
        await until(lambda: right.meter.estimate().num_up_samples == 1, "reported back")
        up, down = left.meter.estimate(), right.meter.estimate()
        assert up.num_up_samples == down.num_down_samples == 1
        assert up.up_bytes_per_s == pytest.approx(down.down_bytes_per_s, rel=0.2)
        await close_both(left, right)

    run(main())


def test_an_upload_cap_is_kept_and_control_passes_it() -> None:
    async def main() -> None:
        rate = 4e6
        shared = Shared(limiter=RateLimiter(max_up_bytes_per_s=rate))
        left, right = make_links(left_shared=shared)
        data = pattern(2_400_000)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        bulk = asyncio.create_task(left.call(State(1, data), deadline_s=30))
        await until(lambda: left.traffic.sent.kind("state").body_bytes > 0, "under way")
        assert await left.call(Ask(1), deadline_s=30) == Reply(1)
        assert not bulk.done()
        assert await bulk == State(1, data)
        elapsed_s = loop.time() - started_at
        # Not faster than the cap (the burst of a fifth of a second aside); how much slower is the machine's affair.
        assert elapsed_s > len(data) / rate - 0.25
        await close_both(left, right)

    run(main())


def test_a_download_cap_is_kept_and_holds_back_the_sender() -> None:
    async def main() -> None:
        rate = 4e6
        shared = Shared(limiter=RateLimiter(max_down_bytes_per_s=rate))
        streams = memory_pair()
        left, right = make_links(streams=streams, right_shared=shared)
        data = pattern(2_400_000)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        bulk = asyncio.create_task(left.call(State(1, data), deadline_s=30))
        await until(lambda: left.backlog_bytes > 0, "the sender must be held back")
        assert await bulk == State(1, data)
        assert loop.time() - started_at > len(data) / rate - 0.25
        await close_both(left, right)

    run(main())


def test_waiting_for_room_lets_a_handler_hold_back_its_large_answers() -> None:
    async def main() -> None:
        streams = memory_pair()
        most_queued = 0

        async def handler(request: Message, exchange: Exchange) -> Message:
            nonlocal most_queued
            await exchange.wait_for_room(Priority.STATE)
            most_queued = max(most_queued, right.backlog_bytes)
            return State(1, pattern(400_000))

        options = LinkOptions(heartbeat_s=1000, outbound_bytes=MIB)
        left, right = make_links(right_handler=handler, streams=streams, options=options)
        await until(lambda: left.was_greeted, "the first frame is there")
        streams[1].stall(True)
        calls = [asyncio.create_task(left.call(Ask(i), deadline_s=30)) for i in range(20)]
        await until(lambda: right.backlog_bytes >= MIB, "the queue fills")
        for _ in range(30):
            await next_turn()
        assert right.backlog_bytes < 2 * MIB
        streams[1].stall(False)
        await asyncio.gather(*calls)
        assert most_queued < MIB
        await close_both(left, right)

    run(main())


def test_a_broken_link_frees_what_it_held_of_the_shared_memory() -> None:
    async def main() -> None:
        shared = Shared(request_budget=Budget(6 * MIB), answer_budget=Budget(6 * MIB))
        streams = memory_pair()
        streams[0].wire_out.faults.cut_at = 9 * MIB
        left, right = make_links(streams=streams, right_shared=shared)
        data = pattern(4 * MIB)
        outcomes = await asyncio.gather(
            *(left.call(Tensor(i, data), deadline_s=30) for i in range(6)), return_exceptions=True
        )
        assert any(isinstance(outcome, Exception) for outcome in outcomes)
        await until(lambda: right.error is not None and right.num_open_calls == 0, "ended")
        assert shared.request_budget.used_bytes == 0
        assert shared.answer_budget.used_bytes == 0
        again, other = make_links(right_shared=shared)
        assert await again.call(Tensor(1, data), deadline_s=30) == Tensor(1, data)
        await close_both(again, other)

    run(main())


def test_what_a_call_held_is_freed_when_it_ends_and_not_at_some_later_collection() -> None:
    """Requests, answers and callbacks in circles of references would pile up to many megabytes between collections."""
    kinds = {InboundMessage, OutboundMessage, OutgoingCall, Reservation, Tensor}

    def alive() -> set[int]:
        return {id(item) for item in gc.get_objects() if type(item) in kinds}

    async def calls(left: Link) -> None:
        seen: list[Message] = []
        for number in range(5):
            await left.call(Tensor(number, pattern(300_000)), deadline_s=50, on_progress=seen.append)
        with pytest.raises(CallTimeout):
            await left.call(Tensor(9, pattern(300_000)), deadline_s=1e-6)

    async def main() -> None:
        left, right = make_links(streams=await socket_pair())
        gc.collect()
        before = alive()  # of other tests
        gc.disable()
        try:
            await calls(left)
            await until(lambda: alive() <= before, "nothing of the calls may stay")
        finally:
            gc.enable()
        await close_both(left, right)

    run(main())
