"""The libp2p host of a daemon: an identity, a listening port, and raw streams to peers by id.

A `Transport` over hivemind's p2pd. The host supervises p2pd: when it dies or hangs, the host starts a new one with the
same identity and port, and emits an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from swarmtrain.p2p.addresses import Address, group_by_peer
from swarmtrain.p2p.dialing import AddressBook, answering
from swarmtrain.p2p.errors import (
    BootstrapError,
    DialResult,
    HostDownError,
    HostError,
    NetError,
    P2pdTimeoutError,
    PeerUnreachable,
)
from swarmtrain.p2p.identity import Identity
from swarmtrain.p2p.network import ByteStream, CallHandler, HostEvent, HostEventKind, HostOptions
from swarmtrain.p2p.p2pd import P2pd, P2pdOptions, bundled_p2pd, dial_failure
from swarmtrain.p2p.p2pd_stream import IncomingStreams, P2pdStream
from swarmtrain.p2p.relay import reserve, start_relay
from swarmtrain.p2p.state_dir import StateDirectory, fix_ports

__all__ = ["Host", "HostEvent", "HostEventKind", "HostOptions"]

logger = logging.getLogger(__name__)

PROTOCOL = "/swarmtrain/1"
PORT_WAIT_S = 2.0  # how long a killed predecessor may hold our port
CLOSE_WAIT_S = 3.0
UP_S = 2.0  # a p2pd that does not answer IDENTIFY within this time counts as hung
REDIAL_HEAD_START_S = 2.0  # a new p2pd knows no peers: dial the bootstrap peers before the restart is announced
TROUBLE = (HostEventKind.P2PD_DIED, HostEventKind.RESTART_FAILED)
RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)


class Host:
    """See the module docstring. Made by `Host.start`; a `Transport`."""

    def __init__(self, options: HostOptions, state: StateDirectory, identity: Identity) -> None:
        self.options = options
        self.identity = identity
        self._state = state
        self._listen: tuple[Address, ...] = ()
        self._p2pd: P2pd | None = None
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._incoming = IncomingStreams(options.max_incoming_streams, options.max_incoming_streams_per_peer)
        self._outgoing: set[P2pdStream] = set()
        self._book = AddressBook()
        self._addresses: tuple[str, ...] = ()
        self._call_handlers: dict[str, CallHandler] = {}
        self._subscribers: list[Callable[[HostEvent], None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, options: HostOptions) -> Host:
        """Lock the state directory, start p2pd, dial the bootstrap peers.

        On failure, release everything and raise the error that names the cause (see errors.py).
        """
        options.check()
        state = StateDirectory.acquire(options.state_dir)
        try:
            self = cls(options, state, Identity.load_or_create(state.identity_file))
        except BaseException:
            state.release()
            raise
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self) -> None:
        self._listen = await fix_ports(self.options.listen, self._state.remembered_ports(), wait_s=PORT_WAIT_S)
        self._state.clear_sockets()
        await self._incoming.serve(self._state.stream_socket)
        await self._launch()
        self._state.remember_ports([address.port for address in self._listen])
        self._spawn(self._supervise(), "supervise p2pd")
        results = await self.connect(self.options.bootstrap)
        if results and self.options.require_bootstrap and all(result.error for result in results):
            raise BootstrapError(results)
        if self.options.relays and self._p2pd is not None:
            await self._look_after(self._p2pd)  # so that the first address that others learn works
        self._spawn(self._keep(), "keep the host healthy")

    # ---- Transport --------------------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> str:
        """This daemon's identity on the network."""
        return self.identity.peer_id

    def listen(self, accept: Callable[[ByteStream], None]) -> None:
        """Call `accept` for every incoming stream from now on; earlier ones are refused."""
        self._incoming.accept = accept

    async def open(self, peer_id: str, *, timeout_s: float) -> ByteStream:
        """A new stream to `peer_id`. Raises PeerUnreachable, HostDownError or AddressError within `timeout_s`.

        While p2pd restarts, the call waits for it; a call that p2pd's death interrupts fails at once.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._open(peer_id, timeout_s)
        except TimeoutError:
            if not self._ready.is_set():
                raise HostDownError(f"p2pd did not come back within {timeout_s:g} s") from None
            raise PeerUnreachable(f"peer {peer_id}: no answer within {timeout_s:g} s") from None

    async def _open(self, peer_id: str, timeout_s: float) -> ByteStream:
        p2pd = await self._running_p2pd()
        await self._reach(p2pd, peer_id, self._book.get(peer_id), timeout_s)
        stream = await p2pd.open_stream(peer_id, PROTOCOL, timeout_s=timeout_s)
        self._outgoing.add(stream)
        stream.closed.add_done_callback(lambda _: self._outgoing.discard(stream))
        return stream

    async def _reach(self, p2pd: P2pd, peer_id: str, addresses: tuple[Address, ...], timeout_s: float) -> None:
        """Ensure a connection; p2pd dials only addresses that accept connections (see dialing.py).

        Without a known address, p2pd tries alone: it may know one. Raises PeerUnreachable, HostDownError.
        """
        if not addresses or peer_id in await p2pd.connected_peers():
            return
        listening, reason = await answering(addresses, self.options.probe, timeout_s=timeout_s)
        try:
            if not listening:
                raise PeerUnreachable(f"peer {peer_id}: {dial_failure(reason)}")
            await p2pd.connect(peer_id, listening, timeout_s=timeout_s)
        except PeerUnreachable:
            self._book.dialed(peer_id, reached=False)
            raise
        self._book.dialed(peer_id, reached=True)

    # ---- beyond Transport -------------------------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        """The addresses at which others can dial this host, best first, with /p2p/…. Those of relays may change."""
        return self._addresses

    async def call(self, peer_id: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """One small call (the directory's). Raises PeerUnreachable, or HostDownError (at once while p2pd is down)."""
        if self._p2pd is None or not self.is_ready:
            raise HostDownError("p2pd is down")
        await self._reach(self._p2pd, peer_id, self._book.get(peer_id), timeout_s)
        return await self._p2pd.calls.call(peer_id, protocol, payload, timeout_s=timeout_s)

    async def serve_calls(self, protocol: str, handler: CallHandler) -> None:
        """Answer calls of `protocol` from now on, after restarts of p2pd too."""
        self._call_handlers[protocol] = handler
        p2pd = await self._running_p2pd()
        await p2pd.calls.serve(protocol, handler)

    @property
    def is_ready(self) -> bool:
        """False while p2pd is being restarted, and after `close`."""
        return self._ready.is_set() and not self._closing.is_set()

    @property
    def p2pd_process_id(self) -> int | None:
        """The operating system's id of the p2pd in use."""
        return self._p2pd.process_id if self._p2pd is not None else None

    async def is_up(self) -> bool:
        """See `Transport`. Asks p2pd, because its streams end a moment before its death is noticed."""
        if self._p2pd is None or not self.is_ready:
            return False
        try:
            await self._p2pd.identify(timeout_s=UP_S)
        except HostError:
            return False
        return True

    async def wait_ready(self) -> None:
        """Return when p2pd runs; raises HostDownError if the host is closed meanwhile."""
        await self._running_p2pd()

    def learn(self, addresses: Iterable[str], *, of: str | None = None) -> None:
        """Remember addresses (with /p2p/…) for later `open` calls; see `AddressBook.learn`."""
        self._book.learn(addresses, of=of)

    def hear(self, addresses: Iterable[str], *, of: str) -> None:
        """Remember addresses of a peer that others state; see `AddressBook.hear`."""
        self._book.hear(addresses, of=of)

    def known_addresses(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of a peer, as far as this host knows them."""
        return tuple(str(address) for address in self._book.get(peer_id))

    async def connect(self, addresses: Iterable[str]) -> list[DialResult]:
        """Dial every peer named in `addresses`, all at once; one result per peer, without this host itself."""
        grouped = group_by_peer(addresses)
        grouped.pop(self.peer_id, None)
        self.learn(str(address) for way in grouped.values() for address in way)
        return list(await asyncio.gather(*(self._dial(peer_id, way) for peer_id, way in grouped.items())))

    async def dial_back(self, peer_id: str, port: int, *, timeout_s: float) -> tuple[str, str]:
        """Whether the machine behind a connected peer accepts a connection at `port`: (address, error, or empty).

        Only the address at which this host sees the peer is dialed, so that no peer can choose whom.
        """
        p2pd = await self._running_p2pd()
        try:
            observed = await p2pd.observed_addresses(peer_id)
        except NetError as failure:
            return "", str(failure)
        direct = [address.without_peer() for address in observed if not address.is_relayed]
        if not direct:
            return "", "it is connected through a relay only"
        address = direct[0].with_port(port)
        try:
            async with asyncio.timeout(timeout_s):
                await self.options.probe(address.host, port)
        except TimeoutError:
            return str(address), f"no answer within {timeout_s:g} s"
        except OSError as failure:
            return str(address), failure.strerror or str(failure)
        return str(address), ""

    async def connected_peers(self) -> set[str]:
        """Ids of all peers to which this host has a connection."""
        p2pd = await self._running_p2pd()
        return await p2pd.connected_peers()

    def subscribe(self, callback: Callable[[HostEvent], None]) -> None:
        """Call `callback` with every event from now on, on the event loop's thread."""
        self._subscribers.append(callback)

    async def close(self) -> None:
        """End p2pd and all streams, remove the sockets, unlock the state directory. Takes at most a few seconds."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._ready.set()  # wakes tasks that wait for p2pd; they see that the host is closed
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        streams = (*self._outgoing, *self._incoming.close())
        for stream in streams:
            stream.abort()
        if self._p2pd is not None:
            await self._p2pd.stop()
        if streams:
            await asyncio.wait([stream.closed for stream in streams], timeout=CLOSE_WAIT_S)
        self._state.release()

    # ---- p2pd's life ------------------------------------------------------------------------------------------------

    def _p2pd_options(self) -> P2pdOptions:
        options = self.options
        return P2pdOptions(
            binary=options.p2pd_binary or bundled_p2pd(),
            control_path=self._state.control_socket,
            identity_file=self._state.identity_file,
            listen=tuple(str(address) for address in self._listen),
            announce=options.announce,
            serve_relay=options.relay,
            port_mapping=options.port_mapping,
            limits=options.p2pd_limits,
        )

    async def _launch(self) -> None:
        """Start p2pd and register our protocol with it."""
        p2pd = await self._start_p2pd()
        try:
            await p2pd.serve(PROTOCOL, self._state.stream_socket)
            for protocol, handler in self._call_handlers.items():
                await p2pd.calls.serve(protocol, handler)
            self._note_addresses(await p2pd.identify(), [])
        except BaseException:
            await p2pd.stop()
            raise
        self._p2pd = p2pd
        self._ready.set()

    async def _start_p2pd(self) -> P2pd:
        options, timeout_s = self._p2pd_options(), self.options.start_timeout_s
        if self.options.relay:
            return await start_relay(options, self._state.guest_socket, self.peer_id, timeout_s=timeout_s)
        options.control_path.unlink(missing_ok=True)
        return await P2pd.start(options, timeout_s=timeout_s)

    async def _supervise(self) -> None:
        """Whenever p2pd ends, start a new one, however many attempts it takes."""
        while True:
            assert self._p2pd is not None
            await self._p2pd.died.wait()
            self._ready.clear()
            self._tell(HostEventKind.P2PD_DIED, self._p2pd.death)
            await self._p2pd.stop()
            await self._relaunch()
            redial = self._spawn(self._look_after(self._p2pd), "dial the bootstrap peers again")
            await asyncio.wait({redial}, timeout=REDIAL_HEAD_START_S)
            self._tell(HostEventKind.P2PD_RESTARTED, f"p2pd runs again as process {self.p2pd_process_id}")

    async def _relaunch(self) -> None:
        num_failures = 0
        while True:
            await asyncio.sleep(RESTART_PAUSES_S[min(num_failures, len(RESTART_PAUSES_S) - 1)])
            try:
                listen = tuple(str(address) for address in self._listen)
                await fix_ports(listen, [], wait_s=PORT_WAIT_S)
                await self._launch()
                return
            except (NetError, OSError) as error:
                num_failures += 1
                self._tell(HostEventKind.RESTART_FAILED, f"p2pd did not start (attempt {num_failures}): {error}")

    async def _keep(self) -> None:
        """Check regularly that p2pd answers and that bootstrap peers and relays are connected; update our addresses."""
        num_silent = 0
        while True:
            await asyncio.sleep(self.options.health_interval_s)
            p2pd = await self._running_p2pd()
            try:
                await self._look_after(p2pd)
                num_silent = 0
            except P2pdTimeoutError:
                num_silent += 1
                if num_silent >= 2:
                    logger.warning("p2pd no longer answers; it is killed and restarted")
                    p2pd.kill()
                    num_silent = 0
            except NetError as error:
                logger.debug("a health check of p2pd failed: %s", error)

    async def _look_after(self, p2pd: P2pd) -> None:
        timeout_s = self.options.health_timeout_s
        reported = await p2pd.identify(timeout_s=timeout_s)
        connected = await p2pd.connected_peers(timeout_s=timeout_s)
        wanted = (*self.options.bootstrap, *self.options.relays)
        for result in await self.connect(text for text in wanted if Address.parse(text).peer_id not in connected):
            if result.error:
                logger.info("cannot reach %s", result)
            else:
                connected.add(result.peer_id)
        relays = {relay: ways for relay, ways in group_by_peer(self.options.relays).items() if relay in connected}
        granted = await asyncio.gather(*(self._reserve(p2pd, relay) for relay in relays))
        ways = [way for relay, is_granted in zip(relays, granted, strict=True) if is_granted for way in relays[relay]]
        self._note_addresses(reported, [way.through_relay() for way in ways])

    async def _reserve(self, p2pd: P2pd, relay: str) -> bool:
        try:
            reservation = await reserve(p2pd, relay, timeout_s=self.options.dial_timeout_s)
        except NetError as error:
            logger.info("no reservation: %s", error)
            return False
        if not reservation.is_useful:
            logger.warning("%s is not a real relay: it cuts after %d bytes", relay, reservation.circuit_bytes)
        return reservation.is_useful

    async def _dial(self, peer_id: str, addresses: tuple[Address, ...]) -> DialResult:
        error: str | None = None
        try:
            p2pd = await self._running_p2pd()
            await self._reach(p2pd, peer_id, addresses, self.options.dial_timeout_s)
        except NetError as failure:
            error = str(failure).removeprefix(f"peer {peer_id}: ")
        return DialResult(peer_id, tuple(str(address) for address in addresses), error)

    async def _running_p2pd(self) -> P2pd:
        await self._ready.wait()
        if self._closing.is_set() or self._p2pd is None:
            raise HostDownError("the host is closed")
        return self._p2pd

    def _note_addresses(self, reported: list[Address], relayed: list[Address]) -> None:
        direct = [Address.parse(text) for text in self.options.announce]
        direct = direct or [address for address in reported if not address.is_relayed]
        outside = [address for address in direct if not address.is_loopback]
        inside = [address for address in direct if address.is_loopback]
        best_first = (relayed, outside, inside) if self.options.behind_nat else (outside, relayed, inside)
        addresses = tuple(dict.fromkeys(str(a.with_peer(self.peer_id)) for group in best_first for a in group))
        if addresses != self._addresses:
            self._addresses = addresses
            self._tell(HostEventKind.ADDRESSES_CHANGED, ", ".join(addresses))

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _tell(self, kind: HostEventKind, detail: str) -> None:
        logger.log(logging.WARNING if kind in TROUBLE else logging.INFO, "%s: %s", kind.value, detail)
        for callback in self._subscribers:
            callback(HostEvent(kind, detail))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks = [other for other in self._tasks if not other.done()]
        self._tasks.append(task)
        task.add_done_callback(_report_failure)
        return task


def _report_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, NetError):
        logger.info("could not %s: %s", task.get_name(), error)  # p2pd went down meanwhile: `_supervise` handles it
    elif error is not None:
        logger.error("the task %r failed", task.get_name(), exc_info=error)
