"""Number formats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import NonFiniteTensor, decode
from swarmtrain.codec.payload import header_bytes

from .generators import Case, cases, context, encoder, numbers, round_trip, same_bits


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_fp32_and_raw_keep_every_bit(case: Case) -> None:
    tensor = case.tensor()
    assert same_bits(round_trip("raw", tensor).tensor, tensor)
    if case.dtype is not torch.float64:
        assert same_bits(round_trip("fp32", tensor).tensor, tensor.float())


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_fp16_and_bf16_tensors_pass_their_own_format_unchanged(case: Case) -> None:
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        tensor = numbers(case.kind, case.shape, case.seed).clamp(-65504, 65504).to(dtype)
        assert same_bits(round_trip(name, tensor).tensor, tensor.float())


@settings(max_examples=60, deadline=None)
@given(case=cases(all_dtypes=False), power=st.integers(-100, 100))
def test_fp16_keeps_eleven_bits_at_any_scale(case: Case, power: int) -> None:
    base = numbers("gaussian", case.shape, case.seed)
    tensor = base * 2.0**power
    received = round_trip("fp16", tensor).tensor
    largest = tensor.abs().amax() if tensor.numel() else torch.tensor(0.0)
    assert ((received - tensor).abs() <= tensor.abs() * 2.0**-11 + largest * 2.0**-40).all()
    assert torch.equal(received, round_trip("fp16", base).tensor * 2.0**power)


def test_plain_fp16_would_lose_what_the_common_exponent_keeps() -> None:
    gradient = numbers("gaussian", (8, 64), 1) * 1e-9
    received = round_trip("fp16", gradient).tensor
    assert (gradient.half().float() == 0).all()
    assert torch.dot(received.view(-1), gradient.view(-1)) / torch.dot(gradient.view(-1), gradient.view(-1)) > 0.999


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_largest_numbers_saturate(name: str) -> None:
    tensor = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, 1.0])
    received = round_trip(name, tensor).tensor
    assert torch.isfinite(received).all()
    assert ((received - tensor).abs()[:2] <= 0.004 * tensor.abs()[:2]).all()


def test_fp64_numbers_beyond_fp32_are_refused_unless_raw() -> None:
    tensor = torch.tensor([1e300], dtype=torch.float64)
    for name in ("fp32", "fp16", "bf16", "quant8"):
        with pytest.raises(NonFiniteTensor):
            encoder(name).encode(tensor, context())
    assert same_bits(round_trip("raw", tensor).tensor, tensor)


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_sizes_to_the_byte(case: Case) -> None:
    tensor = case.tensor()
    for name, width in (("fp32", 4), ("fp16", 2), ("bf16", 2), ("raw", tensor.element_size())):
        payload = encoder(name).encode(tensor, context()).payload
        assert len(payload) == header_bytes(tensor.dim()) + width * tensor.numel()


def test_a_sum_that_overflows_is_not_taken_for_infinity() -> None:
    tensor = torch.full((1000,), 3e38)
    assert same_bits(round_trip("fp32", tensor).tensor, tensor)


def test_the_received_tensor_does_not_share_memory_with_the_payload() -> None:
    payload = bytearray(encoder("fp32").encode(torch.ones(10), context()).payload)
    received = decode(payload, context()).tensor
    payload[-1] ^= 255
    assert torch.equal(received, torch.ones(10))
