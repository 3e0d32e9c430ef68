from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.data.permutation import MAX_SIZE, permute, round_keys

SEEDS = st.integers(-(1 << 70), 1 << 70)


@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 1 << 40))
@settings(deadline=None, max_examples=150)
def test_it_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(size), size, seed=seed, epoch=epoch)
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(size))


def test_it_is_a_bijection_for_every_small_size() -> None:
    for size in range(1, 260):
        assert np.array_equal(np.sort(permute(np.arange(size), size, seed=size, epoch=1)), np.arange(size))


@given(size=st.integers(1, MAX_SIZE), seed=SEEDS, data=st.data())
@settings(deadline=None, max_examples=100)
def test_huge_ranges_stay_in_bounds_without_collisions(size: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=50, unique=True))
    images = permute(np.array(positions, dtype=np.int64), size, seed=seed, epoch=0)
    assert len(set(images.tolist())) == len(positions)
    assert all(0 <= image < size for image in images.tolist())


@given(size=st.integers(2, 10**9), seed=SEEDS, data=st.data())
@settings(deadline=None, max_examples=50)
def test_an_image_depends_on_nothing_but_its_own_position(size: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permute(positions, size, seed=seed, epoch=3)
    alone = [int(permute(positions[i : i + 1], size, seed=seed, epoch=3)[0]) for i in range(len(positions))]
    assert together.tolist() == alone


def test_the_shuffle_is_pinned_for_ever() -> None:
    """A change here would silently change the training data of every run."""
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == PINNED_TEN
    assert permute(np.arange(3), 10**12, seed=-5, epoch=7).tolist() == PINNED_HUGE


def test_seeds_and_epochs_give_different_shuffles() -> None:
    orders = [permute(np.arange(1000), 1000, seed=seed, epoch=epoch) for seed in range(4) for epoch in range(4)]
    for number, first in enumerate(orders):
        for second in orders[:number]:
            assert (first == second).mean() < 0.02  # by chance about one in a thousand agrees
    assert round_keys(1, 23) != round_keys(12, 3)  # the two numbers are kept apart


@pytest.mark.parametrize("size", [4, 5])
def test_all_orders_of_a_tiny_range_come_up_equally_often(size: int) -> None:
    epochs, orders = 3000, math.factorial(size)
    seen = Counter(tuple(permute(np.arange(size), size, seed=11, epoch=epoch).tolist()) for epoch in range(epochs))
    expected = epochs / orders
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in seen) + (orders - len(seen)) * expected
    assert (chi_square - (orders - 1)) / math.sqrt(2 * (orders - 1)) < 5


def test_neighbours_are_torn_apart() -> None:
    images = permute(np.arange(100_000), 100_000, seed=1, epoch=0)
    correlation = np.corrcoef(images[:-1], images[1:])[0, 1]
    assert abs(correlation) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), images)[0, 1]) < 0.02


@pytest.mark.parametrize(("positions", "size"), [([0], 0), ([0], -1), ([5], 5), ([-1], 5), ([0], MAX_SIZE + 1)])
def test_positions_and_sizes_out_of_range_are_refused(positions: list[int], size: int) -> None:
    with pytest.raises(ValueError, match=r"size|positions"):
        permute(np.array(positions), size, seed=0, epoch=0)


PINNED_TEN = [0, 3, 6, 8, 2, 1, 9, 7, 4, 5]
PINNED_HUGE = [327430957187, 23361718267, 898387417236]
