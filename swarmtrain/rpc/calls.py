"""The calling half of a link: requests of this end, and the answers to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarmtrain.rpc.errors import CallRefused, CallTimeout, LinkClosed, MalformedAnswer, ProtocolViolation, Violation
from swarmtrain.rpc.inbound import InboundMessage
from swarmtrain.rpc.outbound import OutboundMessage
from swarmtrain.wire.errors import WireError
from swarmtrain.wire.frames import MAX_DEADLINE_MS, FrameType, RefusalPayload, Start, pack_frame
from swarmtrain.wire.schema import EncodedMessage, Message, encode

if TYPE_CHECKING:
    from swarmtrain.rpc.link import Link

OnProgress = Callable[[Message], None]
_MAX_ABANDONED = 1024
ClosedError = Callable[[bool], LinkClosed]  # takes `request_sent`, makes the error to raise


class OutgoingCall:
    """One request and its future answer.

    An abandoned call (cancelled or timed out) stays known until the other end sends its final frame, so that a late
    answer is not taken for a protocol violation.
    """

    __slots__ = ("abandoned", "answer", "call_id", "inbound", "on_progress", "request")

    def __init__(self, answer: asyncio.Future[Message], on_progress: OnProgress | None) -> None:
        self.answer = answer
        self.on_progress = on_progress
        self.call_id = 0
        self.request: OutboundMessage
        self.inbound: InboundMessage | None = None
        self.abandoned = False


class Caller:
    """Opens calls and receives what the other end sends for them."""

    def __init__(self, link: Link, first_call_id: int) -> None:
        self._link = link
        self._next_call_id = first_call_id
        self._calls: dict[int, OutgoingCall] = {}  # the request has been begun
        self._queued: dict[OutgoingCall, None] = {}  # no byte of the request has been written
        self._closed: ClosedError | None = None

    @property
    def num_open(self) -> int:
        """Calls whose callers are still waiting."""
        return len(self._queued) + sum(not call.abandoned for call in self._calls.values())

    async def call(self, request: Message, *, deadline_s: float, on_progress: OnProgress | None = None) -> Message:
        """Send `request` and wait for its final answer; see `Link.call`."""
        encoded = encode(request)
        call: OutgoingCall | None = None
        try:
            async with asyncio.timeout(deadline_s):
                await self._link.queue.wait_for_room(encoded.priority)
                call = self._open(encoded, deadline_s, on_progress)
                return await call.answer
        except TimeoutError as error:
            raise CallTimeout(f"no answer to {encoded.kind} from {self._link.peer_id} in {deadline_s:g} s") from error
        finally:
            if call is not None:
                self._leave(call)

    def _open(self, encoded: EncodedMessage, deadline_s: float, on_progress: OnProgress | None) -> OutgoingCall:
        if self._closed is not None:
            raise self._closed(False)
        call = OutgoingCall(asyncio.get_running_loop().create_future(), on_progress)
        call.request = OutboundMessage(
            FrameType.REQUEST,
            encoded,
            deadline_ms=min(MAX_DEADLINE_MS, max(1, round(deadline_s * 1000))),
            on_start=lambda: self._begun(call),
            on_written=lambda: None,
        )
        self._queued[call] = None
        self._link.queue.submit(call.request)
        return call

    def _begun(self, call: OutgoingCall) -> int:
        """Number the call when its first byte is written, so that call ids rise on the wire."""
        call.call_id = self._next_call_id
        self._next_call_id += 2
        self._queued.pop(call, None)
        self._calls[call.call_id] = call
        return call.call_id

    def _leave(self, call: OutgoingCall) -> None:
        """The caller no longer waits: cancel the call at the other end unless it has ended."""
        self._link.queue.drop(call.request)
        if call in self._queued:
            self._queued.pop(call, None)
        elif self._calls.get(call.call_id) is call and not call.abandoned:
            call.abandoned = True
            if call.inbound is not None:
                self._link.inbound.discard(call.inbound)
            self._link.queue.send_control(pack_frame(FrameType.CANCEL, call.call_id))
        call.request.on_start = _left  # breaks the cycle: the callback holds the call, which holds the request
        call.on_progress = None
        self._link.call_ended()

    def check_abandoned(self) -> None:
        """Raise ProtocolViolation if the other end does not acknowledge cancels."""
        if sum(call.abandoned for call in self._calls.values()) > _MAX_ABANDONED:
            raise ProtocolViolation(Violation.STALLED, f"more than {_MAX_ABANDONED} cancels were not acknowledged")

    def start_received(self, call_id: int, start_type: FrameType, start: Start) -> None:
        """A progress message or an answer begins."""
        call = self._known(call_id)
        if call.inbound is not None:
            raise ProtocolViolation(Violation.OUT_OF_ORDER, f"two messages at once in call {call_id}")
        if call.request.num_left and not call.abandoned:
            raise ProtocolViolation(Violation.OUT_OF_ORDER, f"call {call_id} is answered before it was asked")
        call.inbound = self._link.inbound.start(
            call_id, start_type, start, discard=call.abandoned, expires_at=float("inf")
        )

    def inbound_message(self, call_id: int) -> InboundMessage:
        """The message that the chunks of `call_id` belong to."""
        call = self._known(call_id)
        if call.inbound is None:
            raise ProtocolViolation(Violation.OUT_OF_ORDER, f"a chunk of no message in call {call_id}")
        return call.inbound

    def message_complete(self, message: InboundMessage) -> None:
        """A progress message or an answer has arrived completely."""
        call = self._calls[message.call_id]
        call.inbound = None
        is_final = message.start_type is FrameType.ANSWER
        if is_final:
            del self._calls[message.call_id]
        if message.discarded:
            return
        self._link.inbound.release(message)  # the caller owns the memory from here on
        try:
            item, num_blob_bytes = self._link.registry.decode_counted(message.body)
        except WireError as error:
            self._link.count_received(message, 0)
            self._link.traffic.num_malformed += 1
            if is_final:
                _fail(call, MalformedAnswer(f"malformed {message.kind} from {self._link.peer_id}: {error}"))
            return
        self._link.count_received(message, num_blob_bytes)
        if is_final and not call.answer.done():
            call.answer.set_result(item)
        elif not is_final:
            self._show_progress(call, item)

    def _show_progress(self, call: OutgoingCall, item: Message) -> None:
        if call.on_progress is None or call.answer.done():
            return
        try:
            call.on_progress(item)
        except Exception as error:  # raised by the caller's own code: the caller gets it
            _fail(call, error)

    def refused(self, call_id: int, payload: RefusalPayload) -> None:
        """The other end ends the call without an answer."""
        call = self._known(call_id)
        del self._calls[call_id]
        if call.inbound is not None:
            self._link.inbound.discard(call.inbound)
            call.inbound = None
        if call.request.num_left and not call.abandoned:
            # The refusal overtook the request: drop the rest, and end the request at the other end.
            self._link.queue.drop(call.request)
            self._link.queue.send_control(pack_frame(FrameType.CANCEL, call_id))
        _fail(call, CallRefused.of(payload))

    def request_of(self, call_id: int) -> OutboundMessage | None:
        """The request of a call, to which credit applies; None if the call has ended."""
        call = self._calls.get(call_id)
        return None if call is None else call.request

    def link_lost(self, closed: ClosedError, last_seen: int | None) -> None:
        """Fail all calls, and every later one. `last_seen`: the last call that the other end began, as it says."""
        self._closed = closed
        for call in (*self._queued, *self._calls.values()):
            if call.inbound is not None:
                self._link.inbound.release(call.inbound)
            is_unseen = last_seen is not None and call.call_id > last_seen
            _fail(call, closed(call.call_id != 0 and not is_unseen))
        self._queued.clear()
        self._calls.clear()

    def _known(self, call_id: int) -> OutgoingCall:
        call = self._calls.get(call_id)
        if call is None:
            raise ProtocolViolation(Violation.UNKNOWN_CALL, f"call {call_id} is not open")
        return call


def _left() -> int:
    raise AssertionError("a request was begun whose caller has left")


def _fail(call: OutgoingCall, error: BaseException) -> None:
    if not call.answer.done():
        call.answer.set_exception(error)
        call.answer.exception()  # marks it as retrieved: the caller of an abandoned call never does
