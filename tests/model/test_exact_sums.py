"""Sums on the grid do not depend on order, grouping or history; what cannot be added exactly is refused whole."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmtrain.errors import DivergedError
from swarmtrain.model import exact
from swarmtrain.model.exact import (
    GRID_EXPONENT,
    SUM_LIMIT,
    VALUE_LIMIT,
    ExactSum,
    FloatSum,
    halving_sum,
    largest_magnitude,
    squared_norm,
)
from swarmtrain.native import native

GRID = Fraction(2) ** GRID_EXPONENT
JUST_BELOW_LIMIT = float(np.nextafter(np.float32(128), np.float32(0)))

single_values = st.one_of(
    st.floats(-JUST_BELOW_LIMIT, JUST_BELOW_LIMIT, width=32),
    st.sampled_from([0.0, -0.0, JUST_BELOW_LIMIT, -JUST_BELOW_LIMIT, 2.0**-149, -(2.0**-149), 2.0**-44, 2.0**-45]),
    # Ties: odd multiples of half a grid step, as far up as fp32 can hold them.
    st.integers(-(2**22), 2**22).map(lambda i: (2 * i + 1) * 2.0**-45),
)


def rounded(value: float) -> Fraction:
    """The nearest multiple of the grid, ties to even, in rational arithmetic."""
    return round(Fraction(value) / GRID) * GRID


@settings(deadline=None, max_examples=150)
@given(st.lists(single_values, min_size=1, max_size=64))
@example([JUST_BELOW_LIMIT, -JUST_BELOW_LIMIT])
@example([2.0**-45, 2.0**-45])
@example([3 * 2.0**-45])
def test_every_value_is_rounded_once_to_the_grid(values: list[float]) -> None:
    total = ExactSum(len(values))
    total.add([0], [torch.tensor(values, dtype=torch.float32)])
    assert [Fraction(x) for x in total.total.tolist()] == [rounded(value) for value in values]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.floats(-127.0, 127.0), min_size=1, max_size=8))
def test_double_precision_values_are_rounded_once_too(values: list[float]) -> None:
    total = ExactSum(len(values))
    total.add([0], [torch.tensor(values, dtype=torch.float64)])
    assert [Fraction(x) for x in total.total.tolist()] == [rounded(value) for value in values]


moderate = st.one_of(st.floats(-8.0, 8.0, width=32), st.integers(-(2**20), 2**20).map(lambda i: (2 * i + 1) * 2.0**-45))
microbatch_lists = st.lists(st.tuples(moderate, moderate, moderate), min_size=1, max_size=24)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), microbatches=microbatch_lists)
def test_any_order_grouping_and_detour_gives_the_rational_sum(
    data: st.DataObject, microbatches: list[tuple[float, float, float]]
) -> None:
    order = data.draw(st.permutations(range(len(microbatches))))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)))
    detours = data.draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    sums = [ExactSum(3) for _ in range(4)]
    for index, group, detour in zip(order, groups, detours, strict=True):
        value = torch.tensor(microbatches[index], dtype=torch.float32)
        extra = torch.tensor(microbatches[0], dtype=torch.float32)
        if detour:
            sums[group].add([0], [extra])
        sums[group].add([0], [value])
        if detour:
            sums[group].add([0], [extra], sign=-1)
    found = sum((part.total for part in sums), torch.zeros(3, dtype=torch.float64))
    expected = [sum(rounded(value) for value in column) for column in zip(*microbatches, strict=True)]
    assert [Fraction(x) for x in found.tolist()] == expected


def test_plain_sums_do_depend_on_order() -> None:
    """The property above is not one that any sum has."""
    values = [torch.tensor([2.0**24]), torch.tensor([1.0]), torch.tensor([1.0])]
    totals = []
    for order in (values, values[::-1]):
        total = FloatSum(1)
        for value in order:
            total.add([0], [value])
        totals.append(total.total.item())
    assert totals[0] != totals[1]


def test_missing_gradients_count_as_zeros_and_offsets_are_kept() -> None:
    total = ExactSum(8)
    total.add([0, 2, 6], [torch.tensor([1.0, 2.0]), None, torch.tensor([[3.0], [4.0]])])
    assert total.total.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0]


def test_sums_longer_than_a_chunk_are_whole() -> None:
    values = torch.linspace(-1.0, 1.0, 300_001)
    total = ExactSum(values.numel())
    total.add([0], [values])
    assert relative_to_grid(total.total, values) <= 0.5
    total.add([0], [values], sign=-1)
    assert not total.total.any()


def relative_to_grid(total: Tensor, values: Tensor) -> float:
    return float((total - values.double()).abs().max()) / 2.0**GRID_EXPONENT


@pytest.mark.parametrize("bad", [128.0, -128.0, 1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_leaves_the_grid_is_refused_and_nothing_is_added(bad: float, place: int) -> None:
    """In whichever tensor it stands: a NaN must not hide behind a number."""
    total = ExactSum(12)
    total.add([0], [torch.full((12,), 0.25)])
    gradients = [torch.full((4,), 0.5) for _ in range(3)]
    gradients[place][2] = bad
    for sign in (1, -1):
        with pytest.raises(DivergedError):
            total.add([0, 4, 8], gradients, sign=sign)
    assert torch.equal(total.total, torch.full((12,), 0.25, dtype=torch.float64))
    total.add([0], [torch.full((12,), JUST_BELOW_LIMIT)])  # and it still works


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_plain_sums_refuse_what_is_not_finite_and_add_nothing(bad: float, place: int) -> None:
    total = FloatSum(12)
    gradients = [torch.full((4,), 0.5) for _ in range(3)]
    gradients[place][2] = bad
    with pytest.raises(DivergedError):
        total.add([0, 4, 8], gradients)
    assert not total.total.any()


def test_a_sum_beyond_the_exact_range_is_refused_and_nothing_is_added() -> None:
    total = ExactSum(2)
    for _ in range(4):
        total.add([0], [torch.tensor([JUST_BELOW_LIMIT, 1.0])])
    before = total.total.clone()
    with pytest.raises(DivergedError, match="exact range"):
        total.add([0], [torch.tensor([1.0, 1.0])])
    assert torch.equal(total.total, before)
    assert float(before.max()) < SUM_LIMIT


def test_many_large_microbatches_that_cancel_are_no_divergence() -> None:
    """A thousand microbatches of which each alone is harmless: the sum itself is what must stay in range."""
    total = ExactSum(2)
    for index in range(1024):
        total.add([0], [torch.tensor([VALUE_LIMIT / 2 * (-1) ** index, 0.25])])
    assert total.total.tolist() == [0.0, 256.0]


def test_taking_away_counts_towards_the_range() -> None:
    total = ExactSum(1)
    for _ in range(5):
        total.add([0], [torch.tensor([100.0])], sign=-1)
    with pytest.raises(DivergedError):
        total.add([0], [torch.tensor([100.0])], sign=-1)
    assert total.total.item() == -500.0


def test_clearing_gives_the_whole_range_back() -> None:
    total = ExactSum(1)
    for _ in range(20):
        for _ in range(5):
            total.add([0], [torch.tensor([100.0])])
        total.clear()
    assert total.total.item() == 0.0


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.integers(1, 5), st.integers(0, 2**31))
def test_halving_sum_is_a_sum(rows: int, columns: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, columns))
    found = halving_sum(torch.from_numpy(values)).numpy()
    expected = [math.fsum(values[:, column]) for column in range(columns)]
    assert np.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, (1 << 17) - 1, 1 << 17, (1 << 18) + 77])
def test_squared_norm_has_the_same_bits_for_every_number_of_threads(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(squared_norm(torch.from_numpy(values)))
    assert found[0] == found[1]
    assert found[0] == pytest.approx(math.fsum(values * values), rel=1e-12)


def test_largest_magnitude_sees_both_signs_and_nan() -> None:
    assert largest_magnitude(torch.tensor([1.0, -3.0])) == 3.0
    assert largest_magnitude(torch.tensor([])) == 0.0
    assert math.isnan(largest_magnitude(torch.tensor([1.0, math.nan, 2.0])))
    assert largest_magnitude(torch.tensor([1.0, -math.inf])) == math.inf


@pytest.mark.skipif(native() is None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_machine_code_and_python_agree(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sign: int) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(-60, 6, (40, 50), generator=generator)
    values = (torch.randn(40, 50, generator=generator) * 2.0**sizes).to(dtype)
    odd = torch.tensor([0.0, -0.0, 2.0**-45, -(2.0**-45), 3 * 2.0**-45, 2.0**-140, -(2.0**-140), -127.5]).to(dtype)
    values[0, : len(odd)] = odd
    calls: list[int] = []
    totals = []
    for loops in (native(), None):
        monkeypatch.setattr(exact, "native", lambda loops=loops: calls.append(1) or loops)
        total = ExactSum(3 * values.numel() + 50)
        for offset, gradient in ((0, values), (2000, values.t()), (4000, values[3].expand(40, 50)), (6000, values[0])):
            total.add([offset], [gradient], sign=sign)
            total.add([offset], [gradient], sign=sign)
        totals.append(total.total)
    assert len(calls) == 2 * 6  # few numbers are added without it
    assert torch.equal(*totals)
    assert torch.equal(torch.signbit(totals[0]), torch.signbit(totals[1]))
    assert int((totals[0] != 0).sum()) > 3000


@pytest.mark.skipif(native() is None, reason="there is no C compiler")
def test_machine_code_writes_only_where_it_was_told() -> None:
    total = ExactSum(1000)
    total.put(300, torch.ones(400))
    assert total.total[300:700].eq(1.0).all()
    assert float(total.total.sum()) == 400.0
