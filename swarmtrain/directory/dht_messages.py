"""What DHT nodes say to each other: three questions with their answers, in msgpack, read strictly.

`sender` in a question and `responder` in an answer is the node's place, or nothing for one that wants to stay unknown.
`addresses` are multiaddrs in bytes, without the peer id at their end: where the sender can be dialed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import msgpack

from swarmtrain.directory.kademlia import PLACE_BYTES

MAX_RECORDS_PER_STORE = 64
MAX_RECORDS_PER_ANSWER = 1024  # checking one costs 100 us
MAX_NEIGHBOURS_PER_ANSWER = 20
MAX_PEER_ID_BYTES = 64
MAX_ADDRESSES = 8
MAX_ADDRESS_BYTES = 512


class MalformedDhtMessage(Exception):
    """Bytes that are not a message of the kind they should be."""


def _is_place(value: object) -> bool:
    return isinstance(value, bytes) and len(value) in (0, PLACE_BYTES)


def _are_bytes(value: object, max_count: int, max_bytes: int) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= max_count
        and all(isinstance(part, bytes) and len(part) <= max_bytes for part in value)
    )


@dataclass(frozen=True, slots=True)
class _DhtMessage:
    def pack(self) -> bytes:
        """The bytes that `unpack` reads."""
        values = tuple(getattr(self, field.name) for field in fields(self))  # astuple would copy every record
        packed: bytes = msgpack.packb(values, use_bin_type=True)
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Raises MalformedDhtMessage."""
        try:
            values = msgpack.unpackb(packed, raw=False, use_list=False)
            checks = _CHECKS[cls]
            is_right = isinstance(values, tuple) and len(values) == len(checks)
            if is_right and all(check(value) for check, value in zip(checks, values, strict=True)):
                return cls(*values)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException):
            pass  # the same as a wrong field
        raise MalformedDhtMessage(f"{len(packed)} bytes are not a {cls.__name__}")


@dataclass(frozen=True, slots=True)
class Ping(_DhtMessage):
    """Are you there?"""

    sender: bytes
    addresses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Pong(_DhtMessage):
    """Yes, and this is what my clock says."""

    responder: bytes
    time: float


@dataclass(frozen=True, slots=True)
class Store(_DhtMessage):
    """Keep these records under this key."""

    sender: bytes
    key: bytes
    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stored(_DhtMessage):
    """Which of them I keep."""

    responder: bytes
    accepted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Find(_DhtMessage):
    """What do you have under this key, and whom do you know near it?"""

    sender: bytes
    key: bytes
    addresses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FoundHere(_DhtMessage):
    """These records, and these peers: raw peer ids, each with the addresses it is known by."""

    responder: bytes
    records: tuple[bytes, ...]
    neighbours: tuple[tuple[bytes, tuple[bytes, ...]], ...]


def _is_key(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == PLACE_BYTES


def _are_flags(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_RECORDS_PER_STORE
        and all(flag in (True, False) for flag in value)
    )


def _are_addresses(value: object) -> bool:
    return _are_bytes(value, MAX_ADDRESSES, MAX_ADDRESS_BYTES)


def _are_neighbours(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_NEIGHBOURS_PER_ANSWER
        and all(isinstance(part, tuple) and len(part) == 2 and _are_addresses(part[1]) for part in value)
        and _are_bytes(tuple(part[0] for part in value), MAX_NEIGHBOURS_PER_ANSWER, MAX_PEER_ID_BYTES)
    )


_CHECKS: dict[type[Any], tuple[Callable[[object], bool], ...]] = {
    Ping: (_is_place, _are_addresses),
    Pong: (_is_place, lambda value: isinstance(value, float) and math.isfinite(value)),
    Store: (_is_place, _is_key, lambda value: _are_bytes(value, MAX_RECORDS_PER_STORE, 2**16)),
    Stored: (_is_place, _are_flags),
    Find: (_is_place, _is_key, _are_addresses),
    FoundHere: (
        _is_place,
        lambda value: _are_bytes(value, MAX_RECORDS_PER_ANSWER, 2**16),
        _are_neighbours,
    ),
}
