"""Raw p2pd streams: a unix connection that begins with one short message from p2pd and is a plain pipe after it.

In a stream that we open, the message answers STREAM_OPEN; in one that p2pd hands us, it names the peer at the other
end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from swarmtrain.p2p.addresses import decode_varint, peer_id_from_bytes
from swarmtrain.p2p.errors import (
    AddressError,
    HostDownError,
)
from swarmtrain.p2p.network import ByteStream, StreamReceiver
from swarmtrain.p2p.p2pd_calls import p2pd_pb2, parsed

logger = logging.getLogger(__name__)

MAX_GREETING_BYTES = 4096
WRITE_HIGH_WATER_BYTES = 512 * 1024
WRITE_LOW_WATER_BYTES = 128 * 1024
CLOSE_DEADLINE_S = 30.0  # how long `close` waits for an other end that does not read
GREETING_DEADLINE_S = 10.0


class P2pdStream(asyncio.BufferedProtocol):
    """A `ByteStream` on one connection to p2pd.

    States: greeting (p2pd's message is being read) -> parked (no receiver yet; reading is paused, so no byte is lost
    and back-pressure holds) -> flowing (bytes go directly into the receiver's buffers) -> closed.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.greeting: asyncio.Future[bytes] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._peer_id = ""
        self._transport: asyncio.Transport | None = None
        self._receiver: StreamReceiver | None = None
        self._scratch = bytearray(2 * MAX_GREETING_BYTES)
        self._num_filled = 0
        self._early = memoryview(b"")  # bytes that arrived together with the greeting
        self._reading_paused = False
        self._writing_paused = False
        self._told_closed = False
        self._close_deadline: asyncio.TimerHandle | None = None

    # ---- ByteStream -------------------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> str:
        """The authenticated identity at the other end."""
        return self._peer_id

    @peer_id.setter
    def peer_id(self, peer_id: str) -> None:
        self._peer_id = peer_id

    def start(self, receiver: StreamReceiver) -> None:
        """Begin delivering to `receiver`, from the next iteration of the loop on."""
        if self._receiver is not None:
            raise RuntimeError("the stream was started twice")
        self._receiver = receiver
        asyncio.get_running_loop().call_soon(self._begin)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue `data`; ignored once the stream is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def unsent_bytes(self) -> int:
        """See `ByteStream`."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def pause_reading(self) -> None:
        """Deliver nothing until `resume_reading`."""
        self._reading_paused = True
        self._follow_pause()

    def resume_reading(self) -> None:
        """Undo `pause_reading`."""
        self._reading_paused = False
        if self._early:
            asyncio.get_running_loop().call_soon(self._deliver_early)
        else:
            self._follow_pause()

    def close(self) -> None:
        """Flush the queue, then close; abort after CLOSE_DEADLINE_S."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.close()
        self._close_deadline = asyncio.get_running_loop().call_later(CLOSE_DEADLINE_S, self.abort)

    def abort(self) -> None:
        """Close at once and drop the queue."""
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.BufferedProtocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self._transport.set_write_buffer_limits(WRITE_HIGH_WATER_BYTES, WRITE_LOW_WATER_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._receiver is not None and self.greeting.done():
            return self._receiver.get_buffer(sizehint)
        return memoryview(self._scratch)[self._num_filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._receiver is not None and self.greeting.done():
            self._receiver.buffer_updated(nbytes)
            return
        self._num_filled += nbytes
        self._read_greeting()

    def eof_received(self) -> bool:
        return False  # p2pd has no half-close: EOF ends both directions

    def connection_lost(self, exc: Exception | None) -> None:
        if self._close_deadline is not None:
            self._close_deadline.cancel()
        if not self.greeting.done():
            self.greeting.set_exception(HostDownError("p2pd closed the connection before it answered"))
            self.greeting.exception()  # marks it as retrieved: the caller of an aborted open has left
        if not self.closed.done():
            self.closed.set_result(None)
        if self._receiver is not None:
            self._tell_closed(exc)

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._receiver is not None:
            self._receiver.pause_writing()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._receiver is not None:
            self._receiver.resume_writing()

    # ---- internals --------------------------------------------------------------------------------------------------

    def _read_greeting(self) -> None:
        """Take the length-prefixed message off the front, keep the bytes behind it, and pause reading."""
        try:
            header = decode_varint(memoryview(self._scratch)[: self._num_filled])
        except AddressError:
            header = (MAX_GREETING_BYTES + 1, 0)
        if header is None:
            return
        length, offset = header
        if length > MAX_GREETING_BYTES:
            logger.error("p2pd sent a greeting of %d bytes", length)
            self.abort()
            return
        if self._num_filled < offset + length:
            return
        self._early = memoryview(bytes(self._scratch[offset + length : self._num_filled]))
        message = bytes(self._scratch[offset : offset + length])
        self._scratch = bytearray()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        if not self.greeting.done():
            self.greeting.set_result(message)

    def _begin(self) -> None:
        assert self._receiver is not None
        if self._writing_paused and not self.closed.done():
            self._receiver.pause_writing()
        self._deliver_early()
        if self.closed.done():  # the stream ended before it had a receiver
            self._tell_closed(None)

    def _tell_closed(self, error: Exception | None) -> None:
        if self._receiver is not None and not self._told_closed:
            self._told_closed = True
            self._receiver.stream_closed(error)

    def _deliver_early(self) -> None:
        receiver = self._receiver
        assert receiver is not None
        try:
            while self._early and not self._reading_paused and not self.closed.done():
                buffer = receiver.get_buffer(len(self._early))
                num_bytes = min(len(buffer), len(self._early))
                buffer[:num_bytes] = self._early[:num_bytes]
                self._early = self._early[num_bytes:]
                receiver.buffer_updated(num_bytes)
        except Exception:  # a bug in the receiver: end this stream, as asyncio does for later bytes
            logger.exception("a receiver failed on bytes from %s", self._peer_id)
            self.abort()
        self._follow_pause()

    def _follow_pause(self) -> None:
        """Pause or resume the transport as requested."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._receiver is None:
            return
        if self._reading_paused:
            transport.pause_reading()
        else:
            transport.resume_reading()


class IncomingStreams:
    """Passes incoming streams to `accept`, within limits per peer and in total; refuses them while it is None."""

    def __init__(self, max_streams: int, max_streams_per_peer: int) -> None:
        self.accept: Callable[[ByteStream], None] | None = None
        self._max_streams = max_streams
        self._max_streams_per_peer = max_streams_per_peer
        self._streams: set[P2pdStream] = set()
        self._num_of_peer: Counter[str] = Counter()
        self._server: asyncio.Server | None = None

    async def serve(self, socket_path: Path) -> None:
        """Listen on `socket_path`. The listener survives restarts of p2pd."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._new_stream, str(socket_path), backlog=1024)

    def close(self) -> list[P2pdStream]:
        """Accept no more streams. Returns those that are still open."""
        if self._server is not None:
            self._server.close()
        return list(self._streams)

    def _new_stream(self) -> P2pdStream:
        stream = P2pdStream()
        deadline = asyncio.get_running_loop().call_later(GREETING_DEADLINE_S, stream.abort)
        stream.greeting.add_done_callback(lambda _: deadline.cancel())
        stream.greeting.add_done_callback(partial(self._greeted, stream))
        self._streams.add(stream)
        stream.closed.add_done_callback(lambda _: self._streams.discard(stream))
        return stream

    def _greeted(self, stream: P2pdStream, greeting: asyncio.Future[bytes]) -> None:
        """p2pd has named the peer of a stream: accept the stream, or refuse it."""
        if greeting.cancelled() or greeting.exception() is not None:
            return
        try:
            stream.peer_id = peer_of_stream(greeting.result())
        except AddressError as error:
            logger.warning("an incoming stream was refused: %s", error)
            stream.abort()
            return
        is_full = len(self._streams) > self._max_streams
        if self.accept is None or is_full or self._num_of_peer[stream.peer_id] >= self._max_streams_per_peer:
            logger.debug("an incoming stream of %s was refused", stream.peer_id)
            stream.abort()
            return
        self._num_of_peer[stream.peer_id] += 1
        stream.closed.add_done_callback(lambda _: self._forget(stream.peer_id))
        try:
            self.accept(stream)
        except Exception:
            logger.exception("accepting a stream of %s failed", stream.peer_id)
            stream.abort()

    def _forget(self, peer_id: str) -> None:
        self._num_of_peer[peer_id] -= 1
        if self._num_of_peer[peer_id] <= 0:
            del self._num_of_peer[peer_id]


def peer_of_stream(greeting: bytes) -> str:
    """The peer at the other end of an incoming stream, from p2pd's greeting; raises AddressError."""
    try:
        return peer_id_from_bytes(parsed(greeting, p2pd_pb2.StreamInfo()).peer)
    except HostDownError as error:
        raise AddressError(str(error)) from None
