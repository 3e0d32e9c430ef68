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
    StageAllReduce,
    expected_wait_s,
    is_critical,
    stages_to_compress,
)

from .generators import context, encoder, numbers, same_bits
from .pipeline import Pipeline, Send


def critical_sends(pipeline: Pipeline, exact: int, compressed: int) -> set[Send]:
    """What the rule selects when every sender knows what its receiver still has to do."""
    work = pipeline.run(lambda _: exact).other_work
    return {send for send, left in work.items() if is_critical(SendEstimate(left, exact, compressed))}


@pytest.mark.parametrize("num_stages", range(2, 9))
@pytest.mark.parametrize("extra", [1, 2, 5, 12])
@pytest.mark.parametrize(("forward", "backward"), [(10, 20), (10, 10), (10, 35)])
@pytest.mark.parametrize("wire", [1, 9, 10])
def test_in_1f1b_it_selects_exactly_the_epilogue(
    num_stages: int, extra: int, forward: int, backward: int, wire: int
) -> None:
    """If no message takes longer than a forward, and there is one to hide it behind.

    And each stage's first gradient, for which an idle stage waits as well: the rule asks nothing else.
    """
    num_microbatches = 2 * (num_stages - 1) + extra
    pipeline = Pipeline(num_stages, num_microbatches, 2, forward, backward, activation=wire)
    chosen = critical_sends(pipeline, exact=wire, compressed=0)
    assert chosen == pipeline.epilogue() | pipeline.first()
    everything = pipeline.run(lambda _: 0).end
    assert pipeline.run(lambda send: 0 if send in chosen else wire).end == everything
    assert pipeline.run(lambda _: wire).end > everything


@pytest.mark.parametrize("num_stages", range(2, 9))
@pytest.mark.parametrize("extra", [1, 3, 12])
def test_in_plain_1f1b_receivers_stand_idle_before_exactly_the_sends_of_optimus_cc(num_stages: int, extra: int) -> None:
    """The paper's own schedule, with one forward per following stage, as far as transfers take no time."""
    pipeline = Pipeline(num_stages, num_stages + extra, 1)
    idle = {send for send, time in pipeline.run(lambda _: 0).idle.items() if time}
    assert idle == pipeline.epilogue() | pipeline.first()


def test_for_four_stages_and_sixteen_microbatches_six_of_48_sends_are_in_the_epilogue() -> None:
    epilogue = Pipeline(4, 16, 1).epilogue()
    assert [sum(stage == sender for sender, _ in epilogue) for stage in (1, 2, 3)] == [3, 2, 1]


@pytest.mark.parametrize(("warm_up", "wire"), [(1, 5), (2, 20)])
def test_what_cannot_be_hidden_is_selected_in_the_middle_of_a_step_too(warm_up: int, wire: int) -> None:
    """A shallow pipeline has no forward to hide a message behind; a deep one has, but a long message outlasts it."""
    pipeline = Pipeline(4, 16, warm_up, activation=wire)
    chosen = critical_sends(pipeline, exact=wire, compressed=0)
    assert chosen > pipeline.epilogue() | pipeline.first()


@pytest.mark.parametrize("warm_up", [1, 2])
def test_the_schedule_is_1f1b(warm_up: int) -> None:
    """The checks above rest on it: each microbatch once each way, backward after forward, so many open as warmed up."""
    pipeline = Pipeline(4, 8, warm_up)
    for stage in range(4):
        order = pipeline.order(stage)
        assert sorted(order) == sorted((kind, index) for kind in ("forward", "backward") for index in range(8))
        is_open = 0
        for kind, _ in order:
            is_open += 1 if kind == "forward" else -1
            assert 0 <= is_open <= warm_up * (3 - stage) + 1


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
@given(st.lists(st.builds(StageAllReduce, st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)), max_size=6))
def test_the_fewest_stages_are_compressed_that_end_the_step_as_early_as_possible(stages: list[StageAllReduce]) -> None:
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
    stages = [StageAllReduce(drained_s=10.0 - stage, exact_s=4.0, compressed_s=1.5) for stage in range(4)]
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
