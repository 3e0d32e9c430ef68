"""A stage's gradient through every codec: all peers agree, failed attempts leave no trace, errors are fed back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from runs import small

from swarmtrain.errors import ManifestError
from swarmtrain.model.exact import SUM_LIMIT
from swarmtrain.model.state import StageState
from swarmtrain.reduce.all_reduce import AllReduce, Lane
from swarmtrain.reduce.coding import (
    StageCoder,
    factor_pieces,
    gradient_spec,
    left_pieces,
    stage_elements,
    together,
)
from swarmtrain.reduce.partition import owned_elements
from swarmtrain.reduce.selective import PROBE_AFTER, StageCompression
from swarmtrain.reduce.shares import EXACT, CodedShares
from swarmtrain.reduce.totals import BadShare
from swarmtrain.wire.messages import Prepare, RosterEntry

from .loopback import FakeNode, bounded, reduced_by_all

CODECS = ("bf16", "int8", "topk64", "powersgd2", "lowrank100")
NUM_PEERS = 3


def state_of(codec: str, *overrides: str) -> StageState:
    return StageState(small(f"reduce.codec={codec}", "stages.count=2", *overrides), 0)


def gradient(size: int, seed: int) -> torch.Tensor:
    """On the exact grid, and with a few directions that matter, as gradients have them."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e-3
    return (values * 2**44).round() / 2**44


@pytest.mark.parametrize("codec", CODECS)
def test_all_peers_leave_with_the_same_bits_and_close_to_the_sum(codec: str) -> None:
    async def main() -> None:
        states = [state_of(codec) for _ in range(NUM_PEERS)]
        coders = [StageCoder(state) for state in states]
        size = coders[0].layout.gradient_size
        shares: list[torch.Tensor | None] = [gradient(size, seed) for seed in range(NUM_PEERS - 1)]
        shares.append(None)  # a newcomer, or a peer without work
        exact = sum(share for share in shares if share is not None)
        assert isinstance(exact, torch.Tensor)
        before = [share.clone() for share in shares if share is not None]
        found = await reduced_by_all(coders, shares)
        for share, former in zip(shares, before, strict=False):  # they are lent, see StageWorker.lend_sum
            assert share is not None
            assert torch.equal(share, former)
        assert all(torch.equal(item.gradient, found[0].gradient) for item in found)
        loss = float((found[0].gradient - exact).norm() / exact.norm())
        assert 0.0 < loss < {"bf16": 5e-3, "int8": 3e-2}.get(codec, 1.0)
        for item in found:
            item.commit()
        assert len({state.digest() for state in states}) == 1  # PowerSGD's factors are part of it

    bounded(main())


@pytest.mark.parametrize("codec", CODECS)
def test_a_stage_with_one_peer_is_what_the_reference_trainer_computes(codec: str) -> None:
    async def main() -> None:
        alone, group = StageCoder(state_of(codec)), StageCoder(state_of(codec))
        for step in range(3):
            share = gradient(alone.layout.gradient_size, step)
            expected = alone.alone(share)
            (found,) = await reduced_by_all([group], [share])
            assert torch.equal(found.gradient, expected.gradient)
            expected.commit()
            found.commit()

    bounded(main())


@pytest.mark.parametrize("codec", CODECS)
def test_peers_without_a_network_leave_with_what_peers_in_a_network_do(codec: str) -> None:
    """Where one peer owns everything; the others' shares are rounded on their way."""

    async def main() -> None:
        here, there = ([StageCoder(state_of(codec)) for _ in range(2)] for _ in range(2))
        for step in range(3):
            shares = [gradient(here[0].layout.gradient_size, 2 * step + seed) for seed in range(2)]
            expected = together(here, shares)
            found = await reduced_by_all(there, list(shares), has_one_owner=True)
            assert all(torch.equal(item.gradient, expected.gradient) for item in found)
            expected.commit()
            for item in found:
                item.commit()

    bounded(main())


def test_factors_beyond_the_range_of_exact_sums_are_added_up() -> None:
    coder = StageCoder(state_of("powersgd2"))
    share = 400.0 * gradient(coder.layout.gradient_size, 1).sign()
    factors = coder.factors(share)
    left = factors.left()
    assert left is not None
    vector = factors.vector(torch.linalg.qr(left.view(-1, 2)).Q.reshape(-1))
    assert vector is not None
    assert float(vector.abs().max()) > SUM_LIMIT
    found = coder.alone(share).gradient
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("codec", ["topk64", "powersgd2", "lowrank100"])
def test_what_was_left_out_is_sent_later_and_a_failed_attempt_leaves_no_trace(codec: str) -> None:
    tried, straight = StageCoder(state_of(codec)), StageCoder(state_of(codec))
    share = gradient(tried.layout.gradient_size, 1)
    total = torch.zeros_like(share)
    for _ in range(12):
        tried.alone(2.0 * share)  # an attempt that came to nothing
        first, second = tried.alone(share), straight.alone(share)
        assert torch.equal(first.gradient, second.gradient)
        first.commit()
        second.commit()
        total += first.gradient
    once = float((straight_once(codec, share) - share).norm())
    assert float((total / 12 - share).norm()) < 0.9 * once


def straight_once(codec: str, share: torch.Tensor) -> torch.Tensor:
    return StageCoder(state_of(codec)).alone(share).gradient


@pytest.mark.parametrize("codec", ["topk64", "powersgd2", "lowrank100"])
def test_reset_forgets_the_error(codec: str) -> None:
    coder = StageCoder(state_of(codec))
    share = gradient(coder.layout.gradient_size, 1)
    coder.alone(share).commit()
    fresh = StageCoder(state_of(codec))
    if codec != "topk64":
        right = coder._state.right_factors
        assert right is not None
        fresh_right = fresh._state.right_factors
        assert fresh_right is not None
        right.copy_(fresh_right)
    assert not torch.equal(coder.alone(share).gradient, fresh.alone(share).gradient)
    coder.reset()
    assert torch.equal(coder.alone(share).gradient, fresh.alone(share).gradient)


def test_fewer_numbers_travel() -> None:
    layout = state_of("powersgd2").layout
    assert layout.factored
    left = left_pieces(layout, [1])[-1].stop
    assert stage_elements(layout, compress=True) + left < 0.5 * stage_elements(layout, compress=False)
    coder = StageCoder(state_of("topk64"))
    form, _ = coder.sliced(compress=True)
    share = gradient(8192, 0).numpy()
    assert len(form.pack(share, 0)) < len(EXACT.pack(share, 0)) / 100


@pytest.mark.parametrize("owned", [0.0, 0.1, 0.5, 0.95])
def test_right_factors_travel_as_32_bits_and_the_rest_as_whole_grid_steps(owned: float) -> None:
    """Wherever one owner's part ends and the next one's begins."""
    coder = StageCoder(state_of("powersgd2"))
    layout, share = coder.layout, gradient(coder.layout.gradient_size, 1)
    factors = coder.factors(share)
    left = factors.left()
    assert left is not None
    assert len(factors.left_form.pack(left.numpy(), 0)) == 4 * left.numel()
    vector = factors.vector(left)
    assert vector is not None
    cut_at = int(owned * vector.numel())
    pieces = factor_pieces(layout, [cut_at, vector.numel() - cut_at])
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, vector.numel())
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    sizes = [len(factors.form.pack(vector[p.start : p.stop].numpy(), p.start)) for p in pieces]
    rest = vector.numel() - layout.right_elements
    assert 0 < layout.right_elements < vector.numel()
    assert sum(sizes) == 4 * layout.right_elements + 5 * rest  # gradients below 2**-5


@pytest.mark.parametrize("codec", ["topk64", "powersgd2", "lowrank100"])
@pytest.mark.parametrize(("pause", "is_used"), [(1, True), (2, True), (3, False)])
def test_an_error_older_than_two_steps_is_not_used(codec: str, pause: int, is_used: bool) -> None:
    """In between the stage went exactly, or the peer had no work."""
    waiting, fresh = StageCoder(state_of(codec)), StageCoder(state_of(codec))
    share = gradient(waiting.layout.gradient_size, 1)
    waiting._state.step = 7
    waiting.reset()
    waiting.alone(share).commit()
    if (right := waiting._state.right_factors) is not None and fresh._state.right_factors is not None:
        fresh._state.right_factors.copy_(right)
    waiting._state.step = 7 + pause
    if codec == "topk64":
        waiting.sliced(compress=True)[1]()  # no work: nothing is sent, nothing used
    else:
        waiting.factors(None)
    assert torch.equal(waiting.alone(share).gradient, fresh.alone(share).gradient) is not is_used


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk64"])
def test_damaged_shares_and_answers_are_refused(codec: str) -> None:
    coder = StageCoder(state_of(codec))
    form, _ = coder.sliced(compress=True)
    assert isinstance(form, CodedShares)
    raw = bytes(form.pack(gradient(5000, 0).numpy(), 0))
    for bad in (raw[:-1], raw[1:], b"", raw + b"x", bytes(len(raw))):
        with pytest.raises(BadShare):
            form.unpack(bad, 5000)
        with pytest.raises(BadShare):
            form.result(bad, 5000)
    with pytest.raises(BadShare):
        form.unpack(raw, 4999)


@pytest.mark.parametrize(
    "codec", ["zip", "topk0", "topk5000", "powersgd0", "lowrank0", "lowrank1001", "lowrank010", "int4", "bf16x"]
)
def test_unknown_codecs_name_the_key(codec: str) -> None:
    with pytest.raises(ManifestError, match=r"reduce\.codec"):
        gradient_spec(small(f"reduce.codec={codec}"))


def test_tracking_needs_statistics_that_are_not_rounded() -> None:
    with pytest.raises(ManifestError, match="tracking"):
        gradient_spec(small("reduce.codec=int8", "boundary.track_every=5"))
    assert gradient_spec(small("reduce.codec=powersgd2", "boundary.track_every=5")).kind == "powersgd"


def test_only_the_stages_that_hold_up_the_step_are_compressed() -> None:
    def chosen(times: dict[int, float], *overrides: str) -> frozenset[int]:
        policy = StageCompression(small("reduce.codec=int8", *overrides))
        assert policy.choose() == (frozenset() if "reduce.selective=true" in overrides else frozenset(range(4)))
        for stage, seconds in times.items():
            policy.took(stage, seconds, compressed=False)
        return policy.choose()

    slow_first = {0: 4.0, 1: 0.5, 2: 0.6, 3: 0.5}
    assert chosen(slow_first, "reduce.selective=true") == {0}
    assert chosen(slow_first) == {0, 1, 2, 3}
    assert chosen({0: 4.0, 1: 3.9, 2: 0.6, 3: 0.5}, "reduce.selective=true") == {0, 1}
    assert chosen(dict.fromkeys(range(4), 0.001), "reduce.selective=true") == frozenset()
    assert StageCompression(small("reduce.selective=true")).choose() == frozenset()


def test_compression_that_does_not_help_is_given_up() -> None:
    policy = StageCompression(small("reduce.codec=int8", "reduce.selective=true"))
    for stage, seconds in enumerate((4.0, 0.5, 0.5, 0.5)):
        policy.took(stage, seconds, compressed=False)
    assert policy.choose() == {0}
    for _ in range(5):
        policy.took(0, 5.0, compressed=True)
    assert policy.choose() == frozenset()


def choices(policy: StageCompression, times: dict[bool, float], num_steps: int) -> list[bool]:
    """Whether stage 0 compresses in each of the next steps; its all-reduces take `times`, the others' half a second."""
    found = []
    for _ in range(num_steps):
        chosen = policy.choose()
        found.append(0 in chosen)
        for stage in range(4):
            policy.took(stage, times[stage in chosen] if stage == 0 else 0.5, compressed=stage in chosen)
    return found


def test_one_slow_step_does_not_keep_a_stage_compressed_for_ever() -> None:
    policy = StageCompression(small("reduce.codec=int8", "reduce.selective=true"))
    assert choices(policy, {False: 4.0, True: 0.3}, 3) == [False, True, True]
    after = choices(policy, {False: 0.1, True: 0.3}, 2 * PROBE_AFTER)  # its line is good again
    assert after[: PROBE_AFTER - 2] == [True] * (PROBE_AFTER - 2)
    assert not any(after[PROBE_AFTER - 2 :])


def test_a_line_that_stays_slow_is_measured_now_and_then() -> None:
    policy = StageCompression(small("reduce.codec=int8", "reduce.selective=true"))
    found = choices(policy, {False: 4.0, True: 0.3}, 1 + 3 * (PROBE_AFTER + 1))
    assert found == [False, *([True] * PROBE_AFTER + [False]) * 3]


def test_compression_that_was_slow_once_is_tried_again() -> None:
    policy = StageCompression(small("reduce.codec=int8", "reduce.selective=true"))
    assert choices(policy, {False: 4.0, True: 9.0}, 3) == [False, True, False]
    assert any(choices(policy, {False: 4.0, True: 0.3}, PROBE_AFTER + 1))


@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 1), (3, 2), (4, 4)])
def test_fused_synchronization_equals_the_unfused_one_and_moves_less(first: int, last: int) -> None:
    """Unfused: each stage adds up its side, then every replica exchanges its side's sum with one of the other side."""

    async def main() -> None:
        size = 1000
        shares = [gradient(size, seed) for seed in range(first + last)]
        names = [f"peer{i}" for i in range(first + last)]

        async def group(peers: list[int]) -> tuple[list[torch.Tensor], int]:
            owned = owned_elements(size, [(0.0, 0.0)] * len(peers))
            roster = tuple(
                RosterEntry(names[i], "life", b"work", elements) for i, elements in zip(peers, owned, strict=True)
            )
            members: dict[str, AllReduce] = {}
            for i in peers:
                node: Any = FakeNode(names[i], members, set())
                prepare = Prepare("run", 1, 0, 3, 1, (), roster)
                members[names[i]] = AllReduce(node, prepare, shares[i], lane=Lane.FUSED, roster=roster)
            outs = [torch.empty(size) for _ in peers]
            await asyncio.gather(*(members[names[i]].run(out) for i, out in zip(peers, outs, strict=True)))
            return outs, sum(item.num_sent + item.num_received for item in members.values())

        all_peers = list(range(first + last))
        fused, fused_moved = await group(all_peers)
        side_one, moved_one = await group(all_peers[:first])
        side_two, moved_two = await group(all_peers[first:])
        unfused = side_one[0] + side_two[0]
        assert all(torch.equal(out, fused[0]) for out in fused)
        assert torch.allclose(fused[0], unfused, rtol=1e-6, atol=1e-9)
        assert fused_moved == 2 * size * (first + last - 1)
        assert moved_one + moved_two == 2 * size * (first + last - 2)
        if first == last:
            exchange = 2 * size * first  # each pair: both sums cross once
            ratio = (moved_one + moved_two + exchange) / fused_moved
            assert ratio == pytest.approx((3 * first - 2) / (2 * first - 1))

    bounded(main())
