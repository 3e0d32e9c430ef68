"""Messages that are being received: admitted against a memory budget, assembled, measured.

The first `CALL_WINDOW_BYTES` of a message may arrive without credit; the sender may send the rest once the receiver has
reserved memory for the whole message and granted credit. So the receiver's memory is bounded, whatever the senders do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmtrain import world
from swarmtrain.rpc.errors import ProtocolViolation, Violation
from swarmtrain.rpc.limits import Budget, Reservation
from swarmtrain.wire.errors import UnknownKind
from swarmtrain.wire.frames import (
    CALL_WINDOW_BYTES,
    LINK_WINDOW_BYTES,
    MAX_CHUNK_BYTES,
    SMALL_MESSAGE_BYTES,
    FrameType,
    Start,
    pack_pair,
)
from swarmtrain.wire.schema import Registry

_CREDIT_BATCH_BYTES = LINK_WINDOW_BYTES // 4  # window credit is returned in batches: a frame per message costs more
_LEAST_REPORTED_BYTES = 64 << 10  # smaller messages say little about a link


@dataclass(frozen=True, slots=True)
class Measurement:
    """The receiver's measurement of one large message: the bytes after the first chunk, and the time they took."""

    num_bytes: int
    seconds: float


class InboundMessage:
    """A message that is being received. If `discarded`, its bytes are read and dropped."""

    __slots__ = (
        "body",
        "call_id",
        "crc",
        "discarded",
        "expires_at",
        "first_at",
        "first_bytes",
        "granted",
        "is_receiving",
        "kind",
        "marked_at",
        "marked_link_bytes",
        "num_bytes",
        "position",
        "reservation",
        "start_type",
        "takes_window",
    )

    def __init__(self, call_id: int, start_type: FrameType, start: Start, expires_at: float) -> None:
        self.call_id = call_id
        self.start_type = start_type
        self.kind = start.kind
        self.num_bytes = start.num_bytes
        self.expires_at = expires_at
        self.body = bytearray()
        self.position = 0
        self.crc = 0
        self.granted = self.window_bytes
        self.reservation: Reservation | None = None
        self.is_receiving = False  # a chunk is being received into `body`, which therefore must not be replaced
        self.discarded = False
        self.takes_window = not self.is_small  # until its first bytes have been credited back
        self.marked_at = 0.0  # when it had last made progress, in time of the loop
        self.marked_link_bytes = 0
        self.first_at = 0.0
        self.first_bytes = 0

    @property
    def is_small(self) -> bool:
        """Small messages need neither credit nor budget."""
        return self.num_bytes <= SMALL_MESSAGE_BYTES

    @property
    def window_bytes(self) -> int:
        """How many of its bytes may arrive before it is admitted."""
        return min(self.num_bytes, CALL_WINDOW_BYTES)

    def is_half_open(self, now: float, link_bytes: int, limit_s: float, least_bytes: int) -> bool:
        """Whether its sender could send, and its link has carried less than `least_bytes` for `limit_s`.

        All messages of a link share its line: on a slow one each comes slowly although the line is full. Its deadline
        is no excuse.
        """
        if self.position >= self.granted or link_bytes >= self.marked_link_bytes + least_bytes:
            self.marked_at, self.marked_link_bytes = now, link_bytes
        return now - self.marked_at > limit_s

    def grow(self) -> None:
        """Allocate the whole body, once the message is admitted."""
        if len(self.body) < self.num_bytes and not self.is_receiving:
            body = bytearray(self.num_bytes)
            body[: self.position] = memoryview(self.body)[: self.position]
            self.body = body


class InboundMessages:
    """Assembles the messages of one link. Credit frames go back through `send_control`."""

    def __init__(
        self,
        registry: Registry,
        send_control: Callable[[bytes], None],
        *,
        request_budget: Budget,
        answer_budget: Budget,
    ) -> None:
        self._registry = registry
        self._send_control = send_control
        # Separate, because a request is held while its handler waits for answers: one budget could deadlock.
        self._budgets = {True: request_budget, False: answer_budget}
        self._open_window = {True: 0, False: 0}  # first bytes that have not been credited back yet
        self._owed_window = {True: 0, False: 0}  # the part of it that is due for credit
        self._trash = memoryview(b"")
        self._closed = False

    def close(self) -> None:
        """Admit no further message: releasing messages one by one at the end must not admit others."""
        self._closed = True

    def start(
        self, call_id: int, start_type: FrameType, start: Start, *, discard: bool, expires_at: float
    ) -> InboundMessage:
        """Begin a message. Raises ProtocolViolation if its kind, size or the window forbids it."""
        is_request = start_type is FrameType.REQUEST
        self._check_size(start, self._budgets[is_request])
        message = InboundMessage(call_id, start_type, start, expires_at)
        self._take_window(message)
        if discard:
            message.discarded = True
            self._credit(message, 0)
        elif message.is_small:
            message.body = bytearray(start.num_bytes)
        else:
            self._reserve(message, self._budgets[is_request])
        return message

    def _check_size(self, start: Start, budget: Budget) -> None:
        try:
            codec = self._registry.codec(start.kind)
        except UnknownKind as error:
            raise ProtocolViolation(Violation.UNKNOWN_KIND, str(error)) from error
        if not 0 < start.num_bytes <= codec.max_bytes:
            detail = f"{start.kind} of {start.num_bytes} bytes, at most {codec.max_bytes}"
            raise ProtocolViolation(Violation.TOO_LARGE, detail)
        if start.num_bytes > budget.limit_bytes:
            detail = f"{start.kind} of {start.num_bytes} bytes, this end holds at most {budget.limit_bytes}"
            raise ProtocolViolation(Violation.TOO_LARGE, detail)

    def _take_window(self, message: InboundMessage) -> None:
        if not message.takes_window:
            return
        is_request = message.start_type is FrameType.REQUEST
        self._open_window[is_request] += message.window_bytes
        if self._open_window[is_request] > LINK_WINDOW_BYTES:
            raise ProtocolViolation(Violation.OVER_CREDIT, "more messages were begun than the link's window allows")

    def _reserve(self, message: InboundMessage, budget: Budget) -> None:
        message.reservation = budget.reserve(message.num_bytes, lambda: self._admitted(message))
        if message.reservation.admitted:
            self._admitted(message)
        else:
            message.body = bytearray(message.granted)

    def _admitted(self, message: InboundMessage) -> None:
        if self._closed:
            return
        message.grow()
        missing = message.num_bytes - message.granted
        message.granted = message.num_bytes
        self._credit(message, missing)

    def _credit(self, message: InboundMessage, call_bytes: int) -> None:
        """Grant the rest of a message and, once, return what its first bytes took from the link's window."""
        is_request = message.start_type is FrameType.REQUEST
        if message.takes_window:
            message.takes_window = False
            self._owed_window[is_request] += message.window_bytes
        owed = self._owed_window[is_request]
        if call_bytes or owed >= _CREDIT_BATCH_BYTES:
            self._owed_window[is_request] = 0
            self._open_window[is_request] -= owed
            self._send_control(pack_pair(FrameType.CREDIT, message.call_id, call_bytes, owed))

    def discard(self, message: InboundMessage) -> None:
        """Release a message's memory; the bytes that still arrive are dropped."""
        if message.discarded:
            return
        message.discarded = True
        if not message.is_receiving:
            message.body = bytearray()
        self.release(message)

    def release(self, message: InboundMessage) -> None:
        """Stop accounting for the message's memory. A second call does nothing.

        A message that fits the window may be complete, and handled, before the budget admits it. It holds its part of
        the window until now, so that window and budget together still bound the memory.
        """
        self._credit(message, 0)
        if message.reservation is not None:
            message.reservation.release()

    def chunk_begins(self, message: InboundMessage, num_bytes: int) -> tuple[memoryview, int]:
        """The buffer for the next chunk, and the checksum so far."""
        end = message.position + num_bytes
        if end > message.num_bytes:
            detail = f"{message.kind}: more bytes than the {message.num_bytes} announced"
            raise ProtocolViolation(Violation.TOO_LARGE, detail)
        if end > message.granted:
            raise ProtocolViolation(
                Violation.OVER_CREDIT, f"{message.kind}: {end} bytes sent, {message.granted} granted"
            )
        if message.discarded:
            return self._trash_buffer(num_bytes), message.crc
        if len(message.body) < end:
            message.grow()  # it was admitted while its last chunk was being received
        if message.position == 0:
            message.first_at = world.monotonic()  # finer than the loop's clock, which may count in milliseconds
            message.first_bytes = num_bytes
        message.is_receiving = True
        return memoryview(message.body)[message.position : end], message.crc

    def chunk_complete(self, message: InboundMessage, num_bytes: int, crc: int) -> bool:
        """Count the chunk; True if it was the last."""
        message.position += num_bytes
        message.crc = crc
        message.is_receiving = False
        if message.discarded:
            message.body = bytearray()
        return message.position == message.num_bytes

    def measure(self, message: InboundMessage) -> Measurement | None:
        """The measurement of a complete `message`; None if it is too small or came in one chunk."""
        num_bytes = message.num_bytes - message.first_bytes
        seconds = world.monotonic() - message.first_at
        if message.num_bytes < _LEAST_REPORTED_BYTES or num_bytes <= 0 or seconds <= 0:
            return None
        return Measurement(num_bytes, seconds)

    def _trash_buffer(self, num_bytes: int) -> memoryview:
        if not self._trash:
            self._trash = memoryview(bytearray(MAX_CHUNK_BYTES))
        return self._trash[:num_bytes]
