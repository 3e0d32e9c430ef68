"""The study itself: what it trains, counts and writes, and that it goes on where it was stopped."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL, small

from swarmtrain.errors import StorageError, UsageError
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.study.links import LINKS, TokenCosts, seconds_per_token
from swarmtrain.study.methods import parse_methods
from swarmtrain.study.plots import draw
from swarmtrain.study.runner import Progress, Study
from swarmtrain.study.tables import as_csv, as_markdown, rows

METHODS = "dense,subspace8,quant4/quant8,topk25"


def study(out: Path, methods: str = METHODS, *overrides: str, seeds: int = 2) -> Study:
    return Study(small("validation.every=2", *overrides), tuple(parse_methods(methods)), seeds, out)


def ignore(progress: Progress) -> None:
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    done = study(tmp_path_factory.mktemp("study"))
    assert len(list(done.train(ignore))) == 8
    return done


def test_a_training_of_the_study_is_the_reference_trainer_s(finished: Study) -> None:
    for method, seed, manifest in finished.runs():
        reports = list(ReferenceTrainer(manifest).run())
        result = next(item for item in finished.results() if (item.method, item.seed) == (method.name, seed))
        assert result.val_loss == reports[-1].val_loss
        assert result.train_loss == reports[-1].loss
        assert [point.val_loss for point in result.points] == [r.val_loss for r in reports if r.val_loss is not None]


def test_several_peers_in_a_stage_are_one_where_sums_are_exact_and_others_where_they_are_not(tmp_path: Path) -> None:
    names = "dense,dense-replicas2,dense-lowrank100,dense-lowrank100-replicas2,dense-lowrank100-replicas1"
    results = {item.method: item.train_loss for item in study(tmp_path, names, seeds=1).train(ignore)}
    one, exact, coded, apart, same = results.values()
    assert exact == one
    assert coded == same
    assert len({one, coded, apart}) == 3


def test_all_methods_of_a_seed_train_on_the_same_tokens(finished: Study) -> None:
    for seed in (7, 8):
        manifests = [manifest for _, its_seed, manifest in finished.runs() if its_seed == seed]
        batches = [ReferenceTrainer(manifest).sampler.microbatch(1, 1).tolist() for manifest in manifests]
        assert all(batch == batches[0] for batch in batches)
    assert finished.runs()[0][2].run.seed != finished.runs()[-1][2].run.seed


def test_the_table_has_losses_and_bytes(finished: Study) -> None:
    table = {row.method: row for row in rows(finished.results())}
    tokens = 2 * 16  # of one message: its header is spread over them
    dense, quant, sub = table["dense"], table["quant4/quant8"], table["subspace8"]
    assert dense.forward_bytes_per_token == 4 * 32 + 48 / tokens
    assert sub.backward_bytes_per_token == 4 * 8 + 48 / tokens
    assert quant.forward_bytes_per_token < quant.backward_bytes_per_token < dense.backward_bytes_per_token / 3
    assert dense.val_loss == dense.val_loss_codec_off
    assert table["topk25"].val_loss != table["topk25"].val_loss_codec_off
    assert dense.val_loss_lowest is not None
    assert dense.val_loss_highest is not None
    assert dense.val_loss_lowest < dense.val_loss_highest
    assert sub.parameters < dense.parameters == quant.parameters
    assert all(row.seeds == 2 and row.diverged == 0 for row in table.values())


def test_csv_and_markdown_hold_every_method(finished: Study) -> None:
    table = rows(finished.results())
    read = list(csv.DictReader(as_csv(table).splitlines()))
    assert [line["method"] for line in read] == METHODS.split(",")
    assert [float(line["val_loss"]) for line in read] == [row.val_loss for row in table]
    lines = as_markdown(table).splitlines()
    assert len(lines) == 2 + 4
    assert len({line.count("|") for line in lines}) == 1


def test_plots_are_written(finished: Study, tmp_path: Path) -> None:
    drawn = draw(finished.results(), tmp_path, "80mbit")
    assert [path.name for path in drawn] == ["loss-tokens.png", "loss-time-80mbit.png", "loss-bytes.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_what_is_finished_is_not_trained_again(finished: Study) -> None:
    before = {path: path.stat().st_mtime_ns for path in (finished.out / "runs").iterdir()}
    assert list(finished.train(ignore)) == []
    assert {path: path.stat().st_mtime_ns for path in (finished.out / "runs").iterdir()} == before


def test_results_of_another_manifest_are_refused(finished: Study) -> None:
    other = Study(small("model.ffn_size=64"), finished.methods, 1, finished.out)
    with pytest.raises(UsageError, match="another manifest"):
        other.results()


def test_a_damaged_result_is_named(finished: Study, tmp_path: Path) -> None:
    copy = study(tmp_path, "dense", seeds=1)
    path = copy.path(copy.methods[0], 7)
    path.parent.mkdir(parents=True)
    for damage in ("{", "[]", "{}", '{"points": 3}'):
        path.write_text(damage)
        with pytest.raises(StorageError, match="is not a result"):
            copy.results()


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    wild = study(tmp_path, "dense", "optimizer.learning_rate=1000.0", "optimizer.clip_norm=0.0", seeds=1)
    (result,) = list(wild.train(ignore))
    assert result.diverged
    assert result.val_loss is None
    assert result.steps < 4
    (row,) = rows(wild.results())
    assert as_markdown([row]).count("\n") == 3
    assert (row.diverged, row.diverged_at_steps) == (1, str(result.steps))
    assert row.forward_bytes_per_token == 4 * 32 + 48 / 32  # although it ended amid a step


def test_all_methods_compute_equally_long_and_as_long_as_one_says(finished: Study) -> None:
    results = finished.results()
    measured = {row.compute_us_per_token for row in rows(results)}
    assert measured == {1e6 * statistics.median(result.costs.stage_s for result in results)}
    assert {row.compute_us_per_token for row in rows(results, 0.5)} == {0.5e6}
    assert all(row.hours_20mbit >= 0.5 * row.tokens / 3600 for row in rows(results, 0.5))


def test_a_method_may_have_a_schedule_of_its_own(tmp_path: Path) -> None:
    seen: list[Progress] = []
    shorter, dense = study(tmp_path, "dense-steps2,dense", seeds=1).train(seen.append)
    assert (shorter.steps, dense.steps) == (2, 4)
    assert [item.num_steps for item in seen] == [2, 2, 4, 4, 4, 4]


def test_dropped_and_carried_residuals_differ_only_where_messages_are_seldom_critical(tmp_path: Path) -> None:
    def losses(*names: str) -> list[float | None]:
        return [result.val_loss for result in study(tmp_path, ",".join(names), seeds=1).train(ignore)]

    dropped, carried = losses("lowrank1-lep", "lowrank1-lep:carry")
    assert dropped == carried
    none, dropped, carried = losses("lowrank1:critical@3", "lowrank1-lep:critical@3", "lowrank1-lep:carry,critical@3")
    assert len({none, dropped, carried}) == 3


def test_only_the_steps_that_are_named_are_critical(tmp_path: Path) -> None:
    exact, seldom, always = study(tmp_path, "dense,lowrank1:critical@2,lowrank1:critical", seeds=1).train(ignore)
    mean = (exact.costs.backward_bytes + always.costs.backward_bytes) / 2
    assert seldom.costs.backward_bytes == pytest.approx(mean)


def test_a_slow_link_is_the_limit_and_a_fast_one_is_not() -> None:
    costs = TokenCosts(stage_s=1e-5, codec_s=1e-6, forward_bytes=512.0, backward_bytes=128.0)
    assert seconds_per_token(costs, LINKS["20mbit"]) == 512.0 / 2.5e6
    assert seconds_per_token(costs, LINKS["100gbit"]) == pytest.approx(1.1e-5)


def test_progress_counts_every_step(tmp_path: Path) -> None:
    seen: list[Progress] = []
    list(study(tmp_path, "dense,subspace8", seeds=1).train(seen.append))
    assert [(item.method, item.run, item.step) for item in seen] == [
        (name, run, step) for run, name in ((1, "dense"), (2, "subspace8")) for step in (1, 2, 3, 4)
    ]
    assert all(item.left_s >= 0.0 for item in seen)


def command(out: Path, *more: str) -> list[str]:
    settings = [text for item in SMALL for text in ("--set", item)]
    fixed = ["--methods", "dense,quant4", "--seeds", "2", "--threads", "1", "--json"]
    return [sys.executable, "-m", "swarmtrain", "study", "nano", *fixed, *settings, "--out", str(out), *more]


@pytest.mark.long
def test_a_killed_study_goes_on_where_it_was(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "--steps", "20"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "result":
            os.kill(process.pid, signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = sorted(path.name for path in (tmp_path / "runs").glob("*.json"))
    assert 1 <= len(kept) < 4
    more = ("--steps", "20", "--stage-seconds", "0.25")
    again = subprocess.run(command(tmp_path, *more), capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in again.stdout.splitlines()]
    assert sum(event["event"] == "result" for event in events) == 4 - len(kept)
    assert events[-1]["event"] == "done"
    assert all(Path(path).exists() for path in events[-1]["files"])
    assert "finished before" in again.stderr
    table = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    assert [line["compute_us_per_token"] for line in table] == ["250000.0", "250000.0"]
