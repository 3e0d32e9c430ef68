"""Which frame goes where: the sink of a link's frame reader."""

from __future__ import annotations

from collections.abc import Callable

from swarmtrain.rpc.calls import Caller
from swarmtrain.rpc.core import LinkCore
from swarmtrain.rpc.errors import ProtocolViolation, Violation
from swarmtrain.rpc.exchange import Callee
from swarmtrain.rpc.keepalive import KeepAlive
from swarmtrain.wire.frames import (
    HEADER_BYTES,
    START_TYPES,
    FrameHeader,
    FrameType,
    RefusalPayload,
    pack_nonce,
    parse_nonce,
    parse_pair,
    parse_refusal,
    parse_start,
)

_MAX_WAITING_CONTROL_FRAMES = 4096


class FrameRouter:
    """Checks that a frame may come now, counts it, and gives it to the calling or to the answering half of the link.

    `initiator` is True at the end that opened the stream: its calls have odd numbers.
    """

    def __init__(
        self,
        core: LinkCore,
        caller: Caller,
        callee: Callee,
        keepalive: KeepAlive,
        *,
        initiator: bool,
        on_goodbye: Callable[[RefusalPayload, int], None],
    ) -> None:
        self._core = core
        self._caller = caller
        self._callee = callee
        self._heartbeat = keepalive
        self._initiator = initiator
        self._on_goodbye = on_goodbye
        self._received = core.traffic.received
        self.has_hello = False

    def control_received(self, header: FrameHeader, payload: memoryview) -> None:
        """See `FrameSink`."""
        frame_type, call_id = header.frame_type, header.call_id
        if frame_type in START_TYPES:
            self._check_hello(frame_type)
            self._start_received(header, payload)
            return
        self._received.control_bytes += HEADER_BYTES + len(payload)
        self._check_hello(frame_type)
        if self._core.queue.num_control_frames > _MAX_WAITING_CONTROL_FRAMES:
            raise ProtocolViolation(Violation.NOT_READING, "too many control frames wait for the peer to read them")
        if frame_type is FrameType.PING:
            self._core.queue.send_control(pack_nonce(FrameType.PONG, parse_nonce(payload)))
        elif frame_type is FrameType.PONG:
            self._heartbeat.pong(parse_nonce(payload))
        elif frame_type is FrameType.CREDIT:
            self._credit_received(call_id, *parse_pair(payload))
        elif frame_type is FrameType.RECEIVED:
            num_bytes, microseconds = parse_pair(payload)
            self._core.meter.up.add(num_bytes, microseconds / 1e6)
        elif frame_type is FrameType.REFUSAL:
            self._expect_call_of(call_id, own=True)
            self._caller.refused(call_id, parse_refusal(payload))
        elif frame_type is FrameType.CANCEL:
            self._expect_call_of(call_id, own=False)
            self._callee.cancelled(call_id)
        elif frame_type is FrameType.GOODBYE:
            self._on_goodbye(parse_refusal(payload), call_id)

    def chunk_begins(self, call_id: int, num_bytes: int) -> tuple[memoryview, int]:
        """See `FrameSink`."""
        message = (self._caller if self._is_own(call_id) else self._callee).inbound_message(call_id)
        traffic = self._received.kind(message.kind)
        traffic.frame_bytes += HEADER_BYTES
        traffic.body_bytes += num_bytes
        return self._core.inbound.chunk_begins(message, num_bytes)

    def chunk_complete(self, call_id: int, num_bytes: int, crc: int) -> None:
        """See `FrameSink`."""
        half = self._caller if self._is_own(call_id) else self._callee
        message = half.inbound_message(call_id)
        if self._core.inbound.chunk_complete(message, num_bytes, crc):
            half.message_complete(message)

    def _is_own(self, call_id: int) -> bool:
        return (call_id % 2 == 1) == self._initiator

    def _expect_call_of(self, call_id: int, *, own: bool) -> None:
        if self._is_own(call_id) is not own:
            raise ProtocolViolation(Violation.UNKNOWN_CALL, f"call {call_id} is not the other end's to speak about")

    def _check_hello(self, frame_type: FrameType) -> None:
        is_hello = frame_type is FrameType.HELLO
        if frame_type is FrameType.GOODBYE:  # a peer that does not want the stream says so at once
            return
        if not self.has_hello and not is_hello:
            raise ProtocolViolation(Violation.NO_HELLO, f"{frame_type.name} before HELLO")
        if self.has_hello and is_hello:
            raise ProtocolViolation(Violation.OUT_OF_ORDER, "a second HELLO")
        self.has_hello = True

    def _start_received(self, header: FrameHeader, payload: memoryview) -> None:
        is_request = header.frame_type is FrameType.REQUEST
        self._expect_call_of(header.call_id, own=not is_request)
        start = parse_start(payload)
        if is_request:
            self._callee.start_received(header.call_id, start)
        else:
            self._caller.start_received(header.call_id, header.frame_type, start)
        self._received.kind(start.kind).frame_bytes += HEADER_BYTES + len(payload)

    def _credit_received(self, call_id: int, call_bytes: int, window_bytes: int) -> None:
        own = self._is_own(call_id)
        message = self._caller.request_of(call_id) if own else self._callee.sending(call_id)
        self._core.queue.grant(message, own, call_bytes, window_bytes)
