"""Writing the directory beside its final name, flushed, then renamed: it exists whole or not at all."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from swarmtrain import world
from swarmtrain.boundary import codec_pair, is_lossless
from swarmtrain.checkpoint import Checkpoint, storage
from swarmtrain.data.tokenizer import ByteTokenizer, JsonTokenizer
from swarmtrain.errors import UsageError
from swarmtrain.export import texts
from swarmtrain.export.weights import llama_shapes, llama_tensors
from swarmtrain.run.manifest import Manifest

MAX_SHARD_BYTES = 5_000_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Progress = Callable[[int, int], None]


def export_checkpoint(
    checkpoint: Checkpoint,
    tokenizer: ByteTokenizer | JsonTokenizer,
    out: Path,
    *,
    dtype: str = "float32",
    ignore_codec: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Progress | None = None,
) -> Path:
    """Write `checkpoint` to the new directory `out`, which `transformers` loads as a `LlamaForCausalLM`.

    In float32 the logits are those of the stages. A plain LLaMA has no wire: a checkpoint that was trained through a
    lossy forward codec is refused unless `ignore_codec`. `out` must not exist, or be an empty directory.
    `on_progress(done, total)` counts tensors.
    """
    manifest = checkpoint.manifest
    _check_kind(manifest)
    _check_codec(manifest, ignore=ignore_codec)
    out = out.absolute()
    _check_target(out)
    partial = out.with_name(f".partial-{out.name}-{os.getpid()}")
    try:
        with storage(partial):
            partial.mkdir(parents=True)
        _write_weights(checkpoint, partial, DTYPES[dtype], max_shard_bytes, on_progress)
        _write_texts(checkpoint, tokenizer, partial, dtype)
        with storage(out):
            world.sync(partial)
            partial.rename(out)
            world.sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _check_kind(manifest: Manifest) -> None:
    if manifest.boundary.kind == "learned" and manifest.stages.count > 1:
        raise UsageError(
            "the encoders and decoders of learned boundaries have no place in a plain LLaMA",
            fix="use `swarmtrain eval` and `swarmtrain generate`, or train with boundary.kind = subspace",
        )


def _check_codec(manifest: Manifest, *, ignore: bool) -> None:
    has_boundary = manifest.stages.count > 1
    if has_boundary and not ignore and not is_lossless(codec_pair(manifest).forward):
        raise UsageError(
            f"this model was trained through the codec {manifest.wire.forward}, which a plain LLaMA does not have: "
            "its logits will differ",
            fix="compare `swarmtrain eval --codec off`; --ignore-codec exports it nevertheless",
        )


def _check_target(out: Path) -> None:
    try:
        taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    except OSError as error:
        raise UsageError(f"cannot look into {out}: {error.strerror}") from error
    if taken:
        raise UsageError(f"{out} already exists", fix="choose another --out, nothing is overwritten")


def _write_weights(
    checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, max_shard_bytes: int, on_progress: Progress | None
) -> None:
    shapes = llama_shapes(checkpoint.manifest)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = plan_shards(sizes, max_shard_bytes)
    files = [shard_name(number, len(shards)) for number in range(len(shards))]
    tensors = _counted(llama_tensors(checkpoint), len(sizes), on_progress)
    for file, names in zip(files, shards, strict=True):
        path, content = directory / file, _take(tensors, names, dtype)
        with storage(path):
            save_file(content, path, metadata={"format": "pt"})
            path.chmod(0o644)  # the library makes files for their owner only; this one is to be shared
            world.sync(path)
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        _write(directory / "model.safetensors.index.json", texts.as_bytes(index))


def plan_shards(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Names in the given order, cut so that a shard has at most `max_bytes`, or one tensor that is larger."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def shard_name(number: int, count: int) -> str:
    """The usual name of shard `number` (from 0) of `count`."""
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _take(tensors: Iterator[tuple[str, Tensor]], names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The next tensors, which are `names`."""
    content = {}
    for name in names:
        found, tensor = next(tensors)
        assert found == name, "tensors come in the order of their shapes"
        content[name] = tensor.to(dtype).contiguous()
    return content


def _counted(
    tensors: Iterable[tuple[str, Tensor]], total: int, on_progress: Progress | None
) -> Iterator[tuple[str, Tensor]]:
    for number, item in enumerate(tensors, start=1):
        yield item
        if on_progress is not None:
            on_progress(number, total)


def _write_texts(checkpoint: Checkpoint, tokenizer: ByteTokenizer | JsonTokenizer, directory: Path, dtype: str) -> None:
    manifest, end = checkpoint.manifest, tokenizer.end_of_text
    num_parameters = sum(math.prod(shape) for shape in llama_shapes(manifest).values())
    contents = {
        "config.json": texts.as_bytes(texts.config(manifest, end, dtype)),
        "generation_config.json": texts.as_bytes(texts.generation_config(end)),
        **texts.tokenizer_files(tokenizer, manifest.model.sequence_length),
        "README.md": texts.card(checkpoint, tokenizer, num_parameters).encode(),
    }
    for name, content in contents.items():
        _write(directory / name, content)


def _write(path: Path, content: bytes) -> None:
    with storage(path):
        path.write_bytes(content)
        world.sync(path)
