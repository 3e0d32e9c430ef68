"""The flat buffers of a stage's state: where every tensor lies, and how the state is cut into chunks. No allocation.

With `schedule.delay` the weights that open steps compute with belong to the state: whoever has it can compute every
open step. A checkpoint at a barrier does not hold them: there they are the parameters. Where microbatches compute in
bf16, such weights are bf16 copies.

All tensors of a stage lie in one flat buffer each for parameters, first and second moments, every tensor at a multiple
of 64 bytes, so that kernels see the same alignment in every split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmtrain.model.layout import GRAM, StagePlan, TensorSpec, plan_stages
from swarmtrain.model.memory import check_memory, does_not_fit, free_bytes
from swarmtrain.model.reduce_bytes import factor_rank
from swarmtrain.run.manifest import Manifest

_ALIGNED_BYTES = 64
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the flat buffers. Row-averaged tensors have a shorter second moment, Muon's none."""

    spec: TensorSpec
    offset: int
    moment_offset: int
    moment_size: int

    @property
    def span(self) -> slice:
        """Of parameters, gradients and first moments."""
        return slice(self.offset, self.offset + self.spec.num_elements)

    @property
    def moment_span(self) -> slice:
        """Of second moments."""
        return slice(self.moment_offset, self.moment_offset + self.moment_size)


@dataclass(frozen=True)
class BufferSpec:
    """One flat buffer of the state."""

    name: str
    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """On the wire and in memory."""
        return self.num_elements * self.dtype.itemsize


WEIGHTS, NEXT_WEIGHTS = "weights", "next_weights"  # buffers: what this step, and the next one, compute with


class StateLayout:
    """The buffers of one stage, in their fixed order: parameters, moments, and where they exist basis and Gram,
    PowerSGD's factors, and the weights of the open steps."""

    def __init__(self, manifest: Manifest, index: int, dtype: torch.dtype = torch.float32) -> None:
        self.manifest = manifest
        self.plan: StagePlan = plan_stages(manifest)[index]
        self.weights_dtype = torch.bfloat16 if manifest.is_rounded else dtype  # of what microbatches compute with
        self.slots, size, moment_size = _lay_out(self.plan, _ALIGNED_BYTES // (2 if manifest.is_rounded else 4))
        d = manifest.model.hidden_size
        self.has_basis = manifest.has_subspace
        self.tracks = self.plan.is_last and manifest.boundary.track_every > 0
        self.num_fused = _num_fused(manifest, self.plan, self.slots)
        self.buffers = [
            BufferSpec("parameters", size, dtype),
            BufferSpec("first_moment", size, dtype),
            BufferSpec("second_moment", moment_size, dtype),
        ]
        if self.has_basis:
            self.buffers.append(BufferSpec("basis", d * manifest.boundary.k, dtype))
        if self.tracks:
            self.buffers.append(BufferSpec("gram", d * d, torch.float64))
        self.factored = [slot for slot in self.slots if self.rank_of(slot)]
        if self.factored:
            self.buffers.append(BufferSpec("right_factors", self.right_elements, torch.float32))
        self.is_delayed = manifest.schedule.delay > 0
        if self.is_delayed:
            self.buffers.append(BufferSpec(WEIGHTS, size, self.weights_dtype))
            if manifest.schedule.predict:  # else they are the parameters
                self.buffers.append(BufferSpec(NEXT_WEIGHTS, size, self.weights_dtype))

    def index(self, name: str) -> int | None:
        """Where a buffer is among all, if this stage has it."""
        return next((index for index, buffer in enumerate(self.buffers) if buffer.name == name), None)

    @property
    def right_elements(self) -> int:
        """Of all right factors that the gradient codec keeps for this stage."""
        return sum(self.rank_of(slot) * slot.spec.shape[1] for slot in self.factored)

    def rank_of(self, slot: Slot) -> int:
        """Of the two factors that the gradient of this matrix travels as; 0 if it travels exactly."""
        return factor_rank(self.manifest, slot.spec) if slot.offset >= self.num_fused else 0

    @property
    def gradient_size(self) -> int:
        """Elements of the flat gradient: all parameters, and the Gram matrix where it is gathered."""
        return sum(buffer.num_elements for buffer in self.buffers if buffer.name in ("parameters", "gram"))

    @property
    def num_bytes(self) -> int:
        """Of the whole state."""
        return sum(buffer.num_bytes for buffer in self.buffers)

    def keeps_weights(self, step: int) -> bool:
        """Whether the open steps compute with other weights than the parameters of `step`. Never at a barrier."""
        manifest = self.manifest
        return self.is_delayed and (manifest.weights_step(step) != step or manifest.is_predicted(step + 1))

    def named(self, buffers: Sequence[Tensor], step: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state after `step` steps by name, as views of `buffers`: what a checkpoint keeps."""
        parameters, first, second = buffers[:3]
        for slot in self.slots:
            yield f"parameter/{slot.spec.name}", parameters[slot.span].view(slot.spec.shape)
        for slot in self.slots:
            yield f"first_moment/{slot.spec.name}", first[slot.span].view(slot.spec.shape)
        for slot in filter(lambda slot: slot.moment_size, self.slots):
            yield f"second_moment/{slot.spec.name}", second[slot.moment_span]
        if self.has_basis:
            yield "subspace/basis", buffers[3].view(self.manifest.model.hidden_size, self.manifest.boundary.k)
        if self.tracks:
            yield GRAM, buffers[4]
        if (factors := self.index("right_factors")) is not None:
            yield "reduce/right_factors", buffers[factors]
        for name in (WEIGHTS, NEXT_WEIGHTS) if self.keeps_weights(step) else ():
            if (weights := self.index(name)) is not None:
                yield f"delay/{name}", buffers[weights]

    def complete(self, buffers: Sequence[Tensor], step: int) -> None:
        """Fill in what a checkpoint leaves out, from what it holds: at a barrier all weights are the parameters."""
        for name in () if self.keeps_weights(step) else (WEIGHTS, NEXT_WEIGHTS):
            if (weights := self.index(name)) is not None:
                buffers[weights].copy_(buffers[0])

    def chunks(self) -> list[tuple[int, int, int]]:
        """(buffer, first byte, byte after the last) of every chunk; a chunk never spans two buffers."""
        return [
            (index, start, min(start + CHUNK_BYTES, buffer.num_bytes))
            for index, buffer in enumerate(self.buffers)
            for start in range(0, buffer.num_bytes, CHUNK_BYTES)
        ]

    def empty(self) -> list[Tensor]:
        """Fresh buffers on the CPU, filled with zeros. HardwareError if the machine has not that much memory."""
        what = f"the state of stage {self.plan.index}"
        check_memory(self.num_bytes, what)
        try:
            return [torch.zeros(buffer.num_elements, dtype=buffer.dtype) for buffer in self.buffers]
        except RuntimeError as error:  # torch raises it when an allocation fails, e.g. because of a `ulimit`
            raise does_not_fit(self.num_bytes, what, free_bytes()) from error


def as_bytes(buffer: Tensor) -> memoryview:
    """The raw bytes of a flat tensor (a view on the CPU, a copy from elsewhere)."""
    return memoryview(buffer.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def chunk_digests(layout: StateLayout, buffers: Sequence[Tensor]) -> list[bytes]:
    """SHA-256 of every chunk, in order."""
    raw = [as_bytes(buffer) for buffer in buffers]
    return [hashlib.sha256(raw[index][start:stop]).digest() for index, start, stop in layout.chunks()]


def state_digest(stage: int, step: int, basis_epoch: int, chunks: Sequence[bytes]) -> str:
    """One name for a whole state: equal exactly when step, basis epoch and every byte are equal."""
    root = hashlib.sha256(f"{stage}:{step}:{basis_epoch}:".encode())
    for chunk in chunks:
        root.update(chunk)
    return root.hexdigest()


def _lay_out(plan: StagePlan, alignment: int) -> tuple[list[Slot], int, int]:
    """Slots, and elements of parameters and of second moments; every slot starts at a multiple of `alignment`."""
    slots, offset, moment_offset = [], 0, 0
    for spec in plan.tensors:
        moment_size = spec.second_moment_size
        slots.append(Slot(spec, offset, moment_offset, moment_size))
        offset = _aligned(offset + spec.num_elements, alignment)
        moment_offset = _aligned(moment_offset + moment_size, alignment)
    return slots, offset, moment_offset


def _num_fused(manifest: Manifest, plan: StagePlan, slots: list[Slot]) -> int:
    """How many elements at the start of the flat gradient the first and the last stage have in common.

    A tied embedding is the first tensor of both; what lies between it and the next one is padding.
    """
    is_shared = manifest.model.tie_embeddings and plan.count > 1 and (plan.is_first or plan.is_last)
    return slots[1].offset if is_shared else 0


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
