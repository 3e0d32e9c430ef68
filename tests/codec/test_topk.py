"""Top-k: selection, positions, mask reuse."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import (
    CodecError,
    Direction,
    NeedAux,
    Scope,
    aux_from_bytes,
    decode,
    inline_aux,
    parse_pair,
)
from swarmtrain.codec.mask import mask_array, select_largest
from swarmtrain.codec.payload import header_bytes
from swarmtrain.codec.spec import TopKSpec

from .crossing import Crossing
from .generators import Case, cases, context, encoder, numbers, round_trip, same_bits, squared

FORWARD, BACKWARD = context(Direction.FORWARD), context(Direction.BACKWARD)


@settings(max_examples=80, deadline=None)
@given(case=cases(all_dtypes=False), kept=st.integers(1, 80))
def test_exactly_k_of_each_row_are_kept_the_largest_and_of_equals_the_first(case: Case, kept: int) -> None:
    rows = numbers(case.kind, (len(case.shape) + 1, 1 + case.seed % 70), case.seed)
    kept = min(kept, rows.shape[1])
    mask = torch.from_numpy(select_largest(rows, kept))
    order = torch.sort(rows.abs(), dim=1, descending=True, stable=True).indices[:, :kept]
    expected = torch.zeros_like(mask).scatter(1, order, True)
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("percent", ["1", "10", "30", "100"])
@settings(max_examples=40, deadline=None)
@given(case=cases(all_dtypes=False))
def test_kept_values_are_exact_and_the_error_is_bounded(percent: str, case: Case) -> None:
    tensor = case.tensor()
    received = round_trip(f"topk{percent}:values=fp32", tensor).tensor
    support = received != 0
    assert torch.equal(received[support], tensor[support])
    if tensor.numel():
        width = case.shape[-1] if case.shape else 1
        kept = TopKSpec(Fraction(percent)).kept_per_row(width)
        assert squared(received - tensor) <= squared(tensor) * (1 - kept / width + 1e-6)


def index_formula(rows: int, width: int, kept: int) -> int:
    bits = math.ceil(math.log2(width)) if width > 1 else 0
    return min(math.ceil(rows * width / 8), math.ceil(rows * kept * bits / 8))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 300),
    percent=st.sampled_from([Fraction(1), Fraction(5, 2), Fraction(10), Fraction(30), Fraction(100)]),
    values=st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
    seed=st.integers(0, 99),
)
def test_sizes_to_the_byte(rows: int, width: int, percent: Fraction, values: str, seed: int) -> None:
    spec = str(TopKSpec(percent, values=values))
    tensor = numbers("gaussian", (rows, width), seed)
    kept = max(1, math.floor(float(percent) * width / 100 + 0.5))
    total = rows * kept
    value_bytes = {"fp32": 4 * total, "fp16": 2 * total, "bf16": 2 * total, "int8": total + 2 * math.ceil(total / 128)}
    forward, backward = encoder(spec), encoder(spec, Direction.BACKWARD)
    sent = forward.encode(tensor, FORWARD)
    expected = header_bytes(2) + index_formula(rows, width, kept) + value_bytes[values]
    assert len(sent.payload) == forward.max_bytes((rows, width)) == expected
    answer = backward.encode(tensor, BACKWARD, sent.aux)
    assert len(answer.payload) == backward.max_bytes((rows, width)) == header_bytes(2) + 8 + value_bytes[values]


def test_the_shorter_of_bitmask_and_indices_is_taken() -> None:
    tensor = numbers("gaussian", (4, 1024), 1)
    dense, sparse = (len(encoder(f"topk{percent}").encode(tensor, FORWARD).payload) for percent in ("20", "1"))
    assert dense == header_bytes(2) + 4 * 1024 // 8 + 2 * 4 * 205
    assert sparse == header_bytes(2) + 4 * 10 * 10 // 8 + 2 * 4 * 10
    for percent in ("20", "1"):
        received = round_trip(f"topk{percent}:values=fp32", tensor).tensor
        mask = torch.from_numpy(select_largest(tensor, 205 if percent == "20" else 10))
        assert same_bits(received, torch.where(mask, tensor, 0.0))


@settings(max_examples=40, deadline=None)
@given(case=cases(all_dtypes=False), seed=st.integers(0, 99))
def test_both_ends_hold_the_same_mask(case: Case, seed: int) -> None:
    sent = encoder("topk10").encode(case.tensor(), FORWARD)
    assert decode(sent.payload, FORWARD).aux == sent.aux
    assert sent.aux is not None
    assert aux_from_bytes(sent.aux.shape, sent.aux.mask) == sent.aux
    separate = encoder("topk10-separate").encode(case.tensor(), FORWARD)
    assert separate.aux is None
    assert decode(separate.payload, FORWARD).aux is None


@pytest.mark.parametrize("pair", ["topk10:values=fp32", "topk30:values=fp32/fp32", "ef-topk10:values=fp32"])
@settings(max_examples=20, deadline=None)
@given(case=cases(all_dtypes=False))
def test_mask_reuse_is_the_exact_gradient(pair: str, case: Case) -> None:
    """d/dx of sum(C(x) * g) is mask * g: also if the gradient travels in a dense format."""
    leaf = case.tensor().clone().requires_grad_()
    gradient = numbers("gaussian", case.shape, case.seed + 1)
    crossing = Crossing(parse_pair(pair), 0)
    received = crossing(leaf)
    (received * gradient).sum().backward()
    sent = encoder(pair.partition("/")[0]).encode(leaf.detach(), FORWARD)
    assert sent.aux is not None
    mask = torch.from_numpy(mask_array(sent.aux, case.shape)).view(case.shape)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.where(mask, gradient, 0.0))


def test_separate_selection_is_not_the_gradient() -> None:
    """The check above can fail."""
    leaf = numbers("gaussian", (8, 64), 1).requires_grad_()
    gradient = numbers("gaussian", (8, 64), 2)
    received = Crossing(parse_pair("topk10-separate:values=fp32"), 0)(leaf)
    (received * gradient).sum().backward()
    assert leaf.grad is not None
    assert not torch.equal(leaf.grad != 0, received != 0)


def test_a_missing_or_another_mask_is_asked_for_and_can_be_sent_inline() -> None:
    tensor, gradient = numbers("gaussian", (8, 64), 1), numbers("gaussian", (8, 64), 2)
    sent = encoder("topk10").encode(tensor, FORWARD)
    other = encoder("topk10").encode(gradient, FORWARD)
    assert sent.aux is not None
    assert other.aux is not None
    answer = encoder("topk10", Direction.BACKWARD).encode(gradient, BACKWARD, sent.aux).payload
    for wrong in (None, other.aux):
        with pytest.raises(NeedAux) as caught:
            decode(answer, BACKWARD, wrong)
        assert caught.value.digest == sent.aux.digest
    complete = inline_aux(answer, sent.aux)
    expected = decode(answer, BACKWARD, sent.aux).tensor
    for known in (None, sent.aux, other.aux):  # the mask within counts: it is that of what was used
        assert same_bits(decode(complete, BACKWARD, known).tensor, expected)
    with pytest.raises(CodecError):
        inline_aux(answer, other.aux)
    with pytest.raises(CodecError):
        inline_aux(complete, sent.aux)
    with pytest.raises(CodecError):
        inline_aux(encoder("fp32").encode(tensor, FORWARD).payload, sent.aux)


def test_a_mask_of_another_shape_is_asked_for() -> None:
    sent = encoder("topk10").encode(numbers("gaussian", (8, 64), 1), FORWARD)
    gradient = numbers("gaussian", (64, 8), 2)
    with pytest.raises(NeedAux):
        encoder("topk10", Direction.BACKWARD).encode(gradient, BACKWARD, sent.aux)
    with pytest.raises(NeedAux):
        decode(encoder("fp32", Direction.BACKWARD).encode(gradient, BACKWARD).payload, BACKWARD, sent.aux)
    with pytest.raises(CodecError):
        aux_from_bytes((8, 64), b"short")


def test_a_reusing_backward_message_cannot_be_encoded_without_the_mask() -> None:
    with pytest.raises(NeedAux):
        encoder("topk10", Direction.BACKWARD).encode(torch.ones(4, 4), BACKWARD)


def test_scopes() -> None:
    assert encoder("topk10").scope is Scope.MICROBATCH
    assert encoder("topk10-separate").scope is Scope.NONE
    assert all(encoder(spec).scope.free_routes for spec in ("topk10", "quant8", "lowrank8-lep", "ef-topk10"))
    assert not any(encoder(spec).scope.free_routes for spec in ("ef21-topk10", "aqsgd-quant4"))
