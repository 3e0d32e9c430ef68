"""An exported checkpoint is a plain LLaMA: an independent implementation loads it and computes the same."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_bf16
from runs import PLAIN_KINDS, shards, small, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from swarmtrain import world
from swarmtrain.checkpoint import Checkpoint
from swarmtrain.data.tokenizer import ByteTokenizer, JsonTokenizer
from swarmtrain.errors import StorageError, UsageError
from swarmtrain.export import export_checkpoint
from swarmtrain.export.directory import plan_shards
from swarmtrain.export.weights import llama_shapes
from swarmtrain.generate import Sampling, generate_tokens
from swarmtrain.inference import TrainedModel, open_checkpoint_source
from swarmtrain.model.sizes import describe


def exported(checkpoint: Checkpoint, out: Path, **options: object) -> Path:
    return export_checkpoint(checkpoint, ByteTokenizer(), out, **options)  # type: ignore[arg-type]


def largest_difference(checkpoint: Checkpoint, out: Path) -> float:
    """Between the stages' logits and those of what `transformers` makes of `out`."""
    llama = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(llama, LlamaForCausalLM)
    ids = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = llama(input_ids=ids).logits
    return float((theirs.float() - TrainedModel(checkpoint).logits(ids)).abs().max())


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("tie", ["true", "false"])
def test_transformers_computes_the_same_logits(tmp_path: Path, kind: str, tie: str) -> None:
    track = ("boundary.track_every=3",) if kind in ("subspace", "projected") else ()
    manifest = small(f"boundary.kind={kind}", f"model.tie_embeddings={tie}", "schedule.steps=8", *track)
    checkpoint = train(manifest, tmp_path / "run")
    out = exported(checkpoint, tmp_path / "out")
    assert largest_difference(checkpoint, out) < 1e-4
    weights = load_file(out / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == llama_shapes(manifest)
    assert sum(tensor.numel() for tensor in weights.values()) == describe(manifest).num_parameters


def test_a_table_of_signs_exports_like_everything_else(tmp_path: Path) -> None:
    checkpoint = train(small("boundary.table=signs"), tmp_path / "run")
    assert largest_difference(checkpoint, exported(checkpoint, tmp_path / "out")) < 1e-4


@needs_bf16()
def test_a_run_in_bf16_exports_its_parameters_in_fp32(tmp_path: Path) -> None:
    """They are what was trained; the stages' logits differ from theirs by rounding only."""
    checkpoint = train(small("model.precision=bf16"), tmp_path / "run")
    out = exported(checkpoint, tmp_path / "out")
    assert 0.0 < largest_difference(checkpoint, out) < 0.1
    head = load_file(out / "model.safetensors")["lm_head.weight"]
    assert head.dtype == torch.float32
    assert not torch.equal(head, head.bfloat16().float())


def test_what_was_trained_with_muon_exports_like_everything_else(tmp_path: Path) -> None:
    checkpoint = train(small("optimizer.kind=muon", "optimizer.learning_rate=0.02"), tmp_path / "run")
    assert largest_difference(checkpoint, exported(checkpoint, tmp_path / "out")) < 1e-4


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"]
)
def test_control_a_weight_that_is_slightly_off_shows_in_the_logits(tmp_path: Path, name: str) -> None:
    checkpoint = train(small(), tmp_path / "run")
    out = exported(checkpoint, tmp_path / "out")
    weights = load_file(out / "model.safetensors")
    weights[name] = weights[name] * 1.01
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    assert largest_difference(checkpoint, out) > 1e-3


@pytest.mark.parametrize(
    "overrides",
    [
        ("stages.count=1",),
        ("stages.count=2", "stages.layers=[1, 3]", "boundary.tail_layers=2"),
        ("boundary.tail_layers=0",),
        ("boundary.k=32",),
        ("boundary.match_parameters=true",),
        ("boundary.kind=learned", "stages.count=1"),
        ("model.num_kv_heads=1", "model.rope_theta=500000.0", "model.norm_epsilon=1e-3"),
        ("model.num_kv_heads=4", "model.vocab_size=300"),
    ],
)
def test_every_shape_and_split_exports(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    checkpoint = train(small(*overrides), tmp_path / "run")
    assert largest_difference(checkpoint, exported(checkpoint, tmp_path / "out")) < 1e-4


def test_both_sides_continue_a_text_alike(tmp_path: Path) -> None:
    checkpoint = train(small("schedule.steps=30"), tmp_path / "run")
    out = exported(checkpoint, tmp_path / "out")
    llama = AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([[84, 104, 101]])
    theirs = llama.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:]
    ours = generate_tokens(TrainedModel(checkpoint), prompt[0].tolist(), 12, 256, Sampling(temperature=0.0))
    assert theirs.tolist() == list(ours)


def test_large_models_are_written_in_shards(tmp_path: Path) -> None:
    checkpoint = train(small(), tmp_path / "run")
    out = exported(checkpoint, tmp_path / "out", max_shard_bytes=50_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert largest_difference(checkpoint, out) < 1e-4


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20), limit=st.integers(1, 150))
def test_shards_hold_everything_once_in_order_and_keep_the_limit(sizes: list[int], limit: int) -> None:
    named = {f"tensor{number}": size for number, size in enumerate(sizes)}
    planned = plan_shards(named, limit)
    assert [name for shard in planned for name in shard] == list(named)
    for shard in planned:
        assert len(shard) == 1 or sum(named[name] for name in shard) <= limit


def test_bfloat16_halves_the_file(tmp_path: Path) -> None:
    checkpoint = train(small(), tmp_path / "run")
    out = exported(checkpoint, tmp_path / "out", dtype="bfloat16")
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    full = load_file(exported(checkpoint, tmp_path / "full") / "model.safetensors")
    assert all(torch.equal(weights[name], full[name].bfloat16()) for name in full)


def test_a_lossy_wire_is_refused_unless_one_insists(tmp_path: Path) -> None:
    checkpoint = train(small("wire.forward=topk20"), tmp_path / "run")
    with pytest.raises(UsageError, match="topk20"):
        exported(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = exported(checkpoint, tmp_path / "out", ignore_codec=True)
    assert "topk20" in (out / "README.md").read_text()
    assert largest_difference(checkpoint, out) > 1e-2  # why it was refused


def test_a_codec_without_a_boundary_to_cross_is_no_obstacle(tmp_path: Path) -> None:
    checkpoint = train(small("wire.forward=topk20", "stages.count=1"), tmp_path / "run")
    assert largest_difference(checkpoint, exported(checkpoint, tmp_path / "out")) < 1e-4


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    checkpoint = train(small(), tmp_path / "run")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        exported(checkpoint, taken)
    with pytest.raises(UsageError, match="already exists"):
        exported(checkpoint, taken / "file")
    assert (taken / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert (exported(checkpoint, tmp_path / "empty") / "config.json").is_file()


@pytest.mark.parametrize("failing_call", [1, 3])
def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int) -> None:
    checkpoint = train(small(), tmp_path / "run")
    calls = []

    def no_space(path: Path) -> None:
        calls.append(path)
        if len(calls) == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(world, "sync", no_space)
    with pytest.raises(StorageError, match="No space left"):
        exported(checkpoint, tmp_path / "exports" / "out")
    assert len(calls) == failing_call  # the fault happened
    assert not any((tmp_path / "exports").iterdir())


@pytest.fixture(scope="module")
def byte_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bytes")
    return exported(train(small(), directory / "run"), directory / "out")


def test_the_byte_tokenizer_loads_with_an_end_of_text(byte_export: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_export)
    assert len(tokenizer) == 256
    assert tokenizer.eos_token_id == 0
    assert tokenizer.bos_token_id is None


TEXTS = st.text(max_size=40) | st.text(alphabet="Ā\0Ġ aÂ\n'", max_size=20)


@pytest.fixture(scope="module")
def loaded(byte_export: Path) -> object:
    return AutoTokenizer.from_pretrained(byte_export)


@settings(max_examples=150, deadline=None)
@given(content=TEXTS)
def test_byte_tokens_are_bytes_and_come_back(loaded: AutoTokenizer, content: str) -> None:
    content = content.encode(errors="ignore").decode()
    ids = loaded(content)["input_ids"]  # type: ignore[operator]
    assert ids == list(content.encode())
    assert loaded.decode(ids) == content  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=30))
def test_any_bytes_decode_as_ours_do(loaded: AutoTokenizer, content: bytes) -> None:
    assert loaded.decode(list(content)) == ByteTokenizer().decode(list(content))  # type: ignore[attr-defined]


def test_a_learned_tokenizer_is_copied_with_its_end_of_text(tmp_path: Path) -> None:
    source = shards(tmp_path, vocab_size=300)
    checkpoint = train(small(f"data.source={source}", "model.vocab_size=320"), tmp_path / "run")
    ours = open_checkpoint_source(checkpoint.manifest).open_tokenizer()
    assert isinstance(ours, JsonTokenizer)
    out = export_checkpoint(checkpoint, ours, tmp_path / "out")
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == ours.end_of_text
    content = "The 7th of many lines, wörter ünd Zeichen."
    assert theirs(content)["input_ids"] == ours.encode(content).tolist()
    assert theirs.decode(theirs(content)["input_ids"]) == content
    assert largest_difference(checkpoint, out) < 1e-4


def test_the_card_holds_the_manifest(byte_export: Path) -> None:
    card = (byte_export / "README.md").read_text()
    assert small().canonical() in card
    assert small().digest() in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_the_weights_are_readable_by_others_like_everything_else(byte_export: Path) -> None:
    names = {path.name for path in byte_export.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (byte_export / "model.safetensors").stat().st_mode & 0o444 == 0o444
