"""A link: one long-lived byte stream to a peer that carries many concurrent calls in both directions.

A call is one request, any number of progress messages from the callee, and exactly one final frame: an answer or a
typed refusal. The protocol trusts neither the stream nor the peer: it has its own lengths, checksums, credits and
keepalives, and a violation closes this link and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from swarmtrain import __version__, world
from swarmtrain.p2p.network import ByteStream
from swarmtrain.rpc.calls import Caller, OnProgress
from swarmtrain.rpc.errors import (
    CallTimeout,
    LinkClosed,
    LinkRefused,
    PeerSilent,
    ProtocolViolation,
    RefusalCode,
    Violation,
)
from swarmtrain.rpc.exchange import Callee, Handler
from swarmtrain.rpc.frames import FrameReader, FrameRouter
from swarmtrain.rpc.gate import Gate, OpenGate
from swarmtrain.rpc.inbound import InboundMessage, InboundMessages
from swarmtrain.rpc.limits import Budget, Shared
from swarmtrain.rpc.meter import LinkMeter, Traffic
from swarmtrain.rpc.outbound import OutboundQueue
from swarmtrain.units import MIB
from swarmtrain.waiting import wait_event
from swarmtrain.wire.frames import (
    FrameType,
    RefusalPayload,
    pack_frame,
    pack_hello,
    pack_nonce,
    pack_pair,
    pack_refusal,
)
from swarmtrain.wire.schema import Message, Priority, Registry


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Settings of one link. The defaults suit home connections."""

    heartbeat_s: float = 2.0
    missed_heartbeats: int = 3  # the peer counts as dead after this many intervals without a byte from it
    chunk_bytes: int = 128 << 10  # an urgent message waits for at most one chunk: 50 ms at 20 Mbit/s; see fit_chunks
    outbound_bytes: int = 64 * MIB  # per priority; above it, a call waits before it queues its request
    inbound_bytes: int = 512 * MIB  # of requests and, separately, of answers that are being received or handled
    max_inbound_calls: int = 256  # at once; further requests get BUSY
    busy_retry_s: float = 0.25  # the retry_after_s of a BUSY
    write_stall_s: float = 60.0  # the link ends if the peer takes no byte for this long, even if it still sends
    stall_grace_s: float = 30.0  # the link ends if a request is incomplete this long after its own deadline
    half_open_s: float = 30.0  # or if it may be sent and its link carries fewer than half_open_bytes in this time
    half_open_bytes: int = 16 << 10
    close_s: float = 5.0  # how long a graceful close waits for open calls and for the other end


class Link:
    """See the module docstring. Construct it on the running loop, then `start` it.

    `initiator` is True at exactly one end: the one that opened the stream.
    """

    def __init__(
        self,
        stream: ByteStream,
        registry: Registry,
        handler: Handler,
        *,
        initiator: bool,
        options: LinkOptions | None = None,
        shared: Shared | None = None,
        gate: Gate | None = None,
        meter: LinkMeter | None = None,
        on_closed: Callable[[Link], None] | None = None,
    ) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        self.peer_id = stream.peer_id
        self.registry = registry
        self.options = options = options or LinkOptions()
        self.shared = shared = shared or Shared()
        self.gate = gate or OpenGate()
        self.meter = meter or LinkMeter(stream.peer_id)
        self.traffic = Traffic()
        self.queue = OutboundQueue(
            stream.write,
            self.traffic.sent,
            shared.limiter.up,
            chunk_bytes=options.chunk_bytes,
            limit_bytes=options.outbound_bytes,
        )
        self.inbound = InboundMessages(
            registry,
            self.queue.send_control,
            request_budget=Budget(options.inbound_bytes, shared.request_budget),
            answer_budget=Budget(options.inbound_bytes, shared.answer_budget),
        )
        self.caller = Caller(self, first_call_id=1 if initiator else 2)
        self.callee = Callee(self, handler)
        self.keepalive = KeepAlive(self)
        self._router = FrameRouter(self, initiator=initiator)
        self._reader = FrameReader(self._router)
        self._is_closing = False
        self._call_ended = asyncio.Event()
        self._was_greeted = asyncio.Event()  # or it has ended
        self._stream_closed = asyncio.Event()
        self._is_reading_paused = False
        self._abort_timer: asyncio.TimerHandle | None = None
        self.error: LinkClosed | None = None  # why the link ended
        self.used_at = self._loop.time()  # when a call was last opened or ended

    def start(self) -> None:
        """Send HELLO and begin to receive."""
        self.queue.send_control(pack_hello(self.gate.proof(self.peer_id), f"swarmtrain {__version__}"))
        self.keepalive.start()
        self._stream.start(self)

    # For users of the link.

    @property
    def is_open(self) -> bool:
        """Whether it takes new calls."""
        return self.error is None and not self._is_closing

    @property
    def was_greeted(self) -> bool:
        """Whether the other end has sent HELLO: it speaks the protocol and has accepted the stream."""
        return self._router.has_hello

    @property
    def num_open_calls(self) -> int:
        """Open calls of both directions."""
        return self.caller.num_open + self.callee.num_open

    @property
    def backlog_bytes(self) -> int:
        """Body bytes that are queued here and have not been written yet."""
        return self.queue.queued_bytes

    @property
    def received_bytes(self) -> int:
        """Body bytes received, those of unfinished messages included."""
        return self._reader.num_body_bytes

    async def call(self, request: Message, *, deadline_s: float, on_progress: OnProgress | None = None) -> Message:
        """Send `request`; return its final answer.

        `deadline_s` bounds everything: waiting in the queue, sending, the callee's work and the answer's transfer.
        `on_progress` is called on the loop with each progress message, in order, before the answer is returned.
        If the awaiting task is cancelled or the deadline passes, the callee gets a CANCEL.
        Raises LinkClosed (PeerSilent, ProtocolViolation), CallTimeout, CallRefused, MalformedAnswer, or WireError if
        `request` itself breaks its schema.
        """
        if not self.is_open:
            raise self._closed_error(False)
        self.used_at = self._loop.time()
        if not self.was_greeted:  # until the other end has proven itself it hears nothing of the run
            waited_since = self._loop.time()
            if not await wait_event(self._was_greeted, deadline_s):
                raise CallTimeout(f"{self.peer_id} has not said HELLO in {deadline_s:g} s")
            if not self.is_open:
                raise self._closed_error(False)
            deadline_s -= self._loop.time() - waited_since
        return await self.caller.call(request, deadline_s=deadline_s, on_progress=on_progress)

    def show_certificate(self) -> None:
        """Show the other end this one's certificate, if it has proven itself."""
        credential = self.gate.credential()
        if self.was_greeted and credential and self.error is None:
            self.queue.send_control(pack_frame(FrameType.CERTIFICATE, 0, credential))

    async def close(self, timeout_s: float | None = None) -> None:
        """Take no new calls, wait for open ones, send GOODBYE, and return when the stream is closed.

        All within `timeout_s` (default: the option `close_s`); calls that are still open then fail with LinkClosed.
        """
        if self._stream_closed.is_set():
            return
        ends_at = self._loop.time() + (self.options.close_s if timeout_s is None else timeout_s)
        self._is_closing = True
        self.callee.is_closing = True
        try:
            async with asyncio.timeout_at(ends_at):
                while self.error is None and self.num_open_calls:
                    self._call_ended.clear()
                    await self._call_ended.wait()
                self._say_goodbye("closed", "")
                # The other end closes the stream: only it knows that it has read everything.
                await self._stream_closed.wait()
        except TimeoutError:
            pass
        finally:
            self.abort("closed by this end")

    def refuse_peer(self) -> None:
        """Close at once, and say that this end takes no link with the peer any more."""
        self._say_goodbye(RefusalCode.EXCLUDED, "")
        self._end(LinkClosed(f"link to {self.peer_id}: the peer is excluded"))
        self._close_stream()

    def abort(self, reason: str = "aborted by this end") -> None:
        """Close at once; open calls fail."""
        self._end(LinkClosed(f"link to {self.peer_id}: {reason}"))
        self._stream.abort()

    # StreamReceiver: called by the stream.

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `StreamReceiver`."""
        buffer = self._reader.get_buffer()
        # Under a receive cap, read little at once: pauses between the reads keep the cap.
        return buffer[: self.shared.limiter.down.grant_bytes(len(buffer))]

    def buffer_updated(self, num_bytes: int) -> None:
        """See `StreamReceiver`."""
        self.keepalive.heard()
        try:
            self._reader.buffer_updated(num_bytes)
        except ProtocolViolation as violation:
            self._violated(violation)
        self._keep_receive_cap(num_bytes)

    def stream_closed(self, error: Exception | None) -> None:
        """See `StreamReceiver`."""
        self._stream_closed.set()
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._end(LinkClosed(f"link to {self.peer_id}: the stream ended" + (f" ({error})" if error else "")))

    def pause_writing(self) -> None:
        """See `StreamReceiver`."""
        self.queue.pause()

    def resume_writing(self) -> None:
        """See `StreamReceiver`."""
        self.queue.resume()

    def _keep_receive_cap(self, num_bytes: int) -> None:
        bucket = self.shared.limiter.down
        bucket.charge(num_bytes)
        if bucket.in_debt() and not self._is_reading_paused and self.error is None:
            self._is_reading_paused = True
            self._stream.pause_reading()
            if bucket.acquire(0, Priority.CONTROL, self._resume_reading) is None:
                self._resume_reading()  # the debt was paid off between the two checks

    def _resume_reading(self) -> None:
        self._is_reading_paused = False
        if not self._stream_closed.is_set():
            self._stream.resume_reading()

    # For the two halves of the link, its frame router and its keepalive.

    def greeted(self) -> None:
        """The other end has proven itself: show the certificate, then begin the calls that wait."""
        self.show_certificate()
        self._was_greeted.set()

    def refuse(self, call_id: int, refusal: RefusalPayload) -> None:
        """Answer a call with a refusal."""
        self.traffic.refusals_sent[str(refusal.code)] += 1
        self.queue.send_control(pack_refusal(FrameType.REFUSAL, call_id, refusal))

    def count_received(self, message: InboundMessage, num_blob_bytes: int) -> None:
        """Count a complete message, and tell its sender how fast it arrived."""
        traffic = self.traffic.received.kind(message.kind)
        traffic.num_messages += 1
        traffic.blob_bytes += num_blob_bytes
        measurement = self.inbound.measure(message)
        if measurement is not None:
            self.meter.down.add(measurement.num_bytes, measurement.seconds)
            microseconds = max(1, round(measurement.seconds * 1e6))
            frame = pack_pair(FrameType.RECEIVED, message.call_id, measurement.num_bytes, microseconds)
            self.queue.send_control(frame)

    def call_ended(self) -> None:
        """Note that a call of either direction has ended: a graceful close may wait for it."""
        self.used_at = self._loop.time()
        self._call_ended.set()

    def tick(self, now: float) -> None:
        """At every keepalive: fit the chunk size to the measured rate, and look for stalled calls."""
        if (rate := self.meter.up.bytes_per_s) is not None:
            self.queue.fit_chunks(rate)
        try:
            self.callee.check_stalled(now)
            self.caller.check_abandoned()
            if self.queue.stalled_s(self._stream.unsent_bytes) > self.options.write_stall_s:
                stalled_s = self.options.write_stall_s
                raise ProtocolViolation(Violation.NOT_READING, f"the peer took no byte for {stalled_s:g} s")
        except ProtocolViolation as violation:
            self._violated(violation)

    def peer_silent(self, silent_s: float) -> None:
        """End the link: the peer has been silent for too long."""
        self._end(PeerSilent(f"link to {self.peer_id}: no byte received for {silent_s:.1f} s"))
        self._stream.abort()

    def _violated(self, violation: ProtocolViolation) -> None:
        if self.error is not None:
            return
        self.traffic.violations[violation.violation.value] += 1
        self._say_goodbye(violation.violation.value, str(violation))
        self._end(violation)
        self._close_stream()

    def goodbye_received(self, payload: RefusalPayload, last_seen: int) -> None:
        """The other end closes the link; it has begun to handle no call after `last_seen`."""
        detail = ": ".join(part for part in (payload.code, payload.text) if part)
        kind = LinkRefused if payload.code == RefusalCode.EXCLUDED else LinkClosed
        self._end(kind(f"link to {self.peer_id}: the peer closed it ({detail})"), last_seen)
        self._close_stream()

    def _say_goodbye(self, code: str, text: str) -> None:
        """Send GOODBYE, the last frame of this end."""
        if self.error is None:
            self.callee.is_closing = True
            # It names the last call that was begun here, so that the caller may safely repeat later ones elsewhere.
            frame = pack_refusal(FrameType.GOODBYE, self.callee.last_call_id, RefusalPayload(code, text))
            self.queue.send_control(frame)
            self.queue.flush_control()

    def _close_stream(self) -> None:
        """Flush and close; abort after `close_s`."""
        if not self._stream_closed.is_set():
            self._stream.close()
            self._abort_timer = self._loop.call_later(self.options.close_s, self._stream.abort)

    def _closed_error(self, request_sent: bool) -> LinkClosed:
        """A fresh error for each call: one object in many tasks would mix their tracebacks."""
        error = self.error
        if isinstance(error, ProtocolViolation):
            return ProtocolViolation(error.violation, error.detail, request_sent=request_sent)
        if isinstance(error, PeerSilent | LinkRefused):
            return type(error)(str(error), request_sent=request_sent)
        return LinkClosed(str(error or f"link to {self.peer_id}: closing"), request_sent=request_sent)

    def _end(self, error: LinkClosed, last_seen: int | None = None) -> None:
        """Stop receiving and sending, and fail every open call with the reason."""
        if self.error is not None:
            return
        self.error = error
        self.keepalive.stop()
        self._reader.stop()
        self.queue.close()
        self.inbound.close()
        self.caller.link_lost(self._closed_error, last_seen)
        self.callee.link_lost()
        self._call_ended.set()
        self._was_greeted.set()
        if self._on_closed is not None:
            self._on_closed(self)


class KeepAlive:
    """Detects a dead peer: pings at a fixed interval, whatever else the link does.

    Any received byte counts, not only a pong: a pong may be late behind a long transfer, but then bytes arrive. After
    `missed_heartbeats` intervals without a byte the peer counts as silent.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._interval_s = link.options.heartbeat_s
        self._missed_limit = link.options.missed_heartbeats
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self._ticked_at = self._heard_at
        self._nonce = 0
        self._sent_at: float | None = None

    def start(self) -> None:
        """Send the first ping, and begin to ping regularly."""
        self._heard_at = self._ticked_at = self._loop.time()
        self._ping()
        self._timer = self._loop.call_later(self._interval_s, self._tick)

    def stop(self) -> None:
        """Stop pinging, and make no further calls to the link."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        """Bytes arrived."""
        self._heard_at = self._loop.time()

    def pong(self, nonce: int) -> None:
        """A pong arrived; the round trip is measured if it answers the latest ping."""
        if nonce == self._nonce and self._sent_at is not None:
            self._link.meter.rtt.add(world.monotonic() - self._sent_at)
            self._sent_at = None

    def _tick(self) -> None:
        now = self._loop.time()
        # If this process was suspended or its loop was blocked, bytes of the peer may wait unread.
        if now - self._ticked_at > 2 * self._interval_s:
            self._heard_at = now
        self._ticked_at = now
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        silent_s = now - self._heard_at
        if silent_s > self._missed_limit * self._interval_s:
            self._link.peer_silent(silent_s)
            return
        self._link.tick(now)
        self._ping()

    def _ping(self) -> None:
        self._nonce += 1
        self._sent_at = world.monotonic()  # finer than the loop's clock, which may count in milliseconds
        self._link.queue.send_control(pack_nonce(FrameType.PING, self._nonce))
