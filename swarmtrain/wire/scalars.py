"""Codecs of single values: numbers, texts, bytes, blobs, members of an Enum."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from swarmtrain.wire.errors import OutOfRange, TooLong, WrongType
from swarmtrain.wire.limits import BLOB_ALIGNMENT, AllowNonFinite, Lengths, MaxLength, Range
from swarmtrain.wire.reader import FieldCodec, Reader

MAX_ITEM_HEADER = 5  # bytes of the longest msgpack prefix of a str, bytes, array or map
MAX_NUMBER = 9


def length_limit(marks: Mapping[type, Any], path: str) -> int:
    """The MaxLength among a field's annotations; TypeError if there is none."""
    if MaxLength not in marks:
        raise TypeError(f"{path}: needs MaxLength")
    limit: int = marks[MaxLength].limit
    if limit < 0:
        raise TypeError(f"{path}: MaxLength({limit}) is negative")
    return limit


def bool_codec(marks: Mapping[type, Any], path: str) -> FieldCodec:
    """True or False."""

    def check(value: Any, blobs: object = None) -> bool:
        if value is not True and value is not False:
            raise WrongType(f"{path}: {type(value).__name__} is not a bool")
        return bool(value)

    return FieldCodec(check, lambda reader: check(reader.next()), 1, 0, "bool")


def int_codec(marks: Mapping[type, Any], path: str) -> FieldCodec:
    """An integer within its Range."""
    if Range not in marks:
        raise TypeError(f"{path}: an int needs Range(low, high)")
    low, high = marks[Range].low, marks[Range].high
    if not -(2**63) <= low <= high < 2**64:
        raise TypeError(f"{path}: Range({low}, {high}) is empty or beyond 64 bits")

    def check(value: Any, blobs: object = None) -> int:
        if type(value) is not int:
            raise WrongType(f"{path}: {type(value).__name__} is not an int")
        if not low <= value <= high:
            raise OutOfRange(f"{path}: {value} is outside {low}..{high}")
        return value

    return FieldCodec(check, lambda reader: check(reader.next()), MAX_NUMBER, 0, "int")


def float_codec(marks: Mapping[type, Any], path: str) -> FieldCodec:
    """A finite number within its Range, if it has one. With AllowNonFinite also NaN and infinities, but no negative one
    where the Range has no negative number."""
    low = marks[Range].low if Range in marks else -math.inf
    high = marks[Range].high if Range in marks else math.inf
    allow_non_finite = AllowNonFinite in marks

    def check(value: Any, blobs: object = None) -> float:
        if type(value) is not float:
            raise WrongType(f"{path}: {type(value).__name__} is not a float")
        if not math.isfinite(value):
            if not allow_non_finite or (value == -math.inf and low >= 0.0):
                raise OutOfRange(f"{path}: {value} is not finite")
        elif not low <= value <= high:
            raise OutOfRange(f"{path}: {value} is outside {low}..{high}")
        return value

    def pack(value: Any, blobs: list[memoryview]) -> object:
        # An int is a fine float in Python; on the wire there is one form only.
        return check(float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value)

    return FieldCodec(pack, lambda reader: check(reader.next()), MAX_NUMBER, 0, "float")


def str_codec(marks: Mapping[type, Any], path: str) -> FieldCodec:
    """A text of at most MaxLength characters."""
    limit = length_limit(marks, path)

    def check(value: Any, blobs: object = None) -> str:
        if type(value) is not str:
            raise WrongType(f"{path}: {type(value).__name__} is not a str")
        if len(value) > limit:
            raise TooLong(f"{path}: {len(value)} characters, at most {limit}")
        return value

    max_bytes = MAX_ITEM_HEADER + 4 * limit  # UTF-8 takes at most four bytes per character
    return FieldCodec(check, lambda reader: check(reader.next()), max_bytes, 0, "str")


def bytes_codec(marks: Mapping[type, Any], path: str) -> FieldCodec:
    """At most MaxLength bytes, or one of the allowed Lengths, within the header."""
    if Lengths in marks:
        return _bytes_of_length(marks[Lengths].allowed, path)
    limit = length_limit(marks, path)

    def check(value: Any, blobs: object = None) -> bytes:
        if type(value) is not bytes:
            raise WrongType(f"{path}: {type(value).__name__} is not bytes")
        if len(value) > limit:
            raise TooLong(f"{path}: {len(value)} bytes, at most {limit}")
        return value

    max_bytes = MAX_ITEM_HEADER + limit
    return FieldCodec(check, lambda reader: check(reader.next()), max_bytes, 0, "bytes")


def _bytes_of_length(allowed: tuple[int, ...], path: str) -> FieldCodec:
    if not allowed or min(allowed) < 0:
        raise TypeError(f"{path}: Lengths{allowed} allows nothing")

    def check(value: Any, blobs: object = None) -> bytes:
        if type(value) is not bytes:
            raise WrongType(f"{path}: {type(value).__name__} is not bytes")
        if len(value) not in allowed:
            raise OutOfRange(f"{path}: {len(value)} bytes, not {' or '.join(map(str, allowed))}")
        return value

    return FieldCodec(check, lambda reader: check(reader.next()), MAX_ITEM_HEADER + max(allowed), 0, "bytes")


def blob_codec(path: str, limit: int) -> FieldCodec:
    """At most `limit` bytes, behind the header; the header has their number."""

    def check_length(num_bytes: Any) -> int:
        if type(num_bytes) is not int:
            raise WrongType(f"{path}: the length of a blob is an int, not {type(num_bytes).__name__}")
        if not 0 <= num_bytes <= limit:
            raise TooLong(f"{path}: blob of {num_bytes} bytes, at most {limit}")
        return num_bytes

    def pack(value: Any, blobs: list[memoryview]) -> object:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise WrongType(f"{path}: {type(value).__name__} is not a blob")
        view = memoryview(value)
        if not view.c_contiguous:
            raise WrongType(f"{path}: a blob must be contiguous")
        check_length(view.nbytes)
        # An empty view with a zero in its shape cannot be cast.
        blobs.append(view.cast("B") if view.nbytes else memoryview(b""))
        return view.nbytes

    def unpack(reader: Reader) -> memoryview:
        return reader.take_blob(check_length(reader.next()), path)

    return FieldCodec(pack, unpack, MAX_NUMBER, limit + BLOB_ALIGNMENT - 1, "blob")


def enum_codec(cls: type[Enum], path: str) -> FieldCodec:
    """A member of an Enum with str or int values; travels as its value."""
    members = {member.value: member for member in cls}
    if not all(type(value) in (str, int) for value in members):
        raise TypeError(f"{path}: {cls.__name__} must have str or int values")
    longest = max((len(value.encode()) for value in members if isinstance(value, str)), default=0)

    def pack(value: Any, blobs: list[memoryview]) -> object:
        if type(value) is not cls:
            raise WrongType(f"{path}: {type(value).__name__} is not {cls.__name__}")
        return value.value

    def unpack(reader: Reader) -> Enum:
        raw = reader.next()
        if type(raw) not in (str, int) or raw not in members:
            raise OutOfRange(f"{path}: not a value of {cls.__name__}")
        return members[raw]

    return FieldCodec(pack, unpack, max(MAX_NUMBER, MAX_ITEM_HEADER + longest), 0, f"enum {cls.__name__}")


SCALARS: Mapping[type, Callable[[Mapping[type, Any], str], FieldCodec]] = types.MappingProxyType(
    {bool: bool_codec, int: int_codec, float: float_codec, str: str_codec, bytes: bytes_codec}
)
