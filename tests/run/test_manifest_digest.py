"""The canonical form and the digest name exactly what a manifest means."""

from __future__ import annotations

import tomllib
from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.run.manifest import (
    parse_manifest,
)
from swarmtrain.run.presets import preset

from .manifests import BASE

printable_source = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1)
possible_overrides = st.fixed_dictionaries(
    {
        "run.seed": st.integers(0, 2**63 - 1).map(str),
        "run.name": st.from_regex(r"[a-z0-9][a-z0-9._-]{0,47}", fullmatch=True).map(lambda name: f'"{name}"'),
        "boundary.k": st.integers(1, 128).map(str),
        "boundary.kind": st.sampled_from(["subspace", "projected", "dense"]),
        "boundary.tail_layers": st.integers(0, 2).map(str),
        "optimizer.learning_rate": st.floats(0.0, 1e3).map(repr),
        "optimizer.epsilon": st.floats(1e-16, 1.0).map(repr),
        "schedule.steps": st.integers(1, 10**9).map(str),
        "model.tie_embeddings": st.sampled_from(["true", "false"]),
        "boundary.table": st.sampled_from(["normal", "signs"]),
        "stages.layers": st.sampled_from(["[]", "[1, 1, 4, 2]", "[2,2,2,2]"]),
        "wire.forward": st.from_regex(r"[a-z0-9][a-z0-9+:=,.\-]{0,20}", fullmatch=True).map(lambda name: f'"{name}"'),
    }
)


def as_items(overrides: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]


@settings(deadline=None, max_examples=80)
@given(possible_overrides)
def test_canonical_form_reads_back_as_the_same_manifest(overrides: dict[str, str]) -> None:
    manifest = parse_manifest(BASE, as_items(overrides))
    for text in (manifest.canonical(), manifest.commented()):
        again = parse_manifest(text)
        assert again == manifest
        assert again.canonical() == manifest.canonical()
        assert again.digest() == manifest.digest()


@settings(deadline=None, max_examples=80)
@given(printable_source)
def test_any_directory_name_survives_the_canonical_form(source: str) -> None:
    text = source.replace("\\", "\\\\").replace('"', '\\"')
    manifest = parse_manifest(BASE.replace('source = "embedded"', f'source = "{text}"'))
    assert manifest.data.source == source
    assert parse_manifest(manifest.canonical()) == manifest


@settings(deadline=None, max_examples=80)
@given(possible_overrides, possible_overrides)
def test_digests_are_equal_exactly_when_manifests_are(first: dict[str, str], second: dict[str, str]) -> None:
    a, b = parse_manifest(BASE, as_items(first)), parse_manifest(BASE, as_items(second))
    assert (a.digest() == b.digest()) == (a == b)


def test_every_key_changes_the_digest() -> None:
    """None was left out of the canonical form."""
    changes = {
        "run": {"name": '"other"', "seed": "8", "homepage": '"https://git.example/run"'},
        "model": {"vocab_size": "300", "hidden_size": "256", "num_layers": "9", "num_heads": "2", "num_kv_heads": "1"}
        | {"ffn_size": "353", "sequence_length": "64", "rope_theta": "500.0", "norm_epsilon": "1e-6"}
        | {"tie_embeddings": "true", "precision": '"bf16"'},
        "stages": {"count": "2", "layers": "[1, 3, 2, 2]"},
        "boundary": {"kind": '"projected"', "k": "9", "tail_layers": "2", "track_every": "5", "track_rate": "0.2"}
        | {"reproject_every": "7", "anchor_rank": "5", "match_parameters": "true", "table": '"signs"'},
        "reduce": {"codec": '"int8"', "selective": "true"},
        "wire": {"forward": '"bf16"', "backward": '"bf16"'},
        "data": {"source": '"redirected"', "validation_fraction": "0.1"},
        "batch": {"sequences_per_microbatch": "3", "microbatches_per_step": "5", "accumulate": '"float"'},
        "optimizer": {"learning_rate": "1.0", "beta1": "0.8", "beta2": "0.9", "epsilon": "1e-9", "weight_decay": "0.0"}
        | {"clip_norm": "2.0", "kind": '"muon"', "momentum": "0.9", "adamw_rate": "0.2"},
        "schedule": {
            "steps": "7",
            "warmup_steps": "3",
            "decay": '"linear"',
            "final_fraction": "0.2",
            "delay": "1",
            "delay_from": "3",
            "predict": "true",
        },
        "checks": {"share": "0.02"},
        "validation": {"every": "3", "microbatches": "2"},
        "checkpoint": {"every": "3", "keep": "2"},
    }
    manifest = preset("nano")
    known = {part.name: {item.name for item in fields(getattr(manifest, part.name))} for part in fields(manifest)}
    assert known == {section: set(keys) for section, keys in changes.items()}
    items = [f"{section}.{key}={value}" for section, keys in changes.items() for key, value in keys.items()]
    digests = {parse_manifest(BASE, [item]).digest() for item in items}
    assert len(digests | {manifest.digest()}) == len(items) + 1


def test_order_comments_and_spelling_do_not_change_the_digest() -> None:
    digest = parse_manifest(BASE).digest()
    tables = BASE.strip().split("\n\n")
    backwards = "\n\n".join("\n".join([table.split("\n")[0], *table.split("\n")[:0:-1]]) for table in tables[::-1])
    assert backwards != BASE
    assert parse_manifest(backwards).digest() == digest
    commented = "# a comment\n" + BASE.replace("\n", "   # and another\n").replace("]   #", "] #")
    assert parse_manifest(commented).digest() == digest
    assert parse_manifest(BASE.replace("\n", "\r\n")).digest() == digest
    assert parse_manifest(BASE.replace("learning_rate = 0.004", "learning_rate = 4.0e-3")).digest() == digest
    assert parse_manifest(BASE.replace("clip_norm = 1.0", "clip_norm = 1")).digest() == digest
    assert parse_manifest(BASE.replace("seed = 7", "seed = 0x7")).digest() == digest


def test_defaults_written_out_or_left_out_are_the_same_run() -> None:
    lines = [line for line in BASE.split("\n") if not line.startswith(("weight_decay", "track_every", "keep"))]
    assert parse_manifest("\n".join(lines)).digest() == parse_manifest(BASE, ["checkpoint.keep=3"]).digest()


def test_zero_has_one_spelling() -> None:
    digests = {parse_manifest(BASE, [f"optimizer.weight_decay={zero}"]).digest() for zero in ("0", "0.0", "-0.0")}
    assert len(digests) == 1


def test_digest_is_stable_across_versions_of_the_code() -> None:
    """Checkpoints carry it: a change of the canonical form must be noticed, and decided."""
    manifest = parse_manifest(BASE, ["run.name=frozen"])
    assert len(manifest.digest()) == 64
    assert manifest.canonical().startswith(
        '[run]\nname = "frozen"\nseed = 7\nhomepage = ""\n\n[model]\nvocab_size = 256\n'
    )
    assert tomllib.loads(manifest.canonical())["optimizer"]["learning_rate"] == 0.004
