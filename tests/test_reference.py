"""The reference trainer: what it reports, that it resumes exactly, and that looking at it changes nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from needs import needs_bf16
from runs import KINDS, shards, small, train

from swarmtrain.boundary import Boundary, sample_names
from swarmtrain.data.prepare import PrepareOptions, prepare
from swarmtrain.errors import CheckpointError, DivergedError, ManifestError
from swarmtrain.model.layout import EMBEDDING
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest

# Every family of codecs, those with memory included.
CODECS = (
    ("fp32", "fp32"),
    ("bf16", "fp16"),
    ("quant8", "quant4"),
    ("minmax8", "minmax4"),
    ("topk50", "topk50"),
    ("ef-topk50", "topk50-separate"),
    ("fp32", "lowrank2-lep"),
    ("ef21-topk50", "ef21-topk50"),
    ("aqsgd-quant4", "quant8"),
    ("fp32", "quant4:critical"),
)
REMEMBERING = (("ef-topk20", "ef-topk20"), ("fp32", "lowrank2-lep"), ("ef21-topk20", "ef21-topk20"))


def digests(trainer: ReferenceTrainer) -> list[str]:
    return [worker.state.digest() for worker in trainer.workers]


def finished(manifest: Manifest, out: Path | None = None) -> ReferenceTrainer:
    trainer = ReferenceTrainer(manifest, out=out)
    for _ in trainer.run():
        pass
    return trainer


@pytest.mark.parametrize(("forward", "backward"), CODECS)
def test_every_codec_family_trains(forward: str, backward: str) -> None:
    manifest = small(f"wire.forward={forward}", f"wire.backward={backward}", "schedule.steps=12")
    losses = [report.loss for report in ReferenceTrainer(manifest).run()]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < sum(losses[:3])


def test_a_sample_that_comes_twice_in_a_microbatch_has_two_names(tmp_path: Path) -> None:
    """Where an epoch ends."""
    text, out = tmp_path / "text.txt", tmp_path / "shards"
    text.write_text("Nearly all in one microbatch. " * 40)
    prepare(PrepareOptions((text,), out))
    sizes = ("batch.sequences_per_microbatch=64", "data.validation_fraction=0", "validation.every=0")
    manifest = small("wire.forward=aqsgd-quant4", "schedule.steps=4", f"data.source={out}", *sizes)
    trainer = ReferenceTrainer(manifest)
    windows = trainer.sampler.samples(0, 1)
    assert len(set(windows)) < len(windows) == len(set(sample_names(windows)))
    assert sample_names((5, 7, 5)) != sample_names((5, 7, 7))
    assert sample_names((5, 7)) == (5, 7)
    assert all(math.isfinite(report.loss) for report in trainer.run())


def test_reports_count_steps_and_tokens_and_say_where_checkpoints_are(tmp_path: Path) -> None:
    manifest = small("schedule.steps=5", "validation.every=2", "checkpoint.every=2")
    reports = list(ReferenceTrainer(manifest, out=tmp_path).run())
    assert [report.step for report in reports] == [1, 2, 3, 4, 5]
    assert [report.tokens for report in reports] == [64 * step for step in range(1, 6)]
    assert [report.val_loss is not None for report in reports] == [False, True, False, True, True]
    written = [Path(report.checkpoint).name for report in reports if report.checkpoint]
    assert written == ["step-00000002", "step-00000004", "step-00000005"]
    assert all(report.grad_norm > 0 and report.lr > 0 and report.tokens_per_s > 0 for report in reports)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", [(), ("model.tie_embeddings=true",), ("optimizer.kind=muon",)])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, kind: str, extra: tuple[str, ...]) -> None:
    assert_resumes(tmp_path, f"boundary.kind={kind}", *extra)


@needs_bf16()
@pytest.mark.parametrize("extra", [(), ("optimizer.kind=muon", "schedule.delay=1", "schedule.predict=true")])
def test_a_resumed_run_in_bf16_ends_in_the_same_bits(tmp_path: Path, extra: tuple[str, ...]) -> None:
    """What the checkpoint holds are the parameters in fp32: copies alone would not do."""
    assert_resumes(tmp_path, "model.precision=bf16", "boundary.table=signs", *extra)


def assert_resumes(tmp_path: Path, *overrides: str) -> None:
    manifest = small("checkpoint.every=3", "schedule.steps=7", *overrides)
    stopped = ReferenceTrainer(manifest, out=tmp_path)
    for report in stopped.run():
        if report.step == 5:  # two steps past the checkpoint: they are lost and done again
            break
    resumed = finished(manifest, tmp_path)
    assert resumed.resumed_from is not None
    assert resumed.resumed_from.name == "step-00000003"
    assert digests(resumed) == digests(finished(manifest))


@pytest.mark.parametrize(("forward", "backward"), REMEMBERING)
def test_codecs_that_remember_do_not_spoil_resuming(tmp_path: Path, forward: str, backward: str) -> None:
    wire = (f"wire.forward={forward}", f"wire.backward={backward}")
    manifest = small("checkpoint.every=3", "schedule.steps=6", *wire)
    for report in ReferenceTrainer(manifest, out=tmp_path).run():
        if report.step == 3:
            break
    assert digests(finished(manifest, tmp_path)) == digests(finished(manifest))


@pytest.mark.parametrize(("forward", "backward"), REMEMBERING)
def test_control_codecs_that_keep_their_memory_across_a_checkpoint_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: str, backward: str
) -> None:
    monkeypatch.setattr(Boundary, "forget", lambda *_: None)
    wire = (f"wire.forward={forward}", f"wire.backward={backward}")
    manifest = small("checkpoint.every=3", "schedule.steps=6", *wire)
    for report in ReferenceTrainer(manifest, out=tmp_path).run():
        if report.step == 3:
            break
    assert digests(finished(manifest, tmp_path)) != digests(finished(manifest))


@pytest.mark.parametrize(("backward", "is_watched"), [("lowrank2-lep", True), ("lowrank2", False)])
def test_reports_say_how_biased_lazy_error_propagation_is(backward: str, is_watched: bool) -> None:
    for report in ReferenceTrainer(small(f"wire.backward={backward}")).run():
        assert (report.residual_cosine is not None) is is_watched
        assert -1.0 <= (report.residual_cosine or 0.0) <= 1.0


@pytest.mark.parametrize(("forward", "backward"), [("fp32", "fp32"), *REMEMBERING])
def test_validation_leaves_no_trace(forward: str, backward: str) -> None:
    manifest = small(f"wire.forward={forward}", f"wire.backward={backward}")
    watched, alone = ReferenceTrainer(manifest), ReferenceTrainer(manifest)
    for _ in range(4):
        watched.step()
        assert watched.validate() == watched.validate()
        alone.step()
    assert digests(watched) == digests(alone)


def test_tied_embeddings_stay_equal_at_both_ends() -> None:
    trainer = finished(small("model.tie_embeddings=true"))
    first, last = (worker.state.view(EMBEDDING) for worker in (trainer.workers[0], trainer.workers[-1]))
    assert torch.equal(first, last)
    assert not torch.equal(first, ReferenceTrainer(trainer.manifest).workers[0].state.view(EMBEDDING))


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_tracking_moves_the_basis_of_all_stages_alike(kind: str) -> None:
    trainer = finished(small(f"boundary.kind={kind}", "boundary.track_every=2"))
    bases = [worker.state.basis for worker in trainer.workers]
    assert [worker.state.basis_epoch for worker in trainer.workers] == [2, 2, 2, 2]
    assert all(basis is not None and torch.equal(basis, bases[0]) for basis in bases)
    assert not torch.equal(bases[0], ReferenceTrainer(trainer.manifest).workers[0].state.basis)


def test_a_checkpoint_of_another_manifest_is_refused_and_the_key_is_named(tmp_path: Path) -> None:
    train(small(), tmp_path)
    with pytest.raises(CheckpointError, match=r"\[optimizer\].*learning_rate"):
        ReferenceTrainer(small("optimizer.learning_rate=1e-3"), out=tmp_path)


def test_a_run_that_diverges_says_so() -> None:
    trainer = ReferenceTrainer(small("optimizer.learning_rate=1000", "schedule.warmup_steps=0", "schedule.steps=50"))
    with pytest.raises(DivergedError):
        for _ in trainer.run():
            pass


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("wire.forward=nonsense",), "wire.forward"),
        (("wire.backward=quant5",), "wire.backward"),
        (("wire.backward=topk10",), "wire.backward"),  # reuses a mask that fp32 does not send
        (("wire.backward=aqsgd-quant4",), "wire.backward"),
    ],
)
def test_impossible_codecs_are_refused_before_anything_is_computed(overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(ManifestError) as caught:
        ReferenceTrainer(small(*overrides))
    assert caught.value.key == key


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    source = shards(tmp_path, vocab_size=300)
    with pytest.raises(ManifestError, match=r"model\.vocab_size"):
        ReferenceTrainer(small(f"data.source={source}"))


def test_a_run_without_validation_tokens_trains_and_reports_none() -> None:
    reports = list(ReferenceTrainer(small("data.validation_fraction=0", "validation.every=1")).run())
    assert [report.val_loss for report in reports] == [None] * 4
