"""What DHT nodes say to each other: three questions with their answers.

`sender` in a question and `responder` in an answer is the node's place; it is empty for a node that stays out of the
routing tables of others. Addresses are multiaddrs in bytes, without the peer id at their end: where a node can be
dialed. The name of the protocol on the wire says kind and version, so only the fields travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarmtrain.directory.kademlia import PLACE_BYTES
from swarmtrain.wire.schema import Lengths, MaxLength, Message, Priority, message

MAX_RECORDS_PER_STORE = 64
MAX_RECORDS_PER_ANSWER = 1024  # checking one costs 100 us
MAX_NEIGHBOURS_PER_ANSWER = 20
MAX_PEER_ID_BYTES = 64
MAX_ADDRESSES = 8
MAX_ADDRESS_BYTES = 512
MAX_RECORD_BYTES = 2**16  # far above what a checker takes: one oversized record does not spoil the others of an answer

OptionalPlace = Annotated[bytes, Lengths((0, PLACE_BYTES))]
Key = Annotated[bytes, Lengths((PLACE_BYTES,))]
RawRecord = Annotated[bytes, MaxLength(MAX_RECORD_BYTES)]
Addresses = Annotated[tuple[Annotated[bytes, MaxLength(MAX_ADDRESS_BYTES)], ...], MaxLength(MAX_ADDRESSES)]


@message(kind="dht_ping", priority=Priority.CONTROL)
class Ping(Message):
    """Are you there? Answer: `Pong`."""

    sender: OptionalPlace
    addresses: Addresses


@message(kind="dht_pong", priority=Priority.CONTROL)
class Pong(Message):
    """Yes, and this is what my clock says."""

    responder: OptionalPlace
    time: float


@message(kind="dht_store", priority=Priority.CONTROL)
class Store(Message):
    """Keep these records under this key. Answer: `Stored`."""

    sender: OptionalPlace
    key: Key
    records: Annotated[tuple[RawRecord, ...], MaxLength(MAX_RECORDS_PER_STORE)]


@message(kind="dht_stored", priority=Priority.CONTROL)
class Stored(Message):
    """Which of them I keep."""

    responder: OptionalPlace
    accepted: Annotated[tuple[bool, ...], MaxLength(MAX_RECORDS_PER_STORE)]


@message(kind="dht_find", priority=Priority.CONTROL)
class Find(Message):
    """What do you have under this key, and whom do you know near it? Answer: `FoundHere`."""

    sender: OptionalPlace
    key: Key
    addresses: Addresses


@dataclass(frozen=True, slots=True)
class Contact:
    """Another node and where it can be dialed, as far as the one that names it knows."""

    peer_id: Annotated[bytes, MaxLength(MAX_PEER_ID_BYTES)]
    addresses: Addresses


@message(kind="dht_found_here", priority=Priority.CONTROL)
class FoundHere(Message):
    """These records, and these nodes near the key."""

    responder: OptionalPlace
    records: Annotated[tuple[RawRecord, ...], MaxLength(MAX_RECORDS_PER_ANSWER)]
    neighbours: Annotated[tuple[Contact, ...], MaxLength(MAX_NEIGHBOURS_PER_ANSWER)]
