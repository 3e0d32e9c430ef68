"""A node holds all links of this daemon: it dials on demand, accepts links, answers calls, and calls peers by id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, overload

from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.p2p.network import ByteStream, Transport
from swarmtrain.rpc.calls import OnProgress
from swarmtrain.rpc.dialing import Dialer, DialOptions
from swarmtrain.rpc.errors import CallTimeout, LinkClosed, MalformedAnswer, RefusalCode
from swarmtrain.rpc.exchange import Handler, call_locally
from swarmtrain.rpc.gate import Gate
from swarmtrain.rpc.limits import Budget, HandlerTasks, RateLimiter, Shared
from swarmtrain.rpc.link import Link, LinkOptions
from swarmtrain.rpc.link_table import LinkRecord, LinkSnapshot, LinkTable
from swarmtrain.rpc.meter import LinkEstimate, Traffic
from swarmtrain.units import MIB
from swarmtrain.wire.frames import FrameType, RefusalPayload, pack_refusal
from swarmtrain.wire.schema import Message, Registry

_PATIENCE_S = 2.0
MOVING_S = 86400.0  # the deadline of a call that may last as long as it makes progress
M = TypeVar("M", bound=Message)


class Rejection:
    """Refuses a stream: sends GOODBYE, then reads and ignores what still arrives until the other end closes."""

    def __init__(self, stream: ByteStream, code: str, text: str) -> None:
        self._stream = stream
        self._scratch = memoryview(bytearray(4096))
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, stream.abort)
        stream.start(self)
        stream.write(pack_refusal(FrameType.GOODBYE, 0, RefusalPayload(code, text)))

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `StreamReceiver`."""
        return self._scratch

    def buffer_updated(self, num_bytes: int) -> None:
        """See `StreamReceiver`."""

    def stream_closed(self, error: Exception | None) -> None:
        """See `StreamReceiver`."""
        self._timer.cancel()

    def pause_writing(self) -> None:
        """See `StreamReceiver`."""

    def resume_writing(self) -> None:
        """See `StreamReceiver`."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Settings of a node."""

    link: LinkOptions = field(default_factory=LinkOptions)
    dial: DialOptions = field(default_factory=DialOptions)
    idle_s: float = 300.0  # a link without calls for this long is closed
    max_incoming_per_peer: int = 4  # old links of a peer that dials again may not have ended yet
    max_inbound_calls: int = 4096  # over all links (see `HandlerTasks`); further requests get BUSY
    inbound_bytes: int = 512 * MIB  # over all links: for requests and, separately, for answers


class Node:
    """See the module docstring. Construct it on the running loop; it accepts links from then on."""

    def __init__(
        self,
        transport: Transport,
        registry: Registry,
        handler: Handler,
        options: NodeOptions | None = None,
        *,
        limiter: RateLimiter | None = None,
        on_link_closed: Callable[[str, LinkClosed], None] | None = None,
        look_up: Callable[[str], Awaitable[bool]] | None = None,
        is_excluded: Callable[[str], bool] = lambda peer_id: False,
        gate: Gate | None = None,
    ) -> None:
        """`look_up`: see `Dialer`. A peer that `is_excluded` is neither called nor listened to."""
        self._transport = transport
        self._registry = registry
        self._handler = handler
        self._on_link_closed = on_link_closed
        self._is_excluded = is_excluded
        self._gate = gate
        self.options = options or NodeOptions()
        self._loop = asyncio.get_running_loop()
        self._shared = Shared(
            limiter=limiter or RateLimiter(),
            tasks=HandlerTasks(self.options.max_inbound_calls),
            request_budget=Budget(self.options.inbound_bytes),
            answer_budget=Budget(self.options.inbound_bytes),
        )
        self._neighbours = LinkTable()
        self._ended_traffic = Traffic()
        self._closers: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.num_refused_streams = 0
        self.num_excluded_streams = 0
        self._dialer = Dialer(
            transport,
            self.options.dial,
            look_up=look_up,
            make_place=self._make_place,
            make_link=partial(self._make_link, initiator=True),
        )
        self._idle_timer = self._loop.call_later(self.options.idle_s / 4, self._close_idle_links)
        transport.listen(self._accept)

    @property
    def peer_id(self) -> str:
        """This end's identity."""
        return self._transport.peer_id

    @property
    def num_handlers(self) -> int:
        """Requests whose handlers run."""
        return self._shared.tasks.num_running

    @overload
    async def call(
        self,
        peer_id: str,
        request: Message,
        deadline_s: float,
        on_progress: OnProgress | None = None,
        *,
        expect: type[M],
    ) -> M: ...

    @overload
    async def call(
        self,
        peer_id: str,
        request: Message,
        deadline_s: float,
        on_progress: OnProgress | None = None,
        *,
        expect: None = None,
    ) -> Message: ...

    async def call(
        self,
        peer_id: str,
        request: Message,
        deadline_s: float,
        on_progress: OnProgress | None = None,
        *,
        expect: type[Message] | None = None,
    ) -> Message:
        """Call `peer_id`; dial it if there is no link. `deadline_s` includes the dialing.

        Raises what `Link.call` raises, or PeerUnreachable; HostDownError if this end's own transport is down, which
        says nothing about the peer. If a link breaks before any byte of the request was written, the request is sent
        once more over a new link, because the peer cannot have seen it.
        """
        if self._is_closed:
            raise LinkClosed("this node is closed", request_sent=False)
        if peer_id == self.peer_id:
            answer = await call_locally(
                self.peer_id,
                self._registry,
                self._handler,
                self._shared.tasks,
                request,
                deadline_s=deadline_s,
                on_progress=on_progress,
            )
        else:
            answer = await self._call_remotely(peer_id, request, deadline_s, on_progress)
        if expect is not None and not isinstance(answer, expect):
            raise MalformedAnswer(f"{peer_id} answered {answer.wire.kind} where {expect.wire.kind} was expected")
        return answer

    async def call_while_moving(self, peer_id: str, request: Message, stall_s: float, *, expect: type[M]) -> M:
        """As `call`, but without a deadline: CallTimeout once the peer has sent no byte for `stall_s`."""
        task = self._loop.create_task(self.call(peer_id, request, MOVING_S, expect=expect))
        try:
            received, moved_at = self.received_bytes(peer_id), self._loop.time()
            while not task.done():
                await asyncio.wait({task}, timeout=stall_s / 4)
                if (now_received := self.received_bytes(peer_id)) != received:
                    received, moved_at = now_received, self._loop.time()
                elif not task.done() and self._loop.time() - moved_at >= stall_s:
                    raise CallTimeout(f"nothing has come from {peer_id} for {stall_s:g} s")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _call_remotely(
        self, peer_id: str, request: Message, deadline_s: float, on_progress: OnProgress | None
    ) -> Message:
        if self._is_excluded(peer_id):
            raise PeerUnreachable(f"{peer_id} is excluded from the run")
        ends_at = self._loop.time() + deadline_s
        link = await self._dialer.link_to(peer_id, self._neighbours.get(peer_id), ends_at)
        try:
            left_s = ends_at - self._loop.time()
            return await link.call(request, deadline_s=left_s, on_progress=on_progress)
        except LinkClosed as error:
            await self._dialer.check_up(error)
            if error.request_sent or not link.was_greeted:
                raise
        link = await self._dialer.link_to(peer_id, self._neighbours.get(peer_id), ends_at)
        return await link.call(request, deadline_s=ends_at - self._loop.time(), on_progress=on_progress)

    async def is_up(self) -> bool:
        """Whether this end's own transport works. While it does not, silence says nothing about a peer."""
        return await self._transport.is_up()

    def forgive(self, peer_id: str) -> None:
        """Forget the peer's back-off: the next call dials. For when there is news of the peer."""
        neighbour = self._neighbours.find(peer_id)
        if neighbour is not None:
            neighbour.num_failures = 0
            neighbour.retry_at = 0.0

    def drop(self, peer_id: str) -> None:
        """End all links with a peer that is excluded now."""
        neighbour = self._neighbours.find(peer_id)
        for link in neighbour.links if neighbour is not None else ():
            link.refuse_peer()

    def show_certificate(self) -> None:
        """This end has a new certificate: every link shows it."""
        for link in self._neighbours.links():
            link.show_certificate()

    def _accept(self, stream: ByteStream) -> None:
        if self._is_excluded(stream.peer_id):
            self.num_excluded_streams += 1
            Rejection(stream, RefusalCode.EXCLUDED, "")
            return
        neighbour = self._neighbours.get(stream.peer_id)
        too_many = len(neighbour.incoming) >= self.options.max_incoming_per_peer
        if self._is_closed or too_many or not self._make_place():
            self.num_refused_streams += 1
            Rejection(stream, RefusalCode.CLOSING if self._is_closed else RefusalCode.BUSY, "too many links")
            return
        link = self._make_link(stream, neighbour)
        neighbour.incoming.append(link)
        link.start()

    def _make_link(self, stream: ByteStream, neighbour: LinkRecord, *, initiator: bool = False) -> Link:
        return Link(
            stream,
            self._registry,
            self._handler,
            initiator=initiator,
            options=self.options.link,
            shared=self._shared,
            gate=self._gate,
            meter=neighbour.meter,
            on_closed=self._link_closed,
        )

    def _link_closed(self, link: Link) -> None:
        neighbour = self._neighbours.get(link.peer_id)
        if link.was_greeted:
            neighbour.num_failures = 0
        elif link is neighbour.outgoing and not self._is_closed:
            self._dialer.failed(neighbour, str(link.error))  # it accepted the stream and never sent HELLO
        neighbour.remove(link)
        self._ended_traffic.add(link.traffic)
        if self._on_link_closed is not None and link.error is not None:
            self._on_link_closed(link.peer_id, link.error)

    def _make_place(self) -> bool:
        """True if one more link may be opened; at the limit, the link that has been idle longest is closed."""
        links = self._neighbours.links()
        if len(links) < self.options.dial.max_links:
            return True
        idle = [link for link in links if not link.num_open_calls]
        if not idle:
            return False
        self._close_soon(min(idle, key=lambda link: link.used_at))
        return True

    def _close_idle_links(self) -> None:
        self._idle_timer = self._loop.call_later(self.options.idle_s / 4, self._close_idle_links)
        now = self._loop.time()
        for link in self._neighbours.links():
            if link.is_open and not link.num_open_calls and now - link.used_at > self.options.idle_s:
                self._close_soon(link)

    def _close_soon(self, link: Link) -> None:
        task = self._loop.create_task(link.close())
        self._closers.add(task)
        task.add_done_callback(self._closers.discard)

    def has_link(self, peer_id: str) -> bool:
        """Whether a call to the peer would find an open link. A dead peer's link ends within seconds."""
        neighbour = self._neighbours.find(peer_id)
        return neighbour is not None and neighbour.usable() is not None

    def links(self) -> tuple[LinkSnapshot, ...]:
        """All links, for the status."""
        return self._neighbours.snapshot(self._loop.time())

    def transfers(self) -> tuple[tuple[int, float], tuple[int, float]]:
        """(bytes, seconds) of measured messages, sent and received, without peers that the table has forgotten."""
        return self._neighbours.transfers()

    def estimate(self, peer_id: str) -> LinkEstimate:
        """The estimate of the link to `peer_id`; it survives the links themselves."""
        neighbour = self._neighbours.get(peer_id)
        return neighbour.meter.estimate(sum(link.backlog_bytes for link in neighbour.links))

    def received_bytes(self, peer_id: str) -> int:
        """Body bytes received over the open links with a peer: grows while a message makes progress, not with pings."""
        neighbour = self._neighbours.find(peer_id)
        return sum(link.received_bytes for link in neighbour.links) if neighbour is not None else 0

    def backlog_bytes(self) -> int:
        """Body bytes that wait to be sent, to all peers."""
        return sum(link.backlog_bytes for link in self._neighbours.links())

    def set_prior(self, peer_id: str, up_bytes_per_s: float) -> None:
        """The rate to a peer as the directory states it; used until a message was measured."""
        self._neighbours.get(peer_id).meter.up.set_prior(up_bytes_per_s)

    def traffic(self) -> Traffic:
        """All traffic since the start, that of ended links included."""
        total = Traffic()
        total.add(self._ended_traffic)
        for link in self._neighbours.links():
            total.add(link.traffic)
        return total

    def cut(self) -> None:
        """Break all links at once, as a network failure would. The next call dials again."""
        for link in self._neighbours.links():
            link.abort("cut on purpose")

    async def close(self, timeout_s: float = 5.0) -> None:
        """Close all links gracefully and end all handlers, within about `timeout_s`; open calls may end meanwhile."""
        self._is_closed = True
        self._idle_timer.cancel()
        dials = self._neighbours.dials()
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        await asyncio.gather(*(link.close(timeout_s) for link in self._neighbours.links()))
        await asyncio.gather(*self._closers, return_exceptions=True)
        await self._shared.tasks.drain(0.0)
