"""Frame headers: what was packed parses, and no damaged header passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.wire import frames
from swarmtrain.wire.errors import BadFrame, WireError, WrongVersion
from swarmtrain.wire.frames import FrameType, RefusalPayload, Start


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(FrameType), st.integers(0, 2**64 - 1), st.integers(1, 2048), st.integers(0, 2**32 - 1))
def test_a_header_round_trips(frame_type: FrameType, call_id: int, length: int, crc: int) -> None:
    packed = frames.pack_header(frame_type, call_id, length, crc)
    assert len(packed) == frames.HEADER_BYTES
    assert frames.parse_header(b"xx" + packed, 2) == frames.FrameHeader(frame_type, call_id, length, crc)


def test_every_flipped_bit_of_a_header_is_found() -> None:
    packed = frames.pack_header(FrameType.CHUNK, 77, 1000, 12345)
    for position in range(len(packed) * 8):
        damaged = bytearray(packed)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(BadFrame):
            frames.parse_header(damaged)


def test_another_version_is_told_apart_from_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PROTOCOL_VERSION", 1)
    packed = frames.pack_header(FrameType.PING, 0, 8, 0)
    monkeypatch.undo()
    with pytest.raises(WrongVersion, match="version 1"):
        frames.parse_header(packed)


@pytest.mark.parametrize(
    ("frame_type", "length"),
    [(FrameType.CHUNK, frames.MAX_CHUNK_BYTES + 1), (FrameType.CHUNK, 0), (FrameType.PING, 2049), (99, 8), (0, 8)],
)
def test_impossible_types_and_lengths_are_refused(frame_type: FrameType, length: int) -> None:
    with pytest.raises(BadFrame):
        frames.parse_header(frames.pack_header(frame_type, 1, length, 0))


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=frames.HEADER_BYTES, max_size=64))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(WireError):
        frames.parse_header(data)


def payload_of(frame: bytes) -> memoryview:
    return memoryview(frame)[frames.HEADER_BYTES :]


def test_payloads_round_trip() -> None:
    start = Start("tensor", 2**40, 5000)
    assert frames.parse_start(payload_of(frames.pack_start(FrameType.REQUEST, 1, start))) == start
    refusal = RefusalPayload("busy", "too much, später", 0.25, redirect_to="12D3KooWThief", stage=1023)
    assert frames.parse_refusal(payload_of(frames.pack_refusal(FrameType.REFUSAL, 1, refusal))) == refusal
    assert frames.parse_pair(payload_of(frames.pack_pair(FrameType.CREDIT, 1, 5, 2**63))) == (5, 2**63)
    assert frames.parse_nonce(payload_of(frames.pack_nonce(FrameType.PING, 9))) == 9


def test_long_texts_of_refusals_are_cut_and_never_too_large_for_a_frame() -> None:
    frame = frames.pack_refusal(FrameType.REFUSAL, 1, RefusalPayload("c" * 500, "ä" * 5000, 1e30, "p" * 500, 10**9))
    assert frames.parse_header(frame).length <= frames.MAX_CONTROL_BYTES
    parsed = frames.parse_refusal(payload_of(frame))
    assert parsed.code == "c" * frames.MAX_CODE_BYTES
    assert parsed.text.startswith("ä" * 500)
    assert parsed.redirect_to == "p" * frames.MAX_PEER_ID_BYTES


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=80))
def test_random_payloads_parse_or_are_refused(data: bytes) -> None:
    for parse in (frames.parse_start, frames.parse_refusal, frames.parse_pair, frames.parse_nonce):
        try:
            parse(memoryview(data))
        except BadFrame:
            pass
