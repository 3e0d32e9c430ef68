"""Who owns what: everything has exactly one owner, whatever the sizes and bandwidths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from swarmtrain.reduce.partition import PIECE_ELEMENTS, cut, owned_elements

RATE = st.one_of(st.just(0.0), st.floats(1e3, 1e15))
RATES = st.lists(st.tuples(RATE, RATE), min_size=1, max_size=12)


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 10**9), RATES)
def test_shares_make_up_the_whole_and_none_is_negative(size: int, rates: list[tuple[float, float]]) -> None:
    owned = owned_elements(size, rates)
    assert len(owned) == len(rates)
    assert sum(owned) == size
    assert min(owned) >= 0


def test_peers_of_equal_bandwidth_own_about_equal_parts() -> None:
    owned = owned_elements(10_000, [(5e6, 5e6)] * 4)
    assert max(owned) - min(owned) <= 10_000 * 0.01


@pytest.mark.parametrize("slow", [(1e5, 0.0), (0.0, 1e5), (1e5, 1e7), (1e7, 1e5)])
def test_a_peer_with_a_much_slower_line_owns_less_whichever_way_it_is(slow: tuple[float, float]) -> None:
    least, *others = owned_elements(1_000_000, [slow, (1e7, 0.0), (1e7, 1e8)])
    assert least < min(others) / 2


def test_a_wide_downlink_does_not_stand_for_an_unknown_uplink() -> None:
    equal = owned_elements(8_000_000, [(2.5e6, 0.0)] * 8)
    assert owned_elements(8_000_000, [(0.0, 125e6), *[(2.5e6, 0.0)] * 7]) == equal
    assert owned_elements(8_000_000, [(0.0, 125e6), *[(0.0, 0.0)] * 7]) == equal


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(1e4, 1e9), min_size=3, max_size=10))
def test_no_linear_program_finds_a_quicker_all_reduce(rates: list[float]) -> None:
    """The outside oracle: minimise t, so that 1 + (n - 2) s <= t * rate for every peer, and the shares s make up 1."""
    size, count = 10**9, len(rates)
    scale = max(rates)
    limits = np.diag([count - 2.0] * count)
    limits = np.column_stack([limits, [-rate / scale for rate in rates]])
    whole = np.array([[1.0] * count + [0.0]])
    best = linprog([0.0] * count + [1.0], limits, [-1.0] * count, whole, [1.0]).fun
    owned = owned_elements(size, [(rate, 0.0) for rate in rates])
    ours = max((1 + (count - 2) * part / size) / (rate / scale) for part, rate in zip(owned, rates, strict=True))
    assert ours <= best * (1 + 1e-6)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 3 * PIECE_ELEMENTS), min_size=1, max_size=6))
def test_pieces_cover_everything_once_in_order(owned: list[int]) -> None:
    pieces = cut(owned)
    at = 0
    sizes = dict.fromkeys(range(len(owned)), 0)
    for number, piece in enumerate(pieces):
        assert (piece.index, piece.start) == (number, at)
        assert 0 < piece.stop - piece.start <= PIECE_ELEMENTS
        sizes[piece.owner] += piece.stop - piece.start
        at = piece.stop
    assert list(sizes.values()) == owned
