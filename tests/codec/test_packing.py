"""Bits without gaps."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec.packing import (
    entropy_bytes,
    index_bits,
    pack_codes,
    pack_indices,
    packed_bytes,
    unpack_codes,
    unpack_indices,
)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_come_back_from_the_fewest_bytes(bits: int) -> None:
    generator = numpy.random.default_rng(bits)
    for count in [*range(70), 255, 256, 257, 999, 1000, 1001]:
        codes = generator.integers(0, 1 << bits, count, dtype=numpy.uint8)
        packed = pack_codes(codes, bits)
        assert packed.size == packed_bytes(count, bits) == -(-count * bits // 8)
        assert (unpack_codes(packed, bits, count) == codes).all()


def test_packing_is_what_its_description_says() -> None:
    assert pack_codes(numpy.array([1, 2, 3, 7, 0], dtype=numpy.uint8), 3).tolist() == [
        0b11_010_001,
        0b0_000_111_0,
    ]


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(0, 32), count=st.integers(0, 300), seed=st.integers(0, 999))
def test_indices_come_back_from_the_fewest_bytes(bits: int, count: int, seed: int) -> None:
    indices = numpy.random.default_rng(seed).integers(0, 1 << bits, count, dtype=numpy.uint64).astype(numpy.uint32)
    packed = pack_indices(indices, bits)
    assert packed.size == packed_bytes(count, bits)
    assert (unpack_indices(packed, bits, count) == indices).all()


def test_index_bits_tell_exactly_that_many_things_apart() -> None:
    assert [index_bits(count) for count in (1, 2, 3, 4, 5, 2048, 2049, 4096)] == [0, 1, 2, 2, 3, 11, 12, 12]


def test_the_entropy_of_one_tenth_is_less_than_half_a_bit() -> None:
    assert entropy_bytes(100, 1000) * 8 / 1000 == pytest.approx(0.469, abs=1e-3)
    assert entropy_bytes(0, 1000) == entropy_bytes(1000, 1000) == 0
