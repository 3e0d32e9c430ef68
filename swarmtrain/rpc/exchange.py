"""The answering half of a link: requests of the other end, and the handlers that answer them.

A daemon's calls to itself go through the same handlers and the same checks, without a stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from swarmtrain.rpc.calls import OnProgress
from swarmtrain.rpc.errors import CallRefused, CallTimeout, ProtocolViolation, Refusal, RefusalCode, Violation
from swarmtrain.rpc.inbound import InboundMessage
from swarmtrain.rpc.limits import HandlerTasks
from swarmtrain.rpc.outbound import OutboundMessage
from swarmtrain.wire.errors import WireError
from swarmtrain.wire.frames import FrameType, RefusalPayload, Start
from swarmtrain.wire.schema import EncodedMessage, Message, Priority, Registry, encode

if TYPE_CHECKING:
    from swarmtrain.rpc.link import Link

_log = logging.getLogger(__name__)
_MAX_WAITING_PROGRESS = 16


class Exchange:
    """What a handler knows about its call, apart from the request.

    `cancelled` is set when the caller cancels the call; `caller_gone` when the answer can no longer reach the caller
    (the link is lost, or the call is cancelled). Neither cancels the handler's task: the handler decides whether the
    work is worth finishing.
    """

    def __init__(self, peer_id: str, deadline: float) -> None:
        self.peer_id = peer_id
        self.deadline = deadline  # the caller's, in the time of this event loop
        self.cancelled = asyncio.Event()
        self.caller_gone = asyncio.Event()

    def progress(self, item: Message) -> None:
        """Send a progress message; never waits. If too many are queued, the oldest is dropped."""
        raise NotImplementedError

    def release(self) -> None:
        """Release the request's memory before the answer, once its blobs are no longer needed."""
        raise NotImplementedError

    async def wait_for_room(self, priority: Priority) -> None:
        """Wait until the link's send queue is below its limit: before making a large answer."""
        raise NotImplementedError


Handler = Callable[[Message, Exchange], Awaitable[Message]]


class IncomingCall(Exchange):
    """One request of the other end."""

    def __init__(self, link: Link, call_id: int, deadline: float) -> None:
        super().__init__(link.peer_id, deadline)
        self._link = link
        self.call_id = call_id
        self.inbound: InboundMessage | None = None  # while the request arrives
        self.held: InboundMessage | None = None  # the request's memory, while the handler works
        self.has_place = False
        self.closed = False  # the final frame is sent, or the link is lost: nothing more may be sent
        self.sending: OutboundMessage | None = None
        self._waiting: deque[tuple[FrameType, EncodedMessage]] = deque()
        self._all_sent = asyncio.Event()

    def progress(self, item: Message) -> None:
        """See `Exchange.progress`."""
        if self.closed:
            return
        if len(self._waiting) >= _MAX_WAITING_PROGRESS:
            self._waiting.popleft()
            self._link.traffic.num_progress_dropped += 1
        self._send(FrameType.PROGRESS, encode(item))

    def release(self) -> None:
        """See `Exchange.release`."""
        if self.held is not None:
            self._link.inbound.release(self.held)
            self.held = None

    async def wait_for_room(self, priority: Priority) -> None:
        """See `Exchange.wait_for_room`."""
        await self._link.queue.wait_for_room(priority)

    async def send_answer(self, encoded: EncodedMessage) -> None:
        """Send the final answer; returns when it is written, or when it can no longer be."""
        if not self.closed:
            self._send(FrameType.ANSWER, encoded)
            await self._all_sent.wait()

    def close(self) -> None:
        """Send nothing more."""
        self.closed = True
        self._waiting.clear()
        if self.sending is not None:
            self._link.queue.drop(self.sending)
            self.sending = None
        self._all_sent.set()

    def _send(self, start_type: FrameType, encoded: EncodedMessage) -> None:
        self._waiting.append((start_type, encoded))
        if self.sending is None:
            self._send_next()

    def _send_next(self) -> None:
        """One message of a call at a time, in order, whatever their priorities."""
        start_type, encoded = self._waiting.popleft()
        self.sending = OutboundMessage(
            start_type, encoded, on_start=lambda: self.call_id, on_written=lambda: self._written(start_type)
        )
        self._link.queue.submit(self.sending)

    def _written(self, start_type: FrameType) -> None:
        self.sending = None
        if start_type is FrameType.ANSWER:
            self.close()
        elif self._waiting:
            self._send_next()


class Callee:
    """Receives requests, runs the handler of each in its own task, and sends the answers."""

    def __init__(self, link: Link, handler: Handler) -> None:
        self._link = link
        self._handler = handler
        self._calls: dict[int, IncomingCall] = {}
        self.last_call_id = 0  # of the latest call that was begun
        self.is_closing = False  # refuses new requests

    @property
    def num_open(self) -> int:
        """Requests without a final frame yet."""
        return len(self._calls)

    def start_received(self, call_id: int, start: Start) -> None:
        """A request begins."""
        if call_id <= self.last_call_id:
            raise ProtocolViolation(Violation.OUT_OF_ORDER, f"call {call_id} after call {self.last_call_id}")
        self.last_call_id = call_id
        now = asyncio.get_running_loop().time()
        call = IncomingCall(self._link, call_id, now + start.deadline_ms / 1000)
        refusal = self._claim_place(call)
        call.inbound = self._link.inbound.start(
            call_id,
            FrameType.REQUEST,
            start,
            discard=refusal is not None,
            expires_at=call.deadline + self._link.options.stall_grace_s,
        )
        call.inbound.marked_at, call.inbound.marked_link_bytes = now, self._link.received_bytes
        self._calls[call_id] = call
        if refusal is not None:
            call.close()
            self._link.refuse(call_id, RefusalPayload(refusal, retry_after_s=self._link.options.busy_retry_s))

    def _claim_place(self, call: IncomingCall) -> RefusalCode | None:
        if self.is_closing:
            return RefusalCode.CLOSING
        if len(self._calls) >= self._link.options.max_inbound_calls:
            return RefusalCode.BUSY
        if not self._link.shared.tasks.try_claim(call.peer_id):
            return RefusalCode.BUSY
        call.has_place = True
        return None

    def inbound_message(self, call_id: int) -> InboundMessage:
        """The request that the chunks of `call_id` belong to."""
        call = self._calls.get(call_id)
        if call is None:
            raise ProtocolViolation(Violation.UNKNOWN_CALL, f"a chunk of call {call_id}, which is not open")
        if call.inbound is None:
            raise ProtocolViolation(Violation.OUT_OF_ORDER, f"a chunk of call {call_id}, whose request is complete")
        return call.inbound

    def message_complete(self, message: InboundMessage) -> None:
        """A request has arrived completely."""
        call = self._calls[message.call_id]
        call.inbound = None
        if message.discarded:
            self._end(call)
            return
        try:
            request, num_blob_bytes = self._link.registry.decode_counted(message.body)
        except WireError as error:
            self._link.count_received(message, 0)
            self._link.traffic.num_malformed += 1
            self._link.inbound.release(message)
            self._link.refuse(call.call_id, RefusalPayload(RefusalCode.MALFORMED, f"{error.error_id}: {error}"))
            self._end(call)
            return
        self._link.count_received(message, num_blob_bytes)
        call.held = message
        message.body = bytearray()  # the request's blobs hold what they need of it
        self._link.shared.tasks.spawn(self._run(call, request))

    async def _run(self, call: IncomingCall, request: Message) -> None:
        try:
            answer = encode(await self._handler(request, call))
            del request
            await call.send_answer(answer)
        except Refusal as refusal:
            self._refuse(call, refusal.payload)
        except asyncio.CancelledError:
            self._refuse(call, RefusalPayload(RefusalCode.CLOSING, "the peer is shutting down"))
            raise
        except Exception as error:
            _log.exception("handler of a call from %s failed", call.peer_id)
            self._refuse(call, RefusalPayload(RefusalCode.INTERNAL, type(error).__name__))
        finally:
            self._end(call)

    def _refuse(self, call: IncomingCall, refusal: RefusalPayload) -> None:
        if not call.closed:
            call.close()
            self._link.refuse(call.call_id, refusal)

    def cancelled(self, call_id: int) -> None:
        """The caller wants no answer. A cancel that crossed the answer on the wire is ignored."""
        call = self._calls.get(call_id)
        if call is None:
            if call_id > self.last_call_id:
                raise ProtocolViolation(Violation.UNKNOWN_CALL, f"cancel of call {call_id}, which was never opened")
            return
        self._refuse(call, RefusalPayload(RefusalCode.CANCELLED))
        call.cancelled.set()
        call.caller_gone.set()
        if call.inbound is not None:
            self._link.inbound.discard(call.inbound)
            call.inbound = None
            self._end(call)

    def sending(self, call_id: int) -> OutboundMessage | None:
        """The message that is being sent for a call, to which credit applies; None if there is none."""
        call = self._calls.get(call_id)
        return None if call is None else call.sending

    def check_stalled(self, now: float) -> None:
        """Raise ProtocolViolation if a request was begun and never finished."""
        options, received = self._link.options, self._link.received_bytes
        for call in self._calls.values():
            if call.inbound is None:
                continue
            if call.inbound.is_half_open(now, received, options.half_open_s, options.half_open_bytes):
                detail = f"call {call.call_id}: of {call.inbound.kind} next to nothing has come for "
                raise ProtocolViolation(Violation.STALLED, f"{detail}{options.half_open_s:g} s")
            if now > call.inbound.expires_at:
                raise ProtocolViolation(Violation.STALLED, f"call {call.call_id}: {call.inbound.kind} never ended")

    def link_lost(self) -> None:
        """Give up the answers; the handlers go on."""
        for call in tuple(self._calls.values()):
            call.close()
            call.caller_gone.set()
            if call.inbound is not None:
                self._link.inbound.release(call.inbound)
                self._end(call)

    def _end(self, call: IncomingCall) -> None:
        """Forget a call whose final frame is sent and whose handler has ended."""
        call.release()
        call.close()
        if call.has_place:
            call.has_place = False
            self._link.shared.tasks.unclaim(call.peer_id)
        self._calls.pop(call.call_id, None)
        self._link.call_ended()


class LocalExchange(Exchange):
    """The exchange of a daemon's call to itself."""

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
        """No budget holds the request."""

    async def wait_for_room(self, priority: Priority) -> None:
        """Returns at once: there is no queue."""


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
    """As `Link.call`, within this process. As over a link, the handler goes on if the caller leaves."""
    loop = asyncio.get_running_loop()
    item = registry.loop_back(encode(request))
    if not tasks.try_claim(peer_id):
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
        # One iteration of the loop later, so that the caller sees all progress before the answer.
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
        tasks.unclaim(exchange.peer_id)
    _settle(answer, error)


def _settle(answer: asyncio.Future[Message], outcome: Message | Exception) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
        answer.exception()  # marks it as retrieved: a caller that left never does
    else:
        answer.set_result(outcome)
