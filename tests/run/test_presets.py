"""Manifest files and the manifests that ship with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.errors import ManifestError, SwarmtrainError, UsageError
from swarmtrain.run.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ModelSection,
    OptimizerSection,
    load_manifest,
    parse_manifest,
    split_layers,
)
from swarmtrain.run.presets import PRESETS, preset, resolve_manifest

from .manifests import BASE, refused


def test_files_are_read_with_or_without_byte_order_mark(tmp_path: Path) -> None:
    for prefix in (b"", b"\xef\xbb\xbf"):
        path = tmp_path / "run.toml"
        path.write_bytes(prefix + BASE.replace("\n", "\r\n").encode())
        assert load_manifest(path) == preset("nano")
        assert resolve_manifest(str(path), ["k=4"]).boundary.k == 4


def test_files_that_cannot_be_read_are_errors_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "huge.toml").write_bytes(b"#" * (MAX_MANIFEST_BYTES + 1))
    for name in ("missing.toml", "", "binary.toml", "huge.toml"):
        with pytest.raises(ManifestError) as caught:
            load_manifest(tmp_path / name)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["nan0", "", "x" * 5000, "a\x00b", "/", "/root/none/run.toml"])
def test_neither_preset_nor_file_says_what_there_is(name: str) -> None:
    with pytest.raises(SwarmtrainError) as caught:
        resolve_manifest(name)
    assert isinstance(caught.value, UsageError)
    assert "nano" in caught.value.fix


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete_and_named_after_themselves(name: str) -> None:
    manifest = preset(name)
    assert manifest.run.name == name
    assert parse_manifest(manifest.canonical()) == manifest
    assert resolve_manifest(name) == manifest
    assert [layer for stage in split_layers(manifest) for layer in stage] == list(range(manifest.model.num_layers))


def test_the_largest_preset_is_the_published_setting() -> None:
    manifest = preset("llama-8b")
    assert (manifest.stages.count, manifest.model.hidden_size, manifest.boundary.k) == (32, 4096, 40)
    assert manifest.model.sequence_length == 4096
    assert manifest.model.num_layers == 32


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UsageError, match="micro"):
        preset("nani")


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 60), st.integers(1, 60))
def test_even_splits_differ_by_at_most_one_layer(layers: int, count: int) -> None:
    if count > layers:
        assert refused(BASE, f"num_layers={layers}", f"stages.count={count}").key == "stages.count"
        return
    manifest = parse_manifest(BASE, [f"num_layers={layers}", f"stages.count={count}", "boundary.tail_layers=0"])
    split = split_layers(manifest)
    sizes = [len(stage) for stage in split]
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_sections_are_frozen() -> None:
    manifest = preset("nano")
    with pytest.raises(AttributeError):
        manifest.run.seed = 3  # type: ignore[misc]
    assert isinstance(manifest, Manifest)
    assert isinstance(manifest.model, ModelSection)
    assert isinstance(manifest.optimizer, OptimizerSection)
    assert manifest.tokens_per_step == 8 * 4 * 128
