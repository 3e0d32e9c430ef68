"""One message on its way out: what of it was written, and what may be."""

from __future__ import annotations

from collections.abc import Callable

from swarmtrain.wire.frames import CALL_WINDOW_BYTES, SMALL_MESSAGE_BYTES, FrameType
from swarmtrain.wire.schema import EncodedMessage


class OutboundMessage:
    """A message on its way out. `credit` is how much of its body the receiver allows, `position` what was written."""

    __slots__ = (
        "_buffer_index",
        "_buffer_offset",
        "call_id",
        "crc",
        "credit",
        "deadline_ms",
        "encoded",
        "on_start",
        "on_written",
        "position",
        "start_type",
    )

    def __init__(
        self,
        start_type: FrameType,
        encoded: EncodedMessage,
        *,
        deadline_ms: int = 0,
        on_start: Callable[[], int],
        on_written: Callable[[], None],
    ) -> None:
        self.start_type = start_type
        self.encoded = encoded
        self.deadline_ms = deadline_ms
        self.on_start = on_start  # gives the call id; called just before the first byte is written
        self.on_written = on_written
        self.call_id = 0  # 0: nothing was written yet
        self.credit = min(encoded.num_bytes, CALL_WINDOW_BYTES)
        self.position = 0
        self.crc = 0
        self._buffer_index = 0
        self._buffer_offset = 0

    @property
    def started(self) -> bool:
        """Its first frame was written."""
        return self.call_id != 0

    @property
    def window_bytes(self) -> int:
        """What its beginning takes from the link's window; small messages take nothing."""
        return 0 if self.encoded.num_bytes <= SMALL_MESSAGE_BYTES else min(self.encoded.num_bytes, CALL_WINDOW_BYTES)

    @property
    def num_left(self) -> int:
        """Body bytes that are not written yet."""
        return self.encoded.num_bytes - self.position

    def take(self, num_bytes: int) -> list[memoryview]:
        """The next `num_bytes` of the body, as views."""
        pieces = []
        self.position += num_bytes
        while num_bytes:
            buffer = self.encoded.buffers[self._buffer_index]
            piece = buffer[self._buffer_offset : self._buffer_offset + num_bytes]
            pieces.append(piece)
            num_bytes -= len(piece)
            self._buffer_offset += len(piece)
            if self._buffer_offset == len(buffer):
                self._buffer_index += 1
                self._buffer_offset = 0
        return pieces
