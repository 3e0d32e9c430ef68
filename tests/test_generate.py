"""Sampling: the right distribution, the same text for the same seed, the same scores with and without a cache."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_bf16
from runs import KINDS, shards, small, train

from swarmtrain.data.tokenizer import ByteTokenizer, JsonTokenizer
from swarmtrain.errors import DataError, DivergedError, UsageError
from swarmtrain.generate import Sampling, _ByteText, _TokenText, choose, generate_text, generate_tokens
from swarmtrain.inference import TrainedModel, open_checkpoint_source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return TrainedModel(train(small("schedule.steps=20"), tmp_path_factory.mktemp("run")))


def text(model: TrainedModel, **options: object) -> str:
    return "".join(generate_text(model, ByteTokenizer(), **options))  # type: ignore[arg-type]


def test_a_seed_gives_one_text_and_another_seed_another(model: TrainedModel) -> None:
    first = text(model, prompt="We", num_tokens=60, sampling=Sampling(seed=1))
    assert first == text(model, prompt="We", num_tokens=60, sampling=Sampling(seed=1))
    assert first != text(model, prompt="We", num_tokens=60, sampling=Sampling(seed=2))
    assert first != text(model, prompt="You", num_tokens=60, sampling=Sampling(seed=1))


def test_temperature_zero_needs_no_seed(model: TrainedModel) -> None:
    texts = {text(model, num_tokens=30, sampling=Sampling(temperature=0.0, seed=seed)) for seed in range(3)}
    assert len(texts) == 1


def test_text_goes_on_far_beyond_the_window(model: TrainedModel) -> None:
    tokens = list(generate_tokens(model, [10], 100, 256, Sampling()))
    assert len(tokens) == 100
    assert len(set(tokens)) > 5


def test_a_prompt_longer_than_the_window_keeps_its_end(model: TrainedModel) -> None:
    greedy = Sampling(temperature=0.0)
    prompt = [ord(char) for char in "a long sentence that does not fit into the window"]
    whole = next(generate_tokens(model, prompt, 1, 256, greedy))
    assert whole == next(generate_tokens(model, prompt[-16:], 1, 256, greedy))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", ["true", "false"])
def test_cached_scores_are_those_of_the_whole_window(tmp_path: Path, kind: str, tie: str) -> None:
    model = TrainedModel(train(small(f"boundary.kind={kind}", f"model.tie_embeddings={tie}"), tmp_path))
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    whole = model.logits(ids)  # (2, 16, v)
    caches = model.new_caches()
    pieces = [model.logits(ids[:, :5], caches)]
    pieces += [model.logits(ids[:, n : n + 1], caches) for n in range(5, 16)]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-4)
    forgotten = model.new_caches()  # control: with an emptied cache the scores are others
    model.logits(ids[:, :5], forgotten)
    assert not torch.allclose(model.logits(ids[:, 15:], forgotten)[:, 0], whole[:, 15], atol=1e-2)


@needs_bf16()
def test_cached_scores_in_bf16_are_those_of_the_whole_window_up_to_rounding(tmp_path: Path) -> None:
    """Keys and values in the cache are bf16 too; kernels for one position round differently."""
    model = TrainedModel(train(small("model.precision=bf16", "boundary.table=signs"), tmp_path))
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    whole = model.logits(ids)  # (2, 16, v)
    assert whole.dtype == torch.float32
    caches = model.new_caches()
    pieces = [model.logits(ids[:, :5], caches)]
    pieces += [model.logits(ids[:, n : n + 1], caches) for n in range(5, 16)]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=0.05 * float(whole.abs().max()))


def test_a_lossy_codec_is_used_and_never_with_a_cache(tmp_path: Path) -> None:
    checkpoint = train(small("wire.forward=topk20", "schedule.steps=20"), tmp_path)
    through, without = TrainedModel(checkpoint), TrainedModel(checkpoint, use_codec=False)
    assert not through.is_lossless
    assert without.is_lossless
    ids = torch.arange(40, 56)[None]
    assert not torch.allclose(through.logits(ids), without.logits(ids), atol=1e-3)
    assert text(through, num_tokens=20) == text(through, num_tokens=20)


SCORES = st.lists(st.floats(-30, 30), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(scores=SCORES, temperature=st.floats(0.05, 5.0))
def test_choice_follows_the_softmax(scores: list[float], temperature: float) -> None:
    """Of evenly spaced points each token gets its share."""
    tensor, count = torch.tensor(scores, dtype=torch.float64), 200
    found = [choose(tensor, Sampling(temperature, 1.0), (n + 0.5) / count) for n in range(count)]
    shares = torch.softmax(tensor / temperature, dim=0)
    for token, share in enumerate(shares.tolist()):
        assert abs(found.count(token) / count - share) <= 1.5 / count + 1e-9


@settings(max_examples=80, deadline=None)
@given(scores=SCORES, top_p=st.floats(0.01, 1.0), point=st.floats(0.0, 1.0, exclude_max=True))
def test_top_p_keeps_the_smallest_set_of_that_mass(scores: list[float], top_p: float, point: float) -> None:
    tensor = torch.tensor(scores, dtype=torch.float64)
    token = choose(tensor, Sampling(1.0, top_p), point)
    shares = torch.softmax(tensor, dim=0)
    likelier = float(shares[tensor > tensor[token]].sum())
    assert likelier < top_p + 1e-9  # those before it did not reach the mass yet


def test_a_tiny_top_p_is_the_likeliest_token() -> None:
    scores = torch.tensor([0.1, 3.0, -1.0, 2.9])
    assert {choose(scores, Sampling(1.0, 1e-9), n / 50) for n in range(50)} == {1}
    assert choose(scores, Sampling(0.0), 0.99) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(DivergedError):
        choose(torch.tensor([0.0, bad]), Sampling(), 0.5)


@pytest.mark.parametrize(
    "values", [(-0.1, 0.9), (math.nan, 0.9), (101.0, 0.9), (1.0, 0.0), (1.0, 1.1), (1.0, math.nan)]
)
def test_impossible_sampling_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(*values)


def test_ids_beyond_the_tokenizer_are_never_sampled(tmp_path: Path) -> None:
    """The model may have more rows than the tokenizer has tokens; at high temperature they would all be drawn."""
    model = TrainedModel(train(small("model.vocab_size=4096"), tmp_path))
    assert max(generate_tokens(model, [10], 200, 256, Sampling(temperature=100.0, top_p=1.0))) < 256
    assert max(generate_tokens(model, [10], 50, 4096, Sampling(temperature=100.0, top_p=1.0))) >= 256  # control


def test_the_end_of_a_text_ends_it(model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [ord("a"), ord("b"), 0, ord("c")]
    monkeypatch.setattr("swarmtrain.generate.generate_tokens", lambda *_: iter(tokens))
    assert text(model, prompt="x") == "ab"


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=30).map(lambda text: text.encode()))
def test_streamed_bytes_are_the_text(content: bytes) -> None:
    stream = _ByteText()
    assert "".join([stream.add(byte) for byte in content]) + stream.rest() == content.decode(errors="replace")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    directory = shards(tmp_path_factory.mktemp("bpe"), vocab_size=280)
    return JsonTokenizer.open(directory / "tokenizer.json")


def pieces_of(bpe: JsonTokenizer, ids: list[int]) -> Iterator[str]:
    stream = _TokenText(bpe)
    for token in ids:
        yield stream.add(token)
    yield stream.rest()


@settings(max_examples=60, deadline=None)
@given(content=st.text(max_size=30))
def test_streamed_tokens_are_the_text(bpe: JsonTokenizer, content: str) -> None:
    content = content.encode(errors="ignore").decode()
    pieces = list(pieces_of(bpe, bpe.encode(content).tolist()))
    assert "".join(pieces) == content


def test_tokens_that_are_no_text_are_not_held_back_for_ever(bpe: JsonTokenizer) -> None:
    ids = [bpe.encode("ö").tolist()[0]] * 100 if len(bpe.encode("ö")) > 1 else [bpe.encode("€").tolist()[0]] * 100
    pieces = list(pieces_of(bpe, ids))
    assert sum(1 for piece in pieces if piece) > 1
    assert set("".join(pieces)) == {"\N{REPLACEMENT CHARACTER}"}


def test_a_run_with_a_learned_tokenizer_writes_text(tmp_path: Path) -> None:
    source = shards(tmp_path, vocab_size=280)
    checkpoint = train(small(f"data.source={source}", "model.vocab_size=320"), tmp_path / "run")
    tokenizer = open_checkpoint_source(checkpoint.manifest).open_tokenizer()
    model = TrainedModel(checkpoint)
    first = "".join(generate_text(model, tokenizer, prompt="The 5th", num_tokens=40))
    assert first
    assert first == "".join(generate_text(model, tokenizer, prompt="The 5th", num_tokens=40))


def test_a_prompt_the_model_cannot_know_is_refused(model: TrainedModel, bpe: JsonTokenizer) -> None:
    with pytest.raises(DataError, match="prompt"):
        next(generate_text(model, bpe, prompt="many lines, many lines"))


def test_points_are_those_of_pythons_own_generator(model: TrainedModel) -> None:
    """The stream of random numbers is part of what a seed means: it must not depend on torch's version."""
    scores = model.logits(torch.tensor([[10]]))[0, -1]
    token = next(generate_tokens(model, [10], 1, 256, Sampling(seed=5)))
    assert token == choose(scores, Sampling(seed=5), random.Random(5).random())
