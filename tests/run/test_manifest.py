"""What a manifest refuses, in one line that names the key and what is allowed."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.errors import ManifestError
from swarmtrain.run.fields import rule_of
from swarmtrain.run.manifest import (
    MAX_MANIFEST_BYTES,
    parse_manifest,
)
from swarmtrain.run.presets import preset

from .manifests import BASE, parsed_or_refused, refused

MALFORMED = {
    "no table": "[run",
    "no value": "[run]\nname =",
    "bare words": "this is not a manifest",
    "two tables of a name": BASE + "[run]\nname = 'x'\n",
    "two keys of a name": "[run]\nname = 'a'\nname = 'b'\n",
    "a zero byte": "\x00",
    "unclosed text": "[run]\nname = 'a",
    "nested too deeply": "x = " + "[" * 100_000,
    "a number of many digits": "[run]\nseed = " + "9" * 5000,
    "too long": "#" * (MAX_MANIFEST_BYTES + 1),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_text_is_refused_in_one_line(text: str) -> None:
    refused(text)


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("latin-1")))
def test_no_text_at_all_brings_a_traceback(text: str) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(text)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_damage_to_a_manifest_brings_a_traceback(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(BASE)))
    end = data.draw(st.integers(start, min(len(BASE), start + 30)))
    damaged = BASE[:start] + data.draw(st.text(max_size=12)) + BASE[end:]
    parsed_or_refused(damaged)


# (override, the key that the error names, words that say what is allowed)
IMPOSSIBLE = [
    ("boundary.k=129", "boundary.k", "at most model.hidden_size = 128"),
    ("boundary.k=0", "boundary.k", ">= 1"),
    ("model.num_heads=3", "model.num_heads", "must divide model.hidden_size = 128"),
    ("model.num_heads=128", "model.num_heads", "even width"),
    ("model.num_kv_heads=3", "model.num_kv_heads", "must divide model.num_heads = 4"),
    ("stages.count=9", "stages.count", "at most model.num_layers = 8"),
    ("stages.count=0", "stages.count", ">= 1"),
    ("stages.layers=[4, 4]", "stages.layers", "needs stages.count = 4"),
    ("stages.layers=[2, 2, 2, 3]", "stages.layers", "must be model.num_layers = 8"),
    ("stages.layers=[4, 0, 2, 2]", "stages.layers", ">= 1"),
    ("stages.layers=[4, -1, 3, 2]", "stages.layers", ">= 1"),
    ("stages.layers=[2, 2, 2, 2.0]", "stages.layers", "whole numbers"),
    ("stages.layers=[2, 2, 2, true]", "stages.layers", "whole numbers"),
    ("stages.layers=8", "stages.layers", "list of whole numbers"),
    ("stages.layers=[[8]]", "stages.layers", "list of whole numbers"),
    ("stages.layers=[" + "1, " * 1025 + "1]", "stages.layers", "list of whole numbers"),
    ("boundary.tail_layers=3", "boundary.tail_layers", "the last stage has 2 layers"),
    ("boundary.kind=telepathy", "boundary.kind", '"subspace", "projected", "dense"'),
    ("boundary.kind=3", "boundary.kind", '"subspace"'),
    ("boundary.k=8.0", "boundary.k", "a whole number"),
    ("boundary.k=true", "boundary.k", "a whole number"),
    ('boundary.k="8"', "boundary.k", "a whole number"),
    ("boundary.k=2020-01-01", "boundary.k", "a whole number"),
    ("boundary.k={a = 1}", "boundary.k", "a whole number"),
    ("boundary.k=", "boundary.k", "a whole number"),
    ("model.tie_embeddings=1", "model.tie_embeddings", "true or false"),
    ("model.vocab_size=255", "model.vocab_size", "at least 256"),
    ("optimizer.learning_rate=fast", "optimizer.learning_rate", "a number"),
    ("optimizer.learning_rate=nan", "optimizer.learning_rate", "a number"),
    ("optimizer.learning_rate=inf", "optimizer.learning_rate", "a number"),
    ("optimizer.learning_rate=-1e-3", "optimizer.learning_rate", ">= 0"),
    ("optimizer.beta2=1.0", "optimizer.beta2", "<="),
    ("optimizer.kind=sgd", "optimizer.kind", '"adamw", "muon"'),
    ("optimizer.momentum=1.0", "optimizer.momentum", "<="),
    ("optimizer.adamw_rate=-0.1", "optimizer.adamw_rate", ">= 0"),
    ("batch.accumulate=maybe", "batch.accumulate", '"exact", "float"'),
    ("schedule.decay=steep", "schedule.decay", '"cosine", "linear", "constant"'),
    ("schedule.steps=0", "schedule.steps", ">= 1"),
    ("run.name=A B", "run.name", "matches"),
    ("run.name=" + "a" * 49, "run.name", "matches"),
    ("run.name=7", "run.name", "text"),
    ("run.seed=-1", "run.seed", ">= 0"),
    ("wire.forward=FP 32", "wire.forward", "matches"),
    ('data.source=""', "data.source", "embedded"),
    ('data.source="a\\u0000b"', "data.source", "control character"),
    ('data.source="a\\nb"', "data.source", "control character"),
    ("data.source=a\udc80b", "data.source", "control character"),
    ("data.source=" + "x" * 4097, "data.source", "4096"),
]


@pytest.mark.parametrize(("override", "key", "words"), IMPOSSIBLE, ids=[item[0][:40] for item in IMPOSSIBLE])
def test_impossible_values_name_the_key_and_what_is_allowed(override: str, key: str, words: str) -> None:
    error = refused(BASE, override)
    assert error.key == key
    assert str(error).startswith(f"{key}: ")
    assert words in str(error)


HUGE = ["9" * 400, "-" + "9" * 400, "0x" + "f" * 9000, "9" * 5000, str(2**63), str(2**64 + 1), "1e400", "[" * 10_000]


@pytest.mark.parametrize("value", HUGE, ids=lambda value: f"{value[:8]}-{len(value)}")
def test_huge_numbers_are_refused_for_every_kind_of_key(value: str) -> None:
    for key in ("run.seed", "boundary.k", "optimizer.learning_rate", "stages.layers", "model.vocab_size"):
        assert refused(BASE, f"{key}={value}").key == key
    refused(BASE, f"stages.layers=[{value}]")
    section, _, leaf = "boundary.k".partition(".")
    text = BASE.replace(f"\n{leaf} = 8\n", f"\n{leaf} = {value}\n")
    assert text != BASE
    refused(text)
    assert section in BASE


def test_unknown_keys_and_sections_are_errors() -> None:
    assert refused(BASE.replace("seed =", "sed =")).key == "run.sed"
    assert "seed" in str(refused(BASE.replace("seed =", "sed =")))
    assert refused(BASE + "[extras]\nx = 1\n").key == "extras"
    assert "boundary" in str(refused(BASE + "[extras]\nx = 1\n"))
    assert refused("x = 1\n" + BASE).key == "x"
    assert refused(BASE.replace("[run]", '[run]\n"a\\nb" = 1')).key == "run.a\\nb"
    assert refused(BASE.replace("[run]", "[[run]]")).key == "run"
    assert refused("run = 3\n").key == "run"


def test_missing_keys_are_named_with_what_they_need() -> None:
    error = refused(BASE.replace('kind = "subspace"\n', ""))
    assert error.key == "boundary.kind"
    assert "missing" in str(error)
    assert "projected" in str(error)
    assert refused("").key == "run.name"


def test_every_key_of_every_section_refuses_another_type() -> None:
    """No key was forgotten by the checks."""
    manifest, wrong = preset("nano"), {int: '"x"', float: '"x"', bool: "3", str: "3"}
    seen = 0
    for section_field in fields(manifest):
        section = getattr(manifest, section_field.name)
        hints = get_type_hints(type(section))
        for item in fields(section):
            key = f"{section_field.name}.{item.name}"
            assert refused(BASE, f"{key}={wrong.get(hints[item.name], '3')}").key == key
            assert rule_of(item).help
            seen += 1
    assert seen > 40


def test_a_dense_boundary_ignores_k_but_cannot_be_tracked() -> None:
    parse_manifest(BASE, ["boundary.kind=dense", "boundary.k=4000", "boundary.tail_layers=8"])
    assert refused(BASE, "boundary.kind=dense", "boundary.track_every=5").key == "boundary.track_every"
