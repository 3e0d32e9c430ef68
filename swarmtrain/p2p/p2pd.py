"""The p2pd child process: its command line, its start and end, and requests on its control socket.

p2pd ends by itself when its last persistent connection closes. `P2pd` holds one such connection (`calls`) as soon as
p2pd is ready; until then `-idleTimeout` bounds p2pd's life. So even SIGKILL of this process leaves no p2pd behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmtrain.p2p.addresses import Address, peer_id_from_bytes, peer_id_to_bytes, unix_address_bytes
from swarmtrain.p2p.confinement import CANNOT_RUN, MIB, P2pdLimits, confined, needed_capabilities
from swarmtrain.p2p.errors import (
    AddressError,
    AddressInUseError,
    HostDownError,
    P2pdFailedError,
    P2pdTimeoutError,
    P2pdUnusableError,
    PeerUnreachable,
)
from swarmtrain.p2p.p2pd_calls import P2pdCalls, framed, hivemind_directory, p2pd_pb2, parsed, read_message
from swarmtrain.p2p.p2pd_stream import P2pdStream

logger = logging.getLogger(__name__)
IDLE_TIMEOUT_S = 20  # how long p2pd lives without a persistent connection; longer than a start on a busy machine
STOP_DEADLINE_S = 3.0
MAX_LINE_CHARACTERS = 2000
DYING_WORDS = ("fatal error: ", "panic: ", "runtime: out of memory")  # what Go's runtime says before a long dump
NO_MEMORY = ("out of memory", "cannot allocate memory", "failed to create new OS thread")
# libp2p's connection manager closes connections even with busy streams, so its limits are far above what a peer needs.
CONNECTIONS_LOW, CONNECTIONS_HIGH = 4096, 8192
# p2pd's defaults are too small: 16 circuits per peer, each cut after 4 GiB or half an hour, with 2 x 16 MiB of buffers.
RELAY_LIMITS = {
    "relayMaxCircuits": "128",
    "relayMaxReservations": "1024",
    "relayDataLimit": str(2**40),
    "relayTimeLimit": "24h",
    "relayBufferSize": str(2**18),
}


@dataclass(frozen=True, slots=True)
class P2pdOptions:
    """Everything that p2pd's command line depends on. Addresses are checked multiaddrs, as text.

    Without an identity file p2pd generates an identity; without listen addresses it only dials.
    """

    binary: Path
    control_path: Path
    identity_file: Path | None = None
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    serve_relay: bool = False
    port_mapping: bool = False
    limits: P2pdLimits = field(default_factory=P2pdLimits)

    def confined_command_line(self) -> list[str]:
        """The arguments that start p2pd with its limits and without privileges."""
        listen = tuple(Address.parse(text) for text in self.listen)
        return confined(self.command_line(), self.limits, needed_capabilities(listen, self.control_path.parent))

    def command_line(self) -> list[str]:
        """The arguments that start p2pd.

        Noise is off, because TLS is faster on every CPU with AES. Automatic relays are off (see relay.py), and so is
        QUIC. p2pd's own DHT is off, because it dials at will and fills libp2p's list of peers in dial back-off.
        """
        flags: dict[str, str] = {
            "id": str(self.identity_file or ""),
            "listen": f"/unix{self.control_path}",
            "hostAddrs": ",".join(self.listen),
            "noListenAddrs": "" if self.listen else "1",
            "announceAddrs": ",".join(self.announce),
            "idleTimeout": f"{IDLE_TIMEOUT_S}s",
            "noise": "0",
            "tls": "1",
            "relay": "1",
            "autoRelay": "0",
            "relayDiscovery": "0",
            "relayService": _flag(self.serve_relay),
            "natPortMap": _flag(self.port_mapping),
            "autonat": "1",
            "connManager": "1",
            "connLo": str(CONNECTIONS_LOW),
            "connHi": str(CONNECTIONS_HIGH),
        }
        if self.serve_relay:
            flags |= {
                "forceReachabilityPublic": "1",
                **RELAY_LIMITS,
            }  # else p2pd first waits to be sure that it is reachable
        return [str(self.binary), *(f"-{name}={value}" for name, value in flags.items() if value)]


def _flag(value: bool) -> str:
    return "1" if value else "0"


def bundled_p2pd() -> Path:
    """The path of the p2pd that hivemind installs."""
    return hivemind_directory() / "hivemind_cli" / "p2pd"


class P2pd:
    """A running p2pd, made by `P2pd.start`. `died` is set as soon as the process has ended, for whatever reason."""

    def __init__(self, options: P2pdOptions, process: asyncio.subprocess.Process) -> None:
        self.options = options
        self.died = asyncio.Event()
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=20)
        self._last_words = ""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls: P2pdCalls | None = None
        self._reader = asyncio.create_task(self._read_output(), name="p2pd output")

    @classmethod
    async def start(cls, options: P2pdOptions, *, timeout_s: float) -> P2pd:
        """Start p2pd and wait until it answers. On failure, end it and raise the error that names the cause."""
        process = await _spawn(options)
        self = cls(options, process)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready
                self._calls = await P2pdCalls.connect(options.control_path)
        except TimeoutError:
            await self.stop()
            raise P2pdTimeoutError("starting", timeout_s) from None
        except HostDownError:
            await self.stop()
            raise P2pdFailedError(self._reason()) from None
        except BaseException:
            await self.stop()
            raise
        return self

    @property
    def calls(self) -> P2pdCalls:
        """Small calls to other hosts through this p2pd."""
        assert self._calls is not None
        return self._calls

    @property
    def process_id(self) -> int:
        """The operating system's id of the p2pd process."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """p2pd's exit status once it has ended (negative: the signal that ended it)."""
        return self._process.returncode

    @property
    def death(self) -> str:
        """How p2pd ended, for people, once it has."""
        status = f"p2pd ended with status {self.exit_status}"
        return f"{status}: {self._last_words}" if self._last_words else status

    async def stop(self) -> None:
        """End p2pd: SIGTERM, then SIGKILL after STOP_DEADLINE_S. Returns when the process has ended."""
        if self._calls is not None:
            await self._calls.close()
        self.kill(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            self.kill(signal.SIGKILL)
            await self._process.wait()
        await self._reader

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        """Send a signal to p2pd if it still runs."""
        if self._process.returncode is None:
            try:
                os.kill(self._process.pid, with_signal)  # Process.send_signal may reap it, and asyncio misses its end
            except ProcessLookupError:
                logger.debug("p2pd ended before the signal was sent")

    async def request(self, request: Any, *, timeout_s: float) -> Any:
        """The response to one request on the control socket; it may be an error response.

        Raises HostDownError, P2pdTimeoutError.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(self.options.control_path))
                writer.write(framed(request))
                return await read_message(reader, p2pd_pb2.Response())
        except TimeoutError:
            raise P2pdTimeoutError("an answer", timeout_s) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise HostDownError(f"p2pd does not answer: {error}") from error
        finally:
            if writer is not None:
                writer.close()

    async def identify(self, *, timeout_s: float = 5.0) -> list[Address]:
        """The addresses at which p2pd believes it can be dialed, without the peer id."""
        response = await self.request(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), timeout_s=timeout_s)
        addresses = []
        for raw in response.identify.addrs:
            try:
                addresses.append(Address.from_bytes(raw))
            except AddressError as error:
                logger.debug("p2pd reports an address of an unsupported kind: %s", error)
        return addresses

    async def connect(self, peer_id: str, addresses: tuple[Address, ...], *, timeout_s: float) -> None:
        """Ensure a connection to the peer; raises PeerUnreachable with the reason."""
        connect = p2pd_pb2.ConnectRequest(
            peer=peer_id_to_bytes(peer_id),
            addrs=[address.without_peer().to_bytes() for address in addresses],
            timeout=max(1, round(timeout_s)),
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect)
        try:
            response = await self.request(request, timeout_s=timeout_s)
        except P2pdTimeoutError:
            raise PeerUnreachable(f"peer {peer_id}: no answer within {timeout_s:g} s") from None
        if response.type == p2pd_pb2.Response.ERROR:
            raise PeerUnreachable(f"peer {peer_id}: {dial_failure(response.error.msg)}")

    async def connected_peers(self, *, timeout_s: float = 5.0) -> set[str]:
        """Ids of all peers to which p2pd has a connection now."""
        response = await self.request(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), timeout_s=timeout_s)
        return {peer_id_from_bytes(peer.id) for peer in response.peers}

    async def observed_addresses(self, peer_id: str, *, timeout_s: float = 5.0) -> list[Address]:
        """The other ends of this host's connections to a peer."""
        response = await self.request(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), timeout_s=timeout_s)
        mine = [peer for peer in response.peers if peer_id_from_bytes(peer.id) == peer_id]
        return [Address.from_bytes(raw) for peer in mine for raw in peer.addrs]

    async def serve(self, protocol: str, socket_path: Path, *, timeout_s: float = 5.0) -> None:
        """Have p2pd connect to `socket_path` for every incoming stream of `protocol`."""
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=unix_address_bytes(str(socket_path)), proto=[protocol], balanced=False
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)
        response = await self.request(request, timeout_s=timeout_s)
        if response.type == p2pd_pb2.Response.ERROR:
            raise P2pdFailedError(f"p2pd refuses to serve {protocol}: {one_line(response.error.msg)}")

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float) -> P2pdStream:
        """A raw stream to the peer; raises PeerUnreachable, HostDownError. The caller sets its own deadline too."""
        raw_peer_id = peer_id_to_bytes(peer_id)
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_unix_connection(P2pdStream, str(self.options.control_path))
        except OSError as error:
            raise HostDownError(f"p2pd does not answer: {error}") from error
        try:
            opening = p2pd_pb2.StreamOpenRequest(peer=raw_peer_id, proto=[protocol], timeout=max(1, round(timeout_s)))
            stream.write(framed(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)))
            response = parsed(await stream.greeting, p2pd_pb2.Response())
            if response.type == p2pd_pb2.Response.ERROR:
                raise PeerUnreachable(f"peer {peer_id}: {dial_failure(response.error.msg)}")
        except BaseException:
            stream.abort()
            raise
        stream.peer_id = peer_id
        return stream

    async def _read_output(self) -> None:
        """Read p2pd's output until p2pd ends; then set `died`."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-MAX_LINE_CHARACTERS:]
            for line in lines:
                self._note_line(line.decode(errors="replace").strip()[:MAX_LINE_CHARACTERS])
        self._note_line(rest.decode(errors="replace").strip())
        await self._process.wait()
        self.died.set()
        if not self._ready.done():
            self._ready.set_exception(self._start_error())

    def _note_line(self, line: str) -> None:
        if not line:
            return
        self._last_lines.append(line)
        logger.debug("p2pd: %s", line)
        if not self._last_words and line.startswith(DYING_WORDS):
            self._last_words = self._explained(line)
        if line.startswith("Peer ID:") and not self._ready.done():
            self._ready.set_result(None)

    def _explained(self, line: str) -> str:
        if not any(sign in line for sign in NO_MEMORY):
            return one_line(line)
        return f"it needed more than the {self.options.limits.memory_bytes // MIB} MiB of memory that it may have"

    def _reason(self) -> str:
        if self._last_words:
            return self._last_words
        said = [line for line in self._last_lines if not line.startswith("goroutine")]
        return said[-1] if said else f"exit status {self._process.returncode}, without any output"

    def _start_error(self) -> Exception:
        reason = self._reason()
        if self._process.returncode == CANNOT_RUN:
            return P2pdUnusableError(self.options.binary, reason)
        if "address already in use" in reason and "listen tcp" in reason:
            return AddressInUseError(reason.split("listen tcp", 1)[1].lstrip("46 ").split(": bind")[0])
        return P2pdFailedError(reason)


async def _spawn(options: P2pdOptions) -> asyncio.subprocess.Process:
    environment = {**os.environ, "GOLOG_LOG_FMT": "json", **options.limits.environment()}
    environment.setdefault("GOLOG_LOG_LEVEL", "error")
    if options.serve_relay:
        environment["GOMAXPROCS"] = "1"  # see the race in relay.py; one core relays about 350 MiB/s
    if reason := _why_unusable(options.binary):
        raise P2pdUnusableError(options.binary, reason)
    try:
        return await asyncio.create_subprocess_exec(
            *options.confined_command_line(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the daemon, which drains before it ends p2pd
        )
    except OSError as error:
        raise P2pdUnusableError(options.binary, error.strerror or str(error)) from None


def _why_unusable(binary: Path) -> str | None:
    """Why the binary cannot run, or None. Checked here because uvloop passes a non-program to the shell instead."""
    try:
        with binary.open("rb") as file:
            header = file.read(20)
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not os.access(binary, os.X_OK):
        return "the file is not executable"
    with open(sys.executable, "rb") as file:
        native = file.read(20)
    is_elf_system = native.startswith(b"\x7fELF")
    is_native = header[:6] == native[:6] and header[18:20] == native[18:20]  # word size, byte order, kind of machine
    if is_elf_system and not is_native and not header.startswith(b"#!"):
        return "it is not a program for this machine"
    return None


def dial_failure(message: str) -> str:
    """p2pd's message about a failed dial, reduced to the line that a person needs."""
    for sign, meaning in (
        ("connection refused", "connection refused (nothing listens there)"),
        ("no route to host", "no route to host"),
        ("network is unreachable", "the network is unreachable"),
        ("peer id mismatch", "another peer answers at that address (peer id mismatch)"),
        ("no addresses", "no address of the peer is known"),
        ("routing: not found", "no address of the peer is known"),
        ("failed to find any peer in table", "no address of the peer is known"),
        ("protocols not supported", "it does not speak this protocol"),
        ("protocol not supported", "it does not speak this protocol"),
        ("dial to self", "it is this peer itself"),
        ("NO_RESERVATION", "it has no reservation at its relay now"),
        ("RESOURCE_LIMIT_EXCEEDED", "its relay is full"),
        ("CONNECTION_FAILED", "its relay cannot reach it"),
        ("i/o timeout", "no answer in time"),
        ("deadline exceeded", "no answer in time"),
        ("dial backoff", "the last dial failed a moment ago, and the back-off still lasts"),
    ):
        if sign in message:
            return meaning
    return one_line(message)


def one_line(message: str) -> str:
    """`message` without line breaks, at most 300 characters."""
    return " ".join(message.split())[:300]
