"""The token table: what its two forms hold, and that neither is ever larger than it has to be."""

from __future__ import annotations

import hashlib

import pytest
import torch

from swarmtrain.errors import ManifestError
from swarmtrain.model.initial import draw_normal
from swarmtrain.model.layout import embedding_spread, table_bytes
from swarmtrain.model.subspace import tensor_digest
from swarmtrain.model.table import SignTable, table_digest, token_table
from swarmtrain.model.tracing import peak_bytes
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset

from .chains import tiny

TABLES = ("normal", "signs")


def made(manifest: Manifest) -> torch.Tensor:
    table = token_table(manifest)
    assert table is not None
    return table.whole()


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_those_of_the_whole_table(kind: str, dtype: torch.dtype) -> None:
    table = token_table(tiny(f"boundary.table={kind}"), "cpu", dtype)
    assert table is not None
    ids = torch.tensor([3, 0, 39, 3])
    assert table.rows(ids).dtype == dtype
    assert torch.equal(table.rows(ids), table.whole()[ids])


@pytest.mark.parametrize("tie", ["true", "false"])
def test_signs_are_the_bits_that_were_drawn_lowest_first(tie: str) -> None:
    manifest = tiny("boundary.table=signs", f"model.tie_embeddings={tie}")
    table = token_table(manifest)
    assert isinstance(table, SignTable)
    whole, spread = table.whole(), embedding_spread(manifest)
    for row, packed in zip(whole.tolist(), table.packed.tolist(), strict=True):
        bits = "".join(f"{byte:08b}"[::-1] for byte in packed)
        assert row == [spread if bit == "1" else -spread for bit in bits]
    assert 0.4 < float((whole > 0).float().mean()) < 0.6


def test_another_seed_is_another_table() -> None:
    for kind in TABLES:
        tables = [made(tiny(f"boundary.table={kind}", f"run.seed={seed}")) for seed in (3, 4)]
        assert not torch.equal(*tables)


def test_the_normal_table_is_that_of_earlier_runs() -> None:
    manifest = tiny()
    assert torch.equal(made(manifest), draw_normal(3, "token_table", (40, 16)))
    assert table_digest(manifest) == tensor_digest(made(manifest))


def test_the_digest_tells_tables_apart() -> None:
    names = [table_digest(tiny(f"boundary.table={kind}", f"run.seed={seed}")) for kind in TABLES for seed in (3, 4)]
    names.append(table_digest(tiny("boundary.table=signs", "model.tie_embeddings=true")))  # other entries, same bits
    assert len(set(names)) == len(names)
    assert table_digest(tiny("boundary.kind=dense")) == ""


@pytest.mark.parametrize("kind", TABLES)
def test_the_digest_never_holds_the_numbers(kind: str) -> None:
    manifest = tiny(f"boundary.table={kind}", "model.vocab_size=40000", "model.hidden_size=64")
    assert peak_bytes(lambda: table_digest(manifest)) < 4 * 40000 * 64 / 2
    assert peak_bytes(lambda: made(manifest)) >= 4 * 40000 * 64  # a control


def test_signs_take_a_bit_and_a_microbatch_its_own_rows() -> None:
    manifest = tiny("boundary.table=signs", "model.vocab_size=40000", "model.hidden_size=64")
    table = token_table(manifest)
    assert isinstance(table, SignTable)
    assert table.packed.numel() == table_bytes(manifest) == 40000 * 64 // 8
    assert peak_bytes(lambda: table.rows(torch.arange(100))) < 100 * 64 * 8


def test_the_tables_of_large_presets_are_small() -> None:
    for name, megabytes in (("llama-1b", 9), ("llama-8b", 66)):
        manifest = preset(name, ["boundary.table=signs"])
        assert table_bytes(manifest) < megabytes * 1e6
        assert table_bytes(preset(name, ["boundary.table=normal"])) == 32 * table_bytes(manifest)


def test_signs_fill_whole_bytes() -> None:
    with pytest.raises(ManifestError, match=r"boundary\.table: signs fill whole bytes; model\.hidden_size is 20"):
        tiny("boundary.table=signs", "model.hidden_size=20", "model.num_heads=2", "model.num_kv_heads=1")
    tiny("boundary.kind=dense", "boundary.table=signs", "model.hidden_size=20", "model.num_heads=2")


def test_the_bits_are_fixed() -> None:
    """A run goes on with the table that it began with."""
    table = token_table(tiny("boundary.table=signs"))
    assert isinstance(table, SignTable)
    assert hashlib.sha256(table.packed.numpy().tobytes()).hexdigest()[:16] == "44f4cd453ed4d74b"
