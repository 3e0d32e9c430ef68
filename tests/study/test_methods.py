"""Method names become manifests, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmtrain.errors import ManifestError, UsageError
from swarmtrain.run.presets import preset
from swarmtrain.study.methods import parse_method, parse_methods

# Every name that the study promises: kind, k, forward, backward.
NAMES = {
    "dense": ("dense", 8, "fp32", "fp32"),
    "subspace": ("subspace", 8, "fp32", "fp32"),
    "subspace16": ("subspace", 16, "fp32", "fp32"),
    "projected": ("projected", 8, "fp32", "fp32"),
    "learned": ("learned", 8, "fp32", "fp32"),
    "learned4": ("learned", 4, "fp32", "fp32"),
    "fp16": ("dense", 8, "fp16", "fp16"),
    "quant4": ("dense", 8, "quant4", "quant4"),
    "quant2": ("dense", 8, "quant2", "quant2"),
    "minmax4": ("dense", 8, "minmax4", "minmax4"),
    "topk10": ("dense", 8, "topk10", "topk10"),
    "topk2.5": ("dense", 8, "topk2.5", "topk2.5"),
    "topk10-separate": ("dense", 8, "topk10-separate", "topk10-separate"),
    "ef-topk10": ("dense", 8, "ef-topk10", "topk10"),
    "ef21-topk10": ("dense", 8, "ef21-topk10", "ef21-topk10"),
    "aqsgd-quant4": ("dense", 8, "aqsgd-quant4", "quant8"),
    "aqsgd-topk30": ("dense", 8, "aqsgd-topk30", "quant8"),
    "lowrank8": ("dense", 8, "fp32", "lowrank8"),
    "lowrank8-lep": ("dense", 8, "fp32", "lowrank8-lep"),
    "lowrank8-lep:carry": ("dense", 8, "fp32", "lowrank8-lep:carry"),
    "subspace+quant8": ("subspace", 8, "quant8", "quant8"),
    "quant4/quant8": ("dense", 8, "quant4", "quant8"),
    "learned16+quant4/quant8": ("learned", 16, "quant4", "quant8"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_becomes_its_manifest(name: str) -> None:
    manifest = parse_method(name).applied_to(preset("nano"), seed=11)
    found = (manifest.boundary.kind, manifest.boundary.k, manifest.wire.forward, manifest.wire.backward)
    assert found == NAMES[name]
    assert manifest.run.seed == 11
    assert not manifest.boundary.match_parameters


def test_matched_and_tracked_are_subspaces() -> None:
    matched = parse_method("matched4").applied_to(preset("nano"), seed=0)
    assert (matched.boundary.kind, matched.boundary.k, matched.boundary.match_parameters) == ("subspace", 4, True)
    tracked = parse_method("subspace8-tracked50").applied_to(preset("nano"), seed=0)
    assert (tracked.boundary.kind, tracked.boundary.track_every) == ("subspace", 50)


def test_endings_change_what_they_name_and_nothing_else() -> None:
    base = preset("nano")
    plain = parse_method("subspace4").applied_to(base, seed=0)
    tracked = parse_method("subspace4-tracked10-rate2.5").applied_to(base, seed=0)
    assert (tracked.boundary.track_every, tracked.boundary.track_rate) == (10, 2.5)
    slower = parse_method("subspace4-lr0.25-steps60").applied_to(base, seed=0)
    assert slower.optimizer.learning_rate == base.optimizer.learning_rate / 4
    assert slower.schedule.steps == 60
    assert replace(tracked, boundary=plain.boundary) == plain
    assert replace(slower, optimizer=plain.optimizer, schedule=plain.schedule) == plain
    both = parse_method("dense-steps60+quant4").applied_to(base, seed=0)
    assert (both.schedule.steps, both.wire.forward) == (60, "quant4")


def test_a_method_may_name_its_optimizer() -> None:
    base = preset("nano")
    muon = parse_method("subspace8-muon0.02").applied_to(base, seed=base.run.seed)
    assert (muon.optimizer.kind, muon.optimizer.learning_rate) == ("muon", 0.02)
    slower = parse_method("subspace8-muon0.02-lr0.5-steps60").applied_to(base, seed=0)
    assert (slower.optimizer.learning_rate, slower.schedule.steps) == (0.01, 60)
    back = parse_method("dense-adamw4e-3").applied_to(muon, seed=0)
    assert (back.optimizer.kind, back.optimizer.learning_rate) == ("adamw", 0.004)
    assert parse_method("subspace8").applied_to(muon, seed=0).optimizer == muon.optimizer


def test_a_method_may_name_its_precision_and_its_token_table() -> None:
    base = preset("nano")
    plain = parse_method("subspace8").applied_to(base, seed=0)
    both = parse_method("subspace8-signs-rounded-muon0.02").applied_to(base, seed=0)
    assert (both.model.precision, both.boundary.table, both.optimizer.kind) == ("bf16", "signs", "muon")
    rounded = parse_method("subspace8-rounded").applied_to(base, seed=0)
    assert replace(rounded, model=plain.model) == plain != rounded
    signs = parse_method("subspace8-signs").applied_to(base, seed=0)
    assert replace(signs, boundary=plain.boundary) == plain != signs
    assert parse_method("subspace8").applied_to(both, seed=0).boundary.table == "signs"  # as in the manifest


def test_at_says_how_often_messages_are_critical() -> None:
    found = parse_methods("lowrank4-lep:critical@4,lowrank4-lep:carry,critical@12,lowrank4:critical")
    assert [(method.critical_every, method.backward) for method in found] == [
        (4, "lowrank4-lep:critical"),
        (12, "lowrank4-lep:carry,critical"),
        (1, "lowrank4:critical"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        " , ",
        "quant4@4",
        "lowrank4:critical@0",
        "lowrank4:critical@",
        "subspace4-rate2",
        "dense-tracked5-rate2",
        "subspace4-lr1..2",
        "subspace4-lr",
        "subspace4-lr2-lr2",
        "subspace4-foo2",
        "subspace4-muon",
        "subspace4-muon0.02-adamw0.02",
        "subspace4-int8-topk64",
        "subspace4-replicas0",
        "subspace4-replicas65",
        "subspace4-lowrank",
        "subspac",
        "quant5",
        "subspace+",
        "+quant8",
        "quant4+quant8",
        "dense8",
        "dense-tracked5",
        "topk0",
        "a/b/c",
        "quant4/aqsgd-quant4",
        "quant4/topk10",
        "subspace+subspace",
        "topk10:sparse",
        "subspace8-tracked",
        "subspace8-signs2",
        "subspace8-signs-signs",
        "subspace8-roundedsigns",
        "dense-signs",
    ],
)
def test_what_is_no_method_is_one_line_that_says_what_is(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_methods(name)
    assert "\n" not in str(caught.value)
    assert "a method is" in caught.value.fix


def test_a_method_that_does_not_fit_the_model_names_the_key() -> None:
    with pytest.raises(ManifestError, match=r"boundary\.k"):
        parse_method("subspace999").applied_to(preset("nano"), seed=0)


@pytest.mark.parametrize("codec", ["int8", "bf16", "topk64", "powersgd4", "lowrank100"])
def test_gradients_are_reduced_with_the_codec_that_is_named(codec: str) -> None:
    method = parse_method(f"dense-muon0.02-{codec}-replicas3")
    assert method.applied_to(preset("nano"), seed=0).reduce.codec == codec
    assert method.num_replicas == 3
    plain = parse_method("dense").applied_to(preset("nano", ["reduce.codec=int8"]), seed=0)
    assert plain.reduce.codec == "int8"


@pytest.mark.parametrize("name", ["dense-int7", "dense-topk5000", "dense-lowrank0", "dense-bf8"])
def test_a_gradient_codec_that_there_is_not_names_the_key(name: str) -> None:
    with pytest.raises(ManifestError, match=r"reduce\.codec"):
        parse_method(name).applied_to(preset("nano"), seed=0)


def test_options_of_a_codec_may_hold_commas() -> None:
    found = parse_methods("dense,lowrank8-lep:factors=fp32,carry,subspace4+quant4:group=64/quant8, quant8")
    assert [method.name for method in found] == [
        "dense",
        "lowrank8-lep:factors=fp32,carry",
        "subspace4+quant4:group=64/quant8",
        "quant8",
    ]


def test_a_method_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_methods("dense,quant4,dense")


def test_file_names_are_distinct_and_plain() -> None:
    methods = parse_methods(
        "quant4/quant8,quant4,topk5:values=int8,lowrank8-lep:carry,subspace+quant8,lowrank4:critical,lowrank4:critical@4"
    )
    names = [method.file_name for method in methods]
    assert len(set(names)) == len(names)
    assert not [name for name in names if set(name) & set("/:,=@\\")]
