"""The contract between the byte movers below (libp2p, plain sockets in tests) and the links above.

A `ByteStream` is an ordered pipe of bytes to one authenticated peer. It may break at any byte, and a break may look
like a clean end: whoever sits on top brings lengths, checksums, end marks and keepalives of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class StreamReceiver(Protocol):
    """What a link hands to its stream; called on the event loop's thread only (as `asyncio.BufferedProtocol`)."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go. Never empty."""

    def buffer_updated(self, num_bytes: int) -> None:
        """`num_bytes` were written to the start of the last buffer."""

    def stream_closed(self, error: Exception | None) -> None:
        """The stream is gone. Called exactly once; nothing is called after it."""

    def pause_writing(self) -> None:
        """The outgoing buffer is above its high-water mark: stop writing."""

    def resume_writing(self) -> None:
        """The outgoing buffer has drained."""


class ByteStream(Protocol):
    """An open pipe. Bytes that arrived before `start` are kept and delivered then."""

    @property
    def peer_id(self) -> str:
        """The authenticated identity at the other end."""

    def start(self, receiver: StreamReceiver) -> None:
        """Begin delivering to `receiver`. Call once, soon after the stream was opened or accepted."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue `data`; never blocks. The caller may not change it afterwards. Ignored after the stream closed."""

    @property
    def unsent_bytes(self) -> int:
        """What was written and is still here: falls while the other end takes anything."""

    def pause_reading(self) -> None:
        """Deliver nothing until `resume_reading`: back-pressure reaches the other end."""

    def resume_reading(self) -> None:
        """Undo `pause_reading`."""

    def close(self) -> None:
        """Flush what is queued, then close. Unread input is lost at the other end's peril: let the receiver close."""

    def abort(self) -> None:
        """Close at once, dropping what is queued."""


class Transport(Protocol):
    """Opens streams to peers by identity, and accepts theirs."""

    @property
    def peer_id(self) -> str:
        """This end's identity."""

    async def open(self, peer_id: str, *, timeout_s: float) -> ByteStream:
        """A new stream to `peer_id`; raises a `NetError` within `timeout_s` if that cannot be had."""

    async def is_up(self) -> bool:
        """Whether this end itself works. Asked when something has failed: if not, it says nothing about others."""

    def listen(self, accept: Callable[[ByteStream], None]) -> None:
        """Call `accept` for every incoming stream from now on."""
