"""`index.json`: what a directory of token shards holds. Written last, so a directory with an index is complete."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.data.tokenizer import BYTES, JSON, MAX_VOCAB_SIZE, TokenizerDescription
from swarmtrain.errors import DataError

INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT = "swarmtrain-shards"
VERSION = 1
MAX_INDEX_BYTES = 1 << 26
MAX_SHARDS = 200_000  # keeps the index below its largest size
MAX_TOKENS = 1 << 53
DTYPES: Mapping[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_SHARD_FILE = re.compile(r"tokens-\d{6}\.bin")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardEntry:
    """One file of raw little-endian token ids."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """Everything `index.json` says. `prepared` records the options and sources, for people and for re-runs."""

    dtype: str
    tokenizer: TokenizerDescription
    shards: tuple[ShardEntry, ...]
    documents: int
    prepared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def digest(self) -> str:
        """sha256 over what determines the tokens of every window; not over how the directory came about."""
        identity = {
            "dtype": self.dtype,
            "tokenizer": asdict(self.tokenizer),
            "shards": [asdict(s) for s in self.shards],
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> bytes:
        """The content of `index.json`; the same index gives the same bytes."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "tokenizer": asdict(self.tokenizer),
            "tokens": self.num_tokens,
            "documents": self.documents,
            "shards": [asdict(shard) for shard in self.shards],
            "prepared": self.prepared,
        }
        return (json.dumps(content, indent=1) + "\n").encode()


def shard_file(number: int) -> str:
    """The name of shard `number`."""
    return f"tokens-{number:06d}.bin"


def dtype_for(vocab_size: int) -> str:
    """The narrowest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(directory: Path) -> ShardIndex:
    """Read and check `directory/index.json`; `DataError` says what is wrong with it."""
    path = directory / INDEX_FILE
    content = read_json(path, max_bytes=MAX_INDEX_BYTES)
    if content.get("format") != FORMAT:
        raise DataError(f"{path}: not an index of token shards (format {str(content.get('format'))[:40]!r})")
    if content.get("version") != VERSION:
        raise DataError(
            f"{path}: version {str(content.get('version'))[:40]} of the format; this program reads {VERSION}",
            fix="prepare the data again with this version",
        )
    index = ShardIndex(
        dtype=_choice(path, content, "dtype", tuple(DTYPES)),
        tokenizer=_tokenizer(path, _object(path, content, "tokenizer")),
        shards=shard_entries(path, content.get("shards")),
        documents=integer(path, content, "documents", 0, MAX_TOKENS),
        prepared=_object(path, content, "prepared"),
    )
    total = integer(path, content, "tokens", 1, MAX_TOKENS)
    if total != index.num_tokens:
        raise DataError(f"{path}: tokens is {total}, but the shards add up to {index.num_tokens}")
    if dtype_for(index.tokenizer.vocab_size) == "uint32" and index.dtype == "uint16":
        raise DataError(f"{path}: dtype uint16 cannot hold a vocabulary of {index.tokenizer.vocab_size}")
    return index


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    try:
        if path.stat().st_size > max_bytes:
            raise DataError(f"{path}: larger than {max_bytes} bytes")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: malformed: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: malformed: expected an object")
    return content


def shard_entries(path: Path, value: object) -> tuple[ShardEntry, ...]:
    """The list under `shards`: files numbered from 0, none empty."""
    if not isinstance(value, list) or len(value) > MAX_SHARDS:
        raise DataError(f"{path}: shards: expected a list of at most {MAX_SHARDS}")
    return tuple(_shard_entry(path, number, entry) for number, entry in enumerate(value))


def integer(path: Path, content: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """`content[key]`, an integer in [low, high]."""
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise DataError(f"{path}: {key}: expected an integer from {low} to {high}, found {str(value)[:40]}")
    return value


def _shard_entry(path: Path, number: int, entry: object) -> ShardEntry:
    if not isinstance(entry, dict):
        raise DataError(f"{path}: shards[{number}]: expected an object")
    name, digest = entry.get("file"), entry.get("sha256")
    if not isinstance(name, str) or not _SHARD_FILE.fullmatch(name) or name != shard_file(number):
        raise DataError(f"{path}: shards[{number}].file: expected {shard_file(number)!r}, found {str(name)[:40]!r}")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise DataError(f"{path}: shards[{number}].sha256: expected 64 hexadecimal digits")
    return ShardEntry(name, integer(path, entry, "tokens", 1, MAX_TOKENS), digest)


def _tokenizer(path: Path, content: Mapping[str, Any]) -> TokenizerDescription:
    digest = content.get("digest")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise DataError(f"{path}: tokenizer.digest: expected 64 hexadecimal digits")
    vocab_size = integer(path, content, "vocab_size", 1, MAX_VOCAB_SIZE)
    no_end = content.get("end_of_text") is None
    end_of_text = None if no_end else integer(path, content, "end_of_text", 0, vocab_size - 1)
    return TokenizerDescription(_choice(path, content, "kind", (BYTES, JSON)), digest, vocab_size, end_of_text)


def _choice(path: Path, content: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> str:
    value = content.get(key)
    if value not in allowed:
        raise DataError(f"{path}: {key}: expected one of {', '.join(allowed)}, found {str(value)[:40]!r}")
    return str(value)


def _object(path: Path, content: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    if not isinstance(value, dict):
        raise DataError(f"{path}: {key}: expected an object")
    return value
