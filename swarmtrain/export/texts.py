"""The texts of an exported directory: configuration, tokenizer, model card. Plain JSON; no library is needed."""

from __future__ import annotations

import json
from typing import Any

from swarmtrain import __version__
from swarmtrain.checkpoint import Checkpoint
from swarmtrain.data.tokenizer import ByteTokenizer, JsonTokenizer
from swarmtrain.run.manifest import Manifest

_END_OF_BYTES = "\0"  # byte 0 ends a text of byte tokens


def config(manifest: Manifest, end_of_text: int | None, dtype: str) -> dict[str, Any]:
    """config.json of a `LlamaForCausalLM`; readable by versions 4 and 5 of `transformers`."""
    model = manifest.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": manifest.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }


def generation_config(end_of_text: int | None) -> dict[str, Any]:
    """generation_config.json: sampling as in `swarmtrain generate`."""
    return {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
    }


def tokenizer_files(tokenizer: ByteTokenizer | JsonTokenizer, sequence_length: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json."""
    content = as_bytes(_byte_tokenizer()) if isinstance(tokenizer, ByteTokenizer) else tokenizer.content
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    if isinstance(tokenizer, ByteTokenizer):
        settings["eos_token"] = _END_OF_BYTES
    elif tokenizer.end_of_text is not None:
        settings["eos_token"] = tokenizer.spelling(tokenizer.end_of_text)
    return {"tokenizer.json": content, "tokenizer_config.json": as_bytes(settings)}


def _byte_tokenizer() -> dict[str, Any]:
    """256 tokens, id = byte, as a `tokenizers` file.

    Byte-level BPE without merges: every byte is spelled by one printable character (the usual byte-to-character map).
    Byte 0 is the exception. As a special token its spelling is searched for in the text itself, and the usual one, Ā,
    is a letter that texts contain; so it is spelled by the character NUL, which has the same id either way.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    end = {"id": 0, "content": _END_OF_BYTES, "single_word": False, "lstrip": False, "rstrip": False}
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": pieces,
        "post_processor": None,
        "decoder": pieces,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The character that spells each byte: itself where it is printable, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    characters = [chr(byte) if byte in printable else chr(next(free)) for byte in range(256)]
    return [_END_OF_BYTES, *characters[1:]]


def card(checkpoint: Checkpoint, tokenizer: ByteTokenizer | JsonTokenizer, num_parameters: int) -> str:
    """README.md: what the model is, how to load it, and the manifest that made it."""
    manifest = checkpoint.manifest
    kind, codec = manifest.boundary.kind, manifest.wire.forward
    width = "" if kind == "dense" else f", {manifest.boundary.k} numbers per token"
    tokens = "bytes" if isinstance(tokenizer, ByteTokenizer) else f"{tokenizer.vocab_size} tokens"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [llama, swarmtrain]
---

# {manifest.run.name}, step {checkpoint.step}

A LLaMA with {num_parameters:,} parameters, trained with swarmtrain in {manifest.stages.count} pipeline stages
(boundary: {kind}{width}; codec of activations: {codec}).

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")

| | |
|---|---|
| steps | {checkpoint.step} of {manifest.schedule.steps} |
| training tokens | {checkpoint.step * manifest.tokens_per_step:,} |
| context | {manifest.model.sequence_length} tokens |
| tokenizer | {tokens} |
| data | {manifest.data.source} |
| manifest digest | {manifest.digest()} |
| exported by | swarmtrain {__version__} |

## Manifest

```toml
{manifest.canonical()}```
"""


def as_bytes(content: dict[str, Any]) -> bytes:
    """JSON as it lies in a file."""
    return (json.dumps(content, indent=2, ensure_ascii=True) + "\n").encode()
