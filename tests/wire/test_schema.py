"""Messages: valid ones round trip, anything else is refused with a typed error before it costs anything."""

from __future__ import annotations

import dataclasses
import math
import struct
import tracemalloc
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.wire.errors import (
    ExtraBytes,
    MalformedMessage,
    MissingField,
    OutOfRange,
    TooLong,
    TruncatedMessage,
    UnknownField,
    UnknownKind,
    WireError,
    WrongType,
    WrongVersion,
)
from swarmtrain.wire.messages import Done, Prepared
from swarmtrain.wire.schema import (
    PROTOCOL_VERSION,
    Blob,
    Lengths,
    MaxLength,
    Message,
    Priority,
    Range,
    Registry,
    encode,
    message,
    pack_fields,
    unpack_fields,
)

from .samples import EXAMPLE, REGISTRY, Everything, Hop, Nothing, One, everythings


@settings(deadline=None, max_examples=150)
@given(everythings)
def test_a_valid_message_round_trips(item: Everything) -> None:
    encoded = encode(item)
    body = encoded.join()
    assert len(body) == encoded.num_bytes <= Everything.wire.max_bytes
    assert REGISTRY.decode(body) == item
    assert REGISTRY.decode(bytearray(body)) == item
    assert REGISTRY.loop_back(encoded) == item
    assert REGISTRY.decode_counted(body)[1] == encoded.num_blob_bytes


def test_messages_without_fields_and_with_one_round_trip() -> None:
    for item in (Nothing(), One(7)):
        assert REGISTRY.decode(encode(item).join()) == item


def test_nan_passes_where_it_is_allowed_and_only_there() -> None:
    item = dataclasses.replace(EXAMPLE, loss=math.nan)
    decoded = REGISTRY.decode(encode(item).join())
    assert isinstance(decoded, Everything)
    assert math.isnan(decoded.loss)
    with pytest.raises(OutOfRange):
        encode(dataclasses.replace(EXAMPLE, ratio=math.nan))


def test_blobs_are_neither_copied_when_sent_nor_when_received() -> None:
    source = bytearray(200)
    encoded = encode(dataclasses.replace(EXAMPLE, tensor=source))
    assert any(buffer.obj is source for buffer in encoded.buffers)
    body = bytearray(encoded.join())
    decoded = REGISTRY.decode(body)
    assert isinstance(decoded, Everything)
    assert isinstance(decoded.tensor, memoryview)
    assert decoded.tensor.obj is body
    assert not decoded.tensor.readonly


def test_blobs_start_at_aligned_offsets_and_padding_must_be_zero() -> None:
    encoded = encode(EXAMPLE)
    body = bytearray(encoded.join())
    (header_bytes,) = struct.unpack_from("<I", body)
    padding = range(4 + header_bytes, -(-(4 + header_bytes) // 16) * 16)
    assert padding, "the example must have padding"
    assert bytes(body[padding.stop : padding.stop + 33]) == EXAMPLE.tensor
    body[padding.start] = 1
    with pytest.raises(ExtraBytes):
        REGISTRY.decode(body)


def test_a_blob_of_any_contiguous_format_is_sent_as_its_bytes() -> None:
    doubles = memoryview(struct.pack("<3d", 1, 2, 3)).cast("d")
    decoded = REGISTRY.decode(encode(dataclasses.replace(EXAMPLE, tensor=doubles)).join())
    assert isinstance(decoded, Everything)
    assert bytes(decoded.tensor) == doubles.tobytes()
    with pytest.raises(WrongType):
        encode(dataclasses.replace(EXAMPLE, tensor=memoryview(bytes(16))[::2]))


BAD_VALUES: list[tuple[str, Any, type[WireError]]] = [
    ("small", 6, OutOfRange),
    ("small", True, WrongType),
    ("small", 1.0, WrongType),
    ("small", None, WrongType),
    ("wide", 2**64, OutOfRange),
    ("flag", 1, WrongType),
    ("ratio", "x", WrongType),
    ("ratio", math.inf, OutOfRange),
    ("share", 1.5, OutOfRange),
    ("text", "x" * 11, TooLong),
    ("text", b"x", WrongType),
    ("text", "\ud800", WrongType),
    ("digest", b"x" * 33, TooLong),
    ("digest", "x", WrongType),
    ("colour", "red", WrongType),
    ("ids", (1, 1001), OutOfRange),
    ("ids", tuple(range(21)), TooLong),
    ("ids", [1], WrongType),
    ("route", (Hop("x" * 9, 0),), TooLong),
    ("route", ("x",), WrongType),
    ("rates", {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, TooLong),
    ("rates", {1: 1.0}, WrongType),
    ("maybe", 3, WrongType),
    ("tensor", bytes(201), TooLong),
    ("tensor", 3, WrongType),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_VALUES)
def test_a_message_that_breaks_its_own_limits_is_not_sent(name: str, value: Any, error: type[WireError]) -> None:
    with pytest.raises(error, match=f"everything.{name}|everything: "):
        encode(dataclasses.replace(EXAMPLE, **{name: value}))


def header_of(item: Message) -> list[Any]:
    """The msgpack header of a message, to be tampered with."""
    body = encode(item).join()
    (header_bytes,) = struct.unpack_from("<I", body)
    header: list[Any] = msgpack.unpackb(body[4 : 4 + header_bytes])
    return header


def body_with(header: Any) -> bytes:
    """A message with that header and the example's blobs."""
    packed = msgpack.packb(header)
    blobs = encode(EXAMPLE).blobs
    body = struct.pack("<I", len(packed)) + packed
    for blob in blobs:
        body += bytes(-len(body) % 16) + bytes(blob)
    return body


def test_the_tampering_helpers_make_a_valid_message_if_nothing_is_tampered_with() -> None:
    assert REGISTRY.decode(body_with(header_of(EXAMPLE))) == EXAMPLE


FIELD_NAMES = [field.name for field in dataclasses.fields(Everything)]
BAD_WIRE_VALUES: list[tuple[str, Any, type[WireError]]] = [
    ("small", 6, OutOfRange),
    ("small", True, WrongType),
    ("small", "1", WrongType),
    ("small", [1], MalformedMessage),
    ("small", {"a": 1}, MalformedMessage),
    ("flag", 1, WrongType),
    ("flag", None, WrongType),
    ("ratio", 1, WrongType),
    ("ratio", math.nan, OutOfRange),
    ("text", "x" * 11, TooLong),
    ("text", b"x", WrongType),
    ("digest", b"x" * 33, TooLong),
    ("colour", "green", OutOfRange),
    ("colour", 1, OutOfRange),
    ("colour", [], OutOfRange),
    ("level", 2, OutOfRange),
    ("level", True, OutOfRange),
    ("ids", [1001], OutOfRange),
    ("ids", list(range(21)), TooLong),
    ("ids", 5, MalformedMessage),
    ("route", [["a"]], MissingField),
    ("route", [["a", 1, 2]], UnknownField),
    ("route", [[["a"], 1]], MalformedMessage),
    ("rates", {"a": "b"}, WrongType),
    ("rates", {"a" * 129: 1.0}, TooLong),
    ("rates", [], MalformedMessage),
    ("maybe", [["a", 1], ["b", 2]], WrongType),
    ("maybe", None, MalformedMessage),
    ("tensor", -1, TooLong),
    ("tensor", 201, TooLong),
    ("tensor", 100, TruncatedMessage),
    ("tensor", b"x", WrongType),
    ("tensor", msgpack.ExtType(5, b"abc"), MalformedMessage),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_WIRE_VALUES)
def test_a_tampered_field_is_refused(name: str, value: Any, error: type[WireError]) -> None:
    header = header_of(EXAMPLE)
    header[3][FIELD_NAMES.index(name)] = value
    with pytest.raises(error):
        REGISTRY.decode(body_with(header))


def test_missing_and_unknown_fields_kinds_versions_and_schemas_are_refused() -> None:
    kind, version, fingerprint, values = header_of(EXAMPLE)
    with pytest.raises(MissingField, match="parts"):
        REGISTRY.decode(body_with([kind, version, fingerprint, values[:-1]]))
    with pytest.raises(UnknownField):
        REGISTRY.decode(body_with([kind, version, fingerprint, [*values, 1]]))
    with pytest.raises(UnknownKind):
        REGISTRY.decode(body_with(["nobody", version, fingerprint, values]))
    with pytest.raises(WrongVersion):
        REGISTRY.decode(body_with([kind, PROTOCOL_VERSION + 1, fingerprint, values]))
    with pytest.raises(WrongVersion):
        REGISTRY.decode(body_with([kind, version, fingerprint ^ 1, values]))
    for header in ([kind, version, fingerprint], {}, 7, [kind, version, fingerprint, values, 1], [7, 1, 1, []]):
        with pytest.raises(MalformedMessage):
            REGISTRY.decode(body_with(header))


def test_two_equal_keys_of_a_dictionary_are_refused() -> None:
    header = header_of(EXAMPLE)
    header[3][FIELD_NAMES.index("rates")] = {"a": 1.0, "b": 2.0}
    body = body_with(header).replace(b"\xa1b\xcb", b"\xa1a\xcb")
    with pytest.raises(UnknownField, match="two entries"):
        REGISTRY.decode(body)


def test_extra_bytes_after_the_header_or_the_blobs_are_refused() -> None:
    body = encode(One(7)).join()
    with pytest.raises(ExtraBytes):
        REGISTRY.decode(body + b"\0")
    longer_header = struct.pack("<I", len(body) - 4 + 1) + body[4:] + b"\xc0"
    with pytest.raises(ExtraBytes):
        REGISTRY.decode(longer_header)


def test_every_truncation_is_refused() -> None:
    body = encode(EXAMPLE).join()
    for length in range(len(body)):
        with pytest.raises(WireError):
            REGISTRY.decode(body[:length])


def test_every_flipped_bit_gives_a_message_or_a_wire_error() -> None:
    body = encode(EXAMPLE).join()
    num_refused = 0
    for position in range(len(body) * 8):
        damaged = bytearray(body)
        damaged[position // 8] ^= 1 << position % 8
        try:
            REGISTRY.decode(damaged)
        except WireError:
            num_refused += 1
    assert num_refused > 0


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        REGISTRY.decode(data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_random_headers_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        REGISTRY.decode(struct.pack("<I", len(data)) + data)


json_like: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(FIELD_NAMES) - 1), json_like)
def test_any_value_in_any_field_gives_a_message_or_a_wire_error(index: int, value: Any) -> None:
    header = header_of(EXAMPLE)
    header[3][index] = value
    try:
        body = body_with(header)
    except (UnicodeEncodeError, ValueError):
        return  # nothing that msgpack can even write
    try:
        item = REGISTRY.decode(body)
    except WireError:
        return
    assert encode(item).num_bytes <= Everything.wire.max_bytes  # what decodes is within its own limits


def claims() -> list[bytes]:
    """Headers that claim far more than they hold."""
    huge_array, huge_map = b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"
    huge_text, huge_bytes = b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"
    kind = b"\xaaeverything"
    prefix = b"\x94" + kind + b"\x01\xce" + struct.pack(">I", Everything.wire.fingerprint)
    tops = [huge_array * 2000, huge_map * 2000, huge_text, huge_bytes, b"\x91" * 5000, b"\xdc\x10\x00" * 3000]
    return [*tops, *(prefix + top for top in tops), *(prefix + b"\xdc\x00\x10" + top for top in tops)]


@pytest.mark.parametrize("header", claims())
def test_a_claimed_length_allocates_nothing(header: bytes) -> None:
    body = struct.pack("<I", len(header)) + header
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            REGISTRY.decode(body)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    unpacker_bytes = 48_000  # msgpack's own stack, whatever the input
    assert peak_bytes < unpacker_bytes + 8 * len(body)


def test_a_schema_without_limits_is_refused_when_it_is_declared() -> None:
    def declare(hint: Any) -> None:
        cls = type("Bad", (Message,), {"__annotations__": {"field": hint}, "__module__": __name__})
        message(kind="bad", priority=Priority.CONTROL)(cls)

    good = [Annotated[int, Range(0, 1)], bool, float, Annotated[str, MaxLength(1)], Annotated[Blob, MaxLength(1)]]
    for hint in good:
        declare(hint)
    bad = [
        int,
        str,
        bytes,
        Blob,
        tuple[bool, ...],
        tuple[bool, float],
        Annotated[tuple[int, ...], MaxLength(1)],
        dict[str, bool],
        Annotated[dict[int, bool], MaxLength(1)],
        list[bool],
        Annotated[int, Range(1, 0)],
        Annotated[int, Range(0, 2**64)],
        int | str,
        object,
        Any,
    ]
    for hint in bad:
        with pytest.raises(TypeError):
            declare(hint)


def test_a_nested_record_must_be_frozen_and_may_not_contain_itself() -> None:
    @dataclasses.dataclass
    class Loose:
        flag: bool

    @dataclasses.dataclass(frozen=True)
    class Endless:
        more: Any

    Endless.__annotations__["more"] = Endless | None
    for record, complaint in ((Loose, "frozen"), (Endless, "contains itself")):
        cls = type("Bad", (Message,), {"__annotations__": {"field": record}, "__module__": __name__})
        with pytest.raises(TypeError, match=complaint):
            message(kind="bad", priority=Priority.CONTROL)(cls)


def test_one_kind_belongs_to_one_class() -> None:
    @message(kind="one", priority=Priority.CONTROL)
    class Another(Message):
        pass

    with pytest.raises(TypeError, match="one"):
        Registry(One, Another)


def test_messages_are_frozen_and_have_no_dictionary() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        One(1).value = 2  # type: ignore[misc]
    assert not hasattr(One(1), "__dict__")


def test_truncated_and_malformed_are_told_apart() -> None:
    with pytest.raises(TruncatedMessage):
        REGISTRY.decode(b"")
    with pytest.raises(TruncatedMessage):
        REGISTRY.decode(struct.pack("<I", 100) + b"\x94")
    with pytest.raises(MalformedMessage):
        REGISTRY.decode(struct.pack("<I", 1) + b"\xc1")


@message(kind="note", priority=Priority.CONTROL)
class Note(Message):
    number: Annotated[int, Range(0, 9)]
    signature: Annotated[bytes, Lengths((0, 4))]


@pytest.mark.parametrize("note", [Note(0, b""), Note(9, b"sign")])
def test_fields_alone_are_a_small_form_without_kind_and_version(note: Note) -> None:
    packed = pack_fields(note)
    assert packed == msgpack.packb([note.number, note.signature])
    assert unpack_fields(Note, packed) == note


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([10, b""], OutOfRange),
        ([1, b"sig"], OutOfRange),
        ([1, "sign"], WrongType),
        ([1], MissingField),
        ([1, b"", 2], UnknownField),
        ({1: b""}, MalformedMessage),
        ([1, bytes(100)], TooLong),
    ],
)
def test_fields_alone_are_checked_as_in_a_message(values: object, error: type[WireError]) -> None:
    with pytest.raises(error):
        unpack_fields(Note, msgpack.packb(values))


def test_a_count_that_is_only_claimed_allocates_nothing() -> None:
    @message(kind="many", priority=Priority.CONTROL)
    class Many(Message):
        numbers: Annotated[tuple[Annotated[int, Range(0, 9)], ...], MaxLength(2**30)]

    tracemalloc.start()
    try:
        for claimed in (b"\x91\xdd\x3f\xff\xff\xff", b"\x91\xdd\x3f\xff\xff\xff\x01"):
            with pytest.raises(TruncatedMessage):
                unpack_fields(Many, claimed)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_lengths_that_a_field_is_made_with_are_checked_too() -> None:
    with pytest.raises(OutOfRange):
        pack_fields(Note(1, b"abc"))


def test_a_message_with_blobs_has_no_form_without_header() -> None:
    @message(kind="blobs", priority=Priority.CONTROL)
    class Blobs(Message):
        data: Annotated[Blob, MaxLength(9)]

    with pytest.raises(TypeError):
        pack_fields(Blobs(b"x"))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, -2.0, 1e39])
def test_a_loss_that_is_no_loss_is_not_decoded(loss: float) -> None:
    with pytest.raises(OutOfRange):
        encode(Done(loss, (), 0.0, 0.0, 0.0, b""))


@pytest.mark.parametrize("norm", [-1.0, -math.inf, 1e101])
def test_a_squared_norm_is_not_negative(norm: float) -> None:
    with pytest.raises(OutOfRange):
        encode(Prepared(norm, "x"))
    encode(Prepared(math.nan, "x"))  # training may diverge
    encode(Prepared(math.inf, "x"))
