"""Totals: the exact sum, whatever the order and whoever adds up which shares first."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.model.exact import GRID_EXPONENT
from swarmtrain.reduce.packing import Packed, pack, packed_share
from swarmtrain.reduce.totals import DIGIT_BITS, NUM_DIGITS, BadShare, Share, Total

SINGLE = st.floats(-(2.0**120), 2.0**120, width=32)  # so that no sum is infinite
CLOSE = st.floats(-8.0, 8.0, width=32).filter(lambda value: value == 0.0 or abs(value) > 2.0**-20)
STEPS = st.integers(-(2**50), 2**50)


def columns(element: st.SearchStrategy[float]) -> st.SearchStrategy[list[np.ndarray]]:
    """Shares of one size."""
    return st.integers(1, 6).flatmap(
        lambda size: st.lists(st.lists(element, min_size=size, max_size=size).map(np.array), min_size=1, max_size=9)
    )


def on_grid(share: np.ndarray) -> Packed:
    raw = pack(share.astype(np.float64) * 2.0**GRID_EXPONENT)
    assert raw is not None
    packed = packed_share(raw, share.size)
    assert packed is not None
    return packed


def in_one(shares: list[Share], size: int) -> np.ndarray:
    total = Total(size)
    for share in shares:
        total.add(share)
    return total.rounded()


def in_groups(shares: list[Share], size: int, seed: int) -> np.ndarray:
    """In any order, in groups of any size that pass on their sums in parts."""
    chance = random.Random(seed)
    shares = chance.sample(shares, len(shares))
    groups: list[list[Share]] = [[] for _ in range(chance.randint(1, len(shares)))]
    for share in shares:
        chance.choice(groups).append(share)
    cuts = sorted({0, size, chance.randint(0, size)})
    totals = []
    for group in groups:
        total = Total(size)
        for share in group:
            total.add(share)
        totals.append(total)
    whole = []
    for start, stop in pairwise(cuts):
        root = Total(stop - start)
        for total in chance.sample(totals, len(totals)):
            root.add_packed(total.packed(start, stop))
        whole.append(root.rounded())
    return np.concatenate(whole)


@settings(deadline=None, max_examples=200)
@given(columns(STEPS), st.integers())
def test_sums_on_the_grid_are_exact_in_any_order_and_grouping(rows: list[np.ndarray], seed: int) -> None:
    shares = [Share(on_grid(row)) for row in rows]
    exact = [sum(int(row[i]) for row in rows) for i in range(rows[0].size)]
    expected = np.array([np.float32(float(Fraction(total) / 2**-GRID_EXPONENT)) for total in exact])
    assert np.array_equal(in_one(shares, rows[0].size), expected)
    assert np.array_equal(in_groups(shares, rows[0].size, seed), expected)


@settings(deadline=None, max_examples=200)
@given(columns(CLOSE), st.integers())
def test_sums_of_other_numbers_are_exact_where_they_are_not_too_far_apart(rows: list[np.ndarray], seed: int) -> None:
    shares = [Share(row.astype(np.float32)) for row in rows]
    exact = [sum(Fraction(float(row[i])) for row in rows) for i in range(rows[0].size)]
    expected = np.array([float(total) for total in exact]).astype(np.float32)
    assert np.array_equal(in_one(shares, rows[0].size), expected)
    assert np.array_equal(in_groups(shares, rows[0].size, seed), expected)


@settings(deadline=None, max_examples=300)
@given(columns(SINGLE), st.integers())
def test_sums_of_any_numbers_depend_on_neither_order_nor_grouping(rows: list[np.ndarray], seed: int) -> None:
    shares = [Share(row.astype(np.float32)) for row in rows]
    size = rows[0].size
    whole = in_one(shares, size)
    assert np.array_equal(in_one(random.Random(seed).sample(shares, len(shares)), size), whole)
    assert np.array_equal(in_groups(shares, size, seed), whole)
    exact = [float(sum(Fraction(float(row[i])) for row in rows)) for i in range(size)]
    lost = len(shares) * max(float(np.abs(row).max()) for row in rows) * 2.0 ** (-DIGIT_BITS * (NUM_DIGITS - 1))
    assert np.allclose(whole, exact, rtol=2.0**-23, atol=lost + 2.0**-140)


def test_control_the_same_numbers_in_fp32_depend_on_their_order() -> None:
    big, small = np.float32(1.0), np.float32(2.0**-24)
    assert (big + small) + small != big + (small + small)
    shares = [Share(np.array([value], dtype=np.float32)) for value in (big, small, small)]
    assert in_one(shares, 1) == in_one(shares[::-1], 1) == big + (small + small)


def test_shares_on_and_off_the_grid_add_up() -> None:
    shares = [Share(on_grid(np.array([2**43, 0]))), Share(np.array([0.1, 0.2])), Share(np.zeros(2))]
    expected = np.array([0.5 + 0.1, 0.2], dtype=np.float32)
    for seed in range(20):
        assert np.array_equal(in_groups(shares, 2, seed), expected)


def test_a_sum_beyond_the_exact_range_is_no_number_at_any_root() -> None:
    largest = np.array([2**52, 1])
    shares = [Share(on_grid(largest))] * 3
    assert np.isnan(in_one(shares, 2)).all()
    back = [*shares, Share(on_grid(-largest)), Share(on_grid(-largest))]
    assert np.array_equal(in_one(back, 2), in_one(shares[:1], 2))


def test_more_shares_than_64_bits_hold_are_not_added_wrongly() -> None:
    """Only a broken peer sends such numbers; their sum must not come back as a small one."""
    most = Share(Packed(np.full(7, 0x7F, dtype=np.uint8), 7))
    total = Total(1)
    for _ in range(3000):
        total.add(most)
    assert np.isnan(total.rounded()).all()
    root = Total(1)
    root.add_packed(total.packed(0, 1))
    assert np.isnan(root.rounded()).all()


def test_a_sum_takes_as_few_bytes_as_its_numbers_need() -> None:
    total = Total(1000)
    sparse = np.zeros(1000)
    sparse[::100] = 1000
    total.add(Share(on_grid(sparse)))
    assert len(total.packed(0, 1000)) < 1000 // 8 + 10 * 2 + 16
    total.add(Share(on_grid(np.full(1000, 2.0**20))))
    assert 3 * 1000 <= len(total.packed(0, 1000)) < 3 * 1000 + 16
    coarse = Total(1000)
    coarse.add(Share(on_grid(np.arange(1, 1001) * 2.0**16)))
    assert len(coarse.packed(0, 1000)) < 2 * 1000 + 16
    assert len(Total(1000).packed(0, 1000)) < 16


def a_sum() -> bytes:
    total = Total(100)
    total.add(Share(on_grid(np.arange(100))))
    total.add(Share(np.linspace(0.0, 0.1, 100, dtype=np.float32)))
    return total.packed(0, 100)


@pytest.mark.parametrize("size", [99, 101])
def test_a_sum_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(BadShare):
        Total(size).add_packed(a_sum())


def test_damaged_sums_are_refused_and_leave_nothing() -> None:
    good, total = a_sum(), Total(100)
    for bad in (b"", good[:1], good[:5], good[:-1], good + b"x", b"\0\x07" + good[2:], good[:2] + b"\x7f" + good[3:]):
        with pytest.raises(BadShare):
            total.add_packed(bad)
    assert not total.rounded().any()


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=80), st.integers(1, 9))
def test_any_bytes_are_a_sum_or_refused(raw: bytes, size: int) -> None:
    total = Total(size)
    try:
        total.add_packed(raw)
    except BadShare:
        assert not total.rounded().any()
    else:
        assert total.rounded().shape == (size,)
