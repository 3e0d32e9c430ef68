"""Symmetric and min-max quantization."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec.payload import header_bytes
from swarmtrain.codec.quant import quantize

from .generators import Case, cases, context, encoder, numbers, round_trip, same_bits

BITS = (2, 3, 4, 6, 8)
TINY = 2.0**-126  # the smallest normal number: below it scales have fewer bits


def group_maxima(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """For each element the largest magnitude of its group."""
    flat = tensor.reshape(-1)
    padded = torch.zeros(-(-flat.numel() // group) * group)
    padded[: flat.numel()] = flat.abs()
    return padded.view(-1, group).amax(dim=1).repeat_interleave(group)[: flat.numel()].view(tensor.shape)


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(case=cases(all_dtypes=False), group=st.sampled_from([8, 64, 128]))
def test_the_error_is_at_most_half_a_step(bits: int, case: Case, group: int) -> None:
    tensor = case.tensor()
    received = round_trip(f"quant{bits}:group={group}", tensor).tensor
    levels = (1 << (bits - 1)) - 1
    allowed = group_maxima(tensor.contiguous(), group) / (2 * levels) * (1 + 1 / 128 + 1e-5)
    assert ((received - tensor).abs() <= allowed + TINY / 64).all()


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(case=cases(all_dtypes=False))
def test_no_value_changes_sign_or_moves_by_more_than_itself(bits: int, case: Case) -> None:
    tensor = case.tensor()
    received = round_trip(f"quant{bits}", tensor).tensor
    assert (received * tensor.sign() >= 0).all()
    assert ((received - tensor).abs() <= tensor.abs() * (1 + 1e-3) + 2.0**-149).all()


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(case=cases(all_dtypes=False), power=st.integers(-60, 60))
def test_it_commutes_with_signs_and_powers_of_two(bits: int, case: Case, power: int) -> None:
    base = numbers(case.kind if case.kind not in ("huge", "denormal", "tiny") else "gaussian", case.shape, case.seed)
    received = round_trip(f"quant{bits}", base).tensor
    assert torch.equal(round_trip(f"quant{bits}", -base).tensor, -received)
    assert torch.equal(round_trip(f"quant{bits}", base * 2.0**power).tensor, received * 2.0**power)


@pytest.mark.parametrize("sigma", [1e-4, 1e-8, 1e-20, 1e-36])
def test_small_gradients_survive(sigma: float) -> None:
    """An epsilon in the scale, or an fp16 one, fails this at 1e-6 already."""
    tensor = numbers("gaussian", (32, 128), 7) * sigma
    unit = tensor.double() / sigma
    received = round_trip("quant8", tensor).tensor.double() / sigma
    assert (received * unit).sum() / (unit * unit).sum() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(case=cases(), group=st.sampled_from([8, 24, 64, 128, 1024]))
def test_sizes_to_the_byte(bits: int, case: Case, group: int) -> None:
    count = math.prod(case.shape)
    sender = encoder(f"quant{bits}:group={group}")
    expected = header_bytes(len(case.shape)) + math.ceil(count * bits / 8) + 2 * math.ceil(count / group)
    assert len(sender.encode(case.tensor(), context()).payload) == sender.max_bytes(case.shape) == expected
    sender = encoder(f"minmax{bits}")
    expected = header_bytes(len(case.shape)) + math.ceil(count * bits / 8) + 8
    assert len(sender.encode(case.tensor(), context()).payload) == sender.max_bytes(case.shape) == expected


def test_the_sizes_of_a_large_message() -> None:
    shape = (4, 1024, 2048)
    body = {spec: encoder(spec).max_bytes(shape) - header_bytes(3) for spec in ("quant4", "quant2", "fp16")}
    assert body == {"quant4": 4_325_376, "quant2": 2_228_224, "fp16": 16_777_216}


@pytest.mark.parametrize("bits", BITS)
def test_chunks_do_not_show(bits: int) -> None:
    """A tensor of several chunks decodes like its groups one by one."""
    tensor = numbers("mixed scales", (1, 9 * (1 << 15) + 77), 3).view(-1)
    received = round_trip(f"quant{bits}", tensor).tensor
    pieces = [round_trip(f"quant{bits}", piece).tensor for piece in tensor.split(128 * 100)]
    assert same_bits(received, torch.cat(pieces))


def test_large_messages_decode_like_small_ones() -> None:
    tensor = numbers("gaussian", (1, (1 << 20) + 100), 3).view(-1)
    received = round_trip("quant4", tensor).tensor
    pieces = [round_trip("quant4", piece).tensor for piece in tensor.split(128 * 1000)]
    assert same_bits(received, torch.cat(pieces))


def test_equal_numbers_get_equal_bytes_whatever_the_thread_count() -> None:
    tensor = numbers("gaussian", (1, 1 << 17), 3).view(-1)
    single = quantize(tensor, 4, 128)
    torch.set_num_threads(2)
    try:
        assert (quantize(tensor, 4, 128) == single).all()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(case=cases(all_dtypes=False))
def test_minmax_is_within_half_a_step_exact_at_its_ends_and_idempotent(bits: int, case: Case) -> None:
    tensor = case.tensor()
    received = round_trip(f"minmax{bits}", tensor).tensor
    if tensor.numel() == 0:
        return
    low, high = float(tensor.min()), float(tensor.max())
    step = (high - low) / ((1 << bits) - 1)
    assert ((received.double() - tensor.double()).abs() <= step / 2 * 1.01 + 2.0**-149).all()
    assert float(received.min()) == low
    assert float(received.max()) == high
    again = round_trip(f"minmax{bits}", received).tensor
    assert ((again.double() - received.double()).abs() <= step * 1e-5).all()


@pytest.mark.parametrize("value", [0.0, 3.25, -1e-40, 3.4e38])
def test_minmax_of_a_constant_is_exact(value: float) -> None:
    tensor = torch.full((3, 7), value)
    assert same_bits(round_trip("minmax4", tensor).tensor, tensor)
