"""Gaps and losses at equal time, on curves that are known."""

from __future__ import annotations

from dataclasses import replace

from swarmtrain.study.compare import common_stage_s, loss_at, paired_gaps, shortest_s
from swarmtrain.study.links import TokenCosts
from swarmtrain.study.results import Point, RunResult, as_lines, from_lines
from swarmtrain.study.tables import as_markdown, rows

RATE = 100.0  # bytes per second


def run(method: str, seed: int, loss: float | None, *, sends: float = 4.0, tokens: int = 100) -> RunResult:
    """A training of `tokens` tokens with validations at the half and at the end, where the loss is one lower."""
    half = None if loss is None else loss + 1.0
    return RunResult(
        method=method,
        seed=seed,
        manifest_digest="",
        num_trained=1000,
        steps=10,
        tokens=tokens,
        train_loss=loss,
        val_loss=loss,
        val_loss_codec_off=loss,
        points=(Point(5, tokens // 2, half), Point(10, tokens, loss)),
        costs=TokenCosts(stage_s=9.0, codec_s=0.0, forward_bytes=sends, backward_bytes=sends / 2),
        diverged="" if loss is not None else "diverged",
    )


def test_gaps_are_between_runs_of_the_same_seed() -> None:
    dense = [run("dense", 1, 2.0), run("dense", 2, 3.0), run("dense", 3, None)]
    other = [run("other", 2, 3.5), run("other", 1, 2.25), run("other", 3, 9.0), run("other", 4, 9.0)]
    assert paired_gaps(other, dense) == [0.5, 0.25]
    row = rows([*dense, *other])[1]
    assert (row.gap, row.gap_lowest, row.gap_highest) == (0.375, 0.25, 0.5)
    assert (rows(dense)[0].gap, rows(other)[0].gap) == (None, None)


def test_the_loss_at_a_time_lies_on_the_curve_of_the_run() -> None:
    slow = run("dense", 1, 2.0)  # 0.04 s per token over this link: validations after 2 and 4 s
    assert loss_at(slow, 0.01, RATE, 1.9) is None
    assert loss_at(slow, 0.01, RATE, 2.0) == 3.0
    assert loss_at(slow, 0.01, RATE, 3.0) == 2.5
    assert loss_at(slow, 0.01, RATE, 4.0) == loss_at(slow, 0.01, RATE, 99.0) == 2.0
    assert loss_at(slow, 0.08, RATE, 4.0) == 3.0  # now computing takes longer than sending
    assert loss_at(run("dense", 1, None), 0.01, RATE, 3.0) is None


def test_equal_time_is_the_end_of_the_first_method_that_saw_all_tokens() -> None:
    dense, small = [run("dense", seed, 2.0) for seed in (1, 2)], run("small", 1, 2.2, sends=1.5)
    short, broken = run("short", 1, 2.5, sends=1.0, tokens=50), run("broken", 1, None, sends=0.1)
    assert shortest_s([*dense, small, short, broken], 0.01, RATE) == 1.5
    assert shortest_s([*dense, small], 0.03, RATE) == 3.0
    assert shortest_s([broken], 0.01, RATE) == 0.0


def test_runs_that_diverged_do_not_say_how_long_computing_takes() -> None:
    done = run("dense", 1, 2.0)
    broken = [replace(run("quant2", seed, None), costs=replace(done.costs, stage_s=0.0)) for seed in (1, 2, 3)]
    assert common_stage_s([done, *broken]) == 9.0
    assert common_stage_s(broken) == 0.0


def test_what_diverged_is_shown_with_its_steps() -> None:
    some = [run("some", 1, 2.0), run("some", 2, None), replace(run("some", 3, None), steps=7)]
    line = as_markdown(rows([run("dense", 1, 1.5), *some])).splitlines()[-1]
    assert "2.000; 2 of 3 diverged at step 10, 7 | +0.500 |" in line
    assert "| diverged at step 10 | - |" in as_markdown(rows([some[1]]))


def test_lines_hold_every_result() -> None:
    results = [run("dense", 1, 2.0), run("quant4/quant8", 2, None)]
    assert from_lines(as_lines(results)) == results
