"""A corpus whose tokens tell where they came from."""

from __future__ import annotations

import numpy as np

from swarmtrain.data.tokenizer import ByteTokenizer, Tokens


class Counting:
    """A token store of 0, 1, 2, ..."""

    vocab_size = 1 << 60
    digest = "counting"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def read(self, start: int, count: int) -> Tokens:
        assert start >= 0
        assert start + count <= self.num_tokens
        return np.arange(start, start + count, dtype=np.int64)

    def open_tokenizer(self) -> ByteTokenizer:
        raise NotImplementedError
