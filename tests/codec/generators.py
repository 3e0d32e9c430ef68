"""Nasty tensors, and short names for what every codec test needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from swarmtrain.codec import Aux, Decoded, Direction, Encoder, MessageContext, decode, make_encoder, parse_spec

KINDS = (
    "gaussian",
    "constant",
    "zero",
    "outlier",
    "one-sided",
    "tiny",
    "huge",
    "denormal",
    "ties",
    "mixed scales",
)

# Every codec whose messages any replica can decode.
FREE_SPECS = (
    "fp32",
    "fp16",
    "bf16",
    "raw",
    "quant2",
    "quant3",
    "quant4",
    "quant6",
    "quant8",
    "quant4:group=64",
    "quant8:group=8",
    "minmax2",
    "minmax3",
    "minmax4",
    "minmax6",
    "minmax8",
    "topk10",
    "topk2.5",
    "topk100",
    "topk30-separate",
    "topk10:values=int8",
    "topk10-separate:values=fp32",
    "topk10:values=bf16",
    "lowrank1",
    "lowrank8",
    "lowrank4:factors=fp32",
    "lowrank4:factors=bf16",
    "lowrank4-lep",
    "lowrank4-lep:carry",
    "ef-topk10",
    "ef-quant4",
    "ef-quant2:carry",
    "quant4:critical",
    "lowrank4-lep:critical",
)
STICKY_SPECS = ("ef21-topk10", "ef21-quant4", "aqsgd-quant4", "aqsgd-topk30", "aqsgd-quant2:key=quant8")

# The error is never larger than the tensor.
CONTRACTIONS = tuple(name for name in FREE_SPECS if name.startswith(("quant", "topk", "lowrank")) and "lep" not in name)


def numbers(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A contiguous fp32 tensor of one nasty kind."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    choice = torch.rand(shape, generator=generator)
    match kind:
        case "gaussian":
            return normal
        case "constant":
            return torch.full(shape, 1.5 - 3 * (seed % 2))
        case "zero":
            return torch.zeros(shape)
        case "outlier":
            flat = normal.view(-1)
            if flat.numel():
                flat[seed % flat.numel()] = 10.0 ** (2 + seed % 3)
            return normal
        case "one-sided":
            return normal.relu()
        case "tiny":
            return normal * 10.0 ** (-9 + seed % 5)
        case "huge":
            return normal.clamp(-3, 3) * 1e30
        case "denormal":
            return normal * 1e-41
        case "ties":
            return torch.where(choice > 0.5, 1.0, -1.0)
        case "mixed scales":
            return normal * torch.exp(20 * choice - 10)
        case _:
            raise AssertionError(kind)


@dataclass(frozen=True)
class Case:
    """A tensor that hypothesis can print."""

    kind: str
    shape: tuple[int, ...]
    seed: int
    dtype: torch.dtype = torch.float32
    strided: bool = False

    def tensor(self) -> torch.Tensor:
        plain = numbers(self.kind, self.shape, self.seed)
        if self.dtype is torch.float16:
            plain = plain.clamp(-65504, 65504)
        tensor = plain.to(self.dtype)
        if not self.strided or not self.shape:
            return tensor
        wide = torch.zeros(*self.shape[:-1], 2 * self.shape[-1], dtype=self.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]  # not contiguous


SHAPES = st.one_of(
    st.sampled_from([(), (1,), (1, 1), (0, 4), (3, 0), (2, 0, 5), (1, 1, 1, 1), (7,), (129,), (2, 3, 5, 2)]),
    st.tuples(st.integers(1, 40), st.integers(1, 70)),
    st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 70)),
)


def cases(*, all_dtypes: bool = True) -> st.SearchStrategy[Case]:
    dtypes = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return st.builds(
        Case,
        kind=st.sampled_from(KINDS),
        shape=SHAPES,
        seed=st.integers(0, 1 << 16),
        dtype=st.sampled_from(dtypes if all_dtypes else dtypes[:1]),
        strided=st.booleans(),
    )


def context(
    direction: Direction = Direction.FORWARD, *, step: int = 0, sender: str = "a", receiver: str = "b", **more: object
) -> MessageContext:
    return MessageContext(0, direction, step=step, sender=sender, receiver=receiver, **more)  # type: ignore[arg-type]


def encoder(spec: str, direction: Direction = Direction.FORWARD) -> Encoder:
    return make_encoder(parse_spec(spec), boundary=0, direction=direction)


def direction_of(spec: str) -> Direction:
    """Forward, but gradients for what is meant for them."""
    return Direction.BACKWARD if spec.startswith(("lowrank", "ef-quant")) else Direction.FORWARD


def round_trip(spec: str, tensor: torch.Tensor, aux: Aux | None = None) -> Decoded:
    direction = direction_of(spec)
    encoded = encoder(spec, direction).encode(tensor, context(direction), aux)
    return decode(encoded.payload, context(direction), aux)


def squared(tensor: torch.Tensor) -> float:
    """||x||² in fp64, scaled so that neither huge nor denormal tensors leave its range."""
    return float((tensor.double() ** 2).sum())


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal shapes, dtypes and bits (so that NaN equals NaN, and -0 is not 0)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.contiguous().view(integers), second.contiguous().view(integers))


def elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
