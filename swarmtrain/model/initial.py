"""Initial values: every tensor is drawn on the CPU from (run seed, full name) alone.

So any split into stages gives the same model, and a peer that joins at step 0 downloads nothing. The draw uses integer
arithmetic: `torch.randn` gives other bits on processors with other vector instructions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from swarmtrain.model.layout import Role, TensorSpec
from swarmtrain.run.manifest import Manifest

_DRAW_CHUNK = 1 << 16  # elements drawn at once; part of the definition, since it orders the random words


def draw_normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Normal-like fp32 numbers, mean 0 and variance 1, that depend on (seed, name, shape) only.

    Each is the sum of twelve 16-bit uniform integers, scaled by a power of two: exact, so the same on every processor.
    The tails end at 6; the fourth moment is 2.9 instead of 3.
    """
    values = torch.empty(math.prod(shape), dtype=torch.float32, device="cpu")
    start = 0
    for chunk in normal_chunks(seed, name, values.numel()):
        values[start : start + chunk.numel()] = chunk
        start += chunk.numel()
    return values.view(shape)


def normal_chunks(seed: int, name: str, count: int) -> Iterator[Tensor]:
    """The numbers of `draw_normal` in order, some at a time."""
    generator = _generator(seed, name)
    for start in range(0, count, _DRAW_CHUNK):
        size = min(_DRAW_CHUNK, count - start)
        words = torch.empty(3 * size, dtype=torch.int64).random_(-(2**63), None, generator=generator)
        pieces = words.view(torch.int16).view(12, -1).unbind()
        total = pieces[0].int()
        for piece in pieces[1:]:
            total += piece
        # A piece lies in [-2**15, 2**15): mean -1/2, variance (2**32 - 1) / 12.
        yield total.float().add_(6.0).mul_(2.0**-16)


def draw_bytes(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Random bytes, uint8, that depend on (seed, name, shape) only."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=_generator(seed, name))
    return words.view(torch.uint8)[:count].view(shape)


def _generator(seed: int, name: str) -> torch.Generator:
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(key, "little") >> 1)


def initial_tensor(manifest: Manifest, spec: TensorSpec, basis: Tensor | None) -> Tensor:
    """The value of `spec` at step 0, on the CPU: fp32, or fp64 where it is a product that is to be rounded once.

    Tensors that live in S as dense matrices are built from the same draw as their factored twins, so that the two
    constrained kinds start as the same function.
    """
    seed = manifest.run.seed
    if spec.spread == 0.0:
        return torch.ones(spec.shape)
    if spec.role is Role.FACTOR_ROWS:
        return draw_normal(seed, spec.name, spec.shape) * _factor_scale(manifest, spec)
    if spec.role is Role.ROWS_IN_S:
        assert basis is not None
        factor = draw_normal(seed, spec.name, (spec.shape[0], basis.shape[1])) * _factor_scale(manifest, spec)
        return factor.double() @ basis.T.double()  # (V, d)
    if spec.role is Role.COLUMNS_IN_S:
        assert basis is not None
        factor = draw_normal(seed, spec.name, (basis.shape[1], spec.shape[1])) * _factor_scale(manifest, spec)
        return basis.double() @ factor.double()  # (d, in)
    if spec.role in (Role.DECODER, Role.ENCODER):
        assert basis is not None
        return basis.clone() if spec.role is Role.DECODER else basis.T.contiguous()
    return draw_normal(seed, spec.name, spec.shape) * spec.spread


def _factor_scale(manifest: Manifest, spec: TensorSpec) -> float:
    return spec.spread * math.sqrt(manifest.model.hidden_size / manifest.boundary.k)
