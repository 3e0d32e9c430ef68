"""What one microbatch holds on a stage: arithmetic, in bytes. Tests hold it against what a running stage allocates.

Between forward and backward a stage keeps either its whole graph, or the inputs of its layers only: then backward
computes one layer at a time again. Backward frees a layer's graph as it passes, and leaves gradients of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from swarmtrain.model.layout import StagePlan
from swarmtrain.model.loss import chunk_rows
from swarmtrain.run.manifest import Manifest

_FP32 = 4


@dataclass(frozen=True, slots=True)
class Activations:
    """Of one microbatch on one stage."""

    kept_bytes: int  # from forward to backward
    peak_bytes: int  # the most that forward and backward hold, with what is kept and the gradients of parameters


def activations(manifest: Manifest, plan: StagePlan, *, recomputes: bool) -> Activations:
    """Count."""
    counted = _Count(manifest, plan, recomputes)
    return Activations(counted.kept, max(counted.moments()))


class _Count:
    """d = hidden size, f = MLP width, w = width of the stream, v = vocabulary; in bytes per number of a token.

    Factors of products have the width of `model.precision`, everything between them is fp32.
    """

    def __init__(self, manifest: Manifest, plan: StagePlan, recomputes: bool) -> None:
        self.manifest, self.plan, self.recomputes = manifest, plan, recomputes
        model, kind = manifest.model, manifest.boundary.kind
        self.factor = 2 if manifest.is_rounded else _FP32
        self.tokens = manifest.batch.sequences_per_microbatch * model.sequence_length
        self.row = _FP32 * self.tokens
        self.d, self.f = model.hidden_size, manifest.ffn_size
        self.w = manifest.boundary.k if kind == "subspace" else self.d
        # Two norms keep input and normed, and products what they read: the output of the norm; then queries, keys,
        # values (of every head) and what was attended.
        norm = 2 * self.row * self.d
        self.attention = norm + self.of_factors(5 * self.d) + self.row * model.num_heads
        self.mlp = norm + self.of_factors(self.d + 4 * self.f)
        self.ends, self.freed_first = 0, 0
        if plan.is_last:
            self.ends = norm + self.of_factors(self.d)  # the last norm; the gradient of what the head reads
            self.freed_first = self.ends
        elif kind == "learned":
            self.ends = self.of_factors(self.d)  # what the encoder reads
            self.freed_first = self.ends
        elif kind == "dense":
            self.ends = self.row * self.d  # the output
        if recomputes and kind == "subspace":
            self.ends += self.row * self.d  # token vectors, from which layers read the stream
        if kind != "dense":  # what came in, what goes out, token ids
            self.ends += self.row * (manifest.boundary.k * ((not plan.is_first) + (not plan.is_last)) + 2)
        self.head = _FP32 * model.vocab_size * self.d if plan.is_last else 0

    def of_factors(self, numbers: int) -> int:
        """Bytes of so many numbers per token."""
        return self.factor * self.tokens * numbers

    def kept_of(self, layer: int) -> int:
        """What a layer keeps."""
        if self.recomputes:
            return self.row * (self.d if self.plan.is_tail(layer) else self.w)
        return self.attention + self.mlp

    @property
    def kept(self) -> int:
        """What all layers keep. On the last stage backward comes at once, and the head's gradient is not counted."""
        return sum(map(self.kept_of, self.plan.layers)) + self.ends

    def moments(self) -> Iterator[int]:
        """The bytes at the moments at which they can be most. A parameter's gradient goes as it is added."""
        kept = self.kept
        if self.plan.is_last:
            model = self.manifest.model
            rows = min(chunk_rows(model.vocab_size), self.tokens)
            weight = self.factor * model.vocab_size * self.d
            made = weight if model.tie_embeddings and self.manifest.boundary.kind != "dense" else 0
            yield kept + self.head + made + 2 * _FP32 * rows * model.vocab_size
            if self.factor < _FP32:  # rounded, before it is added
                yield kept + self.head + made + weight
        if self.recomputes:  # a forward without a graph: one layer's MLP is the most
            yield kept + self.row * 2 * self.d + self.of_factors(3 * self.f)
        kept -= self.freed_first
        for layer in reversed(self.plan.layers):
            again = self.attention + self.mlp if self.recomputes else 0
            down = self._largest(rf"layers\.{layer}\.mlp\.down")
            yield kept + again + down + self.of_factors(self.f) + self.row * self.w
            yield kept + again + self.of_factors(2 * self.f) + self.row * self.w  # gradients of two of the MLP
            matrix = self._largest(rf"layers\.{layer}\.mlp\.(gate|up)")
            yield kept + again + matrix + self.of_factors(self.f + 2 * self.d) + self.row * self.w
            # Then those of queries, keys, values and what was attended.
            found = self._largest(rf"layers\.{layer}\.attention")
            yield kept + found + again - self.mlp + self.of_factors(4 * self.d) + self.row * self.w
            kept -= self.kept_of(layer)
        # Of token vectors it is added up in fp32.
        wide = 0 if self.factor == _FP32 or self.plan.is_last else self._largest("embedding") * _FP32 // self.factor
        yield (
            self._largest(r"(?!layers|head|embedding)" if self.plan.is_last else r"(?!layers)")
            + wide
            + self.row * self.w
        )

    def _largest(self, pattern: str) -> int:
        """Gradient of the largest parameter of that name, in the width of its product."""
        found = [spec.num_elements for spec in self.plan.tensors if re.match(pattern, spec.name)]
        return self.factor * max(found, default=0)
