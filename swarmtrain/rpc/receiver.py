"""From bytes to frames, without a copy of what is large.

Headers and control frames pass through one small scratch buffer. When a chunk does not end in it, the stream is handed
the message's own buffer, and the rest of the chunk is received straight into its place.
"""

from __future__ import annotations

import zlib
from typing import Protocol

from swarmtrain.rpc.errors import ProtocolViolation, Violation
from swarmtrain.wire.checksum import crc32
from swarmtrain.wire.errors import BadFrame, WrongVersion
from swarmtrain.wire.frames import HEADER_BYTES, BadMagic, FrameHeader, FrameType, parse_header

SCRATCH_BYTES = 32 << 10


class FrameSink(Protocol):
    """Who gets the frames. Its methods raise `ProtocolViolation` for what is not allowed."""

    def control_received(self, header: FrameHeader, payload: memoryview) -> None:
        """A whole frame other than CHUNK. `payload` is valid during the call only."""

    def chunk_begins(self, call_id: int, num_bytes: int) -> tuple[memoryview, int]:
        """Where the chunk goes (exactly `num_bytes`), and the checksum of the message so far."""

    def chunk_complete(self, call_id: int, num_bytes: int, crc: int) -> None:
        """The chunk is in its place and its checksum is right."""


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
        self.num_body_bytes = 0  # of messages, finer than chunks: what moves on a slow line

    def stop(self) -> None:
        """Ignore everything from now on; lets go of the message buffer."""
        self.stopped = True
        self._chunk = None
        self._target = self._scratch[:0]

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self.stopped:
            return self._scratch
        if self._chunk is not None:
            return self._target[self._target_filled :]
        return self._scratch[self._num_filled :]

    def buffer_updated(self, num_bytes: int) -> None:
        """`num_bytes` arrived. ProtocolViolation if they cannot be right."""
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
            self._num_filled = 0  # an unfinished chunk takes all that was left
        elif start:
            rest = self._num_filled - start
            self._scratch[:rest] = bytes(self._scratch[start : self._num_filled])
            self._num_filled = rest

    def _parse_frame(self, start: int) -> int:
        """Handle the frame at `start` of the scratch buffer; how many bytes it took, 0 if it is not all there."""
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
        crc = crc32(self._target, self._crc)  # a chunk is short enough to be in the processor's cache still
        self._chunk = None
        self._target = self._scratch[:0]
        if crc != header.crc:
            raise ProtocolViolation(Violation.BAD_CHECKSUM, "a chunk is damaged, missing or out of order")
        self._sink.chunk_complete(header.call_id, header.length, crc)
