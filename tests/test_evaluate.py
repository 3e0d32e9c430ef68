"""`evaluate` gives the trainer's own validation loss, through the wire that the model was trained with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from needs import needs_bf16
from runs import KINDS, shards, small, train

from swarmtrain.checkpoint import Checkpoint
from swarmtrain.errors import CheckpointError, DataError
from swarmtrain.evaluate import Evaluation, evaluate
from swarmtrain.inference import TrainedModel, open_checkpoint_source
from swarmtrain.reference import ReferenceTrainer


def evaluated(checkpoint: Checkpoint, **options: object) -> Evaluation:
    return evaluate(checkpoint, open_checkpoint_source(checkpoint.manifest), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", ["fp32", "topk30"])
@pytest.mark.parametrize("tie", ["true", "false"])
def test_it_is_the_trainers_validation_loss_to_the_last_bit(tmp_path: Path, kind: str, codec: str, tie: str) -> None:
    manifest = small(f"boundary.kind={kind}", f"wire.forward={codec}", f"model.tie_embeddings={tie}")
    last = list(ReferenceTrainer(manifest, out=tmp_path).run())[-1]
    result = evaluated(train(manifest, tmp_path))
    assert result.loss == last.val_loss
    assert (result.step, result.codec, result.microbatches, result.tokens) == (4, codec, 3, 3 * 2 * 16)
    assert result.perplexity == math.exp(result.loss)
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2))


@needs_bf16()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "projected"])
@pytest.mark.parametrize("tie", ["true", "false"])
def test_a_run_in_bf16_is_evaluated_in_bf16(tmp_path: Path, kind: str, tie: str) -> None:
    manifest = small(
        f"boundary.kind={kind}", "boundary.table=signs", f"model.tie_embeddings={tie}", "model.precision=bf16"
    )
    last = list(ReferenceTrainer(manifest, out=tmp_path).run())[-1]
    assert evaluated(train(manifest, tmp_path)).loss == last.val_loss


def test_the_codec_matters_exactly_where_it_is_lossy(tmp_path: Path) -> None:
    exact = train(small(), tmp_path / "exact")
    assert evaluated(exact, use_codec=False).loss == evaluated(exact).loss
    assert evaluated(exact, use_codec=False).codec == "off"
    lossy = train(small("wire.forward=topk20"), tmp_path / "lossy")
    assert evaluated(lossy, use_codec=False).loss != evaluated(lossy).loss


def test_the_basis_that_tracking_moved_is_used(tmp_path: Path) -> None:
    manifest = small("boundary.track_every=2")
    last = list(ReferenceTrainer(manifest, out=tmp_path).run())[-1]
    assert evaluated(train(manifest, tmp_path)).loss == last.val_loss


def test_more_microbatches_than_there_are_means_all(tmp_path: Path) -> None:
    manifest = small(f"data.source={shards(tmp_path)}")
    result = evaluated(train(manifest, tmp_path / "run"), num_microbatches=10**6)
    available = open_checkpoint_source(manifest).num_windows("validation", 17) // 2
    assert result.microbatches == available > manifest.validation.microbatches
    seen: list[tuple[int, int]] = []
    evaluated(
        train(manifest, tmp_path / "run"),
        num_microbatches=2,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]


def test_bits_per_byte_are_for_byte_tokens_only(tmp_path: Path) -> None:
    source = shards(tmp_path, vocab_size=300)
    result = evaluated(train(small(f"data.source={source}", "model.vocab_size=320"), tmp_path / "run"))
    assert result.bits_per_byte is None
    assert result.as_json()["bits_per_byte"] is None


def test_data_that_moved_is_found_where_one_says(tmp_path: Path) -> None:
    source = shards(tmp_path)
    checkpoint = train(small(f"data.source={source}"), tmp_path / "run")
    before = evaluated(checkpoint).loss
    moved = source.rename(tmp_path / "redirected")
    with pytest.raises(DataError):
        evaluated(checkpoint)
    assert evaluate(checkpoint, open_checkpoint_source(checkpoint.manifest, str(moved))).loss == before


def test_a_run_without_validation_tokens_cannot_be_validated(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no validation tokens"):
        evaluated(train(small("data.validation_fraction=0"), tmp_path))


def test_a_checkpoint_whose_tensors_do_not_fit_its_manifest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = train(small(), tmp_path)
    tensors = checkpoint.load_stage(0)
    tensors["parameter/embedding.weight"] = torch.zeros(256, 9)
    monkeypatch.setattr(Checkpoint, "load_stage", lambda *_: tensors)
    with pytest.raises(CheckpointError, match=r"embedding\.weight"):
        TrainedModel(checkpoint)


def test_a_perplexity_beyond_all_numbers_is_null_in_json() -> None:
    assert Evaluation("c", 1, "off", 1, 1, 800.0, math.inf, None).as_json()["perplexity"] is None
