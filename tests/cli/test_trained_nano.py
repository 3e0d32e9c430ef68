"""`swarmtrain train nano` learns, and eval, generate and export take what it wrote."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmtrain.checkpoint import complete, open_checkpoint
from swarmtrain.data.source import embedded_text
from swarmtrain.inference import TrainedModel
from swarmtrain.reference import make_sampler, open_run_source
from swarmtrain.run.presets import preset

from .conftest import NUM_STEPS, NanoRun, arguments
from .programs import call, json_lines, run

NANO_DEADLINE_S = 1500  # one to two minutes on a quiet core


def best_loss(pairs: bool) -> float:
    """The best loss of a model of bytes or byte pairs, counted on the training part, on what validation uses."""
    manifest = preset("nano")
    source = open_run_source(manifest)
    first, end = source.token_range("train")
    tokens = np.frombuffer(embedded_text(), dtype=np.uint8)[first:end]
    counts = np.zeros((256, 256))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    sampler = make_sampler(manifest, source)
    windows = np.concatenate([sampler.validation(index) for index in range(manifest.validation.microbatches)])
    before, after = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    if not pairs:
        counts[:] = counts.sum(0)
    losses = []
    for added in (1.0, 0.1, 0.01, 0.001):  # add-one smoothing, and whatever suits it better
        shares = (counts + added) / (counts.sum(1, keepdims=True) + 256 * added)
        losses.append(float(-np.log(shares[before, after]).mean()))
    return min(losses)


def test_it_learns_more_than_which_bytes_are_frequent(nano_run: NanoRun) -> None:
    losses = [line["loss"] for line in json_lines(nano_run.printed)[:-1]]
    done = json_lines(nano_run.printed)[-1]
    assert losses[0] > math.log(256)  # it knows nothing
    assert done["val_loss"] < best_loss(pairs=False) - 0.1 < math.log(256) - 1.0


@pytest.mark.long
@pytest.mark.timeout(NANO_DEADLINE_S + 120)
def test_in_200_steps_it_learns_clearly_more_than_byte_pairs(tmp_path: Path) -> None:
    trained = run("train", "nano", "--steps", 200, "--threads", 1, "--out", tmp_path / "run", "--json")
    floor = best_loss(pairs=True)
    assert 2.0 < floor < best_loss(pairs=False) < math.log(256)  # the floor itself is one: far below knowing nothing
    assert json_lines(trained.out)[-1]["val_loss"] < floor - 0.3


def test_json_has_one_object_per_step_and_one_at_the_end(nano_run: NanoRun) -> None:
    *steps, done = json_lines(nano_run.printed)
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    for line in steps:
        assert {"step", "loss", "tokens", "tokens_per_s", "grad_norm", "lr"} <= line.keys()
        assert line["tokens"] == 8 * 128 * line["step"]
    assert done.keys() == {"done", "checkpoint", "val_loss"}
    assert done["done"] is True
    assert Path(done["checkpoint"]).name == "step-00000024"
    assert steps[-1]["val_loss"] == done["val_loss"]


def test_the_newest_checkpoints_are_kept(nano_run: NanoRun) -> None:
    names = [path.name for path in complete(nano_run.out / "checkpoints")]
    assert names == ["step-00000012", "step-00000018", "step-00000024"]


def test_training_again_finds_it_done(nano_run: NanoRun) -> None:
    again = call(*arguments(nano_run.out))
    assert again.code == 0
    assert json_lines(again.out) == json_lines(nano_run.printed)[-1:]


def test_eval_gives_the_loss_that_training_ended_with(nano_run: NanoRun) -> None:
    outcome = call("eval", nano_run.out, "--json", "--threads", 1)
    (result,) = json_lines(outcome.out)
    assert result["loss"] == json_lines(nano_run.printed)[-1]["val_loss"]
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))
    (off,) = json_lines(call("eval", nano_run.out, "--json", "--codec", "off", "--threads", 1).out)
    assert (off["codec"], off["loss"]) == ("off", result["loss"])  # fp32 loses nothing
    (more,) = json_lines(call("eval", nano_run.out, "--json", "--microbatches", 20, "--threads", 1).out)
    assert (more["microbatches"], more["tokens"]) == (20, 20 * 8 * 128)
    table = call("eval", nano_run.out, "--threads", 1).out
    assert f"{result['loss']:.4f}" in table
    assert "bits per byte" in table


def test_generate_streams_text_and_repeats_it(nano_run: NanoRun) -> None:
    asked = ("generate", nano_run.out, "--prompt", "The people", "--tokens", 60, "--seed", 3)
    text = run(*asked, "--threads", 1).out
    assert text.startswith("The people")
    assert text.count(" ") > 4  # it knows that much
    assert text == call(*asked, "--threads", 1).out
    (as_json,) = json_lines(call(*asked, "--json", "--threads", 1).out)
    assert text == f"The people{as_json['text']}\n"


def test_export_loads_elsewhere_with_the_same_logits(nano_run: NanoRun, tmp_path: Path) -> None:
    outcome = call("export", nano_run.out, "--out", tmp_path / "llama", "--json")
    assert json_lines(outcome.out)[0]["out"] == str(tmp_path / "llama")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    ids = tokenizer("The people of the United States", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        theirs = llama(input_ids=ids).logits
    ours = TrainedModel(open_checkpoint(nano_run.out)).logits(ids)
    assert float((theirs - ours).abs().max()) < 1e-4
