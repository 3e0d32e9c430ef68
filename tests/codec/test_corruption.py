"""Whatever happens to the bytes, the answer is a typed error: no crash, no wrong tensor, no large allocation."""

from __future__ import annotations

import struct

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import (
    CodecError,
    CorruptPayload,
    Decoder,
    Direction,
    MessageContext,
    NeedAux,
    NeedKeyframe,
    UnknownCodec,
    aqsgd,
    cast,
    chunktopk,
    decode,
    ef21,
    lowrank,
    minmax,
    quant,
    topk,
)
from swarmtrain.codec.payload import Header, seal

from .generators import FREE_SPECS, STICKY_SPECS, context, direction_of, encoder, numbers, same_bits


def payload_of(spec: str, shape: tuple[int, ...]) -> tuple[bytes, MessageContext]:
    now = context(direction_of(spec), samples=tuple(range(shape[0])) if spec.startswith("aqsgd") else ())
    return encoder(spec, direction_of(spec)).encode(numbers("gaussian", shape, 5), now).payload, now


@pytest.mark.parametrize("spec", [*FREE_SPECS, *STICKY_SPECS])
def test_every_flipped_bit_of_a_small_payload_is_noticed(spec: str) -> None:
    payload, now = payload_of(spec, (2, 9))
    decode(payload, now)
    for position in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptPayload):
            decode(damaged, now)


@pytest.mark.parametrize("spec", [*FREE_SPECS, *STICKY_SPECS])
def test_every_cut_and_every_extension_is_noticed(spec: str) -> None:
    payload, now = payload_of(spec, (2, 9))
    for length in range(len(payload)):
        with pytest.raises(CorruptPayload):
            decode(payload[:length], now)
    for extra in (b"\0", payload, bytes(1000)):
        with pytest.raises(CorruptPayload):
            decode(payload + extra, now)


LARGE, LARGE_CONTEXT = payload_of("fp32", (60, 700))  # above the size from which sums are checked


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 8 * len(LARGE) - 1))
def test_every_flipped_bit_of_a_large_payload_is_noticed(position: int) -> None:
    damaged = bytearray(LARGE)
    damaged[position // 8] ^= 1 << position % 8
    with pytest.raises(CorruptPayload):
        decode(damaged, LARGE_CONTEXT)


@settings(max_examples=100, deadline=None)
@given(first=st.integers(5, len(LARGE) // 8 - 1), second=st.integers(5, len(LARGE) // 8 - 1))
def test_exchanged_words_of_a_large_payload_are_noticed(first: int, second: int) -> None:
    damaged = bytearray(LARGE)
    one, other = slice(8 * first, 8 * first + 8), slice(8 * second, 8 * second + 8)
    damaged[one], damaged[other] = damaged[other], damaged[one]
    if damaged != LARGE:
        with pytest.raises(CorruptPayload):
            decode(damaged, LARGE_CONTEXT)


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, len(LARGE) - 1), length=st.integers(1, 9000), seed=st.integers(0, 999))
def test_overwritten_ranges_are_noticed(start: int, length: int, seed: int) -> None:
    damaged = bytearray(LARGE)
    end = min(start + length, len(LARGE))
    damaged[start:end] = numpy.random.default_rng(seed).bytes(end - start)
    if damaged != LARGE:
        with pytest.raises(CorruptPayload):
            decode(damaged, LARGE_CONTEXT)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    for payload in (garbage, b"STc1" + garbage):
        with pytest.raises(CorruptPayload):
            decode(payload, context())


@settings(max_examples=300, deadline=None)
@given(
    codec=st.integers(0, 12),
    shape=st.lists(st.one_of(st.integers(0, 9), st.integers(0, (1 << 32) - 1)), max_size=8).map(tuple),
    flags=st.integers(0, 3),
    parameters=st.binary(max_size=10),
    body=st.binary(max_size=120),
)
def test_well_sealed_nonsense_never_does_more_than_raise_a_codec_error(
    codec: int, shape: tuple[int, ...], flags: int, parameters: bytes, body: bytes
) -> None:
    """A malicious sender can compute checksums, too."""
    payload = seal(Header(codec, torch.float32, shape, len(body), flags, parameters), body)
    for direction in Direction:
        try:
            decoded = decode(payload, context(direction))
        except CodecError:
            continue
        assert torch.isfinite(decoded.tensor).all()
        assert tuple(decoded.tensor.shape) == shape


def sealed(codec: int, shape: tuple[int, ...], parameters: bytes, body: bytes, flags: int = 0) -> bytes:
    return seal(Header(codec, torch.float32, shape, len(body), flags, parameters), body)


BF16_INFINITY, BF16_NAN, BF16_MINUS_ONE = 0x7F80, 0x7FC0, 0xBF80
NAN = struct.pack("<f", float("nan"))

FORGERIES = {
    "cast to an unknown format": sealed(cast.CODEC_ID, (1,), struct.pack("<Bb", 9, 0), bytes(4)),
    "cast with too few bytes": sealed(cast.CODEC_ID, (2,), struct.pack("<Bb", 0, 0), bytes(4)),
    "cast of NaN": sealed(cast.CODEC_ID, (1,), struct.pack("<Bb", 0, 0), NAN),
    "fp16 that overflows": sealed(cast.CODEC_ID, (1,), struct.pack("<Bb", 1, 127), b"\xff\x7b"),
    "quant with an infinite scale": sealed(
        quant.CODEC_ID, (8,), struct.pack("<BH", 8, 8), struct.pack("<H", BF16_INFINITY) + bytes(8)
    ),
    "quant with a negative scale": sealed(
        quant.CODEC_ID, (8,), struct.pack("<BH", 8, 8), struct.pack("<H", BF16_MINUS_ONE) + bytes(8)
    ),
    "quant with a code that overflows": sealed(
        quant.CODEC_ID, (8,), struct.pack("<BH", 8, 8), struct.pack("<H", 0x7F7F) + b"\x80" * 8
    ),
    "quant with 5 bits": sealed(quant.CODEC_ID, (8,), struct.pack("<BH", 5, 8), bytes(7)),
    "quant with groups of 0": sealed(quant.CODEC_ID, (8,), struct.pack("<BH", 8, 0), bytes(10)),
    "minmax with a NaN": sealed(minmax.CODEC_ID, (8,), b"\x08", NAN + bytes(12)),
    "minmax upside down": sealed(minmax.CODEC_ID, (8,), b"\x08", struct.pack("<ff", 1, -1) + bytes(8)),
    "topk that keeps more than there is": sealed(topk.CODEC_ID, (8,), struct.pack("<BBbI", 0, 0, 0, 9), bytes(37)),
    "topk mask that keeps fewer": sealed(topk.CODEC_ID, (8,), struct.pack("<BBbI", 0, 0, 0, 2), b"\x80" + bytes(8)),
    "topk index out of its row": sealed(topk.CODEC_ID, (5,), struct.pack("<BBbI", 0, 1, 0, 1), b"\xe0" + bytes(4)),
    "topk index given twice": sealed(topk.CODEC_ID, (8,), struct.pack("<BBbI", 0, 1, 0, 2), b"\x00" + bytes(8)),
    "topk value NaN": sealed(topk.CODEC_ID, (8,), struct.pack("<BBbI", 0, 0, 0, 1), b"\x80" + NAN),
    "topk with unknown positions": sealed(topk.CODEC_ID, (8,), struct.pack("<BBbI", 0, 7, 0, 1), b"\x80" + bytes(4)),
    "lowrank above the smaller side": sealed(
        lowrank.CODEC_ID, (4, 2), struct.pack("<BHbbh", 0, 3, 0, 0, 0), bytes(4 * 3 * 6)
    ),
    "lowrank factor NaN": sealed(lowrank.CODEC_ID, (1, 1), struct.pack("<BHbbh", 0, 1, 0, 0, 0), NAN + bytes(4)),
    "chunk topk position outside": sealed(
        chunktopk.CODEC_ID, (4,), struct.pack("<H", 64), bytes(16) + bytes(2) + b"\xff\xf0" + bytes(1)
    ),
    "chunk topk representative NaN": sealed(
        chunktopk.CODEC_ID, (4,), struct.pack("<H", 64), NAN + bytes(12) + bytes(2) + bytes(2) + bytes(1)
    ),
    "chunk topk mean NaN": sealed(
        chunktopk.CODEC_ID, (4,), struct.pack("<H", 64), bytes(16) + struct.pack("<H", BF16_NAN) + bytes(3)
    ),
    "EF21 too short": sealed(ef21.CODEC_ID, (1,), b"", bytes(3)),
    "AQ-SGD cut within a part": sealed(aqsgd.CODEC_ID, (1, 1), b"", bytes(20)),
    "AQ-SGD with a long part": sealed(aqsgd.CODEC_ID, (1, 1), b"", struct.pack("<QB8s8sI", 0, 0, b"", b"", 1 << 31)),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_well_sealed_forgery_is_refused(name: str) -> None:
    with pytest.raises(CorruptPayload):
        decode(FORGERIES[name], context())
    with pytest.raises(CorruptPayload):
        Decoder().decode(FORGERIES[name], context())


def test_a_sticky_payload_within_a_sticky_one_is_refused() -> None:
    inner, _ = payload_of("ef21-quant4", (2, 3))
    with pytest.raises(CorruptPayload):
        decode(sealed(ef21.CODEC_ID, (2, 3), b"", bytes(16) + inner, flags=ef21.KEYFRAME), context())


@pytest.mark.parametrize("codec", range(1, 9))
def test_huge_claims_allocate_nothing(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the limit of elements, but far above what the body could hold."""

    def refuse(*arguments: object, **_: object) -> torch.Tensor:
        raise AssertionError(f"allocated {arguments}")

    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, refuse)
    for shape in ((1 << 27,), (1 << 13, 1 << 14), ((1 << 32) - 1, (1 << 32) - 1), ((1 << 32) - 1, 0, (1 << 32) - 1)):
        for parameters in (bytes(10), struct.pack("<BH", 8, 128), struct.pack("<BBbI", 1, 0, 0, 1000), b"\x40"):
            for flags in (0, 1):
                with pytest.raises((CorruptPayload, NeedAux, NeedKeyframe)):
                    decode(sealed(codec, shape, parameters, bytes(64), flags), context())


def test_intact_messages_of_a_newer_build_are_told_apart_from_damage() -> None:
    with pytest.raises(UnknownCodec):
        decode(sealed(77, (1,), b"", b"1234"), context())
    newer = bytearray(payload_of("fp32", (2, 2))[0])
    newer[8] = 2
    with pytest.raises(CorruptPayload):
        decode(newer, context())
    from swarmtrain.codec.payload import _checksum

    newer[4:8] = struct.pack("<I", _checksum(memoryview(newer)[:40], memoryview(newer)[40:]))
    with pytest.raises(UnknownCodec):
        decode(newer, context())


def test_the_forgeries_fail_for_their_own_reason() -> None:
    """The same way of building payloads gives decodable ones when nothing is wrong."""
    good = sealed(topk.CODEC_ID, (8,), struct.pack("<BBbI", 0, 0, 0, 1), b"\x80" + struct.pack("<f", 2.5))
    expected = torch.zeros(8)
    expected[0] = 2.5
    assert same_bits(decode(good, context()).tensor, expected)
