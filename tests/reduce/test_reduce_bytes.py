"""The bytes of an all-reduce that `plan` counts are those of the messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable

import pytest
import torch
from runs import small

from swarmtrain.model.reduce_bytes import MAX_GROUP, reduce_bytes
from swarmtrain.model.state import StageState
from swarmtrain.reduce.coding import StageCoder
from swarmtrain.run.manifest import Manifest

from .loopback import bounded, reduced_by_all

LARGER = ("stages.count=2", "model.hidden_size=64", "model.ffn_size=192")  # so that headers hardly count


def share_of(size: int, seed: int) -> torch.Tensor:
    """On the exact grid, and of the size that needs six bytes."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 2**44).round() / 2**44


def sent(manifest: Manifest, num_peers: int) -> Counter[str]:
    """The bytes of shares and sums that every peer of the last stage sends in an all-reduce."""
    coders = [StageCoder(StageState(manifest, 1)) for _ in range(num_peers)]
    shares = [share_of(coders[0].layout.gradient_size, seed) for seed in range(num_peers)]
    found: Counter[str] = Counter()
    bounded(finished(reduced_by_all(coders, shares, found)))
    return found


async def finished(work: Awaitable[object]) -> None:
    await work


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "topk64", "topk512", "powersgd2", "powersgd5", "lowrank100"])
@pytest.mark.parametrize("num_peers", [2, 7, 33, 70])
def test_every_codec_is_counted_as_it_travels(codec: str, num_peers: int) -> None:
    manifest = small(*LARGER, f"reduce.codec={codec}")
    found = sent(manifest, num_peers)
    assert len(found) == num_peers
    counted = reduce_bytes(manifest, StageState(manifest, 1).plan)
    exactly = 0.03 if num_peers <= MAX_GROUP else 0.12  # how wide a group's sum is depends on the numbers
    assert found.total() / num_peers == pytest.approx(counted.per_peer(num_peers), rel=exactly)
    if "powersgd" not in codec and "lowrank" not in codec:  # factors have whole owners
        assert max(found.values()) < 1.25 * counted.per_peer(num_peers)


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "topk64", "powersgd2"])
def test_the_bytes_of_a_peer_do_not_grow_with_the_number_of_replicas(codec: str) -> None:
    manifest = small(*LARGER, f"reduce.codec={codec}")
    counted = reduce_bytes(manifest, StageState(manifest, 1).plan)
    most = counted.whole + counted.between / (MAX_GROUP // 2)
    assert all(counted.per_peer(num_peers) < most for num_peers in (2, 32, 33, 64, 65, 200, 1000, 3840))
    assert counted.per_peer(3840) < 1.6 * counted.per_peer(MAX_GROUP)


def test_the_statistics_of_tracking_are_counted_too() -> None:
    manifest = small(*LARGER, "boundary.track_every=5")
    counted = reduce_bytes(manifest, StageState(manifest, 1).plan).per_peer(3)
    assert sent(manifest, 3).total() / 3 == pytest.approx(counted, rel=0.01)


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
