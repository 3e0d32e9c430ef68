"""Calls to oneself: the same handler, the same checks, no stream."""

from __future__ import annotations

import asyncio
import logging

from swarmtrain.rpc.calls import OnProgress
from swarmtrain.rpc.core import HandlerTasks
from swarmtrain.rpc.errors import CallRefused, CallTimeout, Refusal, RefusalCode
from swarmtrain.rpc.exchange import Exchange, Handler
from swarmtrain.wire.schema import Message, Priority, Registry, encode

_log = logging.getLogger(__name__)


class LocalExchange(Exchange):
    """The exchange of a call to oneself."""

    def __init__(self, peer_id: str, deadline: float, registry: Registry, on_progress: OnProgress | None) -> None:
        super().__init__(peer_id, deadline)
        self._registry = registry
        self._on_progress = on_progress

    def progress(self, item: Message) -> None:
        """Deliver a progress message, after the handler's current step, as a link would."""
        copy = self._registry.loop_back(encode(item))
        if self._on_progress is not None and not self.caller_gone.is_set():
            asyncio.get_running_loop().call_soon(self._deliver, copy)

    def _deliver(self, item: Message) -> None:
        if self._on_progress is not None and not self.caller_gone.is_set():
            self._on_progress(item)

    def release(self) -> None:
        """Nothing is held."""

    async def wait_for_room(self, priority: Priority) -> None:
        """There is always room: nothing is queued."""


async def call_locally(
    peer_id: str,
    registry: Registry,
    handler: Handler,
    tasks: HandlerTasks,
    request: Message,
    *,
    deadline_s: float,
    on_progress: OnProgress | None,
) -> Message:
    """As `Link.call`, within this process. The handler goes on if the caller leaves, as it would over a link."""
    loop = asyncio.get_running_loop()
    item = registry.loop_back(encode(request))
    if not tasks.try_claim():
        raise CallRefused(RefusalCode.BUSY, retry_after_s=0.25)
    exchange = LocalExchange(peer_id, loop.time() + deadline_s, registry, on_progress)
    answer: asyncio.Future[Message] = loop.create_future()
    tasks.spawn(_run(registry, handler, tasks, item, exchange, answer))
    try:
        async with asyncio.timeout(deadline_s):
            return await answer
    except TimeoutError as error:
        raise CallTimeout(f"no answer to {request.wire.kind} from this peer itself in {deadline_s:g} s") from error
    finally:
        if not answer.done() or answer.cancelled():
            exchange.cancelled.set()
        exchange.caller_gone.set()


async def _run(
    registry: Registry,
    handler: Handler,
    tasks: HandlerTasks,
    request: Message,
    exchange: LocalExchange,
    answer: asyncio.Future[Message],
) -> None:
    error: Exception
    try:
        result = registry.loop_back(encode(await handler(request, exchange)))
        # One turn of the loop, so that progress is seen before the answer.
        asyncio.get_running_loop().call_soon(_settle, answer, result)
        return
    except Refusal as refusal:
        error = CallRefused.of(refusal.payload)
    except asyncio.CancelledError:
        _settle(answer, CallRefused(RefusalCode.CLOSING, "the peer is shutting down"))
        raise
    except Exception as failure:
        _log.exception("handler of a call from this peer itself failed")
        error = CallRefused(RefusalCode.INTERNAL, type(failure).__name__)
    finally:
        tasks.unclaim()
    _settle(answer, error)


def _settle(answer: asyncio.Future[Message], outcome: Message | Exception) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
        answer.exception()  # marks it as seen: a caller that left never looks
    else:
        answer.set_result(outcome)
