"""The state of a stage between steps: parameters, moments, step, basis. Flat, hashed, the same on every replica.

The digest is a hash over fixed-size chunks of the state's bytes, which is what a newcomer verifies piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmtrain.errors import CheckpointError
from swarmtrain.model.buffers import NEXT_WEIGHTS, WEIGHTS, Slot, StateLayout, chunk_digests, state_digest
from swarmtrain.model.exact import Accumulator, make_accumulator
from swarmtrain.model.footprint import Offload
from swarmtrain.model.initial import draw_normal, initial_tensor
from swarmtrain.model.layout import StagePlan
from swarmtrain.model.room import Room
from swarmtrain.model.stage import Stage
from swarmtrain.model.subspace import first_basis
from swarmtrain.model.table import token_table
from swarmtrain.run.manifest import Manifest

_VERSIONS = (WEIGHTS, NEXT_WEIGHTS)


@dataclass(frozen=True)
class Weights:
    """A module and the parameters that it computes with: views of one flat buffer."""

    flat: Tensor
    module: Stage
    parameters: list[Tensor]  # in slot order


class StageState:
    """The state of one stage and the modules that compute with it.

    Without a delay every step computes with the parameters themselves. With `schedule.delay` two steps may be open, and
    each has weights of its own: step u's lie in slot u % 2 of `versions`, until step u is applied.
    With `model.precision` = bf16, what microbatches compute with is always a copy, rounded once per step; and with
    `offload`, one on the device.
    """

    def __init__(
        self,
        manifest: Manifest,
        index: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        offload: Offload = Offload.NOTHING,
    ) -> None:
        self.manifest, self.dtype = manifest, dtype
        self.room = Room(device, offload)
        self.layout = StateLayout(manifest, index, dtype)
        self.plan: StagePlan = self.layout.plan
        self.slots: list[Slot] = self.layout.slots
        self.step = 0  # optimizer steps applied so far
        self.basis_epoch = 0  # moves of U so far
        self._flat = [
            buffer.to(self.room.device if spec.name in _VERSIONS else self.room.home)
            for spec, buffer in zip(self.layout.buffers, self.layout.empty(), strict=True)
        ]
        self.parameters, self.first_moment, self.second_moment = self._flat[:3]
        self.basis: Tensor | None = None  # U, (d, k)
        self.gram: Tensor | None = self._flat[4] if self.layout.tracks else None  # C since U last moved
        self._table = token_table(manifest, self.device, dtype)
        if self.layout.has_basis:
            self.basis = self._flat[3].view(manifest.model.hidden_size, manifest.boundary.k)
            self.basis.copy_(first_basis(manifest))
        self._near_epoch = 0  # of the basis on the device
        self._near_basis = self.basis.to(self.device, copy=True) if self._is_apart and self.basis is not None else None
        factors = self.layout.index("right_factors")
        self.right_factors: Tensor | None = None if factors is None else self._flat[factors]  # PowerSGD's Q
        self._fill_initial()
        self.versions = [self._weights(flat) for flat in self._version_buffers()]
        self._own: Weights | None = None  # of the newest parameters, where no version is
        if not self._has_copies:
            self._own = self._weights(self.parameters)
        elif not self.versions:
            self._own = self._weights(self._empty_weights())
        self._before: Tensor | None = None  # the parameters before the update under way, for a prediction
        self.make_versions()

    @property
    def newest(self) -> Weights:
        """What the newest parameters compute with. To be taken anew after each update."""
        if self._own is not None:
            return self._own
        if not self.manifest.schedule.predict:
            return self.versions[(self.step + 1) % 2]
        flat = self._empty_weights()
        self.room.upload(flat, self.parameters)
        return self._weights(flat)

    @property
    def device(self) -> torch.device:
        """What computes. The parameters may lie elsewhere: see `Room`."""
        return self.room.device

    @property
    def _is_apart(self) -> bool:
        return self.room.is_apart

    @property
    def _has_copies(self) -> bool:
        """Whether microbatches never compute with the parameters themselves."""
        return self.manifest.is_rounded or self.room.is_apart

    @property
    def module(self) -> Stage:
        """A module that computes with the newest parameters."""
        return self.newest.module

    @property
    def modules(self) -> list[Stage]:
        """All modules that microbatches compute with."""
        own = [] if self._own is None else [self._own.module]
        return [*own, *(weights.module for weights in self.versions)]

    @property
    def buffers(self) -> list[Tensor]:
        """All of the state, in the layout's order."""
        return self._buffers_at(self.step)

    def _buffers_at(self, step: int) -> list[Tensor]:
        """The same when so many steps are applied."""
        own = [self._flat[index] for index, spec in enumerate(self.layout.buffers) if spec.name not in _VERSIONS]
        if not self.versions:
            return own
        now, later = self.versions[step % 2].flat, self.versions[(step + 1) % 2].flat
        return [*own, now, later] if self.manifest.schedule.predict else [*own, now]

    def weights(self, step: int) -> Weights:
        """What the microbatches of `step` compute with."""
        return self.versions[step % 2] if self.versions else self.newest

    def before_update(self) -> None:
        """The step under way will be applied now: its weights are not needed any more, the parameters before it are."""
        if not self.versions or not self.manifest.is_predicted(self.step + 2):
            return
        if self._has_copies:  # a rounded copy would add its error to the change
            self._before = self.parameters.clone()
        else:
            self._before = self.versions[self.step % 2].flat.copy_(self.parameters)

    def make_versions(self) -> None:
        """After an update: the weights of the steps that compute with this state."""
        manifest, step = self.manifest, self.step
        if self._near_epoch != self.basis_epoch:  # else open microbatches compute with it
            self._bring_basis()
        if not self.versions:
            self._round_own()
            return
        if manifest.weights_step(step) == step:  # a barrier, or the delay has not begun
            self.room.upload(self.versions[step % 2].flat, self.parameters)
        later = self.versions[(step + 1) % 2].flat
        if manifest.is_predicted(step + 1):
            before, self._before = self._before, None
            assert before is not None, "`before_update` was not called"
            self.room.upload(later, torch.sub(self.parameters, before, out=before).add_(self.parameters))
        else:
            self.room.upload(later, self.parameters)

    def _round_own(self) -> None:
        if self._own is not None and self._own.flat is not self.parameters:
            self.room.upload(self._own.flat, self.parameters)

    def _bring_basis(self) -> None:
        """To the device: it has moved."""
        if self._near_basis is not None and self.basis is not None:
            self._near_basis.copy_(self.basis)
        self._near_epoch = self.basis_epoch

    def _empty_weights(self) -> Tensor:
        return torch.empty_like(self.parameters, dtype=self.layout.weights_dtype, device=self.device)

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
        return make_accumulator(self.manifest.batch.accumulate, self.gradient_size, self.room.sums)

    def view(self, name: str) -> Tensor:
        """A parameter by its full name."""
        slot = next(slot for slot in self.slots if slot.spec.name == name)
        return self.parameters[slot.span].view(slot.spec.shape)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that a checkpoint keeps, in a fixed order, as views."""
        return self.layout.named(self.buffers, self.step)

    def load(self, tensors: dict[str, Tensor], *, step: int, basis_epoch: int) -> None:
        """Replace the whole state. Names, shapes and types must match exactly; nothing changes if they do not."""
        own = dict(self.layout.named(self._buffers_at(step), step))
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
        self.layout.complete(self.buffers, step)
        self._share_weights()

    def load_buffers(self, buffers: Sequence[Tensor], *, step: int, basis_epoch: int) -> None:
        """Replace the whole state by downloaded buffers of the same layout."""
        self.step, self.basis_epoch = step, basis_epoch
        for mine, theirs in zip(self.buffers, buffers, strict=True):
            mine.copy_(theirs)
        self._share_weights()

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
            self.parameters[slot.span] = value.reshape(-1).to(self.room.home, self.dtype)
        start = 0
        for slot in self.layout.factored:
            assert self.right_factors is not None
            shape = (slot.spec.shape[1], self.layout.rank_of(slot))
            factor = draw_normal(self.manifest.run.seed, f"right_factor.{slot.spec.name}", shape)
            self.right_factors[start : start + factor.numel()] = factor.reshape(-1)
            start += factor.numel()

    def _version_buffers(self) -> list[Tensor]:
        """Two, with a delay."""
        if not self.layout.is_delayed:
            return []
        found = [self._flat[index] for index, spec in enumerate(self.layout.buffers) if spec.name in _VERSIONS]
        more = 2 - len(found)
        return [*found, *(self._empty_weights() for _ in range(more))]

    def _share_weights(self) -> None:
        """After loading: weights that the state does not name. They are the parameters."""
        self._before = None
        self._bring_basis()
        self._round_own()
        if self.versions and not self.manifest.schedule.predict:
            self.room.upload(self.versions[(self.step + 1) % 2].flat, self.parameters)

    def _weights(self, flat: Tensor) -> Weights:
        """A module whose parameters are views of `flat`."""
        basis = self.basis if self._near_basis is None else self._near_basis
        module = Stage(self.manifest, self.plan, basis, self._table)
        names = [slot.spec.name for slot in self.slots]
        assert sorted(dict(module.named_parameters())) == sorted(names), "the layout and the module disagree"
        parameters: list[Tensor] = []
        for slot in self.slots:
            parent, _, leaf = slot.spec.name.rpartition(".")
            parameter = torch.nn.Parameter(flat[slot.span].view(slot.spec.shape))
            setattr(module.get_submodule(parent), leaf, parameter)
            parameters.append(parameter)
        return Weights(flat, module, parameters)
