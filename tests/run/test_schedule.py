"""The learning rate, the gradient's scale and the step's loss: pure functions that every machine evaluates alike."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset
from swarmtrain.run.schedule import gradient_scale, learning_rate, mean_loss


def scheduled(steps: int, warmup: int, decay: str, final: float = 0.1) -> Manifest:
    return preset(
        "nano",
        [
            f"schedule.steps={steps}",
            f"schedule.warmup_steps={warmup}",
            f"schedule.decay={decay}",
            f"schedule.final_fraction={final}",
        ],
    )


any_schedule = st.tuples(
    st.integers(1, 400), st.integers(0, 500), st.sampled_from(["cosine", "linear", "constant"]), st.floats(0.0, 1.0)
)


@settings(deadline=None, max_examples=60)
@given(any_schedule)
def test_rate_lies_between_zero_and_peak_and_reaches_the_peak(schedule: tuple[int, int, str, float]) -> None:
    steps, warmup, decay, final = schedule
    manifest = scheduled(steps, warmup, decay, final)
    peak = manifest.optimizer.learning_rate
    rates = [learning_rate(manifest, step) for step in range(steps + 5)]
    assert all(0.0 <= rate <= peak * (1 + 1e-15) for rate in rates)
    if warmup <= steps:
        assert max(rates) == pytest.approx(peak)


@settings(deadline=None, max_examples=60)
@given(any_schedule)
def test_rate_rises_in_the_warm_up_and_never_after_it(schedule: tuple[int, int, str, float]) -> None:
    steps, warmup, decay, final = schedule
    manifest = scheduled(steps, warmup, decay, final)
    rates = [learning_rate(manifest, step) for step in range(steps + 5)]
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b * (1 - 1e-15) for a, b in itertools.pairwise(rates[warmup:]))


@settings(deadline=None, max_examples=60)
@given(any_schedule)
def test_rate_ends_at_the_final_fraction(schedule: tuple[int, int, str, float]) -> None:
    steps, warmup, decay, final = schedule
    assume(decay != "constant" and warmup < steps - 1)
    manifest = scheduled(steps, warmup, decay, final)
    for step in (steps - 1, steps, steps + 1000):
        assert learning_rate(manifest, step) == pytest.approx(manifest.optimizer.learning_rate * final, abs=1e-15)


def test_first_step_already_learns() -> None:
    assert learning_rate(scheduled(100, 10, "cosine"), 0) == pytest.approx(0.004 / 10)
    assert learning_rate(scheduled(100, 0, "cosine"), 0) == pytest.approx(0.004)
    assert learning_rate(scheduled(1, 0, "linear"), 0) == pytest.approx(0.004)


def test_shapes_at_the_middle() -> None:
    assert learning_rate(scheduled(101, 0, "linear", 0.0), 50) == pytest.approx(0.002)
    assert learning_rate(scheduled(101, 0, "cosine", 0.0), 50) == pytest.approx(0.002)
    assert learning_rate(scheduled(101, 0, "cosine", 0.0), 25) == pytest.approx(0.004 * (1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(scheduled(101, 0, "constant", 0.0), 100) == 0.004


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=32), st.integers(1, 1000))
def test_gradient_is_averaged_and_clipped_to_the_bound(squares: list[float], microbatches: int) -> None:
    manifest = preset("nano", [f"batch.microbatches_per_step={microbatches}", "optimizer.clip_norm=1.5"])
    norm, scale = gradient_scale(manifest, squares)
    total = math.sqrt(math.fsum(squares))
    assert norm == pytest.approx(total / microbatches)
    assert total * scale <= 1.5 * (1 + 1e-12)
    if norm <= 1.5:
        assert scale == 1.0 / microbatches


def test_no_bound_means_no_clipping() -> None:
    manifest = preset("nano", ["optimizer.clip_norm=0"])
    assert gradient_scale(manifest, [1e12]) == (1e6 / 4, 0.25)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=64), st.randoms())
def test_loss_of_a_step_does_not_depend_on_the_order_of_reports(losses: list[float], random: object) -> None:
    shuffled = list(losses)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert mean_loss(shuffled) == mean_loss(losses)
    assert mean_loss(losses) == pytest.approx(sum(losses) / len(losses))
