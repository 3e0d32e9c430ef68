"""The numeric class tells machines apart that compute other bits, and only these."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from needs import needs_bf16

from swarmtrain.model.numeric_class import numeric_class
from swarmtrain.run.presets import preset

from .chains import tiny

BF16 = "model.precision=bf16"
PROGRAM = """
import torch
from swarmtrain.model.numeric_class import numeric_class
from swarmtrain.run.presets import preset
torch.set_num_threads(1)
print(numeric_class(preset("nano", ["model.precision=bf16"])))
"""


def test_the_same_process_finds_the_same_class_again() -> None:
    assert numeric_class(tiny()) == numeric_class(tiny())
    assert numeric_class(tiny()) != numeric_class(tiny("model.hidden_size=32"))


@needs_bf16()
def test_the_class_is_that_of_the_runs_precision() -> None:
    assert numeric_class(tiny(BF16)) == numeric_class(tiny(BF16))
    assert numeric_class(tiny(BF16)) != numeric_class(tiny())


@needs_bf16()
def test_attention_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has kernels of its own."""
    plain, real = numeric_class(tiny(BF16)), torch.nn.functional.scaled_dot_product_attention

    def other(*heads: torch.Tensor, is_causal: bool) -> torch.Tensor:
        return real(*heads, is_causal=is_causal) * (1 + 2**-7)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", other)
    assert numeric_class(tiny(BF16)) != plain


@needs_bf16()
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no vector kernels to do without")
def test_a_processor_with_other_products_in_bf16_is_of_another_class() -> None:
    settings = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert len(other.stdout.strip()) == 16
    assert other.stdout.strip() != numeric_class(preset("nano", [BF16]))
