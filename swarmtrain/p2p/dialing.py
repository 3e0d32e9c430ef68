"""The address book, and a TCP probe before every dial, because p2pd remembers failed dials.

After a failed dial libp2p does not dial that address again for 5 s, then 6, 9, 14 s and so on. A daemon that restarts
within a second, as ours do, would stay unreachable for that long. So p2pd dials only where a plain TCP connection has
just succeeded: its back-off list stays empty, and a restarted peer is reached at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

from swarmtrain.p2p.addresses import Address, group_by_peer
from swarmtrain.p2p.errors import AddressError

logger = logging.getLogger(__name__)

MAX_KNOWN_PEERS = 20_000
MAX_ADDRESSES_OF_PEER = 16
GRACE_S, GRACE_RATIO = 0.1, 3.0
Probe = Callable[[str, int], Awaitable[None]]  # host and port; raises OSError if nothing listens there


class AddressBook:
    """Addresses by peer, bounded: the least recently learned peer is dropped first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Address, ...]] = OrderedDict()
        self._in_doubt: set[str] = set()  # known peers whose last dial failed

    def get(self, peer_id: str) -> tuple[Address, ...]:
        """The known addresses of a peer; may be empty."""
        return self._known.get(peer_id, ())

    def learn(self, addresses: Iterable[str], *, of: str | None = None) -> None:
        """Remember addresses (with /p2p/…), replacing the known ones of those peers.

        The addresses may come from untrusted peers: malformed ones are ignored, and so are those of other peers than
        `of`, if that is given. Pass `of` for what a peer states for itself, or it could replace others' addresses.
        """
        for peer_id, parsed in _readable(addresses).items():
            if of is not None and peer_id != of:
                continue
            self._known[peer_id] = parsed[:MAX_ADDRESSES_OF_PEER]
            self._known.move_to_end(peer_id)
            self._in_doubt.discard(peer_id)
        while len(self._known) > MAX_KNOWN_PEERS:
            self._in_doubt.discard(self._known.popitem(last=False)[0])

    def hear(self, addresses: Iterable[str], *, of: str) -> None:
        """As `learn`, for hearsay: ignored if addresses of that peer are known and the last dial did not fail."""
        if of not in self._known or of in self._in_doubt:
            self.learn(addresses, of=of)

    def dialed(self, peer_id: str, *, reached: bool) -> None:
        """Note whether the known addresses of a peer have reached it."""
        if reached:
            self._in_doubt.discard(peer_id)
        elif peer_id in self._known:
            self._in_doubt.add(peer_id)


def _readable(addresses: Iterable[str]) -> dict[str, tuple[Address, ...]]:
    """As `group_by_peer`, without the malformed addresses."""
    grouped: dict[str, tuple[Address, ...]] = {}
    for text in addresses:
        try:
            ((peer_id, parsed),) = group_by_peer([text]).items()
        except AddressError as error:
            logger.debug("a malformed address was ignored: %s", error)
            continue
        grouped[peer_id] = (*grouped.get(peer_id, ()), *parsed)
    return grouped


async def connect_once(host: str, port: int) -> None:
    """Open a TCP connection and close it. Raises OSError."""
    _, writer = await asyncio.open_connection(host, port)
    writer.transport.abort()


async def answering(addresses: Iterable[Address], probe: Probe, *, timeout_s: float) -> tuple[tuple[Address, ...], str]:
    """The addresses whose first hop accepts TCP connections, in order, and why the others do not ("" if all do).

    For an address through a relay the first hop is the relay. Once one has answered, the others get a moment more: a
    firewall may drop a dial silently, and a direct route is worth a short wait if the relay was quicker.
    """
    asked = tuple(addresses)
    loop = asyncio.get_running_loop()
    asking = {end: loop.create_task(_why_not(*end, probe)) for end in dict.fromkeys((a.host, a.port) for a in asked)}
    started_at = loop.time()
    try:
        pending, ends_at = set(asking.values()), started_at + timeout_s
        while pending and (left_s := ends_at - loop.time()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() is None for task in done):
                ends_at = min(ends_at, loop.time() + GRACE_S + GRACE_RATIO * (loop.time() - started_at))
        reasons = {end: task.result() if task.done() else "i/o timeout" for end, task in asking.items()}
    finally:
        for task in asking.values():
            task.cancel()
    good = tuple(address for address in asked if reasons[address.host, address.port] is None)
    return good, "; ".join(reason for reason in dict.fromkeys(reasons.values()) if reason is not None)


async def _why_not(host: str, port: int, probe: Probe) -> str | None:
    try:
        await probe(host, port)
    except ConnectionRefusedError:
        return "connection refused"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
