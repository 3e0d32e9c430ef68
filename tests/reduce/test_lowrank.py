"""Factors of four bits: what they round to, that nothing is lost for good, and that bits depend on no machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import small

from swarmtrain.model import exact_matmul
from swarmtrain.model.exact_matmul import Engine
from swarmtrain.model.layout import plan_stages
from swarmtrain.model.reduce_bytes import factor_bytes, factor_rank
from swarmtrain.model.state import StageState
from swarmtrain.model.tracing import LiveBytes
from swarmtrain.reduce import lowrank
from swarmtrain.reduce.coding import StageCoder, factor_pieces, left_pieces
from swarmtrain.reduce.lowrank import LARGEST_CODE, decoded, encoded, multiplied, own_start, rounded
from swarmtrain.reduce.totals import BadShare, Total
from swarmtrain.run.presets import preset

from .loopback import bounded, reduced_by_all
from .test_coding import gradient

CODEC = "reduce.codec=lowrank100"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coder() -> StageCoder:
    return StageCoder(StageState(small(CODEC, "stages.count=2"), 0))


def factored_part(coder: StageCoder, flat: torch.Tensor) -> torch.Tensor:
    """What a flat gradient says of the matrices that travel in factors."""
    return torch.cat([flat[slot.span].double() for slot in coder.layout.factored])


def errors_of(coders: list[StageCoder]) -> torch.Tensor:
    """What all peers together still owe."""
    total = sum(
        torch.cat([coder._error[slot.spec.name].reshape(-1).double() for slot in coder.layout.factored])
        for coder in coders
    )
    assert isinstance(total, torch.Tensor)
    return total


@given(
    rows=st.integers(1, 40),
    rank=st.integers(1, 9),
    exponent=st.integers(-60, 60),
    seed=st.integers(0, 2**16),
)
def test_a_factor_is_within_half_a_step_of_every_number_and_rounds_only_once(
    rows: int, rank: int, exponent: int, seed: int
) -> None:
    matrix = normal(rows, rank, seed=seed) * 2.0**exponent
    once = rounded(matrix)
    step = matrix.abs().amax(dim=0) / LARGEST_CODE
    assert bool(((once - matrix).abs() <= step * (0.5 + LARGEST_CODE / 250)).all())  # the scale is a bf16
    assert torch.equal(rounded(once), once)  # so what one peer does alone is what it does as an owner


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0])
def test_a_start_looks_at_what_is_large_and_stays_where_it_was(scale: float) -> None:
    """Of two peers with like gradients it is nearly the same, column by column; and orthonormal for any size."""
    strong = torch.linalg.qr(normal(30, 3, seed=4)).Q
    matrix = (10 * normal(20, 3) @ strong.T + 0.1 * normal(20, 30, seed=1)) * scale
    other = matrix + 0.01 * scale * normal(20, 30, seed=2)
    start = torch.linalg.qr(normal(30, 3, seed=3)).Q
    found = own_start(matrix, start)
    assert torch.allclose(found.T @ found, torch.eye(3), atol=1e-5)
    if scale:
        assert float((strong.T @ found).norm()) > 0.99 * 3**0.5 > float((strong.T @ start).norm())
        assert float((found - own_start(other, start)).norm()) < 0.05


def test_zeros_stay_zeros_and_a_column_of_zeros_disturbs_no_other() -> None:
    matrix = normal(8, 3)
    matrix[:, 1] = 0.0
    found = rounded(matrix)
    assert not bool(found[:, 1].any())
    assert torch.equal(found[:, [0, 2]], rounded(matrix[:, [0, 2]]))


def test_columns_of_left_factors_have_length_one() -> None:
    raw = encoded(torch.linalg.qr(normal(200, 7)).Q, has_unit_columns=True)
    lengths = torch.from_numpy(decoded(raw, 1400)).view(-1, 7).norm(dim=0)
    assert torch.allclose(lengths, torch.ones(7), atol=2**-8)


def test_numbers_beyond_every_range_arrive_as_finite_ones() -> None:
    huge = torch.full((4, 2), 1e300, dtype=torch.float64)
    assert np.isfinite(decoded(encoded(huge), 8)).all()


@pytest.mark.parametrize("damage", ["shorter", "longer", "nan", "huge", "empty"])
def test_damaged_factors_are_refused(damage: str) -> None:
    raw = encoded(normal(10, 4))
    bad = {
        "shorter": raw[:-1],
        "longer": raw + b"x",
        "nan": b"\xc0\x7f" + raw[2:],
        "huge": b"\x7f\x7f" + raw[2:],
        "empty": b"",
    }[damage]
    with pytest.raises(BadShare):
        decoded(bad, 40)


@given(data=st.binary(max_size=120), size=st.integers(1, 100))
def test_any_bytes_are_a_share_or_refused(data: bytes, size: int) -> None:
    form = lowrank.LowRankShares({0: 1}, is_left=False)
    try:
        numbers = form.result(data, size)
    except BadShare:
        return
    assert numbers.size == size


def test_a_product_has_the_same_bits_for_every_engine_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = rounded(normal(300, 40)), rounded(normal(200, 40, seed=1))
    found = {}
    for engine in Engine:
        monkeypatch.setattr(lowrank, "engine_for", lambda device, rows, engine=engine: engine)
        found[engine] = multiplied(left, right)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(found[Engine.FP64], found[Engine.INT8])
    assert torch.equal(found[Engine.FP64], multiplied(left[:, order], right[:, order]))
    assert torch.allclose(found[Engine.FP64], left @ right.T, atol=2.0 ** (8 - exact_matmul.GRID_BITS))


@pytest.mark.parametrize("num_peers", [1, 3, 34])
def test_what_the_gradient_lacks_is_what_the_peers_keep(num_peers: int) -> None:
    """Rounded shares, rounded sums, a rank that is far too small, two groups of 17: all of it is owed, by somebody."""

    async def main() -> None:
        coders = [coder() for _ in range(num_peers)]
        size = coders[0].layout.gradient_size
        for step in range(3):
            shares = [gradient(size, 10 * step + seed) for seed in range(num_peers)]
            owed = errors_of(coders) + sum(factored_part(coders[0], share) for share in shares)
            found = await reduced_by_all(coders, list(shares))
            for item in found:
                item.commit()
            lacking = owed - factored_part(coders[0], found[0].gradient)
            assert float(lacking.norm()) > 0.1 * float(owed.norm())  # a control: it does lack much
            assert float((errors_of(coders) - lacking).norm()) < 1e-5 * float(owed.norm())

    bounded(main())


def test_the_owner_of_a_sum_answers_for_its_rounding() -> None:
    """A control of the test above: without that, errors would not add up."""

    async def main() -> None:
        coders = [coder(), coder()]
        size = coders[0].layout.gradient_size
        found = await reduced_by_all(coders, [gradient(size, 1), gradient(size, 2)])
        forms = [item.commit.__self__.form for item in found]  # type: ignore[attr-defined]
        starts = [start for form in forms for start in form.left_out]
        assert sorted(starts) == [piece.start for piece in factor_pieces(coders[0].layout, [10**9])][: len(starts)]
        assert len(starts) == len(coders[0].layout.factored)
        assert all(form.left_out for form in forms)  # both own some

    bounded(main())


def test_what_was_exact_before_stays_exact() -> None:
    """Gains travel on the exact grid."""
    alone = coder()
    share = gradient(alone.layout.gradient_size, 1)
    found = alone.alone(share).gradient
    gains = [slot for slot in alone.layout.slots if slot not in alone.layout.factored]
    assert gains
    for slot in gains:
        assert torch.equal(found[slot.span], share[slot.span].float())


@pytest.mark.parametrize("owned", [[100, 0, 300], [1, 399, 0], [0, 0, 400], [133, 133, 134]])
def test_every_factor_is_one_piece_of_a_peer_that_owns_something(owned: list[int]) -> None:
    layout = coder().layout
    size = layout.right_elements + layout.gradient_size - sum(slot.spec.num_elements for slot in layout.factored)
    scaled = [item * size // 400 for item in owned]
    scaled[owned.index(max(owned))] += size - sum(scaled)
    pieces = factor_pieces(layout, scaled)
    assert [(piece.index, piece.start) for piece in pieces] == list(
        enumerate([0, *(piece.stop for piece in pieces[:-1])])
    )
    assert pieces[-1].stop == size
    assert [piece.stop - piece.start for piece in pieces[: len(layout.factored)]] == [
        layout.rank_of(slot) * slot.spec.shape[1] for slot in layout.factored
    ]
    assert all(scaled[piece.owner] for piece in [*pieces, *left_pieces(layout, scaled)])


@pytest.mark.parametrize("budget", [20, 100, 200])
def test_factors_take_at_most_the_bytes_that_the_codec_says(budget: int) -> None:
    manifest = preset("llama-1b", [f"reduce.codec=lowrank{budget}"])
    specs = [spec for plan in plan_stages(manifest) for spec in plan.tensors if len(spec.shape) == 2]
    for spec in specs:
        rank = factor_rank(manifest, spec)
        assert 1 <= rank <= min(spec.shape)
        used = factor_bytes(manifest, spec, rank)
        assert used <= budget / 1000 * spec.num_elements < used + factor_bytes(manifest, spec, 1)
        rows, columns = spec.shape
        left = encoded(normal(rows, rank), has_unit_columns=True)
        assert len(left) + len(encoded(normal(columns, rank))) == pytest.approx(used, rel=1e-3)


def test_no_factor_is_longer_than_a_message_may_be() -> None:
    manifest = preset("llama-8b", ["reduce.codec=lowrank1000"])
    specs = [spec for plan in plan_stages(manifest) for spec in plan.tensors if len(spec.shape) == 2]
    longest = max(factor_rank(manifest, spec) * max(spec.shape) / 2 for spec in specs)
    assert (1 << 23) < longest <= (1 << 24) < 32 << 20


def test_a_piece_keeps_its_rank() -> None:
    form = lowrank.LowRankShares({0: 4}, is_left=False)
    share = form.own(normal(40).numpy(), 0)
    total = Total(40)
    total.add(share)
    total.add(share)
    answer = form.answer(total, 0)
    assert np.array_equal(form.result(answer, 40), 2 * share.numbers)
    assert not form.left_out  # twice the same rounds to nothing


def test_a_product_of_factors_is_made_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head's size it would hold several times the matrix otherwise. What it is taken from is its place."""
    left, right, wanted = normal(3000, 4), normal(2000, 4, seed=1), normal(3000, 2000, seed=2)
    expected = wanted - multiplied(left, right)
    peaks = []
    for elements in (1 << 18, 1 << 40):
        monkeypatch.setattr(lowrank, "_BLOCK_ELEMENTS", elements)
        place = wanted.clone()
        with LiveBytes() as seen:
            assert multiplied(left, right, place) is place
        assert torch.equal(place, expected)
        peaks.append(seen.peak / (4 * wanted.numel()))
    assert peaks[0] < 0.8
    assert peaks[1] > 4.0
