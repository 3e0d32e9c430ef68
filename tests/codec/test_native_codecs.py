"""Machine code and Python compute the same bits, and nothing depends on there being machine code."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import payload, quant
from swarmtrain.codec.errors import NonFiniteTensor
from swarmtrain.native import native

from .generators import KINDS, numbers

needs_native = pytest.mark.skipif(native() is None, reason="there is no C compiler")

ENCODE = """
import hashlib, torch
from swarmtrain.codec import Direction, MessageContext, decode, make_encoder, parse_spec
from swarmtrain.native import native
context = MessageContext(0, Direction.FORWARD)
tensor = torch.randn(70, 1024, generator=torch.Generator().manual_seed(5))
encoded = make_encoder(parse_spec("quant8"), boundary=0, direction=Direction.FORWARD).encode(tensor, context).payload
decoded = decode(encoded, context).tensor
print(native() is not None, hashlib.sha256(encoded + decoded.numpy().tobytes()).hexdigest())
"""


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quant, payload):
        monkeypatch.setattr(module, "native", lambda: None)


@needs_native
@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(4096, 9000),
    group=st.sampled_from([8, 64, 128, 4096]),
    seed=st.integers(0, 99),
)
def test_codes_scales_and_numbers_are_the_same(kind: str, size: int, group: int, seed: int) -> None:
    values = numbers(kind, (size,), seed).to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        return
    found = quant.quantize(values, 8, group).copy()
    decoded = quant.dequantize(found, size, 8, group)
    with pytest.MonkeyPatch.context() as patch:
        in_python(patch)
        expected = quant.quantize(values, 8, group).copy()
        again = quant.dequantize(expected, size, 8, group)
    assert (found == expected).all()
    assert torch.equal(decoded.view(torch.int32), again.view(torch.int32))


@needs_native
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 4095, 5000])
def test_numbers_that_are_not_finite_are_refused(bad: float, where: int) -> None:
    values = torch.zeros(5001)
    values[where] = bad
    with pytest.raises(NonFiniteTensor):
        quant.quantize(values, 8, 128)


@needs_native
@pytest.mark.parametrize("size", [(1 << 16) + 1, (1 << 16) + 4096, 1 << 20, (1 << 20) + 4095])
def test_checksums_are_the_same(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    body = memoryview(hashlib.shake_128(b"body").digest(size))
    head = memoryview(bytes(40))
    found = payload._checksum(head, body)
    in_python(monkeypatch)
    assert payload._checksum(head, body) == found


def test_without_a_compiler_the_bits_are_the_same(tmp_path: Path) -> None:
    def run(**environment: str) -> list[str]:
        variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment}
        command = [sys.executable, "-c", ENCODE]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.split()

    usual, off, without = run(), run(SWARMTRAIN_NATIVE="off"), run(CC="/no/such/compiler")
    assert [off[0], without[0]] == ["False", "False"]
    assert usual[1] == off[1] == without[1]


@needs_native
def test_a_cache_that_others_can_write_to_is_not_executed_from(tmp_path: Path) -> None:
    directory = tmp_path / "swarmtrain" / "native"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", ENCODE], env=variables, capture_output=True, text=True, check=True)
    assert found.stdout.split()[0] == "False"
    assert not list(directory.iterdir())
