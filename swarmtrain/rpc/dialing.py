"""Dials peers on demand: one dial at a time for each peer, with an exponential back-off after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmtrain.p2p.errors import HostDownError, NetError, PeerUnreachable
from swarmtrain.p2p.network import ByteStream, Transport
from swarmtrain.rpc.errors import CallTimeout, LinkClosed
from swarmtrain.rpc.link import Link
from swarmtrain.rpc.link_table import LinkRecord


@dataclass(frozen=True, slots=True)
class DialOptions:
    """`dial_s` bounds one dial. The back-off begins at `first_backoff_s` and doubles up to `last_backoff_s`.

    `max_links` bounds all links of the node, incoming ones included.
    """

    max_links: int = 512
    dial_s: float = 10.0
    first_backoff_s: float = 1.0
    last_backoff_s: float = 60.0


class Dialer:
    """Opens this node's outgoing links.

    `look_up` asks the directory for a peer that could not be dialed; if it returns True, the peer is dialed once more.
    `make_place` says whether the node may open one more link; `make_link` makes it of an open stream.
    """

    def __init__(
        self,
        transport: Transport,
        options: DialOptions,
        *,
        look_up: Callable[[str], Awaitable[bool]] | None,
        make_place: Callable[[], bool],
        make_link: Callable[[ByteStream, LinkRecord], Link],
    ) -> None:
        self._transport = transport
        self._options = options
        self._look_up = look_up
        self._make_place = make_place
        self._make_link = make_link
        self._loop = asyncio.get_running_loop()

    async def link_to(self, peer_id: str, neighbour: LinkRecord, ends_at: float) -> Link:
        """An open link to the peer: one that exists, else a new one.

        Raises PeerUnreachable, CallTimeout at `ends_at`, LinkClosed if the node closes meanwhile, or HostDownError.
        """
        link = neighbour.usable()
        if link is not None:
            return link
        if neighbour.dialing is None:
            self._check_may_dial(peer_id, neighbour)
            neighbour.dialing = self._loop.create_task(self._dial(peer_id, neighbour))
            neighbour.dialing.add_done_callback(_see_exception)
        dial = neighbour.dialing
        try:
            # Shielded: other callers may wait for the same dial.
            async with asyncio.timeout_at(ends_at):
                return await asyncio.shield(dial)
        except asyncio.CancelledError:
            if dial.cancelled():  # the dial was cancelled and not this call: the node is closing
                raise LinkClosed("this node is closed", request_sent=False) from None
            raise
        except TimeoutError as error:
            await self.check_up(error)
            raise CallTimeout(f"no link to {peer_id} within the deadline of the call") from error

    def failed(self, neighbour: LinkRecord, reason: str) -> float:
        """Back off exponentially. Returns the seconds until the next dial."""
        neighbour.num_failures += 1
        neighbour.failure = reason
        wait_s = self._options.first_backoff_s * 2.0 ** min(30, neighbour.num_failures - 1)
        wait_s = min(self._options.last_backoff_s, wait_s)
        neighbour.retry_at = self._loop.time() + wait_s
        return wait_s

    async def check_up(self, error: Exception) -> None:
        """Raise HostDownError if this end has failed: the peer gets neither blame nor a back-off."""
        if not await self._transport.is_up():
            raise HostDownError(f"this host's own transport is down: {error}") from error

    def _check_may_dial(self, peer_id: str, neighbour: LinkRecord) -> None:
        wait_s = neighbour.retry_at - self._loop.time()
        if wait_s > 0:
            failures = f"failed dial number {neighbour.num_failures} ({neighbour.failure})"
            raise PeerUnreachable(f"{peer_id} is not dialed for {wait_s:.1f} s after {failures}", retry_after_s=wait_s)
        if not self._make_place():
            raise PeerUnreachable(f"{peer_id} is not dialed: all {self._options.max_links} links are in use")

    async def _dial(self, peer_id: str, neighbour: LinkRecord) -> Link:
        try:
            stream = await self._open(peer_id)
        except HostDownError:
            raise
        except (NetError, OSError) as error:  # TimeoutError is an OSError
            await self.check_up(error)
            detail = str(error) or f"no answer in {self._options.dial_s:g} s"
            wait_s = self.failed(neighbour, detail)
            raise PeerUnreachable(f"cannot reach {peer_id}: {detail}", retry_after_s=wait_s) from error
        finally:
            neighbour.dialing = None
        link = self._make_link(stream, neighbour)
        neighbour.outgoing = link
        link.start()
        return link

    async def _open(self, peer_id: str) -> ByteStream:
        """A stream to the peer. If dialing fails, the directory is asked for the peer, which is dialed once more."""
        try:
            async with asyncio.timeout(self._options.dial_s):
                return await self._transport.open(peer_id, timeout_s=self._options.dial_s)
        except HostDownError:
            raise
        except (NetError, OSError):
            if self._look_up is None or not await self._look_up(peer_id):
                raise
        async with asyncio.timeout(self._options.dial_s):
            return await self._transport.open(peer_id, timeout_s=self._options.dial_s)


def _see_exception(dial: asyncio.Task[Link]) -> None:
    """Mark a dial's exception as retrieved: all of its callers may have left."""
    if not dial.cancelled():
        dial.exception()
