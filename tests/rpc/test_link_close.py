"""The end of a link: open calls end, the time is bounded, nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from swarmtrain.rpc.errors import CallRefused, LinkClosed, RefusalCode
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.limits import Shared
from swarmtrain.wire.schema import Message

from .helpers import Ask, Reply, Tensor, echo, make_links, pattern, run, until
from .transports import memory_pair, socket_pair


def test_close_lets_open_calls_end_and_refuses_new_ones() -> None:
    async def main() -> None:
        started, release = asyncio.Event(), asyncio.Event()

        async def handler(request: Message, exchange: Exchange) -> Message:
            started.set()
            await release.wait()
            return await echo(request, exchange)

        left, right = make_links(right_handler=handler)
        call = asyncio.create_task(left.call(Ask(1), deadline_s=30))
        await started.wait()
        closing = asyncio.create_task(right.close(20.0))
        await until(lambda: not right.is_open, "the close must have begun")
        with pytest.raises(LinkClosed):
            await right.call(Ask(2), deadline_s=10)
        with pytest.raises(CallRefused) as caught:
            await left.call(Ask(3), deadline_s=10)
        assert caught.value.code == RefusalCode.CLOSING
        assert not closing.done()
        release.set()
        assert await call == Reply(1)
        await closing
        assert left.error is not None
        with pytest.raises(LinkClosed):
            await left.call(Ask(4), deadline_s=10)
        await left.close()

    run(main())


def test_close_is_bounded_when_a_handler_never_ends() -> None:
    async def main() -> None:
        shared = Shared()

        async def handler(request: Message, exchange: Exchange) -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        left, right = make_links(right_handler=handler, right_shared=shared)
        call = asyncio.create_task(left.call(Ask(1), deadline_s=30))
        await until(lambda: right.num_open_calls == 1, "the call must be under way")
        await right.close(0.05)
        with pytest.raises(LinkClosed):
            await call
        await left.close()
        assert shared.tasks.num_running == 1
        await shared.tasks.drain(0.0)

    run(main())


def test_the_end_that_gets_the_goodbye_closes_so_that_nothing_is_lost() -> None:
    """The closer must not close the stream itself while the other end may still be reading (over real sockets)."""

    async def main() -> None:
        for _ in range(20):
            left, right = make_links(streams=await socket_pair())
            data = pattern(500_000)
            call = asyncio.create_task(left.call(Tensor(1, data), deadline_s=30))
            await until(lambda right=right: right.num_open_calls == 1, "the call must have begun")  # type: ignore[misc]
            await right.close(10.0)
            assert await call == Tensor(1, data)
            await left.close()
            assert "closed" in str(left.error)

    run(main())


def test_a_call_that_crosses_the_goodbye_is_known_not_to_have_begun() -> None:
    async def main() -> None:
        handled: list[Message] = []

        async def handler(request: Message, exchange: Exchange) -> Message:
            handled.append(request)
            return Reply(1)

        streams = memory_pair()
        left, right = make_links(right_handler=handler, streams=streams)
        assert await left.call(Ask(1), deadline_s=10) == Reply(1)
        streams[0].stall(True)
        call = asyncio.create_task(left.call(Ask(2), deadline_s=10))
        await until(lambda: left.traffic.sent.kind("ask").num_messages == 2, "written, not arrived")
        closing = asyncio.create_task(right.close(5.0))
        with pytest.raises(LinkClosed) as caught:
            await call
        assert not caught.value.request_sent
        streams[0].stall(False)
        await closing
        assert handled == [Ask(1)]

    run(main())


def test_a_call_that_was_begun_when_the_link_closed_is_not_called_unsent() -> None:
    async def main() -> None:
        shared = Shared()

        async def handler(request: Message, exchange: Exchange) -> Message:
            await exchange.caller_gone.wait()
            return Reply(1)

        left, right = make_links(right_handler=handler, right_shared=shared)
        call = asyncio.create_task(left.call(Ask(2), deadline_s=10))
        await until(lambda: right.num_open_calls == 1, "begun")
        await right.close(0.02)
        with pytest.raises(LinkClosed) as caught:
            await call
        assert caught.value.request_sent
        await until(lambda: shared.tasks.num_running == 0, "the handler ends by itself")

    run(main())
