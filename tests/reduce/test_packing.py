"""Packed shares are the same numbers in fewer bytes, with and without machine code."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.model.exact import GRID_EXPONENT
from swarmtrain.native import native
from swarmtrain.reduce import packing
from swarmtrain.reduce.shares import EXACT
from swarmtrain.reduce.totals import Share, Total

needs_native = pytest.mark.skipif(native() is None, reason="there is no C compiler")
STEP = st.one_of(
    st.integers(-(2**53), 2**53),
    st.integers(-(2**39) - 2, -(2**39) + 2),
    st.integers(2**39 - 2, 2**39 + 2),
    st.integers(2**47 - 2, 2**47 + 2),
    st.integers(-5, 5),
)
STEPS = st.lists(STEP, min_size=1, max_size=40)
ROWS = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(STEP, min_size=size, max_size=size), min_size=1, max_size=5)
)


def numbers_of(steps: list[int]) -> np.ndarray:
    return np.array(steps, dtype=np.float64) * 2.0**GRID_EXPONENT


def share_of(raw: bytes | np.ndarray, size: int) -> packing.Packed:
    share = packing.packed_share(raw, size)
    assert share is not None
    return share


def unpacked(raw: bytes | memoryview, size: int) -> np.ndarray:
    numbers = EXACT.unpack(raw, size).numbers
    assert isinstance(numbers, packing.Packed)
    return steps_in(numbers, size) * 2.0**GRID_EXPONENT


def steps_in(share: packing.Packed, size: int) -> np.ndarray:
    total = np.zeros(size, dtype=np.int64)
    assert packing.add_steps(share, total)
    return total


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_every_number_comes_back_in_as_few_bytes_as_the_largest_needs(steps: list[int]) -> None:
    numbers = numbers_of(steps)
    raw = EXACT.pack(numbers, 0)
    largest = max(map(abs, steps))
    assert len(raw) == len(steps) * (5 if largest < 2**39 else 6 if largest < 2**47 else 7)
    assert np.array_equal(unpacked(raw, len(steps)), numbers)


@needs_native
@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_machine_code_and_python_agree(steps: list[int]) -> None:
    numbers = numbers_of(steps)
    ours, python = packing.pack(numbers), packing._pack(numbers)
    assert ours is not None
    assert python is not None
    assert ours.tobytes() == python.tobytes()
    share = packing.packed_share(ours, len(steps))
    assert share is not None
    assert np.array_equal(steps_in(share, len(steps)), packing._steps_of(share))


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=35, max_size=35))
def test_any_bytes_are_finite_numbers(raw: bytes) -> None:
    for size in (5, 7):
        found = unpacked(raw, size)
        assert np.isfinite(found).all()
        assert np.array_equal(found, numbers_of(packing._steps_of(share_of(raw, size)).tolist()))


def sums_of(shares: list[packing.Packed | np.ndarray], size: int) -> list[np.ndarray]:
    """With machine code, where there is any, and without."""
    found = []
    for add, round_ in ((packing.add_steps, packing.rounded), (packing._add_steps, packing._rounded)):
        total = np.zeros(size, dtype=np.int64)
        assert all(add(share, total) for share in shares)
        found.append(round_(total))
    return found


@settings(deadline=None, max_examples=300)
@given(ROWS)
def test_shares_are_added_exactly_and_rounded_once(rows: list[list[int]]) -> None:
    """Against whole numbers of Python's; the first share is the owner's own, which was never packed."""
    shares: list[packing.Packed | np.ndarray] = [numbers_of(rows[0])]
    for row in rows[1:]:
        packed = packing.pack(numbers_of(row))
        assert packed is not None
        shares.append(share_of(packed, len(row)))
    sums = [sum(column) for column in zip(*rows, strict=True)]
    expected = np.array([np.float32(float(Fraction(total) / 2**-GRID_EXPONENT)) for total in sums])
    if max(map(abs, sums)) > 2**53:
        expected[:] = np.nan
    for found in sums_of(shares, len(rows[0])):
        assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("scale", [2.0**-6, 2.0, 2.0**7])
def test_long_shares_are_added_as_short_ones(size: int, scale: float) -> None:
    random = np.random.default_rng(size)
    rows = [np.round(random.uniform(-scale, scale, size) * 2.0**44) * 2.0**-44 for _ in range(3)]
    packed = [packing.pack(row) for row in rows[1:]]
    shares = [rows[0], *(share_of(raw, size) for raw in packed)]
    for found in sums_of(shares, size):
        assert np.array_equal(found, np.sum(rows, axis=0).astype(np.float32))
    for row, share in zip(rows[1:], shares[1:], strict=True):
        assert np.array_equal(steps_in(share, size) * 2.0**GRID_EXPONENT, row)


def test_a_share_off_the_grid_is_not_added_as_whole_numbers() -> None:
    odd = np.array([1.0, 0.1])
    for add in (packing.add_steps, packing._add_steps):
        steps = np.zeros(2, dtype=np.int64)
        assert not add(odd, steps)
        assert not steps.any()
    total = Total(2)
    for _ in range(2):
        total.add(Share(odd))
    assert np.array_equal(EXACT.result(EXACT.answer(total, 0), 2), (odd + odd).astype(np.float32))


@pytest.mark.parametrize("odd", [2.0**-45, 0.1, 1e300, np.inf, -np.inf, np.nan, 2.0**10])
def test_what_is_not_on_the_grid_travels_as_it_is(odd: float) -> None:
    numbers = np.array([1.0, odd, 2.0])
    for packed in (packing.pack(numbers), packing._pack(numbers)):
        assert packed is None
    assert len(EXACT.pack(numbers, 0)) == 24
