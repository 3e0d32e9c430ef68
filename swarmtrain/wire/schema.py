"""Typed messages: a frozen dataclass with limits in its annotations is its own wire format.

    @message(kind="work", priority=Priority.BOUNDARY)
    class Work(Message):
        step: Annotated[int, Range(0, 2**40)]
        coordinates: Annotated[Blob, MaxLength(64 * MIB)]

A message on the wire ("body") is: length of the header (4 bytes, little endian), the header, the blobs. The header is
the msgpack array [kind, protocol version, fingerprint of the field names and types, [field values]]; a blob's value in
it is its length. Each blob starts at a multiple of 16 bytes, the gaps are zero. A message that decodes is one that
could have been encoded.

Where kind and version stand elsewhere, the array of field values is the whole form: `pack_fields`, `unpack_fields`. So
the directory's messages and records stay small, and can be read across versions of the step protocol.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import msgpack

from swarmtrain.wire.errors import (
    ExtraBytes,
    MalformedMessage,
    TooLong,
    TruncatedMessage,
    UnknownKind,
    WireError,
    WrongType,
    WrongVersion,
)
from swarmtrain.wire.fields import compile_record
from swarmtrain.wire.limits import AllowNonFinite, Blob, Lengths, MaxLength, Priority, Range
from swarmtrain.wire.reader import BlobListReader, FieldCodec, Reader, aligned

__all__ = [
    "PROTOCOL_VERSION",
    "AllowNonFinite",
    "Blob",
    "EncodedMessage",
    "Lengths",
    "MaxLength",
    "Message",
    "MessageCodec",
    "Priority",
    "Range",
    "Registry",
    "WireError",
    "encode",
    "message",
    "pack_fields",
    "unpack_fields",
]

PROTOCOL_VERSION = 5  # both ends of a link prove that they have the run's secret since then
MAX_KIND_BYTES = 32
_HEADER_LENGTH = struct.Struct("<I")
_HEADER_OVERHEAD = 64  # array prefixes, kind, version and fingerprint
_PADDING = memoryview(bytes(16))

M = TypeVar("M", bound="Message")


class Message:
    """Base of all messages. Subclasses are made with `@message`; they are frozen dataclasses."""

    __slots__ = ()
    wire: ClassVar[MessageCodec]


class EncodedMessage(NamedTuple):
    """A message ready to be written: `buffers` in order make the body. Blobs are referenced, not copied."""

    kind: str
    priority: Priority
    buffers: tuple[memoryview, ...]
    blobs: tuple[memoryview, ...]
    num_bytes: int

    @property
    def num_blob_bytes(self) -> int:
        """What the blobs take, without padding."""
        return sum(len(blob) for blob in self.blobs)

    def join(self) -> bytes:
        """The whole body in one piece (copies)."""
        return b"".join(self.buffers)


@dataclass(frozen=True, slots=True)
class MessageCodec:
    """What `@message` knows about a class."""

    kind: str
    priority: Priority
    fingerprint: int
    max_bytes: int  # no body of this kind is longer
    record: FieldCodec


@dataclass_transform(frozen_default=True)
def message(*, kind: str, priority: Priority) -> Callable[[type[M]], type[M]]:
    """Make a subclass of `Message` a frozen, slotted dataclass with a wire format. TypeError if it cannot have one."""

    def decorate(cls: type[M]) -> type[M]:
        if not issubclass(cls, Message):
            raise TypeError(f"{cls.__name__} must derive from Message")
        if not kind.isascii() or not 0 < len(kind) <= MAX_KIND_BYTES:
            raise TypeError(f"{cls.__name__}: kind must be 1 to {MAX_KIND_BYTES} ASCII characters")
        if not (is_dataclass(cls) and "__dataclass_fields__" in vars(cls)):
            cls = dataclass(frozen=True, slots=True)(cls)
        record = compile_record(cls, kind)
        fingerprint = zlib.crc32(f"{kind}{record.shape}".encode())
        header_bytes = _HEADER_LENGTH.size + _HEADER_OVERHEAD + len(kind) + record.max_bytes
        max_bytes = aligned(header_bytes) + record.max_blob_bytes
        cls.wire = MessageCodec(kind, Priority(priority), fingerprint, max_bytes, record)
        return cls

    return decorate


def encode(item: Message) -> EncodedMessage:
    """The wire form of `item`. WireError if a field breaks its own limits."""
    codec: MessageCodec = item.wire
    blobs: list[memoryview] = []
    values = codec.record.pack(item, blobs)
    header = _packed([codec.kind, PROTOCOL_VERSION, codec.fingerprint, values], codec.kind)
    buffers = [memoryview(_HEADER_LENGTH.pack(len(header)) + header)]
    offset = len(buffers[0])
    for blob in blobs:
        start = aligned(offset)
        if start != offset:
            buffers.append(_PADDING[: start - offset])
        if len(blob):
            buffers.append(blob)
        offset = start + len(blob)
    return EncodedMessage(codec.kind, codec.priority, tuple(buffers), tuple(blobs), offset)


def pack_fields(item: Message) -> bytes:
    """Nothing but the field values of `item`, which has no blobs. WireError if a field breaks its own limits."""
    blobs: list[memoryview] = []
    values = item.wire.record.pack(item, blobs)
    if blobs:
        raise TypeError(f"{item.wire.kind} has blobs: it cannot be packed without its header")
    return _packed(values, item.wire.kind)


def unpack_fields(cls: type[M], packed: bytes | memoryview) -> M:
    """The message of this class in what `pack_fields` made. Raises WireError and nothing else, whatever the bytes."""
    codec = cls.wire
    if len(packed) > codec.record.max_bytes:
        raise TooLong(f"{codec.kind}: {len(packed)} bytes, at most {codec.record.max_bytes}")
    unpacker = _unpacker(memoryview(packed))
    try:
        item: M = codec.record.unpack(Reader(unpacker, memoryview(b""), 0))
    except (ValueError, msgpack.UnpackException) as error:
        raise _as_wire_error(error) from error
    if unpacker.tell() != len(packed):
        raise ExtraBytes(f"{codec.kind}: {len(packed) - unpacker.tell()} bytes after the last field")
    return item


class Registry:
    """The kinds that one end understands; immutable. Two classes of one kind are a TypeError."""

    def __init__(self, *classes: type[Message]) -> None:
        by_kind: dict[str, type[Message]] = {}
        for cls in classes:
            if by_kind.setdefault(cls.wire.kind, cls) is not cls:
                raise TypeError(f"two messages of kind {cls.wire.kind!r}")
        self._by_kind = MappingProxyType(by_kind)

    def __iter__(self) -> Iterator[type[Message]]:
        return iter(self._by_kind.values())

    def codec(self, kind: str) -> MessageCodec:
        """The codec of `kind`; UnknownKind if there is none."""
        cls = self._by_kind.get(kind)
        if cls is None:
            raise UnknownKind(f"unknown message kind {kind[:MAX_KIND_BYTES]!r}")
        return cls.wire

    def decode(self, body: bytes | bytearray | memoryview) -> Message:
        """The message in `body`. Raises WireError and nothing else, whatever the bytes are.

        Blobs are views of `body`: it must not be changed afterwards.
        """
        return self.decode_counted(body)[0]

    def decode_counted(self, body: bytes | bytearray | memoryview) -> tuple[Message, int]:
        """As `decode`; also how many bytes of blobs there are."""
        view = memoryview(body).cast("B") if len(body) else memoryview(b"")
        if len(view) < _HEADER_LENGTH.size:
            raise TruncatedMessage(f"{len(view)} bytes are no message")
        (header_bytes,) = _HEADER_LENGTH.unpack_from(view)
        blobs_start = _HEADER_LENGTH.size + header_bytes
        if blobs_start > len(view):
            raise TruncatedMessage(f"header of {header_bytes} bytes announced, {len(view) - 4} present")
        try:
            return self._decode(view, header_bytes)
        except (ValueError, msgpack.UnpackException) as error:
            raise _as_wire_error(error) from error

    def loop_back(self, encoded: EncodedMessage) -> Message:
        """What the other end would decode, without copying the blobs: for calls to oneself."""
        header = encoded.buffers[0][_HEADER_LENGTH.size :]
        unpacker = _unpacker(header)
        return self._read(unpacker, BlobListReader(unpacker, encoded.blobs), len(header), encoded.num_bytes)

    def _decode(self, view: memoryview, header_bytes: int) -> tuple[Message, int]:
        start = _HEADER_LENGTH.size
        unpacker = _unpacker(view[start : start + header_bytes])
        reader = Reader(unpacker, view, start + header_bytes)
        item = self._read(unpacker, reader, header_bytes, len(view))
        reader.check_all_taken()
        return item, reader.num_blob_bytes

    def _read(self, unpacker: msgpack.Unpacker, reader: Reader, header_bytes: int, num_bytes: int) -> Message:
        if reader.array() != 4:
            raise MalformedMessage("a message header has four parts")
        codec = self.codec(_as_kind(reader.next()))
        _check_same_schema(codec, reader.next(), reader.next())
        if num_bytes > codec.max_bytes:
            raise TooLong(f"{codec.kind}: {num_bytes} bytes, at most {codec.max_bytes}")
        item: Message = codec.record.unpack(reader)
        if unpacker.tell() != header_bytes:
            raise ExtraBytes(f"{codec.kind}: {header_bytes - unpacker.tell()} bytes after the header")
        return item


def _packed(values: object, kind: str) -> bytes:
    try:
        # A small buffer: the default of 256 KiB costs more than packing a small message.
        packed: bytes = msgpack.Packer(buf_size=512).pack(values)
    except (ValueError, TypeError, OverflowError) as error:  # a lone surrogate in a str, for instance
        raise WrongType(f"{kind}: {error}") from error
    return packed


def _as_wire_error(error: Exception) -> WireError:
    """What msgpack says of damaged bytes, in our words."""
    if isinstance(error, msgpack.OutOfData):
        return TruncatedMessage("the bytes end inside a field")
    return MalformedMessage(f"not a msgpack item of the right type: {str(error) or 'bad format'}")


def _unpacker(header: memoryview) -> msgpack.Unpacker:
    # Items read one by one are scalars: containers have their own calls, so none may come as an item.
    unpacker = msgpack.Unpacker(
        max_buffer_size=max(1, len(header)), max_array_len=0, max_map_len=0, max_ext_len=0, strict_map_key=True
    )
    unpacker.feed(header)
    return unpacker


def _as_kind(value: Any) -> str:
    if type(value) is not str:
        raise MalformedMessage("the kind of a message is a text")
    return value


def _check_same_schema(codec: MessageCodec, version: Any, fingerprint: Any) -> None:
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise WrongVersion(
            f"{codec.kind}: protocol version {version!r:.40}, this end speaks {PROTOCOL_VERSION}",
            fix="run the same version of swarmtrain on both ends",
        )
    if type(fingerprint) is not int or fingerprint != codec.fingerprint:
        raise WrongVersion(
            f"{codec.kind}: the other end's message has other fields than this end's",
            fix="run the same version of swarmtrain on both ends",
        )
