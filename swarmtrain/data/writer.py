"""Writing token shards one after another; each takes its name only when it is complete and on the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from swarmtrain.data.files import AtomicFile
from swarmtrain.data.index import MAX_SHARDS, ShardEntry, shard_file
from swarmtrain.data.tokenizer import Tokens
from swarmtrain.errors import UsageError


class ShardWriter:
    """Fills shards of `shard_tokens` tokens, continuing after the `finished` ones.

    Use as a context manager: a shard that was not finished when the block ends is removed.
    """

    def __init__(
        self, directory: Path, dtype: np.dtype[Any], shard_tokens: int, finished: Sequence[ShardEntry] = ()
    ) -> None:
        self.shards = list(finished)
        self._directory = directory
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._file: AtomicFile | None = None
        self._hasher = hashlib.sha256()
        self._filled = 0
        self._finished_tokens = sum(shard.tokens for shard in finished)

    @property
    def num_tokens(self) -> int:
        """Tokens written so far, with those of the finished shards."""
        return self._finished_tokens + self._filled

    @property
    def full(self) -> bool:
        """The current shard can take no more: call `finish_shard`."""
        return self._filled == self._shard_tokens

    def write(self, tokens: Tokens) -> int:
        """Append as many of `tokens` as the current shard has room for; returns how many those were."""
        part = tokens[: self._shard_tokens - self._filled].astype(self._dtype)  # (<= room,)
        if len(part):
            content = part.tobytes()
            self._current_file().write(content)
            self._hasher.update(content)
            self._filled += len(part)
        return len(part)

    def finish_shard(self) -> None:
        """Complete the current shard, if it holds anything, and begin the next."""
        if self._file is None:
            return
        self._file.commit()
        self.shards.append(ShardEntry(shard_file(len(self.shards)), self._filled, self._hasher.hexdigest()))
        self._finished_tokens += self._filled
        self._file, self._hasher, self._filled = None, hashlib.sha256(), 0

    def _current_file(self) -> AtomicFile:
        if self._file is None:
            if len(self.shards) == MAX_SHARDS:
                raise UsageError(f"this would make more than {MAX_SHARDS} shards", fix="raise --shard-tokens")
            self._file = AtomicFile(self._directory / shard_file(len(self.shards)))
        return self._file

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.discard()
