"""Text <-> token ids: plain bytes, or any Hugging Face `tokenizers` JSON file; and training a byte-level BPE.

Both kinds tokenize a text exactly as it stands: no beginning-of-text token, no padding, no truncation, and a special
token that is merely spelled out in the text stays text. The end-of-text token is added by `prepare`, after each
document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from swarmtrain.data.documents import Cursor, Piece, decode_piece, read_pieces, utf8
from swarmtrain.data.files import atomic_write
from swarmtrain.errors import DataError, MissingExtraError, UsageError

Tokens = npt.NDArray[np.int64]

BYTES = "bytes"
JSON = "json"
MAX_TOKENIZER_BYTES = 1 << 27
MAX_VOCAB_SIZE = 1 << 24
END_OF_TEXT = "<|endoftext|>"
# A tokenizer file does not say which of its special tokens ends a document; these are the names in use.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "<EOS>", "[EOS]")
DEFAULT_TRAINING_BYTES = 1 << 30


@dataclass(frozen=True)
class TokenizerDescription:
    """What identifies a tokenizer in a shard index. `digest` is the sha256 of what defines it."""

    kind: str
    digest: str
    vocab_size: int
    end_of_text: int | None


class Tokenizer(Protocol):
    """Both kinds. Ids are in [0, vocab_size); `end_of_text` is None where the tokenizer has no such token."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int | None: ...

    @property
    def digest(self) -> str: ...

    def encode(self, text: str | bytes) -> Tokens:
        """The ids of `text` (UTF-8 if bytes)."""

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        """`encode` of each, faster."""

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text of `ids`; what is not valid UTF-8 becomes U+FFFD. Raises `DataError` for an id out of range."""


def describe(tokenizer: Tokenizer) -> TokenizerDescription:
    """The entry of a shard index for this tokenizer."""
    kind = BYTES if isinstance(tokenizer, ByteTokenizer) else JSON
    return TokenizerDescription(kind, tokenizer.digest, tokenizer.vocab_size, tokenizer.end_of_text)


class ByteTokenizer:
    """256 tokens, one per byte. A document ends in byte 0, which no ordinary text contains."""

    vocab_size = 256
    end_of_text: int | None = 0
    digest = hashlib.sha256(b"swarmtrain tokenizer: bytes, end of text 0").hexdigest()

    def encode(self, text: str | bytes) -> Tokens:
        """One id per byte of the UTF-8 form; any bytes are taken."""
        content = utf8(text, where="text") if isinstance(text, str) else text
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64)  # (bytes,)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The bytes read as UTF-8."""
        return bytes(checked_ids(ids, self.vocab_size).tolist()).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face `tokenizers` file. `content` is kept: its sha256 is the digest, and `prepare` stores a copy."""

    def __init__(self, content: bytes, name: str, *, end_of_text: str | int | None = None) -> None:
        self.content = content
        self.digest = hashlib.sha256(content).hexdigest()
        self._backend = _load_backend(content, name)
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        if not 0 < self.vocab_size <= MAX_VOCAB_SIZE:
            raise DataError(f"{name}: a vocabulary of {self.vocab_size} ids; 1 to {MAX_VOCAB_SIZE} are possible")
        self.end_of_text = _find_end_of_text(vocabulary, end_of_text, name)

    @classmethod
    def open(cls, path: Path, *, end_of_text: str | int | None = None) -> JsonTokenizer:
        """Load `path`; `end_of_text` names the token or its id, None looks for one of the usual names."""
        try:
            if path.stat().st_size > MAX_TOKENIZER_BYTES:
                raise DataError(f"{path}: larger than {MAX_TOKENIZER_BYTES} bytes, not a tokenizer file")
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: the tokenizer cannot be read: {error.strerror}") from error
        return cls(content, str(path), end_of_text=end_of_text)

    def encode(self, text: str | bytes) -> Tokens:
        """The ids of `text`; bytes must be UTF-8."""
        return self.encode_batch([utf8(text, where="text") if isinstance(text, str) else text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        """`encode` of each, on all cores."""
        try:
            strings = [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError as error:
            raise DataError(f"the text is not UTF-8 at byte {error.start}") from error
        try:
            encodings = self._backend.encode_batch_fast(strings, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception, e.g. for a character it has no token for
            raise DataError(f"the tokenizer cannot encode this text: {error}") from error
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]  # (tokens,) each

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text, special tokens spelled out."""
        text: str = self._backend.decode(checked_ids(ids, self.vocab_size).tolist(), skip_special_tokens=False)
        return text

    def spelling(self, token: int) -> str:
        """How the vocabulary spells `token`, which is not always the text that it stands for."""
        found: str | None = self._backend.id_to_token(token)
        if found is None:
            raise DataError(f"the tokenizer has no token with id {token}")
        return found


def open_tokenizer(name: str, *, end_of_text: str | None = None) -> ByteTokenizer | JsonTokenizer:
    """`bytes`, or the path of a tokenizers JSON file, where `end_of_text` may name the token that ends a document."""
    if name != BYTES:
        return JsonTokenizer.open(Path(name), end_of_text=end_of_text)
    if end_of_text is not None:
        raise UsageError("the end-of-text token cannot be chosen for the bytes tokenizer: it is byte 0")
    return ByteTokenizer()


def train_bpe(
    files: Sequence[Path],
    vocab_size: int,
    out: Path,
    *,
    text_field: str = "text",
    max_bytes: int = DEFAULT_TRAINING_BYTES,
    on_piece: Callable[[Piece], None] | None = None,
) -> JsonTokenizer:
    """Learn a byte-level BPE from the first `max_bytes` of text in `files`, write it to `out` and return it.

    Every byte is in the alphabet, so any text survives a round trip. Id 0 is the end-of-text token. The result is
    a function of the text alone. It has fewer than `vocab_size` tokens when the text has no more pairs to merge.
    `on_piece` is called with every piece that is read, for progress.
    """
    if not 257 <= vocab_size <= MAX_VOCAB_SIZE:
        raise UsageError(f"a BPE needs a vocabulary of 257 (all bytes and end of text) to {MAX_VOCAB_SIZE} tokens")
    tokenizers = _import_tokenizers()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_training_texts(files, text_field, max_bytes, on_piece), trainer)
    content = backend.to_str(pretty=True).encode("utf-8")
    atomic_write(out, content)
    return JsonTokenizer(content, str(out))


def checked_ids(ids: Sequence[int] | npt.NDArray[np.integer[Any]], vocab_size: int) -> Tokens:
    """`ids` as a flat array, or `DataError` if one is not in [0, vocab_size)."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)  # (tokens,)
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise DataError(f"token id {wrong} is not in a vocabulary of {vocab_size}")
    return array


def _training_texts(
    files: Sequence[Path], text_field: str, max_bytes: int, on_piece: Callable[[Piece], None] | None
) -> Iterator[str]:
    left = max_bytes
    for number, path in enumerate(files):
        for piece in read_pieces(path, Cursor(number), text_field):
            if left <= 0:
                return
            left -= len(piece.text)
            if on_piece is not None:
                on_piece(piece)
            yield decode_piece(path, piece)


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "data") from error
    return tokenizers


def _load_backend(content: bytes, name: str) -> Any:
    tokenizers = _import_tokenizers()
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for whatever it does not like
        raise DataError(f"{name}: not a tokenizers JSON file: {error}") from error
    backend.no_truncation()  # files saved after training often carry both, and would cut or pad documents silently
    backend.no_padding()
    backend.encode_special_tokens = True  # despite its name: treat special tokens spelled in the text as text
    return backend


def _find_end_of_text(vocabulary: dict[str, int], wanted: str | int | None, name: str) -> int | None:
    if isinstance(wanted, int):
        if wanted not in vocabulary.values():
            raise DataError(f"{name}: has no token with id {wanted}")
        return wanted
    if wanted is not None:
        if wanted not in vocabulary:
            raise UsageError(f"{name}: has no token {wanted!r} to end documents with")
        return vocabulary[wanted]
    return next((vocabulary[token] for token in END_OF_TEXT_NAMES if token in vocabulary), None)
