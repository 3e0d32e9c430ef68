"""The messages of the DHT: three questions and their answers.

`sender` in a question and `responder` in an answer is the node's place; it is empty for a node that stays out of the
routing tables of others. Addresses are multiaddrs in bytes, without the peer id at their end. The protocol's name on
the wire states kind and version, so that only the fields are sent.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

from swarmtrain.directory.kademlia import PLACE_BYTES
from swarmtrain.p2p.addresses import Address
from swarmtrain.p2p.errors import AddressError
from swarmtrain.wire.schema import Lengths, MaxLength, Message, Priority, message

logger = logging.getLogger(__name__)
MAX_RECORDS_PER_STORE = 64
MAX_RECORDS_PER_ANSWER = 1024  # checking one costs 100 us
MAX_NEIGHBOURS_PER_ANSWER = 20
MAX_PEER_ID_BYTES = 64
MAX_ADDRESSES = 8
MAX_ADDRESS_BYTES = 512
MAX_RECORD_BYTES = (
    2**16
)  # above what a checker accepts: an oversized record does not invalidate the others of an answer

OptionalPlace = Annotated[bytes, Lengths((0, PLACE_BYTES))]
Key = Annotated[bytes, Lengths((PLACE_BYTES,))]
RawRecord = Annotated[bytes, MaxLength(MAX_RECORD_BYTES)]
Addresses = Annotated[tuple[Annotated[bytes, MaxLength(MAX_ADDRESS_BYTES)], ...], MaxLength(MAX_ADDRESSES)]


@message(kind="dht_ping", priority=Priority.CONTROL)
class Ping(Message):
    """Asks whether the node is alive. Answer: `Pong`."""

    sender: OptionalPlace
    addresses: Addresses


@message(kind="dht_pong", priority=Priority.CONTROL)
class Pong(Message):
    """The node is alive; `time` is its clock."""

    responder: OptionalPlace
    time: float


@message(kind="dht_store", priority=Priority.CONTROL)
class Store(Message):
    """Asks the node to store records under a key. Answer: `Stored`."""

    sender: OptionalPlace
    key: Key
    records: Annotated[tuple[RawRecord, ...], MaxLength(MAX_RECORDS_PER_STORE)]


@message(kind="dht_stored", priority=Priority.CONTROL)
class Stored(Message):
    """For each record whether the node stores it."""

    responder: OptionalPlace
    accepted: Annotated[tuple[bool, ...], MaxLength(MAX_RECORDS_PER_STORE)]


@message(kind="dht_find", priority=Priority.CONTROL)
class Find(Message):
    """Asks for the records under a key, and for nodes near it. Answer: `FoundHere`."""

    sender: OptionalPlace
    key: Key
    addresses: Addresses


@dataclass(frozen=True, slots=True)
class Contact:
    """A node and its addresses, as far as the node that names it knows them."""

    peer_id: Annotated[bytes, MaxLength(MAX_PEER_ID_BYTES)]
    addresses: Addresses


@message(kind="dht_found_here", priority=Priority.CONTROL)
class FoundHere(Message):
    """The records that the node has under the key, and the nodes near the key that it knows."""

    responder: OptionalPlace
    records: Annotated[tuple[RawRecord, ...], MaxLength(MAX_RECORDS_PER_ANSWER)]
    neighbours: Annotated[tuple[Contact, ...], MaxLength(MAX_NEIGHBOURS_PER_ANSWER)]


def pack_addresses(addresses: tuple[str, ...]) -> tuple[bytes, ...]:
    """Addresses in the form of `Contact`: the first few, without those that are too long."""
    raw = (Address.parse(text).without_peer().to_bytes() for text in addresses[:MAX_ADDRESSES])
    return tuple(part for part in raw if len(part) <= MAX_ADDRESS_BYTES)


def unpack_addresses(addresses: tuple[bytes, ...], peer_id: str) -> list[str]:
    """The readable ones of the addresses that an untrusted node named for a peer."""
    readable = []
    for raw in addresses:
        try:
            readable.append(str(Address.from_bytes(raw).with_peer(peer_id)))
        except AddressError as error:
            logger.debug("an address of %s was ignored: %s", peer_id, error)
    return readable
