"""Field codecs: from a type annotation to a pair of functions that pack a value and read it back strictly.

Reading is driven by the schema, never by the bytes: each codec pulls exactly the msgpack item that its type allows, and
containers are read as "header, then items". So nesting is as deep as the schema and no deeper, and a length that the
bytes merely claim allocates nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from swarmtrain.wire.errors import MissingField, TooLong, UnknownField, WrongType
from swarmtrain.wire.limits import BlobMark, MaxLength
from swarmtrain.wire.reader import FieldCodec, Reader
from swarmtrain.wire.scalars import MAX_ITEM_HEADER, SCALARS, blob_codec, enum_codec, length_limit

_DEFAULT_KEY_LENGTH = 128


def compile_field(hint: Any, path: str, outer: tuple[type, ...] = ()) -> FieldCodec:
    """The codec of a field with annotation `hint`; `path` names it in errors. TypeError for what cannot be a field."""
    base, marks = _split_annotation(hint)
    if BlobMark in marks:
        return blob_codec(path, length_limit(marks, path))
    if get_origin(base) in (Union, types.UnionType):
        return _optional(base, path, outer)
    if get_origin(base) is tuple:
        return _tuple(base, marks, path, outer)
    if get_origin(base) is dict:
        return _dict(base, marks, path, outer)
    if isinstance(base, type):
        if is_dataclass(base):
            return compile_record(base, path, outer)
        if issubclass(base, Enum):
            return enum_codec(base, path)
        if base in SCALARS:
            return SCALARS[base](marks, path)
    raise TypeError(f"{path}: {hint!r} cannot be a field of a message")


def compile_record(cls: type, path: str, outer: tuple[type, ...] = ()) -> FieldCodec:
    """The codec of a frozen dataclass: an array with one item per field, in the order of the class."""
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{path}: {cls.__name__} must be a frozen dataclass")
    if cls in outer:
        raise TypeError(f"{path}: {cls.__name__} contains itself")
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in fields(cls)]
    codecs = [compile_field(hints[name], f"{path}.{name}", (*outer, cls)) for name in names]
    packs = tuple(codec.pack for codec in codecs)
    unpacks = tuple(codec.unpack for codec in codecs)
    num_fields = len(names)
    get_values = _values_getter(names)

    def pack(value: Any, blobs: list[memoryview]) -> object:
        if type(value) is not cls:
            raise WrongType(f"{path}: {type(value).__name__} is not {cls.__name__}")
        return [pack_field(item, blobs) for pack_field, item in zip(packs, get_values(value), strict=True)]

    def unpack(reader: Reader) -> Any:
        count = reader.array()
        if count < num_fields:
            raise MissingField(f"{path}: no field {names[count]!r}")
        if count > num_fields:
            raise UnknownField(f"{path}: {count - num_fields} fields more than the schema has")
        return cls(*[unpack_field(reader) for unpack_field in unpacks])

    shape = ",".join(f"{name}:{codec.shape}" for name, codec in zip(names, codecs, strict=True))
    max_bytes = MAX_ITEM_HEADER + sum(codec.max_bytes for codec in codecs)
    return FieldCodec(pack, unpack, max_bytes, sum(codec.max_blob_bytes for codec in codecs), f"{{{shape}}}")


def _values_getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from an object to the tuple of its attributes, also for none and for one of them."""
    if not names:
        return lambda value: ()
    if len(names) == 1:
        get_one = attrgetter(names[0])
        return lambda value: (get_one(value),)
    return attrgetter(*names)


def _split_annotation(hint: Any) -> tuple[Any, dict[type, Any]]:
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        return base, {type(mark): mark for mark in marks}
    return hint, {}


def _optional(base: Any, path: str, outer: tuple[type, ...]) -> FieldCodec:
    """None or a value: an array of no or one item, so that a reader need not look ahead."""
    inner_hints = [hint for hint in get_args(base) if hint is not type(None)]
    if len(inner_hints) != 1 or len(get_args(base)) != 2:
        raise TypeError(f"{path}: the only union that can be a field is `T | None`")
    inner = compile_field(inner_hints[0], path, outer)

    def pack(value: Any, blobs: list[memoryview]) -> object:
        return [] if value is None else [inner.pack(value, blobs)]

    def unpack(reader: Reader) -> Any:
        count = reader.array()
        if count > 1:
            raise WrongType(f"{path}: {count} items where one value or none belongs")
        return inner.unpack(reader) if count else None

    return FieldCodec(pack, unpack, MAX_ITEM_HEADER + inner.max_bytes, inner.max_blob_bytes, f"optional {inner.shape}")


def _tuple(base: Any, marks: Mapping[type, Any], path: str, outer: tuple[type, ...]) -> FieldCodec:
    hints = get_args(base)
    if len(hints) != 2 or hints[1] is not Ellipsis:
        raise TypeError(f"{path}: only tuple[T, ...] can be a field; use a frozen dataclass for mixed types")
    limit = length_limit(marks, path)
    inner = compile_field(hints[0], f"{path}[]", outer)

    def check_length(count: int) -> int:
        if count > limit:
            raise TooLong(f"{path}: {count} items, at most {limit}")
        return count

    def pack(value: Any, blobs: list[memoryview]) -> object:
        if type(value) is not tuple:
            raise WrongType(f"{path}: {type(value).__name__} is not a tuple")
        check_length(len(value))
        return [inner.pack(item, blobs) for item in value]

    def unpack(reader: Reader) -> tuple[Any, ...]:
        # A list comprehension grows item by item: a count that is only claimed runs out of data, not of memory.
        return tuple([inner.unpack(reader) for _ in range(check_length(reader.array()))])

    max_bytes = MAX_ITEM_HEADER + limit * inner.max_bytes
    return FieldCodec(pack, unpack, max_bytes, limit * inner.max_blob_bytes, f"tuple[{inner.shape}]")


def _dict(base: Any, marks: Mapping[type, Any], path: str, outer: tuple[type, ...]) -> FieldCodec:
    key_hint, value_hint = get_args(base)
    if key_hint is str:
        key_hint = Annotated[str, MaxLength(_DEFAULT_KEY_LENGTH)]
    if _split_annotation(key_hint)[0] is not str:
        raise TypeError(f"{path}: keys must be str")
    limit = length_limit(marks, path)
    key = compile_field(key_hint, f"{path} key", outer)
    inner = compile_field(value_hint, f"{path}[]", outer)

    def check_length(count: int) -> int:
        if count > limit:
            raise TooLong(f"{path}: {count} entries, at most {limit}")
        return count

    def pack(value: Any, blobs: list[memoryview]) -> object:
        if type(value) is not dict:
            raise WrongType(f"{path}: {type(value).__name__} is not a dict")
        check_length(len(value))
        return {key.pack(name, blobs): inner.pack(item, blobs) for name, item in value.items()}

    def unpack(reader: Reader) -> dict[str, Any]:
        count = check_length(reader.map())
        found: dict[str, Any] = {}
        for _ in range(count):
            name = key.unpack(reader)
            if name in found:
                raise UnknownField(f"{path}: two entries {name!r}")
            found[name] = inner.unpack(reader)
        return found

    max_bytes = MAX_ITEM_HEADER + limit * (key.max_bytes + inner.max_bytes)
    return FieldCodec(pack, unpack, max_bytes, limit * inner.max_blob_bytes, f"dict[{inner.shape}]")
