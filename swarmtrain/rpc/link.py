"""A link: one long-lived byte stream to a neighbour that carries many calls at once, both ways.

A call is one request, any number of progress messages from the callee, and exactly one last word: an answer or a typed
refusal. The protocol does not trust the stream to end well or the peer to behave: lengths, checksums, credits and
keepalives are its own, and any breach closes this link and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, overload

from swarmtrain import __version__
from swarmtrain.p2p.network import ByteStream
from swarmtrain.rpc.budget import Budget
from swarmtrain.rpc.calls import Caller, OnProgress
from swarmtrain.rpc.core import LinkCore, LinkOptions, Shared
from swarmtrain.rpc.counters import Traffic
from swarmtrain.rpc.errors import LinkClosed, MalformedAnswer, PeerSilent, ProtocolViolation, Violation
from swarmtrain.rpc.exchange import Callee, Handler
from swarmtrain.rpc.frame_router import FrameRouter
from swarmtrain.rpc.inbound import InboundMessages
from swarmtrain.rpc.keepalive import KeepAlive
from swarmtrain.rpc.meter import LinkMeter
from swarmtrain.rpc.outbound import OutboundQueue
from swarmtrain.rpc.receiver import FrameReader
from swarmtrain.wire.frames import FrameType, RefusalPayload, pack_frame, pack_nonce, pack_refusal
from swarmtrain.wire.schema import Message, Priority, Registry

M = TypeVar("M", bound=Message)


class Link:
    """See the module. Construct it on the running loop, then `start` it.

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
        meter: LinkMeter | None = None,
        on_closed: Callable[[Link], None] | None = None,
    ) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        self.peer_id = stream.peer_id
        self.options = options or LinkOptions()
        self.traffic = Traffic()
        self._core = self._make_core(registry, shared or Shared(), meter or LinkMeter(stream.peer_id))
        self._caller = Caller(self._core, first_call_id=1 if initiator else 2)
        self._callee = Callee(self._core, handler)
        self._heartbeat = self._make_heartbeat()
        self._router = FrameRouter(
            self._core,
            self._caller,
            self._callee,
            self._heartbeat,
            initiator=initiator,
            on_goodbye=self._goodbye_received,
        )
        self._reader = FrameReader(self._router)
        self._is_closing = False
        self._call_ended = asyncio.Event()
        self._stream_closed = asyncio.Event()
        self._is_reading_paused = False
        self._abort_timer: asyncio.TimerHandle | None = None
        self.error: LinkClosed | None = None  # why the link ended
        self.used_at = self._loop.time()  # when a call was last opened or ended

    def _make_core(self, registry: Registry, shared: Shared, meter: LinkMeter) -> LinkCore:
        options = self.options
        queue = OutboundQueue(
            self._stream.write,
            self.traffic.sent,
            shared.limiter.up,
            chunk_bytes=options.chunk_bytes,
            limit_bytes=options.outbound_bytes,
        )
        inbound = InboundMessages(
            registry,
            queue.send_control,
            request_budget=Budget(options.inbound_bytes, shared.request_budget),
            answer_budget=Budget(options.inbound_bytes, shared.answer_budget),
        )
        return LinkCore(
            peer_id=self.peer_id,
            registry=registry,
            options=options,
            shared=shared,
            traffic=self.traffic,
            meter=meter,
            queue=queue,
            inbound=inbound,
            clock=self._loop.time,
            call_ended=self._on_call_ended,
        )

    def _make_heartbeat(self) -> KeepAlive:
        return KeepAlive(
            self.options.heartbeat_s,
            self.options.missed_heartbeats,
            send_ping=lambda nonce: self._core.queue.send_control(pack_nonce(FrameType.PING, nonce)),
            on_silent=self._peer_silent,
            on_tick=self._tick,
            rtt=self._core.meter.rtt,
        )

    def start(self) -> None:
        """Say hello, and begin to receive."""
        self._core.queue.send_control(pack_frame(FrameType.HELLO, 0, f"swarmtrain {__version__}".encode()))
        self._heartbeat.start()
        self._stream.start(self)

    # What users of the link see.

    @property
    def is_open(self) -> bool:
        """New calls may be tried on it."""
        return self.error is None and not self._is_closing

    @property
    def was_greeted(self) -> bool:
        """The other end has said hello: it speaks the protocol and took the stream."""
        return self._router.has_hello

    @property
    def num_open_calls(self) -> int:
        """Calls under way in both directions."""
        return self._caller.num_open + self._callee.num_open

    @property
    def backlog_bytes(self) -> int:
        """Body bytes that are queued here and not written yet."""
        return self._core.queue.queued_bytes

    @property
    def received_bytes(self) -> int:
        """Body bytes that have come, those of unfinished messages too."""
        return self._reader.num_body_bytes

    @property
    def meter(self) -> LinkMeter:
        """Goodput and round-trip time."""
        return self._core.meter

    @overload
    async def call(
        self, request: Message, *, deadline_s: float, on_progress: OnProgress | None = None, expect: type[M]
    ) -> M: ...

    @overload
    async def call(
        self, request: Message, *, deadline_s: float, on_progress: OnProgress | None = None, expect: None = None
    ) -> Message: ...

    async def call(
        self,
        request: Message,
        *,
        deadline_s: float,
        on_progress: OnProgress | None = None,
        expect: type[Message] | None = None,
    ) -> Message:
        """Send `request`; return its final answer.

        `deadline_s` bounds everything: waiting for room in the queue, sending, the callee's work, the way back.
        `on_progress` is called on the loop with each progress message, in order, before the answer is returned.
        Cancelling the awaiting task, or the deadline, tells the callee (CANCEL).
        Raises LinkClosed (PeerSilent, ProtocolViolation), CallTimeout, CallRefused, MalformedAnswer (also if the answer
        is not an `expect`), or WireError if `request` itself breaks its schema.
        """
        if not self.is_open:
            raise self._closed_error(False)
        self.used_at = self._loop.time()
        answer = await self._caller.call(request, deadline_s=deadline_s, on_progress=on_progress)
        if expect is not None and not isinstance(answer, expect):
            raise MalformedAnswer(f"{self.peer_id} answered {answer.wire.kind} where {expect.wire.kind} was expected")
        return answer

    async def wait_for_room(self, priority: Priority) -> None:
        """Wait until less than the bound is queued at this priority."""
        await self._core.queue.wait_for_room(priority)

    async def close(self, timeout_s: float | None = None) -> None:
        """Take no new calls, let open ones end, say goodbye, and return when the stream is closed.

        All of it within `timeout_s` (default: the option `close_s`); calls that are open then fail with LinkClosed.
        """
        if self._stream_closed.is_set():
            return
        ends_at = self._loop.time() + (self.options.close_s if timeout_s is None else timeout_s)
        self._is_closing = True
        self._callee.is_closing = True
        try:
            async with asyncio.timeout_at(ends_at):
                while self.error is None and self.num_open_calls:
                    self._call_ended.clear()
                    await self._call_ended.wait()
                self._say_goodbye("closed", "")
                # The other end closes: it alone knows that it has read everything.
                await self._stream_closed.wait()
        except TimeoutError:
            pass
        finally:
            self.abort("closed by this end")

    def abort(self, reason: str = "aborted by this end") -> None:
        """Close at once; open calls fail."""
        self._end(LinkClosed(f"link to {self.peer_id}: {reason}"))
        self._stream.abort()

    # StreamReceiver: called by the stream.

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `StreamReceiver`."""
        buffer = self._reader.get_buffer()
        # Under a receive cap, take little at once: the cap is kept by pausing in between.
        return buffer[: self._core.shared.limiter.down.grant_bytes(len(buffer))]

    def buffer_updated(self, num_bytes: int) -> None:
        """See `StreamReceiver`."""
        self._heartbeat.heard()
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
        self._core.queue.pause()

    def resume_writing(self) -> None:
        """See `StreamReceiver`."""
        self._core.queue.resume()

    def _keep_receive_cap(self, num_bytes: int) -> None:
        bucket = self._core.shared.limiter.down
        bucket.charge(num_bytes)
        if bucket.in_debt() and not self._is_reading_paused and self.error is None:
            self._is_reading_paused = True
            self._stream.pause_reading()
            if bucket.acquire(0, Priority.CONTROL, self._resume_reading) is None:
                self._resume_reading()  # the debt was paid off between the two looks

    def _resume_reading(self) -> None:
        self._is_reading_paused = False
        if not self._stream_closed.is_set():
            self._stream.resume_reading()

    def _on_call_ended(self) -> None:
        self.used_at = self._loop.time()
        self._call_ended.set()

    def _tick(self, now: float) -> None:
        if (rate := self.meter.up.bytes_per_s) is not None:
            self._core.queue.fit_chunks(rate)
        try:
            self._callee.check_stalled(now)
            self._caller.check_abandoned()
            if self._core.queue.stalled_s(self._stream.unsent_bytes) > self.options.write_stall_s:
                raise ProtocolViolation(Violation.NOT_READING, f"no byte taken for {self.options.write_stall_s:g} s")
        except ProtocolViolation as violation:
            self._violated(violation)

    def _peer_silent(self, silent_s: float) -> None:
        self._end(PeerSilent(f"link to {self.peer_id}: nothing heard for {silent_s:.1f} s"))
        self._stream.abort()

    def _violated(self, violation: ProtocolViolation) -> None:
        if self.error is not None:
            return
        self.traffic.violations[violation.violation.value] += 1
        self._say_goodbye(violation.violation.value, str(violation))
        self._end(violation)
        self._close_stream()

    def _goodbye_received(self, payload: RefusalPayload, last_seen: int) -> None:
        detail = ": ".join(part for part in (payload.code, payload.text) if part)
        self._end(LinkClosed(f"link to {self.peer_id}: the peer closed it ({detail})"), last_seen)
        self._close_stream()

    def _say_goodbye(self, code: str, text: str) -> None:
        """The last frame: nothing is written after it."""
        if self.error is None:
            self._callee.is_closing = True
            # Its call id is the last one that was begun here: later ones may safely be made elsewhere.
            frame = pack_refusal(FrameType.GOODBYE, self._callee.last_call_id, RefusalPayload(code, text))
            self._core.queue.send_control(frame)
            self._core.queue.flush_control()

    def _close_stream(self) -> None:
        """Flush and close, but not for ever."""
        if not self._stream_closed.is_set():
            self._stream.close()
            self._abort_timer = self._loop.call_later(self.options.close_s, self._stream.abort)

    def _closed_error(self, request_sent: bool) -> LinkClosed:
        """A fresh error for each call: one object in many tasks would mix their tracebacks."""
        error = self.error
        if isinstance(error, ProtocolViolation):
            return ProtocolViolation(error.violation, error.detail, request_sent=request_sent)
        if isinstance(error, PeerSilent):
            return PeerSilent(str(error), request_sent=request_sent)
        return LinkClosed(str(error or f"link to {self.peer_id}: closing"), request_sent=request_sent)

    def _end(self, error: LinkClosed, last_seen: int | None = None) -> None:
        """Nothing goes in or out any more; every open call learns why."""
        if self.error is not None:
            return
        self.error = error
        self._heartbeat.stop()
        self._reader.stop()
        self._core.queue.close()
        self._core.inbound.close()
        self._caller.link_lost(self._closed_error, last_seen)
        self._callee.link_lost()
        self._call_ended.set()
        if self._on_closed is not None:
            self._on_closed(self)
