"""Text from a checkpoint, token by token: temperature, top-p, the same text for the same seed."""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmtrain.data.tokenizer import ByteTokenizer, Tokenizer
from swarmtrain.errors import DataError, DivergedError, UsageError
from swarmtrain.inference import TrainedModel

DEFAULT_PROMPT = "\n"  # the start of a line: in every corpus, and without content
_MAX_HELD = 16  # tokens that are held back until a character is complete


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the likeliest; top_p keeps the smallest set of that mass."""

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:  # also refuses NaN
            raise UsageError(f"the temperature is {self.temperature}; it must lie between 0 and 100")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p is {self.top_p}; it must be above 0 and at most 1")


def generate_text(
    model: TrainedModel,
    tokenizer: Tokenizer,
    *,
    prompt: str = DEFAULT_PROMPT,
    num_tokens: int = 200,
    sampling: Sampling | None = None,
) -> Iterator[str]:
    """Pieces of text that continue `prompt`, in whole characters; ends early at an end-of-text token."""
    ids = [int(token) for token in tokenizer.encode(prompt or DEFAULT_PROMPT)]
    if not ids or max(ids) >= model.manifest.model.vocab_size:
        raise DataError("the run's tokenizer makes no token of this prompt that is in the model's vocabulary")
    pieces = _ByteText() if isinstance(tokenizer, ByteTokenizer) else _TokenText(tokenizer)
    vocab_size = min(tokenizer.vocab_size, model.manifest.model.vocab_size)
    for token in generate_tokens(model, ids, num_tokens, vocab_size, sampling or Sampling()):
        if token == tokenizer.end_of_text:
            break
        piece = pieces.add(token)
        if piece:
            yield piece
    rest = pieces.rest()
    if rest:
        yield rest


def generate_tokens(
    model: TrainedModel, prompt: list[int], num_tokens: int, vocab_size: int, sampling: Sampling
) -> Iterator[int]:
    """Token ids below `vocab_size` that continue `prompt`; the model sees the last `sequence_length` of them."""
    chooser = random.Random(sampling.seed)
    next_scores = _CachedScores(model) if model.is_lossless else _PlainScores(model)
    context = list(prompt)
    for _ in range(num_tokens):
        token = choose(next_scores(context)[:vocab_size], sampling, chooser.random())
        context.append(token)
        yield token


def choose(scores: Tensor, sampling: Sampling, point: float) -> int:
    """The token of `scores` (v,) that the number `point` in [0, 1) falls on. Computed in fp64 on the CPU."""
    scores = scores.to("cpu", torch.float64)
    if not bool(torch.isfinite(scores).all()):
        raise DivergedError("the model's scores are not finite: it diverged in training")
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    ordered, tokens = torch.sort(scores, descending=True, stable=True)
    cumulative = torch.softmax((ordered - ordered[0]) / sampling.temperature, dim=0).cumsum(0)
    kept = int(torch.searchsorted(cumulative, sampling.top_p)) + 1  # the first index at which the mass is reached
    kept = min(kept, len(tokens))
    position = int(torch.searchsorted(cumulative[:kept], point * float(cumulative[kept - 1]), right=True))
    return int(tokens[min(position, kept - 1)])


class _PlainScores:
    """Scores of the next token, computed from the whole window each time: right for every codec."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model

    def __call__(self, context: list[int]) -> Tensor:
        window = context[-self._model.manifest.model.sequence_length :]
        return self._model.logits(torch.tensor([window]))[0, -1]  # (v,)


class _CachedScores:
    """The same from cached keys and values. A full cache is refilled with the newer half of the window."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._length = model.manifest.model.sequence_length
        self._caches = model.new_caches()

    def __call__(self, context: list[int]) -> Tensor:
        seen = self._caches[0].num_positions
        new = context[-1:] if 0 < seen < self._length else self._refill(context, is_full=seen > 0)
        return self._model.logits(torch.tensor([new]), self._caches)[0, -1]  # (v,)

    def _refill(self, context: list[int], *, is_full: bool) -> list[int]:
        self._caches = self._model.new_caches()
        return context[-(max(1, self._length // 2) if is_full else self._length) :]


class _ByteText:
    """Bytes to text; an incomplete character is held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class _TokenText:
    """Tokens to text. A token is decoded together with the one before it, on which a leading space may depend."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        self._held.append(token)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._held) < _MAX_HELD:
            return ""
        self._shown, self._held = self._held, []
        return text

    def rest(self) -> str:
        return self._text() if self._held else ""

    def _text(self) -> str:
        before = self._tokenizer.decode(self._shown) if self._shown else ""
        return self._tokenizer.decode(self._shown + self._held)[len(before) :]
