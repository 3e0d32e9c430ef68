"""In-stage gradients: slices, feedback that is committed with the step, and 64 of 4096."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import CodecError, CodecSpecError, NonFiniteTensor, decode
from swarmtrain.codec.chunktopk import CHUNK, decode_chunk_sum, encode_chunk_sum, kept_in
from swarmtrain.codec.errors import CorruptPayload
from swarmtrain.codec.gradient import ERROR_DECAY, GradientEncoder, parse_gradient_spec
from swarmtrain.codec.payload import header_bytes

from .generators import KINDS, context, numbers, same_bits, squared

SPECS = ("none", "bf16", "int8", "topk64", "topk1", "topk4096")


def gradient_encoder(spec: str, size: int) -> GradientEncoder:
    return GradientEncoder(parse_gradient_spec(spec), size)


def received(payload: bytes) -> torch.Tensor:
    return decode(payload, context()).tensor


def flat(kind: str, size: int, seed: int) -> torch.Tensor:
    return numbers(kind, (size,), seed)


@pytest.mark.parametrize("text", [*SPECS, "powersgd32", "lowrank100", "lowrank1000"])
def test_names_parse_to_themselves(text: str) -> None:
    assert str(parse_gradient_spec(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fp32",
        "topk",
        "topk0",
        "topk5000",
        "powersgd",
        "powersgd0",
        "lowrank",
        "lowrank0",
        "lowrank1001",
        "topk064",
        "int4",
        "topk64 ",
    ],
)
def test_other_names_are_usage_errors(text: str) -> None:
    with pytest.raises(CodecSpecError) as caught:
        parse_gradient_spec(text)
    assert "allowed" in caught.value.fix


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(KINDS), size=st.integers(0, 9000), seed=st.integers(0, 99))
def test_any_slice_comes_back_with_an_error_no_larger_than_itself(spec: str, kind: str, size: int, seed: int) -> None:
    part = flat(kind, size, seed)
    sender = gradient_encoder(spec, size + 3)
    payload = sender.encode(part, 3)
    assert payload == sender.encode(part, 3)
    assert len(payload) <= sender.max_bytes(size)
    result = received(payload)
    assert result.shape == part.shape
    assert squared(result - part) <= squared(part) * (1 + 1e-3) + size * 2.0**-298 * 4


def test_none_keeps_the_bits_of_exact_sums() -> None:
    part = flat("gaussian", 100, 1).double() / 3
    assert same_bits(received(gradient_encoder("none", 100).encode(part, 0)), part)


def test_64_of_4096_take_14_bits_each_and_two_bytes_per_chunk() -> None:
    size = 256 * CHUNK
    payload = gradient_encoder("topk64", size).encode(flat("gaussian", size, 1), 0)
    assert len(payload) == header_bytes(1) + 16 + 256 * (64 * (12 + 2) // 8 + 2)
    assert 4 * size / len(payload) > 143
    assert int((received(payload).view(-1, CHUNK) != 0).sum(dim=1).min()) == 64


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 13000), kept=st.sampled_from([1, 64, 500]))
def test_sizes_to_the_byte(size: int, kept: int) -> None:
    total = size // CHUNK * kept + kept_in(size % CHUNK, kept)
    expected = header_bytes(1) + 16 + 2 * math.ceil(size / CHUNK) + math.ceil(total * 12 / 8) + math.ceil(total * 2 / 8)
    assert len(gradient_encoder(f"topk{kept}", size).encode(flat("gaussian", size, 1), 0)) == expected


def test_signs_and_magnitudes_of_the_largest_values_survive() -> None:
    part = flat("mixed scales", 3 * CHUNK, 2)
    result = received(gradient_encoder("topk64", 3 * CHUNK).encode(part, 0))
    support = result != 0
    assert torch.equal(result[support].sign(), part[support].sign())
    for index in range(3):
        chunk, sent = (tensor[index * CHUNK : (index + 1) * CHUNK] for tensor in (part, result))
        assert chunk[sent != 0].abs().min() >= chunk[sent == 0].abs().max()


@settings(max_examples=15, deadline=None)
@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=5), cuts=st.lists(st.integers(0, 9000), max_size=3))
def test_error_before_is_error_after_plus_sent_whatever_the_cuts(seeds: list[int], cuts: list[int]) -> None:
    size = 9000
    sender = gradient_encoder("topk64", size)
    assert sender.error is not None
    for seed in seeds:
        gradient = flat("gaussian", size, seed)
        before = sender.error.clone()
        bounds = [0, *sorted(cuts), size]
        sent = torch.cat([received(sender.encode(gradient[a:b], a)) for a, b in itertools.pairwise(bounds)])
        assert torch.equal(sender.error, before)  # nothing before commit
        sender.commit()
        assert torch.allclose(sender.error + sent, gradient + ERROR_DECAY * before, atol=1e-5)


def test_an_aborted_all_reduce_leaves_no_trace() -> None:
    sender, witness = gradient_encoder("topk64", 9000), gradient_encoder("topk64", 9000)
    for one in (sender, witness):
        one.encode(flat("gaussian", 9000, 1), 0)
        one.commit()
    sender.encode(flat("gaussian", 9000, 2)[:5000], 0)
    sender.abort()
    with pytest.raises(NonFiniteTensor):
        sender.encode(torch.full((10,), float("nan")), 0)
    sender.commit()
    assert sender.encode(flat("gaussian", 9000, 3), 0) == witness.encode(flat("gaussian", 9000, 3), 0)
    sender.reset()
    assert sender.error is not None
    assert squared(sender.error) == 0


def test_feedback_delivers_a_constant_gradient_in_time() -> None:
    """Negative control: without feedback the same few values are sent for ever."""
    gradient = flat("gaussian", CHUNK, 1)
    sender = gradient_encoder("topk64", CHUNK)
    total = torch.zeros(CHUNK)
    seen = torch.zeros(CHUNK, dtype=torch.bool)
    for _ in range(100):
        sent = received(sender.encode(gradient, 0))
        sender.commit()
        total += sent
        seen |= sent != 0
    once = received(gradient_encoder("topk64", CHUNK).encode(gradient, 0))
    cosine = torch.nn.functional.cosine_similarity
    assert int(seen.sum()) > 20 * 64
    assert cosine(total, gradient, dim=0) > 0.8 > 0.6 > cosine(once, gradient, dim=0)


def test_slices_out_of_range_and_powersgd_are_refused() -> None:
    sender = gradient_encoder("topk64", 100)
    for part, start in ((torch.zeros(101), 0), (torch.zeros(10), 91), (torch.zeros(10), -1), (torch.zeros(2, 2), 0)):
        with pytest.raises(CodecError):
            sender.encode(part, start)
    with pytest.raises(CodecError):
        gradient_encoder("powersgd32", 100)


@pytest.mark.parametrize("size", [1, 100, 4096, 4097, 10000])
@pytest.mark.parametrize("kept", [1, 64, 256, 341, 342, 2048, 4096, 9999])
def test_a_sum_keeps_its_largest_values_in_bf16(size: int, kept: int) -> None:
    values = flat("gaussian", size, size)
    raw = encode_chunk_sum(values.numpy(), kept)
    found = torch.from_numpy(decode_chunk_sum(memoryview(raw), size, kept))
    for start in range(0, size, CHUNK):
        part, wanted = found[start : start + CHUNK], values[start : start + CHUNK]
        is_there = part != 0.0
        assert int(is_there.sum()) == kept_in(part.numel(), min(kept, CHUNK))
        assert torch.equal(part[is_there], wanted[is_there].to(torch.bfloat16).float())
        if not bool(is_there.all()):
            assert float(wanted[is_there].abs().min()) >= float(wanted[~is_there].abs().max())
    for bad in (raw[:-1], raw + b"x", b""):
        with pytest.raises(CorruptPayload):
            decode_chunk_sum(memoryview(bad), size, kept)


@pytest.mark.parametrize("kept", [64, 512])
def test_a_sum_with_positions_that_cannot_be_is_refused(kept: int) -> None:
    raw = encode_chunk_sum(np.zeros(100, dtype=np.float32), kept)
    with pytest.raises(CorruptPayload):
        decode_chunk_sum(memoryview(b"\xff" * len(raw)), 100, kept)


def test_what_is_taken_back_counts_as_left_out() -> None:
    encoder, other = (GradientEncoder(parse_gradient_spec("topk64"), 5000) for _ in range(2))
    values = flat("gaussian", 5000, 1)
    sent = received(encoder.encode(values, 0))
    other.encode(values, 0)
    where = torch.arange(5000) % 2 == 0
    encoder.take_back(where, 0)
    encoder.take_back(where, 0)  # a second time, and of what was not sent: nothing
    encoder.take_back(where, 77)
    encoder.commit()
    other.commit()
    assert encoder.error is not None
    assert other.error is not None
    assert torch.equal(encoder.error, other.error + torch.where(where, sent, 0.0))
    assert bool((sent[where] != 0).any())
