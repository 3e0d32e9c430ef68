"""Directory records: the same schema layer as messages, for what a peer publishes instead of sends.

A record that breaks its schema, or comes from another version of the protocol, is as good as absent.
"""

from __future__ import annotations

from typing import TypeVar

from swarmtrain.wire.errors import WireError, WrongVersion
from swarmtrain.wire.schema import Message, Registry, encode

R = TypeVar("R", bound=Message)

MAX_RECORD_BYTES = 2048


def pack_record(item: Message) -> bytes:
    """The value of a directory record. WireError if a field breaks its own limits."""
    return encode(item).join()


def parse_record(cls: type[R], value: object) -> R | None:
    """The record of this class in a value that anybody may have published; None if there is none."""
    if not isinstance(value, bytes) or len(value) > MAX_RECORD_BYTES:
        return None
    try:
        item = Registry(cls).decode(value)
    except WireError:
        return None
    return item if isinstance(item, cls) else None


def version_fault(cls: type[Message], value: object) -> WrongVersion | None:
    """Why a record cannot be read, if it is because its publisher speaks another version of the protocol."""
    if not isinstance(value, bytes) or len(value) > MAX_RECORD_BYTES:
        return None
    try:
        Registry(cls).decode(value)
    except WrongVersion as error:
        return error
    except WireError:
        return None
    return None
