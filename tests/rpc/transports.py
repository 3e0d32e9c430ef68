"""Byte streams for tests: pipes in memory that can be cut, corrupted, stalled and slowed, and real sockets.

A pipe's two `Wire`s are independent. Faults are set on a wire at any time; offsets count bytes since the start.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from swarmtrain.p2p.errors import HostDownError, NetError
from swarmtrain.p2p.network import ByteStream, StreamReceiver


@dataclass
class Faults:
    """What a wire does to its bytes."""

    cut_at: int | None = None  # nothing from this byte on arrives; both ends see a clean end
    flip_bit_at: tuple[int, int] | None = None  # (byte, bit)
    stalled: bool = False  # keeps bytes, delivers none
    silent: bool = False  # swallows bytes: the sender is happy, the receiver hears nothing
    piece_bytes: int = 1 << 30  # most bytes per delivery
    capacity_bytes: int = 256 << 10  # more than this undelivered pauses the writer


@dataclass
class Wire:
    """One direction of a pipe."""

    faults: Faults = field(default_factory=Faults)
    num_written: int = 0
    num_delivered: int = 0
    most_buffered: int = 0
    written: bytearray = field(default_factory=bytearray)
    keep: bool = False  # keep a copy of everything written, for tests that look at frames


class MemoryStream:
    """One end of a pipe in memory. Implements ByteStream."""

    def __init__(self, peer_id: str, wire_out: Wire) -> None:
        self.peer_id = peer_id
        self.wire_out = wire_out
        self.other: MemoryStream
        self._receiver: StreamReceiver | None = None
        self._inbox = bytearray()
        self._reading = True
        self._scheduled = False
        self._ending = False
        self._ended = False
        self._writer_paused = False
        self.closed = asyncio.Event()

    def start(self, receiver: StreamReceiver) -> None:
        self._receiver = receiver
        self._schedule()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ended or self._ending:
            return
        wire, faults = self.wire_out, self.wire_out.faults
        piece = bytearray(data)
        start, end = wire.num_written, wire.num_written + len(piece)
        wire.num_written = end
        if wire.keep:
            wire.written += piece
        if faults.flip_bit_at is not None and start <= faults.flip_bit_at[0] < end:
            piece[faults.flip_bit_at[0] - start] ^= 1 << faults.flip_bit_at[1]
        if faults.silent:
            return
        if faults.cut_at is not None and end >= faults.cut_at:
            self.other._arrive(piece[: max(0, faults.cut_at - start)])
            self._end_both()
            return
        self.other._arrive(piece)
        wire.most_buffered = max(wire.most_buffered, len(self.other._inbox))
        if len(self.other._inbox) > faults.capacity_bytes and not self._writer_paused:
            self._writer_paused = True
            assert self._receiver is not None
            self._receiver.pause_writing()

    @property
    def unsent_bytes(self) -> int:
        return len(self.other._inbox)

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._schedule()

    def close(self) -> None:
        self._end_both()

    def abort(self) -> None:
        self._inbox.clear()
        self._end_both()

    def stall(self, stalled: bool) -> None:
        """Hold back, or let go, what this end writes."""
        self.wire_out.faults.stalled = stalled
        self.other._schedule()

    @property
    def num_waiting(self) -> int:
        """Bytes that have come and were not delivered yet."""
        return len(self._inbox)

    def _arrive(self, data: bytearray) -> None:
        self._inbox += data
        self._schedule()

    def _end_both(self) -> None:
        for end in (self, self.other):
            end._ending = True
            end._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self._ended:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        wire = self.other.wire_out
        if self._receiver is None or self._ended:
            return
        if self._inbox and self._reading and not wire.faults.stalled:
            buffer = self._receiver.get_buffer(-1)
            assert len(buffer)
            count = min(len(buffer), len(self._inbox), wire.faults.piece_bytes)
            buffer[:count] = self._inbox[:count]
            del self._inbox[:count]
            wire.num_delivered += count
            self._receiver.buffer_updated(count)
            self._resume_other()
            self._schedule()
        elif self._ending:
            self._ended = True
            self.closed.set()
            self._receiver.stream_closed(None)

    def _resume_other(self) -> None:
        other = self.other
        if other._writer_paused and len(self._inbox) <= other.wire_out.faults.capacity_bytes // 4:
            other._writer_paused = False
            if other._receiver is not None and not other._ended:
                other._receiver.resume_writing()


def memory_pair(left_id: str = "left", right_id: str = "right") -> tuple[MemoryStream, MemoryStream]:
    """Two ends of a pipe: the left one's peer is the right one."""
    left, right = MemoryStream(right_id, Wire()), MemoryStream(left_id, Wire())
    left.other, right.other = right, left
    return left, right


class SocketStream(asyncio.BufferedProtocol):
    """A ByteStream over a real socket."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self._transport: asyncio.Transport
        self._receiver: StreamReceiver | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._transport.pause_reading()

    def start(self, receiver: StreamReceiver) -> None:
        self._receiver = receiver
        self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self._receiver is not None
        return self._receiver.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        assert self._receiver is not None
        self._receiver.buffer_updated(nbytes)

    def connection_lost(self, error: Exception | None) -> None:
        if self._receiver is not None:
            self._receiver.stream_closed(error)

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.pause_writing()

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.resume_writing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


async def socket_pair(left_id: str = "left", right_id: str = "right") -> tuple[SocketStream, SocketStream]:
    """Two ends of a real (unix) socket."""
    loop = asyncio.get_running_loop()
    left_socket, right_socket = socket.socketpair()
    _, left = await loop.create_connection(lambda: SocketStream(right_id), sock=left_socket)
    _, right = await loop.create_connection(lambda: SocketStream(left_id), sock=right_socket)
    return left, right


class MemoryNetwork:
    """Transports in memory that can reach each other by peer id."""

    def __init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}
        self.streams: list[tuple[MemoryStream, MemoryStream]] = []

    def add(self, peer_id: str) -> MemoryTransport:
        """A new peer."""
        self.transports[peer_id] = MemoryTransport(self, peer_id)
        return self.transports[peer_id]


class MemoryTransport:
    """One peer of a MemoryNetwork. Implements Transport."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self._network = network
        self.peer_id = peer_id
        self.num_dials = 0
        self.refuses = False  # dials to this peer fail
        self.hangs: asyncio.Event | None = None  # dials to this peer wait for it
        self._accept: Callable[[ByteStream], None] | None = None
        self.is_away = False

    async def is_up(self) -> bool:
        return not self.is_away

    async def open(self, peer_id: str, *, timeout_s: float) -> ByteStream:
        self.num_dials += 1
        if self.is_away:
            raise HostDownError("away")
        target = self._network.transports.get(peer_id)
        if target is None:
            raise NetError(f"no route to {peer_id}")
        if target.hangs is not None:
            await target.hangs.wait()
        if target.refuses or target._accept is None:
            raise NetError(f"{peer_id} refused the connection")
        ours, theirs = memory_pair(self.peer_id, peer_id)
        self._network.streams.append((ours, theirs))
        target._accept(theirs)
        return ours

    def listen(self, accept: Callable[[ByteStream], None]) -> None:
        self._accept = accept
