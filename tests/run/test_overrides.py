"""`--set`: the forms it takes and refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.errors import ManifestError
from swarmtrain.run.manifest import (
    BoundarySection,
    parse_manifest,
)

from .manifests import BASE, parsed_or_refused, refused


def test_overrides_take_toml_values_bare_text_and_short_names() -> None:
    manifest = parse_manifest(
        BASE,
        [
            "boundary.k=16",
            " stages.layers = [1, 2, 3, 2] ",
            "boundary.kind=projected",
            'run.name="quoted"',
            "tie_embeddings=true",
            "learning_rate=1e-3",
            "data.source=/some/where/with=equals",
            "wire.backward=int8:group=64",
        ],
    )
    assert manifest.boundary == BoundarySection(kind="projected", k=16)
    assert manifest.stages.layers == (1, 2, 3, 2)
    assert manifest.run.name == "quoted"
    assert manifest.model.tie_embeddings is True
    assert manifest.optimizer.learning_rate == 1e-3
    assert manifest.data.source == "/some/where/with=equals"
    assert manifest.wire.backward == "int8:group=64"


def test_the_last_override_of_a_key_counts() -> None:
    assert parse_manifest(BASE, ["boundary.k=4", "boundary.k=5"]).boundary.k == 5


def test_overrides_can_make_an_incomplete_manifest_whole() -> None:
    text = BASE.replace('[boundary]\nkind = "subspace"\nk = 8\n', "[boundary]\n")
    assert parse_manifest(text, ["boundary.kind=dense"]).boundary.kind == "dense"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("boundary.k", "section.key=value"),
        ("", "section.key=value"),
        ("=8", "section.key=value"),
        ("boundary=8", "section.key=value"),
        ("nothing=8", "section.key=value"),
        ("nowhere.k=8", "unknown section"),
        ("boundary.q=8", "unknown key"),
        ("boundary.=8", "unknown key"),
        ("boundary.k.x=8", "unknown key"),
        ("every=8", "validation or checkpoint"),
        ("boundary.k=8\ntail_layers=0", "whole number"),
        ("boundary.k=8\n[run]\nseed=3", "whole number"),
        ("\n\x1b[31m=1", "section.key=value"),
    ],
)
def test_bad_overrides_say_what_is_wrong(override: str, words: str) -> None:
    assert words in str(refused(BASE, override))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.text(max_size=40), max_size=3))
def test_no_override_at_all_brings_a_traceback(overrides: list[str]) -> None:
    parsed_or_refused(BASE, *overrides)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(
        ["run.name", "run.seed", "stages.layers", "data.source", "optimizer.beta1", "model.tie_embeddings"]
    ),
    st.text(max_size=40),
)
def test_no_override_of_a_known_key_brings_a_traceback(key: str, value: str) -> None:
    found = parsed_or_refused(BASE, f"{key}={value}")
    if isinstance(found, ManifestError):
        assert found.key == key
    else:
        assert parse_manifest(found.canonical()) == found
