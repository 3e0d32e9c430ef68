"""A whole optimizer step has the same bits for every order and grouping of its microbatches."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.model.state import StageState
from swarmtrain.model.worker import Gradients, StageWorker

from .chains import Chain, some_tokens, tiny

NUM_MICROBATCHES = 6
EXTRA = NUM_MICROBATCHES  # a microbatch that does not belong to the step
Plan = list[tuple[int, int, bool]]  # (microbatch, partial sum that takes it, whether the extra one passes through)


@functools.cache
def prepared(kind: str, accumulate: str, stage: int) -> tuple[Chain, list[Gradients]]:
    """A chain after two steps (so that moments are not zero), and every microbatch's gradients on one of its stages."""
    manifest = tiny(
        f"boundary.kind={kind}", f"batch.accumulate={accumulate}", "boundary.track_every=" + tracking(kind, stage)
    )
    chain = Chain(manifest, torch.float32)
    for step in range(2):
        chain.step(some_tokens(manifest, 100 + step))
    found = []
    for index in range(NUM_MICROBATCHES + 1):
        found.append(chain.backward(chain.forward(some_tokens(manifest, index)))[stage])
    return chain, found


def tracking(kind: str, stage: int) -> str:
    return "5" if kind != "dense" and stage == 3 else "0"


def digest_after_step(kind: str, accumulate: str, stage: int, plan: Plan) -> str:
    """Add the microbatches as planned, add up the partial sums, step, and name the whole state."""
    chain, gradients = prepared(kind, accumulate, stage)
    before = chain.workers[stage].state
    state = StageState(before.manifest, stage)
    state.load(dict(before.named_tensors()), step=before.step, basis_epoch=before.basis_epoch)
    worker = StageWorker(state)
    sums = [state.new_accumulator() for _ in range(3)]
    for index, group, detour in plan:
        if detour:
            sums[group].add(state.gradient_offsets, gradients[EXTRA].own)
        sums[group].add(state.gradient_offsets, gradients[index].own)
        if detour:
            sums[group].add(state.gradient_offsets, gradients[EXTRA].own, sign=-1)
    total = sums[2].total + sums[0].total + sums[1].total
    squared = worker.finish(total)
    worker.apply(total, 1.0 / (NUM_MICROBATCHES * max(1.0, squared**0.5)), 1e-2)
    return f"{squared.hex()} {state.digest()}"


IN_ORDER: Plan = [(index, 0, False) for index in range(NUM_MICROBATCHES)]
plans = st.builds(
    lambda order, groups, detours: list(zip(order, groups, detours, strict=True)),
    st.permutations(range(NUM_MICROBATCHES)),
    st.lists(st.integers(0, 2), min_size=NUM_MICROBATCHES, max_size=NUM_MICROBATCHES),
    st.lists(st.booleans(), min_size=NUM_MICROBATCHES, max_size=NUM_MICROBATCHES),
)


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_order_grouping_and_detours_leave_no_trace(kind: str, stage: int) -> None:
    expected = digest_after_step(kind, "exact", stage, IN_ORDER)

    @settings(deadline=None, max_examples=25)
    @given(plans)
    def check(plan: Plan) -> None:
        assert digest_after_step(kind, "exact", stage, plan) == expected

    check()


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
def test_with_plain_sums_the_same_test_shows_a_difference(kind: str) -> None:
    orders = [IN_ORDER, IN_ORDER[::-1], [(i, i % 3, False) for i in range(6)], [(i, 0, i == 2) for i in range(6)]]
    assert len({digest_after_step(kind, "float", 1, order) for order in orders}) > 1


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
def test_a_lost_or_doubled_microbatch_does_leave_a_trace(kind: str) -> None:
    expected = digest_after_step(kind, "exact", 1, IN_ORDER)
    assert digest_after_step(kind, "exact", 1, IN_ORDER[:-1]) != expected
    assert digest_after_step(kind, "exact", 1, [*IN_ORDER, IN_ORDER[0]]) != expected
    assert digest_after_step(kind, "exact", 1, [*IN_ORDER[:-1], IN_ORDER[0]]) != expected


def test_one_microbatch_has_the_same_gradient_bits_every_time() -> None:
    chain, gradients = prepared("subspace", "exact", 1)
    again = chain.backward(chain.forward(some_tokens(chain.manifest, 0)))[1]
    for first, second in zip(gradients[0].own, again.own, strict=True):
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)
