"""A run's tokens: the embedded corpus or a directory of shards, split into training and validation."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from importlib import resources
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from swarmtrain.data.shards import open_shards
from swarmtrain.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokens
from swarmtrain.errors import DataError, UsageError

EMBEDDED = "embedded"
EMBEDDED_FILE = "addresses.txt.gz"
EMBEDDED_BYTES = 2_096_200
EMBEDDED_SHA256 = "9279a6160f2271f5e17e0b68b98779cc833686e33b3bf09e457adf3db5ea7945"

Split = Literal["train", "validation"]


class TokenStore(Protocol):
    """A long sequence of tokens with random access."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [start, start + count)."""

    def open_tokenizer(self) -> ByteTokenizer | JsonTokenizer:
        """The tokenizer that made them."""


class EmbeddedCorpus:
    """The corpus that comes with the package, as bytes; the same tokens as `data prepare` would make of it."""

    def __init__(self) -> None:
        tokenizer = ByteTokenizer()
        text = embedded_text()
        self._tokens = np.frombuffer(text + b"\0", dtype=np.uint8)  # (bytes + end of text,)
        self.num_tokens = len(self._tokens)
        self.vocab_size = tokenizer.vocab_size
        self.digest = hashlib.sha256(f"{EMBEDDED} {tokenizer.digest} {EMBEDDED_SHA256}".encode()).hexdigest()

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [start, start + count)."""
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise ValueError(f"tokens [{start}, {start + count}) of {self.num_tokens}")
        return self._tokens[start : start + count].astype(np.int64)  # (count,)

    def open_tokenizer(self) -> ByteTokenizer:
        """Bytes."""
        return ByteTokenizer()


class TokenSource:
    """Tokens in two parts that never overlap: the last `validation_fraction` of them are for validation.

    The border depends on the corpus and the fraction only, so that runs with different sequence lengths keep the same
    tokens unseen. Each part is a row of windows of equal length without gaps; tokens left at its end are not used.
    """

    def __init__(self, store: TokenStore, *, validation_fraction: float) -> None:
        if not 0 <= validation_fraction < 1:  # also refuses NaN
            raise UsageError(f"the validation fraction is {validation_fraction}; it must be at least 0 and below 1")
        self._store = store
        self.validation_fraction = validation_fraction
        self.num_tokens = store.num_tokens
        self.vocab_size = store.vocab_size
        self.digest = store.digest
        border = store.num_tokens - math.floor(store.num_tokens * validation_fraction)
        self._ranges: dict[Split, tuple[int, int]] = {"train": (0, border), "validation": (border, store.num_tokens)}

    def token_range(self, split: Split) -> tuple[int, int]:
        """First token of the part, and one past its last."""
        return self._ranges[split]

    def num_windows(self, split: Split, length: int) -> int:
        """How many whole windows of `length` tokens the part has."""
        first, end = self._ranges[split]
        return (end - first) // length

    def window(self, split: Split, index: int, length: int) -> Tokens:
        """Window number `index` of the part: `length` tokens that no other window of this length shares."""
        if not 0 <= index < self.num_windows(split, length):
            raise ValueError(f"{split} window {index} of {self.num_windows(split, length)}")
        return self._store.read(self._ranges[split][0] + index * length, length)  # (length,)

    def open_tokenizer(self) -> ByteTokenizer | JsonTokenizer:
        """The tokenizer that made the tokens, e.g. to decode samples."""
        return self._store.open_tokenizer()


def open_source(source: str, *, validation_fraction: float, verify: bool = False) -> TokenSource:
    """`embedded`, or the path of a directory made by `swarmtrain data prepare`; `verify` hashes all of the latter."""
    store: TokenStore = EmbeddedCorpus() if source == EMBEDDED else open_shards(Path(source), verify=verify)
    return TokenSource(store, validation_fraction=validation_fraction)


def embedded_text() -> bytes:
    """The embedded corpus, checked: `DataError` if the installation is damaged."""
    path = resources.files("swarmtrain.data") / "corpus" / EMBEDDED_FILE
    try:
        with path.open("rb") as file, gzip.open(file) as content:
            text = content.read(EMBEDDED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"the embedded corpus cannot be read: {error}", fix="install swarmtrain again") from error
    if hashlib.sha256(text).hexdigest() != EMBEDDED_SHA256:
        raise DataError("the embedded corpus is damaged: its sha256 is wrong", fix="install swarmtrain again")
    return text
