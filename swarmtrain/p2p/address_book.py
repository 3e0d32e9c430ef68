"""Where peers can be dialed, as far as a host was told. No I/O."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

from swarmtrain.p2p.addresses import Address, group_by_peer
from swarmtrain.p2p.host_errors import AddressError

logger = logging.getLogger(__name__)

MAX_KNOWN_PEERS = 20_000
MAX_ADDRESSES_OF_PEER = 16


class AddressBook:
    """Addresses by peer; the least recently learned go first when there are too many."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Address, ...]] = OrderedDict()
        self._in_doubt: set[str] = set()  # known peers that could not be reached the last time

    def get(self, peer_id: str) -> tuple[Address, ...]:
        """What is known of a peer; empty if nothing."""
        return self._known.get(peer_id, ())

    def learn(self, addresses: Iterable[str], *, of: str | None = None) -> None:
        """Remember addresses (with /p2p/…), in place of what was known of those peers.

        They may come from strangers: what is no address, or not one `of` that peer (if given), is ignored. Give `of`
        for what a peer says of itself, or it could replace the addresses of others.
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
        """As `learn`, for what others say of a peer: taken only if nothing is known of it, or nothing that worked."""
        if of not in self._known or of in self._in_doubt:
            self.learn(addresses, of=of)

    def dialed(self, peer_id: str, *, reached: bool) -> None:
        """Whether what is known of a peer has led to it."""
        if reached:
            self._in_doubt.discard(peer_id)
        elif peer_id in self._known:
            self._in_doubt.add(peer_id)


def _readable(addresses: Iterable[str]) -> dict[str, tuple[Address, ...]]:
    """`group_by_peer` of those that can be read; the others are left out."""
    grouped: dict[str, tuple[Address, ...]] = {}
    for text in addresses:
        try:
            ((peer_id, parsed),) = group_by_peer([text]).items()
        except AddressError as error:
            logger.debug("an address that is none was ignored: %s", error)
            continue
        grouped[peer_id] = (*grouped.get(peer_id, ()), *parsed)
    return grouped
