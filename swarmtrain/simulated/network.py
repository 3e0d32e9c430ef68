"""A simulated network that behaves like libp2p: streams break at any byte, and a break looks like a normal end.

Every direction between two machines is a line of its own, with a delay, a rate, and whether anything passes. What does
not pass waits, as TCP's segments do, and comes when the line is back, if the stream still exists by then. A process
that is killed closes its streams; a machine that vanishes does not.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmtrain.p2p.network import StreamReceiver

if TYPE_CHECKING:
    from swarmtrain.simulated.host import SimulatedHost
    from swarmtrain.simulated.loop import VirtualLoop

HIGH_WATER_BYTES = 256 << 10  # undelivered bytes above which the writer is told to pause
LOW_WATER_BYTES = 64 << 10
SEGMENT_BYTES = 1400  # at most this much arrives at once, or
SEGMENT_S = 0.25  # this much of a line's time: on a slow line, large writes arrive in pieces
KILLED_S = 0.05  # p2pd ends this long after its parent's death


@dataclass
class Line:
    """One direction between two machines."""

    delay_s: float = 0.005
    jitter_s: float = 0.001
    bytes_per_s: float = 12.5e6
    is_blocked: bool = False
    free_at: float = 0.0  # when the last bytes have left


class Network:
    """All lines and streams of a swarm."""

    def __init__(self, loop: VirtualLoop, seed: str, trace: Callable[[str], None]) -> None:
        self.loop, self._trace = loop, trace
        self.rng = random.Random(seed)
        # The hosts on the network now, by peer id and machine: copies of one directory share an identity.
        self.hosts: dict[tuple[str, str], SimulatedHost] = {}
        self.lines: dict[tuple[str, str], Line] = {}  # by names of machines
        self.default = Line()
        self.pipes: list[Pipe] = []
        self.streams: list[tuple[SimulatedStream, SimulatedStream]] = []
        self.connected: dict[
            frozenset[tuple[str, str]], None
        ] = {}  # pairs with a connection: they can open streams without an address
        self.num_bytes = 0
        self.context = contextvars.Context()  # for callbacks of the wire, which belong to no process

    def line(self, source: str, target: str) -> Line:
        """The line from one machine to another."""
        found = self.lines.get((source, target))
        if found is None:
            default = self.default
            found = self.lines[source, target] = Line(default.delay_s, default.jitter_s, default.bytes_per_s)
        return found

    def arrival(self, source: str, target: str, num_bytes: int) -> float:
        """The arrival time of bytes that are sent now, if the line is not blocked."""
        line, now = self.line(source, target), self.loop.time()
        line.free_at = max(now, line.free_at) + num_bytes / line.bytes_per_s
        return line.free_at + line.delay_s + line.jitter_s * self.rng.random()

    def is_blocked(self, source: str, target: str) -> bool:
        """Whether the line is blocked now."""
        return self.line(source, target).is_blocked

    def block(self, source: str, target: str, blocked: bool = True) -> None:
        """Block or unblock one direction; bytes that wait continue when it is unblocked."""
        self.line(source, target).is_blocked = blocked
        if not blocked:
            for pipe in self.pipes:
                if (pipe.source, pipe.target) == (source, target):
                    pipe.poke()

    def note(self, source: str, target: str, num_bytes: int) -> None:
        """Bytes have arrived."""
        self.num_bytes += num_bytes
        self._trace(f"{self.loop.time():.9f} {source} > {target} {num_bytes}")

    def connect(self, one: SimulatedHost, other: SimulatedHost) -> tuple[SimulatedStream, SimulatedStream]:
        """A new stream: the ends of `one` and `other`."""
        left, right = SimulatedStream(self, one, other.peer_id), SimulatedStream(self, other, one.peer_id)
        left.other, right.other = right, left
        for end in (left, right):
            end.outgoing = Pipe(self, end)
            self.pipes.append(end.outgoing)
        self.streams.append((left, right))
        return left, right

    def ended(self, end: SimulatedStream) -> None:
        """Forget streams that both ends have closed."""
        self.streams = [pair for pair in self.streams if not (pair[0].is_ended and pair[1].is_ended)]
        self.pipes = [pipe for pipe in self.pipes if not (pipe.end.is_ended and pipe.end.other.is_ended)]

    def cut(self, machine: str, other: str | None = None) -> int:
        """Break all streams of a machine (or those to another one), at any byte; returns their number."""
        count = 0
        for pair in list(self.streams):
            names = [end.host.machine.name for end in pair]
            if machine in names and (other is None or other in names) and not pair[0].is_ended:
                count += 1
                for end in pair:
                    end.outgoing.truncate(self.rng)
                    end.outgoing.finish()
        return count

    def flip(self, machine: str) -> bool:
        """Flip one bit of a machine's data in flight; returns whether there was any."""
        busy = [pipe for pipe in self.pipes if machine in (pipe.source, pipe.target) and pipe.num_waiting]
        if busy:
            self.rng.choice(busy).flip(self.rng)
        return bool(busy)

    def detach(self, host: SimulatedHost, *, silently: bool) -> None:
        """A process ends with its streams. `silently`: the other ends are not told, as after a loss of power."""
        self.leave(host)
        for pair in list(self.streams):
            for end in pair:
                if end.host is host and not end.is_ended:
                    end.is_ended = True
                    if silently:
                        end.outgoing.is_void = True
                    else:
                        end.outgoing.truncate(self.rng)
                        end.outgoing.finish(delay_s=KILLED_S * self.rng.random())
                    self.ended(end)

    def leave(self, host: SimulatedHost) -> None:
        """Refuse new connections and streams to this host."""
        if self.hosts.get(host.key) is host:
            del self.hosts[host.key]
        for pair in [pair for pair in self.connected if host.key in pair]:
            del self.connected[pair]

    def ends_of(self, host: SimulatedHost) -> list[SimulatedStream]:
        """The open ends of a host's streams."""
        return [end for pair in self.streams for end in pair if end.host is host and not end.is_ended]


class Pipe:
    """One direction of one stream."""

    def __init__(self, network: Network, end: SimulatedStream) -> None:
        self._network, self.end = network, end
        self._items: deque[tuple[float, bytes | None]] = deque()  # None: the end
        self._timer: asyncio.TimerHandle | None = None
        self._last_at = 0.0
        self._is_finished = False
        self.is_void = False  # nothing more arrives, and neither end is told
        self.num_bytes = 0

    @property
    def source(self) -> str:
        """The sending machine."""
        return self.end.host.machine.name

    @property
    def target(self) -> str:
        """The receiving machine."""
        return self.end.other.host.machine.name

    def send(self, data: bytes) -> None:
        """Send bytes."""
        if self._is_finished or self.is_void:
            return
        most = max(SEGMENT_BYTES, int(SEGMENT_S * self._network.line(self.source, self.target).bytes_per_s))
        for start in range(0, len(data), most):
            segment = data[start : start + most]
            at = self._network.arrival(self.source, self.target, len(segment))
            self._last_at = max(at, self._last_at)
            self._items.append((self._last_at, segment))
        self.num_bytes += len(data)
        self._set_timer()

    def finish(self, delay_s: float = 0.0) -> None:
        """End the stream after the bytes in flight."""
        if not self._is_finished and not self.is_void:
            self._is_finished = True
            at = self._network.arrival(self.source, self.target, 0) + delay_s
            self._last_at = max(at, self._last_at)
            self._items.append((self._last_at, None))
            self._set_timer()

    def truncate(self, rng: random.Random) -> None:
        """Lose some of the bytes in flight: a stream may break at any byte."""
        if self._is_finished or not self._items:
            return
        keep = rng.randrange(len(self._items) + 1)
        while len(self._items) > keep:
            _, data = self._items.pop()
            self.num_bytes -= len(data or b"")
        if self._items and rng.random() < 0.5:
            at, data = self._items.pop()
            assert data is not None
            kept = data[: rng.randrange(len(data) + 1)]
            self.num_bytes -= len(data) - len(kept)
            self._items.append((at, kept))

    @property
    def num_waiting(self) -> int:
        """Pieces in flight."""
        return sum(1 for _, data in self._items if data)

    def flip(self, rng: random.Random) -> None:
        """Flip one bit in flight."""
        index = rng.choice([number for number, (_, data) in enumerate(self._items) if data])
        at, data = self._items[index]
        damaged = bytearray(data or b"")
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        self._items[index] = (at, bytes(damaged))

    def poke(self) -> None:
        """Deliver pieces that could not arrive before."""
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is None and self._items and not self.is_void:
            at = max(self._items[0][0], self._network.loop.time())
            self._timer = self._network.loop.call_at(at, self._arrive, context=self._network.context)

    def _arrive(self) -> None:
        """Runs in no process's context; the receiver's callback runs in the receiver's."""
        self._timer = None
        if self.is_void or self._network.is_blocked(self.source, self.target):
            return
        now = self._network.loop.time()
        while self._items and self._items[0][0] <= now:
            _, data = self._items.popleft()
            if data is not None:
                self._network.note(self.source, self.target, len(data))
            self.end.other.arrived(data)
        self._set_timer()

    def consumed(self, num_bytes: int) -> None:
        """The receiver has read bytes: the writer may continue."""
        self.num_bytes -= num_bytes
        self.end.drained()


class SimulatedStream:
    """One end of a stream; a `ByteStream`."""

    def __init__(self, network: Network, host: SimulatedHost, peer_id: str) -> None:
        self._network, self.host, self._peer_id = network, host, peer_id
        self.other: SimulatedStream
        self.outgoing: Pipe
        self._receiver: StreamReceiver | None = None
        self._inbox: deque[bytes | None] = deque()
        self._is_reading = True
        self._is_delivering = False
        self._is_writer_paused = False
        self.is_ended = False

    @property
    def peer_id(self) -> str:
        """See `ByteStream`."""
        return self._peer_id

    def start(self, receiver: StreamReceiver) -> None:
        """See `ByteStream`."""
        self._receiver = receiver
        self._deliver_soon()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `ByteStream`."""
        if self.is_ended or not self.host.process.is_alive:
            return
        self.outgoing.send(bytes(data))
        if self.outgoing.num_bytes > HIGH_WATER_BYTES and not self._is_writer_paused and self._receiver is not None:
            self._is_writer_paused = True
            self._receiver.pause_writing()

    @property
    def unsent_bytes(self) -> int:
        """See `ByteStream`."""
        return self.outgoing.num_bytes

    def pause_reading(self) -> None:
        """See `ByteStream`."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """See `ByteStream`."""
        self._is_reading = True
        self._deliver_soon()

    def close(self) -> None:
        """See `ByteStream`."""
        self.outgoing.finish()
        self._end_soon()

    def abort(self) -> None:
        """See `ByteStream`."""
        if not self.is_ended:
            self.outgoing.truncate(self._network.rng)
        self.outgoing.finish()
        self._end_soon()

    def arrived(self, data: bytes | None) -> None:
        """Bytes or the end arrive."""
        if self.is_ended:
            return
        self._inbox.append(data)
        self._deliver_soon()

    def drained(self) -> None:
        """The other end has read bytes of this end."""
        if self._is_writer_paused and self.outgoing.num_bytes < LOW_WATER_BYTES:
            self._is_writer_paused = False
            self.host.process.call_soon(self._resume)

    def _resume(self) -> None:
        if not self.is_ended and self._receiver is not None:
            self._receiver.resume_writing()

    def _deliver_soon(self) -> None:
        if not self._is_delivering and self._inbox and self._receiver is not None and not self.is_ended:
            self._is_delivering = True
            self.host.process.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_delivering = False
        receiver = self._receiver
        while self._inbox and self._is_reading and not self.is_ended and receiver is not None:
            data = self._inbox.popleft()
            if data is None:
                self._end()
                return
            view, position = memoryview(data), 0
            while position < len(view) and not self.is_ended:
                buffer = receiver.get_buffer(-1)
                count = min(len(buffer), len(view) - position)
                buffer[:count] = view[position : position + count]
                position += count
                receiver.buffer_updated(count)
                if not self._is_reading and position < len(view):
                    self._inbox.appendleft(bytes(view[position:]))
                    break
            self.other.outgoing.consumed(position)

    def _end_soon(self) -> None:
        if not self.is_ended:
            self.host.process.call_soon(self._end)

    def _end(self) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        self.outgoing.finish()
        self._inbox.clear()
        self._network.ended(self)
        if self._receiver is not None:
            self._receiver.stream_closed(None)
