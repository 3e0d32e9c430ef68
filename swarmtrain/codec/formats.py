"""fp32, fp16 and bf16 as formats for numbers on the wire.

fp16 goes with one power of two for the whole tensor, chosen so that the largest magnitude just fits. Scaling by it is
exact, so an fp16 tensor arrives unchanged, and gradients at 1e-8 keep their eleven bits instead of vanishing.
"""

from __future__ import annotations

import math

import torch

from swarmtrain.codec.tensors import largest_magnitude

FORMAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_FP16_MAX = 65504.0
_FP16_SCALED_MAX = _FP16_MAX * 2.0**112  # just below the largest fp32 number
_BF16_MAX = float(torch.finfo(torch.bfloat16).max)  # just below the largest fp32 number
_MAX_EXPONENT = 126  # 2^±126 are normal fp32 numbers, and 1e-45 * 2^126 is still an fp16 number


def to_format(numbers: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """fp32 numbers in the format `name`, and the exponent that `from_format` needs.

    The last few numbers below the largest fp32 one saturate: they are 0.4 % above what bf16 can hold.
    Raises NonFiniteTensor for NaN and infinity.
    """
    largest = largest_magnitude(numbers)
    if name == "fp32":
        return numbers, 0
    if name == "bf16":
        if largest > _BF16_MAX:
            numbers = numbers.clamp(-_BF16_MAX, _BF16_MAX)
        return numbers.to(torch.bfloat16), 0
    if largest > _FP16_SCALED_MAX:
        numbers = numbers.clamp(-_FP16_SCALED_MAX, _FP16_SCALED_MAX)
        largest = _FP16_SCALED_MAX
    exponent = _fp16_exponent(largest)
    if exponent:
        numbers = numbers * 2.0**-exponent
    return numbers.to(torch.float16), exponent


def from_format(numbers: torch.Tensor, exponent: int) -> torch.Tensor:
    """fp32 numbers from what `to_format` gave. Shares memory if they are fp32 already."""
    wide = numbers.to(torch.float32)
    return wide.mul_(2.0**exponent) if exponent else wide


def _fp16_exponent(largest: float) -> int:
    """The smallest e with largest * 2^-e <= the largest fp16 number."""
    if largest == 0.0:
        return 0
    exponent = math.frexp(largest)[1] - 16  # largest * 2^-exponent lies in [2^15, 2^16)
    if math.ldexp(largest, -exponent) > _FP16_MAX:
        exponent += 1
    return max(-_MAX_EXPONENT, exponent)
