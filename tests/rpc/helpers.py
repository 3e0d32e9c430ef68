"""Messages and small helpers shared by the tests of links and nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from patience import PATIENCE

from swarmtrain.p2p.network import ByteStream
from swarmtrain.rpc.exchange import Exchange, Handler
from swarmtrain.rpc.limits import Shared
from swarmtrain.rpc.link import Link, LinkOptions
from swarmtrain.wire.schema import Blob, MaxLength, Message, Priority, Range, Registry, message

from .transports import memory_pair

MIB = 1 << 20
# Heartbeats that never come into a test's way.
QUIET = LinkOptions(heartbeat_s=1000.0)


@message(kind="ask", priority=Priority.CONTROL)
class Ask(Message):
    number: Annotated[int, Range(0, 2**40)]
    text: Annotated[str, MaxLength(1000)] = ""


@message(kind="reply", priority=Priority.CONTROL)
class Reply(Message):
    number: Annotated[int, Range(0, 2**40)]


@message(kind="tensor", priority=Priority.BOUNDARY)
class Tensor(Message):
    number: Annotated[int, Range(0, 2**40)]
    data: Annotated[Blob, MaxLength(64 * MIB)]


@message(kind="state", priority=Priority.STATE)
class State(Message):
    number: Annotated[int, Range(0, 2**40)]
    data: Annotated[Blob, MaxLength(64 * MIB)]


REGISTRY = Registry(Ask, Reply, Tensor, State)


def pattern(num_bytes: int, seed: int = 1) -> bytes:
    """Bytes in which a shift or a swap shows."""
    return random.Random(seed).randbytes(num_bytes)


async def echo(request: Message, exchange: Exchange) -> Message:
    """Answers an Ask with a Reply, everything else with itself."""
    return Reply(request.number) if isinstance(request, Ask) else request


def make_links(
    left_handler: Handler = echo,
    right_handler: Handler = echo,
    *,
    streams: tuple[ByteStream, ByteStream] | None = None,
    options: LinkOptions = QUIET,
    left_shared: Shared | None = None,
    right_shared: Shared | None = None,
    registry: Registry = REGISTRY,
) -> tuple[Link, Link]:
    """Two started links joined by a pipe."""
    left_stream, right_stream = streams or memory_pair()
    left = Link(left_stream, registry, left_handler, initiator=True, options=options, shared=left_shared)
    right = Link(right_stream, registry, right_handler, initiator=False, options=options, shared=right_shared)
    left.start()
    right.start()
    return left, right


async def close_both(left: Link, right: Link) -> None:
    """End a test's links."""
    await asyncio.gather(left.close(5.0), right.close(5.0))


def run(
    coroutine: Coroutine[Any, Any, None],
    timeout_s: float = 60.0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a test; afterwards no task may be left."""

    async def main() -> None:
        async with asyncio.timeout(timeout_s * PATIENCE):
            await coroutine
        left_over = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left_over, f"tasks left behind: {left_over}"

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Let the loop turn until `condition` holds."""
    async with asyncio.timeout(timeout_s * PATIENCE):
        while not condition():
            await next_turn()
    assert condition(), what


async def next_turn() -> None:
    """Give every callback that is ready one turn."""
    turned = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turned.set_result, None)
    await turned
