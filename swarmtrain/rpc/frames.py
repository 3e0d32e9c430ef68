"""Parses frames out of the received bytes without copying large chunks, and routes each to its half of the link.

Headers and control frames pass through one small scratch buffer. If a chunk does not end in it, the stream gets the
message's own buffer next, and the rest of the chunk is received directly into its place.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

from swarmtrain.rpc.errors import ProtocolViolation, Violation
from swarmtrain.wire.checksum import crc32
from swarmtrain.wire.errors import BadFrame, WrongVersion
from swarmtrain.wire.frames import (
    HEADER_BYTES,
    START_TYPES,
    BadMagic,
    FrameHeader,
    FrameType,
    pack_nonce,
    parse_header,
    parse_hello,
    parse_nonce,
    parse_pair,
    parse_refusal,
    parse_start,
)

if TYPE_CHECKING:
    from swarmtrain.rpc.link import Link

SCRATCH_BYTES = 32 << 10
_MAX_WAITING_CONTROL_FRAMES = 4096


class FrameSink(Protocol):
    """The consumer of the frames. Its methods raise `ProtocolViolation` for a frame that is not allowed."""

    def control_received(self, header: FrameHeader, payload: memoryview) -> None:
        """A whole frame other than CHUNK. `payload` is valid during the call only."""

    def chunk_begins(self, call_id: int, num_bytes: int) -> tuple[memoryview, int]:
        """The buffer for the chunk (exactly `num_bytes`), and the checksum of the message so far."""

    def chunk_complete(self, call_id: int, num_bytes: int, crc: int) -> None:
        """The chunk is in its buffer and its checksum is right."""


class FrameReader:
    """The receiving half of a stream; feed it through `get_buffer` and `buffer_updated`."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._num_filled = 0
        self._chunk: FrameHeader | None = None  # the chunk that is being received straight into `_target`
        self._target = self._scratch[:0]
        self._target_filled = 0
        self._crc = 0
        self.stopped = False
        self.num_body_bytes = 0  # counted within chunks too, so that progress shows on a slow line

    def stop(self) -> None:
        """Ignore all further bytes and release the message buffer."""
        self.stopped = True
        self._chunk = None
        self._target = self._scratch[:0]

    def get_buffer(self) -> memoryview:
        """The buffer for the next bytes; never empty."""
        if self.stopped:
            return self._scratch
        if self._chunk is not None:
            return self._target[self._target_filled :]
        return self._scratch[self._num_filled :]

    def buffer_updated(self, num_bytes: int) -> None:
        """`num_bytes` arrived. Raises ProtocolViolation if they break the framing."""
        if self.stopped:
            return
        if self._chunk is not None:
            self._target_received(num_bytes)
            return
        self._num_filled += num_bytes
        start = 0
        while not self.stopped and self._chunk is None:
            used = self._parse_frame(start)
            if not used:
                break
            start += used
        if self._chunk is not None or self.stopped:
            self._num_filled = 0  # an unfinished chunk has taken the rest of the scratch buffer
        elif start:
            rest = self._num_filled - start
            self._scratch[:rest] = bytes(self._scratch[start : self._num_filled])
            self._num_filled = rest

    def _parse_frame(self, start: int) -> int:
        """Handle the frame at `start` of the scratch buffer. Returns its size, or 0 if it is not complete yet."""
        available = self._num_filled - start
        if available < HEADER_BYTES:
            return 0
        header = self._parse_header(start)
        payload_start = start + HEADER_BYTES
        present = min(available - HEADER_BYTES, header.length)
        if header.frame_type is FrameType.CHUNK:
            self._begin_chunk(header, payload_start, present)
            return HEADER_BYTES + present
        if present < header.length:
            return 0
        payload = self._scratch[payload_start : payload_start + header.length]
        if zlib.crc32(payload) != header.crc:
            raise ProtocolViolation(Violation.BAD_CHECKSUM, f"{header.frame_type.name} is damaged")
        try:
            self._sink.control_received(header, payload)
        except BadFrame as error:
            raise ProtocolViolation(Violation.BAD_CONTROL, str(error)) from error
        return HEADER_BYTES + header.length

    def _parse_header(self, start: int) -> FrameHeader:
        try:
            return parse_header(self._scratch, start)
        except BadMagic as error:
            raise ProtocolViolation(Violation.BAD_MAGIC, str(error)) from error
        except WrongVersion as error:
            raise ProtocolViolation(Violation.WRONG_VERSION, str(error)) from error
        except BadFrame as error:
            raise ProtocolViolation(Violation.BAD_HEADER, str(error)) from error

    def _begin_chunk(self, header: FrameHeader, payload_start: int, present: int) -> None:
        self._target, self._crc = self._sink.chunk_begins(header.call_id, header.length)
        self._target_filled = 0
        self._chunk = header
        if present:
            self._target[:present] = self._scratch[payload_start : payload_start + present]
            self._target_received(present)

    def _target_received(self, num_bytes: int) -> None:
        header = self._chunk
        assert header is not None
        self._target_filled += num_bytes
        self.num_body_bytes += num_bytes
        if self._target_filled < header.length:
            return
        crc = crc32(self._target, self._crc)  # a chunk is short enough that it is still in the CPU cache
        self._chunk = None
        self._target = self._scratch[:0]
        if crc != header.crc:
            raise ProtocolViolation(Violation.BAD_CHECKSUM, "a chunk is damaged, missing or out of order")
        self._sink.chunk_complete(header.call_id, header.length, crc)


class FrameRouter:
    """Checks that a frame is allowed now, counts it, and passes it to the calling or the answering half of the link.

    `initiator` is True at the end that opened the stream; the calls of that end have odd ids.
    """

    def __init__(self, link: Link, *, initiator: bool) -> None:
        self._link = link
        self._caller = link.caller
        self._callee = link.callee
        self._initiator = initiator
        self._received = link.traffic.received
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
        if self._link.queue.num_control_frames > _MAX_WAITING_CONTROL_FRAMES:
            raise ProtocolViolation(Violation.NOT_READING, "the peer does not read: too many control frames are queued")
        if frame_type is FrameType.HELLO:
            self._hello_received(parse_hello(payload))
        elif frame_type is FrameType.CERTIFICATE:
            if not self._link.gate.met(self._link.peer_id, bytes(payload)):
                raise ProtocolViolation(Violation.BAD_CERTIFICATE, "")
        elif frame_type is FrameType.PING:
            self._link.queue.send_control(pack_nonce(FrameType.PONG, parse_nonce(payload)))
        elif frame_type is FrameType.PONG:
            self._link.keepalive.pong(parse_nonce(payload))
        elif frame_type is FrameType.CREDIT:
            self._credit_received(call_id, *parse_pair(payload))
        elif frame_type is FrameType.RECEIVED:
            num_bytes, microseconds = parse_pair(payload)
            self._link.meter.up.add(num_bytes, microseconds / 1e6)
        elif frame_type is FrameType.REFUSAL:
            self._expect_call_of(call_id, own=True)
            self._caller.refused(call_id, parse_refusal(payload))
        elif frame_type is FrameType.CANCEL:
            self._expect_call_of(call_id, own=False)
            self._callee.cancelled(call_id)
        elif frame_type is FrameType.GOODBYE:
            self._link.goodbye_received(parse_refusal(payload), call_id)

    def chunk_begins(self, call_id: int, num_bytes: int) -> tuple[memoryview, int]:
        """See `FrameSink`."""
        message = (self._caller if self._is_own(call_id) else self._callee).inbound_message(call_id)
        traffic = self._received.kind(message.kind)
        traffic.frame_bytes += HEADER_BYTES
        traffic.body_bytes += num_bytes
        return self._link.inbound.chunk_begins(message, num_bytes)

    def chunk_complete(self, call_id: int, num_bytes: int, crc: int) -> None:
        """See `FrameSink`."""
        half = self._caller if self._is_own(call_id) else self._callee
        message = half.inbound_message(call_id)
        if self._link.inbound.chunk_complete(message, num_bytes, crc):
            half.message_complete(message)

    def _is_own(self, call_id: int) -> bool:
        return (call_id % 2 == 1) == self._initiator

    def _expect_call_of(self, call_id: int, *, own: bool) -> None:
        if self._is_own(call_id) is not own:
            raise ProtocolViolation(Violation.UNKNOWN_CALL, f"a frame of this type may not name call {call_id}")

    def _check_hello(self, frame_type: FrameType) -> None:
        is_hello = frame_type is FrameType.HELLO
        if frame_type is FrameType.GOODBYE:  # a peer may reject the stream before any HELLO
            return
        if not self.has_hello and not is_hello:
            raise ProtocolViolation(Violation.NO_HELLO, f"{frame_type.name} before HELLO")
        if self.has_hello and is_hello:
            raise ProtocolViolation(Violation.OUT_OF_ORDER, "a second HELLO")

    def _hello_received(self, proof: bytes) -> None:
        if not self._link.gate.is_proven(self._link.peer_id, proof):
            raise ProtocolViolation(Violation.NO_PROOF, "")
        self.has_hello = True
        self._link.greeted()

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
        self._link.queue.grant(message, own, call_bytes, window_bytes)
