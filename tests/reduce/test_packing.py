"""Packed shares are the same numbers in fewer bytes, with and without machine code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec.native import native
from swarmtrain.model.exact import GRID_EXPONENT
from swarmtrain.reduce import packing
from swarmtrain.reduce.shares import EXACT

needs_native = pytest.mark.skipif(native() is None, reason="there is no C compiler")
STEPS = st.lists(
    st.one_of(
        st.integers(-(2**53), 2**53),
        st.integers(-(2**39) - 2, -(2**39) + 2),
        st.integers(2**39 - 2, 2**39 + 2),
        st.integers(2**47 - 2, 2**47 + 2),
        st.integers(-5, 5),
    ),
    min_size=1,
    max_size=40,
)


def numbers_of(steps: list[int]) -> np.ndarray:
    return np.array(steps, dtype=np.float64) * 2.0**GRID_EXPONENT


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_every_number_comes_back_in_as_few_bytes_as_the_largest_needs(steps: list[int]) -> None:
    numbers = numbers_of(steps)
    raw = EXACT.pack(numbers, 0)
    largest = max(map(abs, steps))
    assert len(raw) == len(steps) * (5 if largest < 2**39 else 6 if largest < 2**47 else 7)
    assert np.array_equal(EXACT.unpack(raw, len(steps)).numbers, numbers)


@needs_native
@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_machine_code_and_python_agree(steps: list[int]) -> None:
    numbers = numbers_of(steps)
    ours, python = packing.pack(numbers), packing._pack(numbers)
    assert ours is not None
    assert python is not None
    assert ours.tobytes() == python.tobytes()
    width = ours.size // len(steps)
    assert np.array_equal(packing.unpack(ours, len(steps)), packing._unpack(ours, len(steps), width))


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=35, max_size=35))
def test_any_bytes_are_finite_numbers(raw: bytes) -> None:
    for size in (5, 7):
        assert np.isfinite(EXACT.unpack(raw, size).numbers).all()
    assert np.array_equal(packing.unpack(raw, 7), packing._unpack(np.frombuffer(raw, np.uint8), 7, 5))


@pytest.mark.parametrize("odd", [2.0**-45, 0.1, 1e300, np.inf, -np.inf, np.nan, 2.0**10])
def test_what_is_not_on_the_grid_travels_as_it_is(odd: float) -> None:
    numbers = np.array([1.0, odd, 2.0])
    for packed in (packing.pack(numbers), packing._pack(numbers)):
        assert packed is None
    assert len(EXACT.pack(numbers, 0)) == 24
