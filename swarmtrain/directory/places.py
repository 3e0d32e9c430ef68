"""Places in the DHT: hashes of peer ids and of topics, so that no peer can choose where it sits."""

from __future__ import annotations

import functools
import hashlib

from swarmtrain.directory.kademlia import PLACE_BYTES
from swarmtrain.directory.records import dht_key
from swarmtrain.p2p.addresses import peer_id_to_bytes


@functools.lru_cache(maxsize=8192)  # asked for every peer in every answer
def place_of_peer(peer_id: str) -> int:
    """A peer's place in the DHT: a hash of its peer id."""
    return _place(b"swarmtrain node\0" + peer_id_to_bytes(peer_id))


def place_of_topic(run_id: str, topic: str) -> int:
    """A topic's place in the DHT."""
    return _place(dht_key(run_id, topic).encode())


def _place(name: bytes) -> int:
    return int.from_bytes(hashlib.sha1(name).digest(), "big")


def place_bytes(place: int) -> bytes:
    """A place as messages carry it."""
    return place.to_bytes(PLACE_BYTES, "big")
