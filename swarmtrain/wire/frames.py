"""Frames: the pieces in which messages and control signals cross a byte stream.

Every frame is a fixed header and a payload. Both carry a CRC-32 of their own: the header's makes the length trustworthy
before anything is done with it, the payload's finds damage. In a CHUNK the checksum runs over all chunks of the message
so far, so a chunk that is lost, doubled or out of order is found as well.

A message is one frame that starts it (REQUEST, PROGRESS or ANSWER: kind, total length, deadline) and then CHUNKs with
the same call id until the total is reached. Calls are numbered by the caller, upwards: odd by the end that opened the
stream, even by the other.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from swarmtrain.wire.errors import BadFrame, WrongVersion
from swarmtrain.wire.schema import MAX_KIND_BYTES, PROTOCOL_VERSION

MAGIC = 0x5357  # "WS" on the wire: little endian
MAX_CHUNK_BYTES = 1 << 20
MAX_CONTROL_BYTES = 2048
MAX_CODE_BYTES = 64
MAX_TEXT_BYTES = 1024
MAX_PEER_ID_BYTES = 128
SMALL_MESSAGE_BYTES = 16 << 10  # messages up to here need no credit
CALL_WINDOW_BYTES = 1 << 20  # of a larger message, sent before the receiver grants more
LINK_WINDOW_BYTES = 8 << 20  # of such beginnings of all messages that the receiver has not admitted yet

# magic, protocol version, type, call id, payload length, payload crc; then the crc of these 20 bytes
_HEADER = struct.Struct("<HBBQII")
_HEADER_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _HEADER_CRC.size
_START = struct.Struct("<QI")  # total bytes, deadline in ms
_REFUSAL = struct.Struct("<IHBB")  # retry after ms, stage, length of the code, length of the peer id
_PAIR = struct.Struct("<QQ")
_NONCE = struct.Struct("<Q")
MAX_DEADLINE_MS = 2**32 - 1
_NO_STAGE = 2**16 - 1


class FrameType(IntEnum):
    """What a frame is. The comment names the payload."""

    HELLO = 1  # proof that this end has the run's secret; name and version of the program. First frame of each end
    REQUEST = 2  # start of a request
    PROGRESS = 3  # start of a progress message
    ANSWER = 4  # start of the final answer
    CHUNK = 5  # a piece of the started message
    REFUSAL = 6  # typed error answer: ends the call, and an answer that was begun
    CANCEL = 7  # the caller wants no answer; ends a request that was begun
    CREDIT = 8  # bytes more for this call's message, bytes more for beginnings of messages
    RECEIVED = 9  # a large message is complete: bytes and microseconds that the receiver measured
    PING = 10  # a number
    PONG = 11  # the same number
    GOODBYE = 12  # no more frames come: why
    CERTIFICATE = 13  # of this end, once the other one has proven itself; again when it has a new one


START_TYPES = frozenset({FrameType.REQUEST, FrameType.PROGRESS, FrameType.ANSWER})
_TYPES = {int(frame_type): frame_type for frame_type in FrameType}


class FrameHeader(NamedTuple):
    """A parsed and checked header."""

    frame_type: FrameType
    call_id: int
    length: int
    crc: int


class Start(NamedTuple):
    """The payload of REQUEST, PROGRESS and ANSWER."""

    kind: str
    num_bytes: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class RefusalPayload:
    """The payload of REFUSAL and GOODBYE. `text` is for people; programs read the other fields."""

    code: str
    text: str = ""
    retry_after_s: float = 0.0
    redirect_to: str = ""  # the id of the peer that takes the call instead
    stage: int | None = None  # the stage that could not do its part


class BadMagic(BadFrame):
    """The bytes are not frames of this protocol at all."""

    error_id = "ST-WIRE-MAGIC"


def pack_header(frame_type: FrameType, call_id: int, length: int, crc: int) -> bytes:
    """The header of a frame whose payload has `length` bytes and checksum `crc`."""
    head = _HEADER.pack(MAGIC, PROTOCOL_VERSION, frame_type, call_id, length, crc)
    return head + _HEADER_CRC.pack(zlib.crc32(head))


def pack_frame(frame_type: FrameType, call_id: int, payload: bytes = b"") -> bytes:
    """A whole control frame."""
    return pack_header(frame_type, call_id, len(payload), zlib.crc32(payload)) + payload


def parse_header(data: memoryview | bytes | bytearray, offset: int = 0) -> FrameHeader:
    """The header at `offset`. BadMagic, WrongVersion or BadFrame if it is none that this protocol allows."""
    magic, version, raw_type, call_id, length, crc = _HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        raise BadMagic(f"magic {magic:#06x} instead of {MAGIC:#06x}")
    (header_crc,) = _HEADER_CRC.unpack_from(data, offset + _HEADER.size)
    if header_crc != zlib.crc32(memoryview(data)[offset : offset + _HEADER.size]):
        raise BadFrame("checksum of the header")
    # After the checksum, so that a flipped bit is not taken for an old peer.
    if version != PROTOCOL_VERSION:
        raise WrongVersion(
            f"the peer speaks protocol version {version}, this end {PROTOCOL_VERSION}",
            fix="run the same version of swarmtrain on both ends",
        )
    frame_type = _TYPES.get(raw_type)
    if frame_type is None:
        raise BadFrame(f"unknown frame type {raw_type}")
    limit = MAX_CHUNK_BYTES if frame_type is FrameType.CHUNK else MAX_CONTROL_BYTES
    if length > limit or (frame_type is FrameType.CHUNK and length == 0):
        raise BadFrame(f"{frame_type.name} with {length} bytes, at most {limit}")
    return FrameHeader(frame_type, call_id, length, crc)


def pack_start(frame_type: FrameType, call_id: int, start: Start) -> bytes:
    """A frame that begins a message."""
    payload = _START.pack(start.num_bytes, min(start.deadline_ms, MAX_DEADLINE_MS)) + start.kind.encode("ascii")
    return pack_frame(frame_type, call_id, payload)


def parse_start(payload: memoryview) -> Start:
    """The payload of a frame that begins a message."""
    if not _START.size < len(payload) <= _START.size + MAX_KIND_BYTES:
        raise BadFrame("start of a message with a wrong length")
    num_bytes, deadline_ms = _START.unpack_from(payload)
    try:
        kind = str(payload[_START.size :], "ascii")
    except UnicodeDecodeError as error:
        raise BadFrame("the kind of a message is not ASCII") from error
    return Start(kind, num_bytes, deadline_ms)


def pack_refusal(frame_type: FrameType, call_id: int, refusal: RefusalPayload) -> bytes:
    """A REFUSAL or GOODBYE; code, text and peer id are cut to their limits."""
    code = refusal.code.encode("utf-8", "replace")[:MAX_CODE_BYTES]
    text = refusal.text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    peer_id = refusal.redirect_to.encode("utf-8", "replace")[:MAX_PEER_ID_BYTES]
    retry_after_ms = min(max(0, round(refusal.retry_after_s * 1000)), MAX_DEADLINE_MS)
    stage = _NO_STAGE if refusal.stage is None else min(max(0, refusal.stage), _NO_STAGE - 1)
    fixed = _REFUSAL.pack(retry_after_ms, stage, len(code), len(peer_id))
    return pack_frame(frame_type, call_id, fixed + code + peer_id + text)


def parse_refusal(payload: memoryview) -> RefusalPayload:
    """The payload of a REFUSAL or GOODBYE."""
    if len(payload) < _REFUSAL.size:
        raise BadFrame("a refusal that is too short")
    retry_after_ms, stage, code_bytes, peer_id_bytes = _REFUSAL.unpack_from(payload)
    text_bytes = len(payload) - _REFUSAL.size - code_bytes - peer_id_bytes
    if code_bytes > MAX_CODE_BYTES or peer_id_bytes > MAX_PEER_ID_BYTES or not 0 <= text_bytes <= MAX_TEXT_BYTES:
        raise BadFrame("a refusal with wrong lengths")
    rest = bytes(payload[_REFUSAL.size :])
    texts = rest[:code_bytes], rest[code_bytes : code_bytes + peer_id_bytes], rest[code_bytes + peer_id_bytes :]
    code, peer_id, text = (part.decode("utf-8", "replace") for part in texts)
    return RefusalPayload(code, text, retry_after_ms / 1000, peer_id, None if stage == _NO_STAGE else stage)


def pack_pair(frame_type: FrameType, call_id: int, first: int, second: int) -> bytes:
    """A CREDIT (bytes for the call, bytes for beginnings) or RECEIVED (bytes, microseconds)."""
    return pack_frame(frame_type, call_id, _PAIR.pack(first, second))


def parse_pair(payload: memoryview) -> tuple[int, int]:
    """The two numbers of a CREDIT or RECEIVED."""
    if len(payload) != _PAIR.size:
        raise BadFrame("a pair of numbers with a wrong length")
    first, second = _PAIR.unpack(payload)
    return first, second


def pack_hello(proof: bytes, program: str) -> bytes:
    """A HELLO; the proof has at most 255 bytes."""
    return pack_frame(FrameType.HELLO, 0, bytes((len(proof),)) + proof + program.encode()[:MAX_CODE_BYTES])


def parse_hello(payload: memoryview) -> bytes:
    """The proof in a HELLO."""
    if not len(payload) or len(payload) < 1 + payload[0]:
        raise BadFrame("a HELLO that is too short")
    return bytes(payload[1 : 1 + payload[0]])


def pack_nonce(frame_type: FrameType, nonce: int) -> bytes:
    """A PING or PONG."""
    return pack_frame(frame_type, 0, _NONCE.pack(nonce))


def parse_nonce(payload: memoryview) -> int:
    """The number of a PING or PONG."""
    if len(payload) != _NONCE.size:
        raise BadFrame("a ping with a wrong length")
    (nonce,) = _NONCE.unpack(payload)
    return int(nonce)
