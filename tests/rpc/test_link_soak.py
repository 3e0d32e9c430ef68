"""Random traffic with random cancels, refusals and stalls: every answer is right, and afterwards the books balance."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmtrain.rpc.errors import CallRefused, CallTimeout, Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.limits import Budget, Shared
from swarmtrain.rpc.link import Link, LinkOptions
from swarmtrain.wire.frames import LINK_WINDOW_BYTES
from swarmtrain.wire.schema import Message

from .helpers import MIB, Ask, Reply, State, Tensor, close_both, make_links, next_turn, pattern, run, until
from .transports import MemoryStream, memory_pair

DATA = pattern(3 * MIB)


async def turns(generator: random.Random, most: int) -> None:
    for _ in range(generator.randrange(most + 1)):
        await next_turn()


def random_request(generator: random.Random) -> Message:
    size = generator.choice([0, 100, 16_384, 20_000, 200_000, MIB, 3 * MIB])
    offset = generator.randrange(len(DATA) - size + 1)
    cls = generator.choice([Ask, Tensor, State])
    return Ask(offset) if cls is Ask else cls(offset, memoryview(DATA)[offset : offset + size])


def make_handler(generator: random.Random) -> object:
    async def handler(request: Message, exchange: Exchange) -> Message:
        await turns(generator, 10)
        if generator.random() < 0.2:
            exchange.progress(Reply(1))
        if generator.random() < 0.1:
            raise Refusal("no")
        if generator.random() < 0.3:
            exchange.release()
        return Reply(request.number) if isinstance(request, Ask) else request

    return handler


async def random_call(link: Link, generator: random.Random) -> str:
    request = random_request(generator)
    task = asyncio.create_task(link.call(request, deadline_s=generator.choice([0.02, 20, 20, 20])))
    if generator.random() < 0.25:
        await turns(generator, 40)
        task.cancel()
    try:
        answer = await task
    except asyncio.CancelledError:
        return "cancelled"
    except CallTimeout:
        return "timeout"
    except CallRefused as refused:
        return refused.code
    assert answer == (Reply(request.number) if isinstance(request, Ask) else request)
    return "answered"


async def disturb(streams: tuple[MemoryStream, MemoryStream], generator: random.Random, stop: asyncio.Event) -> None:
    while not stop.is_set():
        stream = generator.choice(streams)
        stream.wire_out.faults.piece_bytes = generator.choice([1000, 5000, 100_000, 1 << 20])
        stream.stall(True)
        await turns(generator, 10)
        stream.stall(False)
        await turns(generator, 50)


def assert_balanced(sender: Link, receiver: Link) -> None:
    """The sender's windows and what the receiver owes it make the whole; nothing is open or reserved."""
    for is_request in (True, False):
        owed = receiver.inbound._owed_window[is_request]
        assert receiver.inbound._open_window[is_request] == owed
        assert sender.queue._windows[is_request] + owed == LINK_WINDOW_BYTES
    assert not sender.caller._calls
    assert not sender.caller._queued
    assert not receiver.callee._calls
    assert sender.backlog_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_is_answered_exactly_and_leaves_balanced_books(seed: int) -> None:
    async def main() -> None:
        generator = random.Random(seed)
        streams = memory_pair()
        shared = [Shared(request_budget=Budget(7 * MIB), answer_budget=Budget(7 * MIB)) for _ in range(2)]
        options = LinkOptions(heartbeat_s=1000, chunk_bytes=50_000, outbound_bytes=4 * MIB, max_inbound_calls=12)
        left, right = make_links(
            make_handler(generator),  # type: ignore[arg-type]
            make_handler(generator),  # type: ignore[arg-type]
            streams=streams,
            options=options,
            left_shared=shared[0],
            right_shared=shared[1],
        )
        stop = asyncio.Event()
        disturber = asyncio.create_task(disturb(streams, generator, stop))
        outcomes: list[str] = []
        for _ in range(4):
            calls = [random_call(generator.choice([left, right]), generator) for _ in range(30)]
            outcomes += await asyncio.gather(*calls)
        stop.set()
        await disturber
        assert left.error is None, left.error
        assert right.error is None, right.error
        await until(lambda: left.num_open_calls == right.num_open_calls == 0, "all ended")
        await until(lambda: not streams[0].num_waiting and not streams[1].num_waiting, "all delivered")
        assert_balanced(left, right)
        assert_balanced(right, left)
        for owner in shared:
            assert owner.request_budget.used_bytes == owner.answer_budget.used_bytes == 0
            assert owner.tasks.num_running == 0
        assert {"answered", "cancelled", "no"} <= set(outcomes)
        await close_both(left, right)

    run(main())
