"""Codecs for the gradients that the replicas of a stage all-reduce.

    none        the numbers as they are, in their own dtype (exact sums travel as fp64)
    bf16  int8  every number rounded; int8 with one scale per group of 128
    topk64      64 of every 4096 in two bits each, what is left out is sent later (about 144 times below fp32)
    powersgd32  two factors of rank 32 per matrix, see powersgd.py
    lowrank100  two factors of four bits a number per matrix, 0.1 bytes per number of it, see reduce/lowrank.py

All but the last two work on any slice of the flat gradient, and `decode` of the package reads their payloads. Nothing
here changes state before `commit`: an all-reduce that is repeated with another roster starts from the same error. An
error that was last used more than MAX_AGE optimizer steps ago is dropped, as between stages: its weights have moved on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from swarmtrain.codec.api import MAX_AGE, Direction, Encoder, MessageContext
from swarmtrain.codec.chunktopk import CHUNK, chunk_topk_bytes, encode_chunk_topk
from swarmtrain.codec.errors import CodecError, CodecSpecError
from swarmtrain.codec.payload import header_bytes
from swarmtrain.codec.registry import decode, make_encoder
from swarmtrain.codec.spec import MAX_RANK, CastSpec, CodecSpec, QuantSpec
from swarmtrain.codec.tensors import plain

ERROR_DECAY = 0.95  # per step, as in SparseLoCo: what is never sent fades out
_CONTEXT = MessageContext(0, Direction.BACKWARD)
_ELEMENTWISE: dict[str, CodecSpec] = {"none": CastSpec("raw"), "bf16": CastSpec("bf16"), "int8": QuantSpec(8)}
_LARGEST = {"topk": CHUNK, "powersgd": MAX_RANK, "lowrank": 1000}
_ALLOWED = (
    "allowed: none, bf16, int8, topkK (K of 4096, as in topk64), powersgdR (rank R, as in powersgd32), "
    "lowrankB (B thousandths of a byte per number, as in lowrank100)"
)


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """`kind` is none, bf16, int8, topk, powersgd or lowrank; `size` is the number after it."""

    kind: str
    size: int = 0

    @property
    def lossy(self) -> bool:
        """False if sums keep every bit."""
        return self.kind != "none"

    @property
    def remembers(self) -> bool:
        """Whether what was left out of a step is kept for the next one."""
        return self.in_factors or self.kind == "topk"

    @property
    def in_factors(self) -> bool:
        """Whether matrices travel as two factors; then not on slices of the flat gradient."""
        return self.kind in ("powersgd", "lowrank")

    def __str__(self) -> str:
        return f"{self.kind}{self.size}" if self.size else self.kind


def parse_gradient_spec(text: str) -> GradientSpec:
    """The codec that `text` names. Raises CodecSpecError that says what is allowed."""
    if text in _ELEMENTWISE:
        return GradientSpec(text)
    match = re.fullmatch(r"(topk|powersgd|lowrank)([1-9]\d{0,3})", text, re.ASCII)
    if match is None or int(match[2]) > _LARGEST[match[1]]:
        raise CodecSpecError(f"gradient codec {text!r} is not one", fix=_ALLOWED)
    return GradientSpec(match[1], int(match[2]))


class GradientEncoder:
    """One peer's encoder for its stage's flat gradient of `num_elements`, in slices of any cut.

    State: for topk the error of the whole gradient, changed by `commit` only. Not for factors (see PowerSGDRound).
    """

    def __init__(self, spec: GradientSpec, num_elements: int) -> None:
        if spec.in_factors:
            raise CodecError(f"{spec.kind} works on matrices, not on slices: use PowerSGDRound")
        self.spec = spec
        self.num_elements = num_elements
        self._error = torch.zeros(num_elements) if spec.kind == "topk" else None
        self._proposed: dict[int, torch.Tensor] = {}  # start of a slice -> its new error
        self._sent: dict[int, bytes] = {}  # start of a slice -> its payload, until `take_back`
        self._step = self._used_at = 0
        self._elementwise = _elementwise_encoder(spec)

    @property
    def error(self) -> torch.Tensor | None:
        """What has been left out so far; None for codecs without feedback. Not to be changed."""
        return self._error

    def begin(self, step: int) -> None:
        """An attempt to reduce the gradient of optimizer step `step`. One that was not committed is given up."""
        self.abort()
        self._step = step
        if self._error is not None and is_outdated(self._used_at, step):
            self._error.zero_()

    def encode(self, part: torch.Tensor, start: int) -> bytes:
        """The payload of the slice `part` (one-dimensional) that begins at `start`. Same call, same bytes."""
        if part.dim() != 1 or start < 0 or start + part.numel() > self.num_elements:
            raise CodecError(
                f"a slice of shape {tuple(part.shape)} at {start} is not within {self.num_elements} numbers"
            )
        if self._elementwise is not None:
            return self._elementwise.encode(part, _CONTEXT).payload
        assert self._error is not None
        wanted = plain(part) + ERROR_DECAY * self._error[start : start + part.numel()]  # (slice,)
        payload = encode_chunk_topk(wanted, part.dtype, self.spec.size)
        self._proposed[start] = wanted - decode(payload, _CONTEXT).tensor
        self._sent[start] = payload
        return payload

    def take_back(self, where: torch.Tensor, start: int) -> None:
        """The values at `where` of the slice at `start` did not get into the sum: they count as left out."""
        payload, error = self._sent.pop(start, None), self._proposed.get(start)
        if payload is not None and error is not None:
            error += torch.where(where, decode(payload, _CONTEXT).tensor, 0.0)

    def commit(self) -> None:
        """The step was applied: the slices encoded since the last commit or abort leave their new errors."""
        for start, error in self._proposed.items():
            assert self._error is not None
            self._error[start : start + error.numel()] = error
            self._used_at = self._step
        self._proposed.clear()
        self._sent.clear()

    def abort(self) -> None:
        """The all-reduce was given up: restore the state before `begin`."""
        self._proposed.clear()
        self._sent.clear()

    def reset(self) -> None:
        """Forget the error: the peer changed stage, was restored, or the run was rolled back."""
        self._proposed.clear()
        self._sent.clear()
        if self._error is not None:
            self._error.zero_()

    def max_bytes(self, num_elements: int) -> int:
        """Length of the payload of a slice (for `none`: at most)."""
        if self._elementwise is not None:
            return self._elementwise.max_bytes((num_elements,))
        return header_bytes(1) + chunk_topk_bytes(num_elements, self.spec.size)


def is_outdated(used_at: int, step: int) -> bool:
    """Whether an error that was last used in step `used_at` is too old for step `step`. Back in time is a roll-back."""
    return not 0 <= step - used_at <= MAX_AGE


def _elementwise_encoder(spec: GradientSpec) -> Encoder | None:
    inner = _ELEMENTWISE.get(spec.kind)
    return None if inner is None else make_encoder(inner, boundary=0, direction=Direction.BACKWARD)
