"""The send queue of one stream: control frames first, then messages by priority, cut into chunks.

At every chunk boundary a more urgent message preempts the one that is being sent. Within a priority the oldest message
goes first, so that the first of several equal messages arrives early instead of all of them late. One chunk in
`LOW_SHARE` goes to the least urgent message, so that a busy link cannot starve a newcomer's download or a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from swarmtrain import world
from swarmtrain.rpc.limits import SendTicket, TokenBucket
from swarmtrain.rpc.meter import DirectionTraffic
from swarmtrain.wire.checksum import crc32
from swarmtrain.wire.frames import (
    CALL_WINDOW_BYTES,
    LINK_WINDOW_BYTES,
    MAX_CHUNK_BYTES,
    SMALL_MESSAGE_BYTES,
    FrameType,
    Start,
    pack_header,
    pack_start,
)
from swarmtrain.wire.limits import Priority
from swarmtrain.wire.schema import EncodedMessage

_JOIN_BYTES = 8 << 10  # up to this size pieces are joined: a write costs more than a small copy
LOW_SHARE = 16
_CHUNK_S = 0.005  # a chunk larger than the least may take this much of the link's time
_MOST_CHUNKS_IN_ONE = 4
_FEWEST_CHUNK_BYTES = 1024  # the rest of a grant is not used for chunks smaller than this


class OutboundMessage:
    """A message that is being sent: `credit` bytes of its body are allowed by the receiver, `position` are written."""

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
        self.on_start = on_start  # returns the call id; called just before the first byte is written
        self.on_written = on_written
        self.call_id = 0  # 0 until the first byte is written
        self.credit = min(encoded.num_bytes, CALL_WINDOW_BYTES)
        self.position = 0
        self.crc = 0
        self._buffer_index = 0
        self._buffer_offset = 0

    @property
    def started(self) -> bool:
        """Whether its first frame has been written."""
        return self.call_id != 0

    @property
    def window_bytes(self) -> int:
        """What its first bytes take from the link's window; small messages take nothing."""
        return 0 if self.encoded.num_bytes <= SMALL_MESSAGE_BYTES else min(self.encoded.num_bytes, CALL_WINDOW_BYTES)

    @property
    def num_left(self) -> int:
        """Body bytes that have not been written yet."""
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


class OutboundQueue:
    """Writes frames through `write` as long as the stream, the rate cap and the receiver's credits allow."""

    def __init__(
        self,
        write: Callable[[bytes | memoryview], None],
        counters: DirectionTraffic,
        bucket: TokenBucket,
        *,
        chunk_bytes: int,
        limit_bytes: int,
    ) -> None:
        self._write = write
        self._counters = counters
        self._bucket = bucket
        self._least_chunk_bytes = self._chunk_bytes = min(chunk_bytes, MAX_CHUNK_BYTES)
        self._limit_bytes = limit_bytes
        self._messages: dict[Priority, deque[OutboundMessage]] = {priority: deque() for priority in Priority}
        self._windows = {True: LINK_WINDOW_BYTES, False: LINK_WINDOW_BYTES}  # by "is a request"
        self._control: deque[bytes] = deque()
        self._queued_bytes = dict.fromkeys(Priority, 0)
        self._waiters: dict[Priority, deque[asyncio.Future[None]]] = {priority: deque() for priority in Priority}
        self._ticket: SendTicket | None = None
        self._allowance = 0
        self._paused = False
        self._paused_at = 0.0
        self._unsent_bytes = 0
        self._closed = False
        self._pumping = False
        self._num_chunks = 0
        self._is_woken = dict.fromkeys(Priority, False)  # a waiter has been released and has not run yet

    @property
    def queued_bytes(self) -> int:
        """Body bytes of all queued messages that have not been written yet."""
        return sum(self._queued_bytes.values())

    @property
    def num_control_frames(self) -> int:
        """Control frames that wait for the stream to drain."""
        return len(self._control)

    def send_control(self, frame: bytes) -> None:
        """Write a control frame before everything else. The rate cap counts it but never delays it."""
        if not self._closed:
            self._control.append(frame)
            self.pump()

    def submit(self, message: OutboundMessage) -> None:
        """Queue a message."""
        if self._closed:
            return
        priority = message.encoded.priority
        self._messages[priority].append(message)
        self._queued_bytes[priority] += message.num_left
        self.pump()

    def fit_chunks(self, bytes_per_s: float) -> None:
        """Use larger chunks on a fast link, where the cost per chunk is in the CPU and not on the wire."""
        fitting = max(self._least_chunk_bytes, int(_CHUNK_S * bytes_per_s))
        self._chunk_bytes = min(fitting, _MOST_CHUNKS_IN_ONE * self._least_chunk_bytes, MAX_CHUNK_BYTES)

    def stalled_s(self, unsent_bytes: int) -> float:
        """For how long the stream has taken no byte although some wait; it holds `unsent_bytes` now."""
        if unsent_bytes != self._unsent_bytes:  # slow, but moving
            self._unsent_bytes, self._paused_at = unsent_bytes, world.monotonic()
        return world.monotonic() - self._paused_at if self._paused and not self._closed else 0.0

    async def wait_for_room(self, priority: Priority) -> None:
        """Return once fewer bytes of `priority` are queued than the limit. One message of any size may exceed it.

        Each priority has its own limit, so that a long queue of state does not delay a boundary tensor.
        """
        waiters = self._waiters[priority]
        while not self._closed and (waiters or self._queued_bytes[priority] >= self._limit_bytes):
            waiter = asyncio.get_running_loop().create_future()
            waiters.append(waiter)
            try:
                await waiter
                return
            finally:
                if waiter in waiters:
                    waiters.remove(waiter)
                else:
                    self._is_woken[priority] = False
                # Only after this task has run on: it may queue its message, and the next waiter must see that.
                asyncio.get_running_loop().call_soon(self._wake, priority)

    def drop(self, message: OutboundMessage) -> None:
        """Forget the rest of a message. Telling the other end is the caller's job."""
        queue = self._messages[message.encoded.priority]
        if message in queue:
            queue.remove(message)
            self._shrink(message.encoded.priority, message.num_left)

    def grant(self, message: OutboundMessage | None, is_request: bool, call_bytes: int, window_bytes: int) -> None:
        """Credit from the receiver: for the rest of one message, and for the first bytes of others of its direction."""
        if message is not None:
            message.credit = min(message.credit + call_bytes, message.encoded.num_bytes)
        self._windows[is_request] = min(self._windows[is_request] + window_bytes, LINK_WINDOW_BYTES)
        self.pump()

    def pause(self) -> None:
        """The stream is full."""
        self._paused = True
        self._paused_at = world.monotonic()

    def resume(self) -> None:
        """The stream has drained."""
        self._paused = False
        self.pump()

    def close(self) -> None:
        """Write nothing more, and drop everything that is queued."""
        self._closed = True
        self._control.clear()
        for queue in self._messages.values():
            queue.clear()
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        for priority in Priority:
            self._queued_bytes[priority] = 0
            self._wake(priority)

    def flush_control(self) -> None:
        """Write all control frames now, even to a full stream: the last step before it closes."""
        while self._control and not self._closed:
            self._write_control()

    def pump(self) -> None:
        """Write everything that may be written now."""
        if self._pumping:  # called back from a write that is in progress
            return
        self._pumping = True
        try:
            while not self._paused and not self._closed and self._write_next():
                pass
        finally:
            self._pumping = False

    def _write_next(self) -> bool:
        if self._control:
            self._write_control()
            return True
        message = self._choose()
        if message is None or not self._has_allowance(message):
            return False
        self._write_chunk(message)
        return True

    def _write_control(self) -> None:
        frame = self._control.popleft()
        self._bucket.charge(len(frame))
        self._counters.control_bytes += len(frame)
        self._write(frame)

    def _choose(self) -> OutboundMessage | None:
        """The most urgent message that may send now; every LOW_SHARE-th time, the least urgent one."""
        first = last = next(sendable := self._sendable(), None)
        if self._num_chunks % LOW_SHARE == LOW_SHARE - 1:
            for message in sendable:
                if last is None or message.encoded.priority > last.encoded.priority:
                    last = message
            return last
        return first

    def _sendable(self) -> Iterator[OutboundMessage]:
        """Messages that may send now, most urgent first.

        While a message waits for the window, no later one of its direction may take from it.
        """
        start_blocked = {True: False, False: False}
        for queue in self._messages.values():
            for message in queue:
                if message.started:
                    if message.credit > message.position:
                        yield message
                    continue
                is_request = message.start_type is FrameType.REQUEST
                needed = message.window_bytes
                if needed and (start_blocked[is_request] or needed > self._windows[is_request]):
                    start_blocked[is_request] = True
                    continue
                yield message

    def _has_allowance(self, message: OutboundMessage) -> bool:
        """Acquire a grant from the rate cap; False if it comes later."""
        if self._allowance >= min(message.num_left, _FEWEST_CHUNK_BYTES, self._chunk_bytes):
            return True
        priority = message.encoded.priority
        if self._ticket is not None:
            if priority < self._ticket.priority:
                self._ticket = self._bucket.raise_priority(self._ticket, priority)
            return False
        wanted = self._bucket.grant_bytes(self._chunk_bytes)
        self._ticket = self._bucket.acquire(wanted, priority, lambda: self._granted(wanted))
        if self._ticket is None:
            self._allowance += wanted
        return self._ticket is None

    def _granted(self, num_bytes: int) -> None:
        self._ticket = None
        self._allowance += num_bytes
        self.pump()

    def _write_chunk(self, message: OutboundMessage) -> None:
        start = b"" if message.started else self._start(message)
        num_bytes = min(self._chunk_bytes, self._allowance, message.num_left, message.credit - message.position)
        pieces = message.take(num_bytes)
        for piece in pieces:
            message.crc = crc32(piece, message.crc)
        self._num_chunks += 1
        head = start + pack_header(FrameType.CHUNK, message.call_id, num_bytes, message.crc)
        traffic = self._counters.kind(message.encoded.kind)
        traffic.frame_bytes += len(head)
        traffic.body_bytes += num_bytes
        self._allowance -= num_bytes + len(head)
        if num_bytes <= _JOIN_BYTES:
            self._write(b"".join((head, *pieces)))
        else:
            self._write(head)
            for piece in pieces:
                self._write(piece)
        if message.num_left == 0:
            traffic.num_messages += 1
            traffic.blob_bytes += message.encoded.num_blob_bytes
            self._messages[message.encoded.priority].remove(message)
        self._shrink(message.encoded.priority, num_bytes)
        if message.num_left == 0:
            message.on_written()

    def _start(self, message: OutboundMessage) -> bytes:
        message.call_id = message.on_start()
        self._windows[message.start_type is FrameType.REQUEST] -= message.window_bytes
        start = Start(message.encoded.kind, message.encoded.num_bytes, message.deadline_ms)
        return pack_start(message.start_type, message.call_id, start)

    def _shrink(self, priority: Priority, num_bytes: int) -> None:
        self._queued_bytes[priority] -= num_bytes
        self._wake(priority)

    def _wake(self, priority: Priority) -> None:
        """Release the first waiter if the limit allows it; the next one only after that one has run."""
        waiters = self._waiters[priority]
        while waiters and (self._closed or self._queued_bytes[priority] < self._limit_bytes):
            if self._is_woken[priority] and not self._closed:
                return
            waiter = waiters.popleft()
            if not waiter.done():
                self._is_woken[priority] = True
                waiter.set_result(None)
