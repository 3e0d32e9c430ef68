"""What holds for every codec, whatever the tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import CodecError, CorruptPayload, Limits, NonFiniteTensor, decode
from swarmtrain.codec.payload import header_bytes

from .generators import (
    CONTRACTIONS,
    FREE_SPECS,
    STICKY_SPECS,
    Case,
    cases,
    context,
    direction_of,
    encoder,
    numbers,
    round_trip,
    same_bits,
    squared,
)

ALL_SPECS = FREE_SPECS + STICKY_SPECS


def context_for(spec: str, shape: tuple[int, ...], **more: object):  # type: ignore[no-untyped-def]
    samples = tuple(range(shape[0])) if spec.startswith("aqsgd") and shape else ()
    return context(direction_of(spec), samples=samples, **more)


@pytest.mark.parametrize("spec", ALL_SPECS)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_shape_dtype_and_size_survive_and_the_input_is_untouched(spec: str, case: Case) -> None:
    tensor = case.tensor()
    if spec.startswith("aqsgd") and not case.shape:
        return
    before = tensor.clone()
    sender = encoder(spec, direction_of(spec))
    encoded = sender.encode(tensor, context_for(spec, case.shape))
    decoded = decode(encoded.payload, context_for(spec, case.shape))
    assert same_bits(tensor, before)
    assert tuple(decoded.tensor.shape) == case.shape
    assert decoded.source_dtype == case.dtype
    assert decoded.tensor.dtype == (case.dtype if spec == "raw" else torch.float32)
    assert decoded.tensor.is_contiguous()
    assert torch.isfinite(decoded.tensor).all()
    assert len(encoded.payload) <= sender.max_bytes(case.shape)
    decoded.tensor.add_(1)  # writable
    assert type(encoded.payload) is bytes


@pytest.mark.parametrize("spec", ALL_SPECS)
@settings(max_examples=12, deadline=None)
@given(case=cases(), count=st.integers(0, 3))
def test_the_same_message_is_the_same_bytes_once_the_first_was_aborted(spec: str, case: Case, count: int) -> None:
    if spec.startswith("aqsgd") and not case.shape:
        return
    tensor = case.tensor()
    sender = encoder(spec, direction_of(spec))
    for index in range(count):  # some history; committed, so that it stays
        history = sender.encode(
            numbers("gaussian", case.shape, index) * 1e-3, context_for(spec, case.shape, step=index)
        )
        sender.commit(history.ticket)
    now = context_for(spec, case.shape, step=count)
    first = sender.encode(tensor, now)
    sender.abort(first.ticket)
    second = sender.encode(tensor, now)
    if spec in FREE_SPECS:
        assert first.payload == second.payload
    else:  # after an abort the receiver's state is unknown: a key-frame, which is always the same
        sender.abort(second.ticket)
        assert sender.encode(tensor, now).payload == second.payload


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_and_leave_no_trace(spec: str, bad: float) -> None:
    good = numbers("gaussian", (4, 33), 1)
    poisoned = good.clone()
    poisoned[2, 17] = bad
    sender, witness = encoder(spec, direction_of(spec)), encoder(spec, direction_of(spec))
    now = context_for(spec, (4, 33))
    for one in (sender, witness):
        one.commit(one.encode(good * 2, now).ticket)
    with pytest.raises(NonFiniteTensor):
        sender.encode(poisoned, now)
    assert sender.encode(good, now).payload == witness.encode(good, now).payload


@pytest.mark.parametrize("spec", [*FREE_SPECS, "ef21-quant4"])
def test_other_than_floating_point_tensors_are_refused(spec: str) -> None:
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(CodecError):
            encoder(spec, direction_of(spec)).encode(torch.ones(4, 4, dtype=dtype), context(direction_of(spec)))


@pytest.mark.parametrize("spec", FREE_SPECS)
def test_encoding_takes_no_part_in_autograd(spec: str) -> None:
    tensor = numbers("gaussian", (4, 16), 3).requires_grad_()
    assert not round_trip(spec, tensor * 2).tensor.requires_grad


@pytest.mark.parametrize("spec", CONTRACTIONS)
@settings(max_examples=25, deadline=None)
@given(case=cases(all_dtypes=False))
def test_the_error_is_never_larger_than_the_tensor(spec: str, case: Case) -> None:
    tensor = case.tensor()
    error = round_trip(spec, tensor).tensor - tensor
    smallest = 2.0**-149  # fp32's own grain, which matters for denormals only
    assert squared(error) <= squared(tensor) * (1 + 1e-3) + tensor.numel() * smallest**2


def test_minmax_is_no_contraction() -> None:
    """The check above can fail: an outlier gives everything small an offset."""
    tensor = numbers("gaussian", (64, 64), 0)
    tensor[0, 0] = 100
    assert squared(round_trip("minmax2", tensor).tensor - tensor) > squared(tensor)


@pytest.mark.parametrize("spec", [name for name in FREE_SPECS if not name.startswith("raw")])
def test_limits_are_checked_against_the_header(spec: str) -> None:
    direction = direction_of(spec)
    payload = encoder(spec, direction).encode(numbers("gaussian", (4, 16), 3), context(direction)).payload
    decode(payload, context(direction), limits=Limits.exactly((4, 16)))
    with pytest.raises(CorruptPayload):
        decode(payload, context(direction), limits=Limits(max_elements=63))
    with pytest.raises(CorruptPayload):
        decode(payload, context(direction), limits=Limits.exactly((16, 4)))


def test_a_header_has_at_most_64_bytes() -> None:
    assert [header_bytes(count) for count in range(9)] == [32, 40, 40, 48, 48, 56, 56, 64, 64]
    with pytest.raises(CodecError):
        encoder("fp32").encode(torch.zeros((1,) * 9), context())


@pytest.mark.parametrize("spec", ["fp32", "quant8", "topk10", "lowrank8"])
def test_bytearrays_and_memoryviews_decode_like_bytes(spec: str) -> None:
    payload = encoder(spec).encode(numbers("gaussian", (40, 70), 3), context()).payload
    plain = decode(payload, context()).tensor
    shifted = memoryview(b"xyz" + payload)[3:]  # not aligned
    for other in (bytearray(payload), memoryview(payload), shifted):
        assert same_bits(decode(other, context()).tensor, plain)
