"""The state of a stage between steps: parameters, moments, step, basis. Flat, hashed, the same on every replica.

The digest is a hash over fixed-size chunks of the state's bytes, which is what a newcomer verifies piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarmtrain.errors import CheckpointError
from swarmtrain.model.buffers import Slot, StateLayout, chunk_digests, state_digest
from swarmtrain.model.exact import Accumulator, make_accumulator
from swarmtrain.model.initial import draw_normal, initial_tensor, token_table
from swarmtrain.model.layout import StagePlan
from swarmtrain.model.stage import Stage
from swarmtrain.model.subspace import first_basis
from swarmtrain.run.manifest import Manifest


class StageState:
    """The state of one stage and the module that computes with it."""

    def __init__(
        self, manifest: Manifest, index: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.manifest, self.device, self.dtype = manifest, torch.device(device), dtype
        self.layout = StateLayout(manifest, index, dtype)
        self.plan: StagePlan = self.layout.plan
        self.slots: list[Slot] = self.layout.slots
        self.step = 0  # optimizer steps applied so far
        self.basis_epoch = 0  # moves of U so far
        self.buffers = [buffer.to(self.device) for buffer in self.layout.empty()]
        self.parameters, self.first_moment, self.second_moment = self.buffers[:3]
        self.basis: Tensor | None = None  # U, (d, k)
        self.gram: Tensor | None = self.buffers[4] if self.layout.tracks else None  # C since U last moved
        table: Tensor | None = None  # T, (V, d)
        if self.layout.has_basis:
            self.basis = self.buffers[3].view(manifest.model.hidden_size, manifest.boundary.k)
            self.basis.copy_(first_basis(manifest))
        if manifest.boundary.kind != "dense":
            table = token_table(manifest).to(self.device, dtype)
        self.right_factors: Tensor | None = self.buffers[-1] if self.layout.factored else None  # PowerSGD's Q
        self._fill_initial()
        self.module = Stage(manifest, self.plan, self.basis, table)
        self._bind()

    @property
    def tracks(self) -> bool:
        """Whether this stage gathers the Gram matrix of its gradients for subspace tracking."""
        return self.layout.tracks

    @property
    def gradient_size(self) -> int:
        """Elements of the flat gradient: all parameters, and the Gram matrix where it is gathered."""
        return self.layout.gradient_size

    @property
    def gradient_offsets(self) -> list[int]:
        """Offset of every tensor in the flat gradient, in slot order; the Gram matrix last."""
        offsets = [slot.offset for slot in self.slots]
        return [*offsets, self.parameters.numel()] if self.gram is not None else offsets

    def new_accumulator(self) -> Accumulator:
        """An empty sum of this stage's gradients."""
        return make_accumulator(self.manifest.batch.accumulate, self.gradient_size, self.device)

    def view(self, name: str) -> Tensor:
        """A parameter by its full name."""
        slot = next(slot for slot in self.slots if slot.spec.name == name)
        return self.parameters[slot.span].view(slot.spec.shape)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that a checkpoint keeps, in a fixed order, as views."""
        return self.layout.named(self.buffers)

    def load(self, tensors: dict[str, Tensor], *, step: int, basis_epoch: int) -> None:
        """Replace the whole state. Names, shapes and types must match exactly; nothing changes if they do not."""
        own = dict(self.named_tensors())
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())
            raise CheckpointError(f"the state's tensors differ from this stage's, first at {odd[0]!r}")
        for name, mine in own.items():
            theirs = tensors[name]
            if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                raise CheckpointError(
                    f"{name} is {tuple(theirs.shape)} {theirs.dtype}, needs {tuple(mine.shape)} {mine.dtype}"
                )
        for name, mine in own.items():
            mine.copy_(tensors[name])
        self.step, self.basis_epoch = step, basis_epoch

    def load_buffers(self, buffers: Sequence[Tensor], *, step: int, basis_epoch: int) -> None:
        """Replace the whole state by downloaded buffers of the same layout."""
        for mine, theirs in zip(self.buffers, buffers, strict=True):
            mine.copy_(theirs)
        self.step, self.basis_epoch = step, basis_epoch

    def chunk_digests(self) -> list[bytes]:
        """SHA-256 of every chunk of the state's bytes, in order."""
        return chunk_digests(self.layout, self.buffers)

    def digest(self) -> str:
        """One name for the whole state: equal exactly when step, basis epoch and every byte are equal."""
        return state_digest(self.plan.index, self.step, self.basis_epoch, self.chunk_digests())

    def _fill_initial(self) -> None:
        basis = first_basis(self.manifest) if self.manifest.boundary.kind != "dense" else None
        for slot in self.slots:
            value = initial_tensor(self.manifest, slot.spec, basis)
            self.parameters[slot.span] = value.reshape(-1).to(self.device, self.dtype)
        start = 0
        for slot in self.layout.factored:
            assert self.right_factors is not None
            shape = (slot.spec.shape[1], self.layout.powersgd_rank)
            factor = draw_normal(self.manifest.run.seed, f"right_factor.{slot.spec.name}", shape)
            self.right_factors[start : start + factor.numel()] = factor.reshape(-1)
            start += factor.numel()

    def _bind(self) -> None:
        """Make the module's parameters views of the flat buffer."""
        parameters = dict(self.module.named_parameters())
        names = [slot.spec.name for slot in self.slots]
        assert sorted(parameters) == sorted(names), "the layout and the module disagree"
        for slot in self.slots:
            parent, _, leaf = slot.spec.name.rpartition(".")
            view = self.parameters[slot.span].view(slot.spec.shape)
            setattr(self.module.get_submodule(parent), leaf, torch.nn.Parameter(view))
