"""A client with a certificate that it does not deserve: it speaks libp2p, and then whatever it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from swarmtrain.chain.membership import Membership
from swarmtrain.p2p.host import Host
from swarmtrain.p2p.identity import RunKey
from swarmtrain.p2p.network import ByteStream, HostOptions
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.node import Node
from swarmtrain.run.invite import parse_invite
from swarmtrain.wire import frames
from swarmtrain.wire.certificates import Certificate, pack_credential, signed_part
from swarmtrain.wire.frames import FrameType, Start
from swarmtrain.wire.messages import MESSAGES, Acknowledged
from swarmtrain.wire.schema import Message

from .harness import LOOPBACK, PATIENCE, Daemon, Swarm

T = TypeVar("T")


def address_of(daemon: Daemon) -> tuple[str, str]:
    """(peer id, address) by which a daemon is dialed, from its own words."""
    (event,) = [item for item in daemon.events if item.get("phase") == "network"]
    address = event["detail"].split(", ")[0]
    return address.rsplit("/p2p/", 1)[1], address


class RawStream:
    """An open stream without any protocol on it."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._buffer = bytearray(1 << 16)
        self.received = bytearray()
        self.ended = asyncio.Event()
        stream.start(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, num_bytes: int) -> None:
        if len(self.received) < 1 << 20:
            self.received += self._buffer[:num_bytes]

    def stream_closed(self, error: Exception | None) -> None:
        self.ended.set()

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        self._stream.write(data)

    def abort(self) -> None:
        self._stream.abort()


class Intruder:
    """Streams and messages to the daemons of a swarm."""

    def __init__(self, host: Host, node: Node, membership: Membership) -> None:
        self.host, self._node, self._membership = host, node, membership

    def hello(self, daemon: Daemon) -> bytes:
        """The first frame of a link with a daemon."""
        return frames.pack_hello(self._membership.proof(address_of(daemon)[0]), "intruder")

    @property
    def peer_id(self) -> str:
        """Its identity: a true one, which the run does not know."""
        return self.host.peer_id

    async def raw(self, daemon: Daemon) -> RawStream:
        """A stream as links use it, under this client's control."""
        peer_id, address = address_of(daemon)
        self.host.learn([address])
        return RawStream(await self.host.open(peer_id, timeout_s=10 * PATIENCE))

    async def expect_end(self, daemon: Daemon, data: bytes) -> bytes:
        """Send `data` and wait until the daemon closes the stream; what it said."""
        stream = await self.raw(daemon)
        stream.write(data)
        async with asyncio.timeout(20 * PATIENCE):
            await stream.ended.wait()
        return bytes(stream.received)

    async def refused(self, daemon: Daemon, message: Message, *, deadline_s: float = 30.0) -> str:
        """Send a message that must be refused; the refusal's code, or `answered KIND`."""
        peer_id, address = address_of(daemon)
        self.host.learn([address])
        self._node.forgive(peer_id)
        try:
            answer = await self._node.call(peer_id, message, deadline_s=deadline_s * PATIENCE)
        except CallRefused as refusal:
            return refusal.code
        return f"answered {answer.wire.kind}"


def traitor(swarm: Swarm, peer_id: str) -> Membership:
    """What a member of stage 0 has that does as it likes."""
    invite, key = parse_invite(swarm.invite()), RunKey.load(swarm.coordinator_dir / "run.key")
    membership = Membership(invite)
    membership.peer_id = peer_id
    certificate = Certificate(invite.run_id, peer_id, 2**40, 1e11, stage=0)
    membership.hold(pack_credential(certificate, key.sign(signed_part(certificate))))
    return membership


@asynccontextmanager
async def intruder(swarm: Swarm, directory: Path) -> AsyncIterator[Intruder]:
    """An intruder that knows the run's coordinator from its invite."""
    _, bootstrap = address_of(swarm.coordinator)
    host = await Host.start(HostOptions(state_dir=directory, listen=(LOOPBACK,), bootstrap=(bootstrap,)))

    async def answer(message: Message, exchange: Exchange) -> Message:
        return Acknowledged("")

    membership = traitor(swarm, host.peer_id)
    node = Node(host, MESSAGES, answer, gate=membership)
    try:
        yield Intruder(host, node, membership)
    finally:
        await node.close()
        await host.close()


def break_in(swarm: Swarm, directory: Path, attack: Callable[[Intruder], Coroutine[Any, Any, T]]) -> T:
    """Run an attack to its end."""

    async def main() -> T:
        async with intruder(swarm, directory) as one:
            return await attack(one)

    return uvloop.run(main())


def request(kind: str, num_bytes: int, body: bytes = b"", call_id: int = 1) -> bytes:
    """A request that claims `num_bytes` and brings `body`."""
    start = frames.pack_start(FrameType.REQUEST, call_id, Start(kind, num_bytes, 30_000))
    return start + (frames.pack_frame(FrameType.CHUNK, call_id, body) if body else b"")
