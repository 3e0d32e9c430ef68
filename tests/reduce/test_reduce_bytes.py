"""The bytes of an all-reduce that `plan` counts are those of the messages."""

from __future__ import annotations

import pytest
import torch
from runs import small

from swarmtrain.model.reduce_bytes import reduce_bytes
from swarmtrain.model.state import StageState
from swarmtrain.reduce.coding import StageCoder, factor_pieces, left_pieces
from swarmtrain.reduce.partition import Piece, cut
from swarmtrain.reduce.shares import ShareFormat

LARGER = ("stages.count=2", "model.hidden_size=64", "model.ffn_size=192")  # so that headers hardly count


def share_of(size: int) -> torch.Tensor:
    """On the exact grid, and of the size that needs six bytes."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (values * 2**44).round() / 2**44


def through(form: ShareFormat, pieces: list[Piece], numbers: torch.Tensor, num_peers: int) -> int:
    """A share of every piece to its owner, and an answer to every piece."""
    total = 0
    for piece in pieces:
        part = numbers[piece.start : piece.stop].numpy()
        share = form.own(part, piece.start)
        total += len(form.pack(part, piece.start)) + len(form.answer([share] * num_peers, piece))
    return total


def sent(coder: StageCoder, num_peers: int) -> int:
    own = coder.layout.gradient_size - coder.layout.num_fused
    share = share_of(own)
    if coder.spec.kind != "powersgd":
        form, _ = coder.sliced(compress=True)
        return through(form, cut([own]), share, num_peers)
    factors = coder.factors(share)
    left = factors.left()
    assert left is not None
    found = through(factors.left_form, left_pieces(coder.layout, [1]), left, num_peers)
    vector = factors.vector(left)
    assert vector is not None
    return found + through(factors.form, factor_pieces(coder.layout, [vector.numel()]), vector, num_peers)


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "topk64", "topk512", "powersgd2", "powersgd5"])
@pytest.mark.parametrize("num_peers", [2, 7])
def test_every_codec_is_counted_as_it_travels(codec: str, num_peers: int) -> None:
    manifest = small(*LARGER, f"reduce.codec={codec}")
    state = StageState(manifest, 1)
    counted = reduce_bytes(manifest, state.plan).of_group(num_peers)
    assert sent(StageCoder(state), num_peers) == pytest.approx(counted, rel=0.03)


def test_the_statistics_of_tracking_are_counted_too() -> None:
    manifest = small(*LARGER, "boundary.track_every=5")
    state = StageState(manifest, 1)
    counted = reduce_bytes(manifest, state.plan).of_group(3)
    assert sent(StageCoder(state), 3) == pytest.approx(counted, rel=0.01)


def test_tied_embeddings_are_counted_exactly_whatever_the_codec() -> None:
    tied, free = (
        reduce_bytes(
            small(*LARGER, "reduce.codec=int8", f"model.tie_embeddings={word}"),
            StageState(small(*LARGER, f"model.tie_embeddings={word}"), 0).plan,
        )
        for word in ("true", "false")
    )
    assert tied.whole > free.whole


def test_float_sums_travel_in_four_bytes() -> None:
    plan = StageState(small(*LARGER), 1).plan
    exact, plain = (reduce_bytes(small(*LARGER, f"batch.accumulate={kind}"), plan).whole for kind in ("exact", "float"))
    assert exact == pytest.approx(1.25 * plain)
