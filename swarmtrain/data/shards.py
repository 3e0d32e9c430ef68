"""A directory of token shards, opened for reading: memory-mapped, so that a corpus may be larger than memory.

Sizes are always checked when a directory is opened; hashes and ids of every token with `verify=True`. Files of an open
directory must not change: a memory map of a file that is cut short kills the process that reads it.
"""

from __future__ import annotations

import hashlib
import mmap
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmtrain.data.index import DTYPES, TOKENIZER_FILE, ShardEntry, ShardIndex, read_index
from swarmtrain.data.tokenizer import BYTES, ByteTokenizer, JsonTokenizer, Tokens
from swarmtrain.errors import DataError

MAX_OPEN_SHARDS = 64  # each memory map holds a file descriptor, and there may be thousands of shards
VERIFY_BLOCK_TOKENS = 1 << 20

RawTokens = npt.NDArray[np.unsignedinteger[Any]]


class Shards:
    """Random access to the tokens of a directory. Safe to use from several threads."""

    def __init__(self, directory: Path, index: ShardIndex) -> None:
        self.directory = directory
        self.index = index
        self.num_tokens = index.num_tokens
        self.vocab_size = index.tokenizer.vocab_size
        self.digest = index.digest
        self._starts = [0, *accumulate(shard.tokens for shard in index.shards)]
        self._maps: OrderedDict[int, RawTokens] = OrderedDict()
        self._lock = Lock()

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [start, start + count), across shard borders. `DataError` if a token is not in the vocabulary."""
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise ValueError(f"tokens [{start}, {start + count}) of {self.num_tokens}")
        result = np.empty(count, dtype=np.int64)  # (count,)
        filled, number = 0, bisect_right(self._starts, start) - 1
        while filled < count:
            offset = start + filled - self._starts[number]
            part = self._map(number)[offset : offset + count - filled]  # (<= count - filled,)
            _check_vocabulary(self.directory / self.index.shards[number].file, part, self.vocab_size)
            result[filled : filled + len(part)] = part
            filled, number = filled + len(part), number + 1
        return result

    def open_tokenizer(self) -> ByteTokenizer | JsonTokenizer:
        """The tokenizer the shards were made with; `DataError` if the file beside them is not that one."""
        description = self.index.tokenizer
        if description.kind == BYTES:
            tokenizer: ByteTokenizer | JsonTokenizer = ByteTokenizer()
        else:
            tokenizer = JsonTokenizer.open(self.directory / TOKENIZER_FILE, end_of_text=description.end_of_text)
        if tokenizer.digest != description.digest or tokenizer.vocab_size != description.vocab_size:
            raise DataError(f"{self.directory}: the tokenizer is not the one that the shards were made with")
        return tokenizer

    def verify(self) -> None:
        """Read every token: hashes must be those of the index, and ids in the vocabulary."""
        for shard in self.index.shards:
            self._verify_shard(shard)

    def _verify_shard(self, shard: ShardEntry) -> None:
        path = self.directory / shard.file
        tokens = _map_shard(path, shard, DTYPES[self.index.dtype], mmap.MADV_SEQUENTIAL)  # (shard.tokens,)
        hasher = hashlib.sha256()
        for start in range(0, len(tokens), VERIFY_BLOCK_TOKENS):
            block = tokens[start : start + VERIFY_BLOCK_TOKENS]  # (<= VERIFY_BLOCK_TOKENS,)
            hasher.update(block.data)
            _check_vocabulary(path, block, self.vocab_size)
        if hasher.hexdigest() != shard.sha256:
            raise DataError(f"{path}: damaged: its sha256 is not that of the index", fix="copy or prepare it again")

    def _map(self, number: int) -> RawTokens:
        with self._lock:
            if number in self._maps:
                self._maps.move_to_end(number)
                return self._maps[number]
            shard = self.index.shards[number]
            # Windows are read in random order: with read-ahead the kernel would fetch up to megabytes for each.
            path = self.directory / shard.file
            tokens = _map_shard(path, shard, DTYPES[self.index.dtype], mmap.MADV_RANDOM)
            self._maps[number] = tokens
            if len(self._maps) > MAX_OPEN_SHARDS:
                self._maps.popitem(last=False)
            return tokens


def open_shards(path: Path, *, verify: bool = False) -> Shards:
    """Open a prepared directory. `DataError` names the file and what is wrong: missing, truncated, damaged.

    `verify` reads everything: minutes for a large corpus, and the only way to notice changed bytes.
    """
    index = read_index(path)
    for shard in index.shards:
        check_size(path / shard.file, shard, DTYPES[index.dtype])
    shards = Shards(path, index)
    if verify:
        shards.verify()
    return shards


def check_size(path: Path, shard: ShardEntry, dtype: np.dtype[Any]) -> None:
    """`DataError` unless the file is there with exactly the bytes of `shard.tokens` tokens."""
    expected = shard.tokens * dtype.itemsize
    try:
        actual = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{path}: missing", fix="copy or prepare it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if actual != expected:
        problem = "truncated" if actual < expected else "too long"
        raise DataError(f"{path}: {problem}: {actual} bytes instead of {expected}", fix="copy or prepare it again")


def _map_shard(path: Path, shard: ShardEntry, dtype: np.dtype[Any], advice: int) -> RawTokens:
    check_size(path, shard, dtype)  # again: directories stay open for days, and reading beyond the end is fatal
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), shard.tokens * dtype.itemsize, access=mmap.ACCESS_READ)
        mapped.madvise(advice)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return np.frombuffer(mapped, dtype=dtype)  # (shard.tokens,); the map lives as long as the array


def _check_vocabulary(path: Path, tokens: RawTokens, vocab_size: int) -> None:
    if tokens.size and int(tokens.max()) >= vocab_size:
        raise DataError(f"{path}: holds token id {int(tokens.max())}, the vocabulary ends at {vocab_size - 1}")
