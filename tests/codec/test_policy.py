"""Compress what somebody waits for: the rule, and what it selects in a 1F1B pipeline."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import Direction, decode
from swarmtrain.codec.payload import peek
from swarmtrain.codec.policy import (
    SendEstimate,
    StageReduction,
    expected_wait_s,
    is_critical,
    stages_to_compress,
)

from .generators import context, encoder, numbers, same_bits

FORWARD_S, BACKWARD_S = 1.0, 2.0


def one_forward_one_backward(num_stages: int, stage: int, num_microbatches: int) -> list[tuple[str, int]]:
    """The order of work of one stage: warm-up forwards, then pairs, then the remaining backwards."""
    warm_up = min(num_stages - 1 - stage, num_microbatches)
    order = [("forward", index) for index in range(warm_up)]
    for index in range(num_microbatches - warm_up):
        order += [("forward", warm_up + index), ("backward", index)]
    return order + [("backward", index) for index in range(num_microbatches - warm_up, num_microbatches)]


def epilogue_rule(num_stages: int, stage: int, num_microbatches: int) -> set[int]:
    """Optimus-CC: the backward sends of the last steady microbatch and of the cool-down are compressed."""
    cool_down = num_stages - 1 - stage
    return set(range(num_microbatches - cool_down - 1, num_microbatches))


def independent_work_s(order: list[tuple[str, int]], microbatch: int) -> float:
    """What a stage can do between its previous backward and the one that needs this message."""
    place = order.index(("backward", microbatch))
    before = itertools.takewhile(lambda operation: operation[0] == "forward", reversed(order[:place]))
    return FORWARD_S * len(list(before))


@pytest.mark.parametrize("num_stages", range(2, 9))
@pytest.mark.parametrize("extra", [0, 1, 3, 12])
def test_in_1f1b_it_selects_exactly_the_epilogue(num_stages: int, extra: int) -> None:
    num_microbatches = num_stages + extra
    for stage in range(1, num_stages):
        receiver = one_forward_one_backward(num_stages, stage - 1, num_microbatches)
        chosen = set()
        for microbatch in range(num_microbatches):
            work_s = independent_work_s(receiver, microbatch)
            if is_critical(SendEstimate(work_s, exact_s=0.9 * FORWARD_S, compressed_s=0.1 * FORWARD_S)):
                chosen.add(microbatch)
        assert chosen == epilogue_rule(num_stages, stage, num_microbatches)
        assert len(chosen) == num_stages - stage


def test_for_four_stages_and_sixteen_microbatches_six_of_48_sends_are_compressed() -> None:
    assert [len(epilogue_rule(4, stage, 16)) for stage in (1, 2, 3)] == [3, 2, 1]


def test_the_schedule_is_1f1b() -> None:
    """The check above rests on it: each microbatch once each way, backward after forward, at most w + 1 open."""
    for stage in range(4):
        order = one_forward_one_backward(4, stage, 8)
        assert sorted(order) == sorted((kind, index) for kind in ("forward", "backward") for index in range(8))
        is_open = 0
        for kind, _ in order:
            is_open += 1 if kind == "forward" else -1
            assert 0 <= is_open <= 4 - stage


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_a_message_is_critical_only_if_compression_shortens_a_wait(
    work: float, exact: float, compressed: float
) -> None:
    critical = is_critical(SendEstimate(work, exact, compressed))
    assert critical == (exact > work and compressed < exact)
    assert expected_wait_s(work, exact) >= 0
    if critical:
        assert is_critical(SendEstimate(work / 2, exact, compressed))  # less other work: still critical


@settings(max_examples=100, deadline=None)
@given(st.lists(st.builds(StageReduction, st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)), max_size=6))
def test_the_fewest_stages_are_compressed_that_end_the_step_as_early_as_possible(stages: list[StageReduction]) -> None:
    def end(compressed: frozenset[int]) -> float:
        return max(
            (s.drained_s + (s.compressed_s if i in compressed else s.exact_s) for i, s in enumerate(stages)),
            default=0.0,
        )

    plans = [
        frozenset(plan) for size in range(len(stages) + 1) for plan in itertools.combinations(range(len(stages)), size)
    ]
    best = min(map(end, plans))
    chosen = stages_to_compress(stages)
    assert end(chosen) == best
    assert len(chosen) == min(len(plan) for plan in plans if end(plan) == best)


def test_in_a_pipeline_that_drains_backwards_the_first_stages_are_compressed() -> None:
    stages = [StageReduction(drained_s=10.0 - stage, exact_s=4.0, compressed_s=1.5) for stage in range(4)]
    assert stages_to_compress(stages) == {0, 1, 2}


def test_the_encoder_follows_the_context() -> None:
    sender = encoder("lowrank2-lep:critical", Direction.BACKWARD)
    message = numbers("gaussian", (16, 32), 1)
    sizes = []
    for critical in (True, False, True):
        now = context(Direction.BACKWARD, critical=critical)
        encoded = sender.encode(message, now)
        sender.commit(encoded.ticket)
        sizes.append(len(encoded.payload))
        assert same_bits(decode(encoded.payload, now).tensor, message) is (not critical)
        assert peek(encoded.payload).codec == (5 if critical else 1)
        assert len(encoded.payload) <= sender.max_bytes((16, 32))
    assert sizes[0] == sizes[2] < sizes[1]


def test_the_residual_waits_for_the_next_critical_message() -> None:
    with_between, without = (encoder("ef-topk10:critical", Direction.BACKWARD) for _ in range(2))
    for sender in (with_between, without):
        sender.commit(sender.encode(numbers("gaussian", (4, 40), 1), context(Direction.BACKWARD)).ticket)
    between = with_between.encode(numbers("gaussian", (4, 40), 2), context(Direction.BACKWARD, critical=False))
    with_between.abort(between.ticket)
    last = numbers("gaussian", (4, 40), 3)
    now = context(Direction.BACKWARD)
    assert with_between.encode(last, now).payload == without.encode(last, now).payload
