"""PowerSGD for in-stage gradients: the mathematics of a round, with the sums left to the caller.

For each matrix M_i = gradient_i + error_i of peer i, and a right factor Q that all peers share:

    P = orth(sum of M_i Q)          left factors, summed by an owner, made orthonormal there, sent to everyone
    Q = sum of M_iᵀ P               right factors, summed by an owner, sent to everyone
    gradient <- P Qᵀ = P Pᵀ sum(M_i),   error_i <- M_i - P (M_iᵀ P)ᵀ   with the peer's own right factor

All peers must use the same bits of P, so it travels as bytes. Errors and Q change in `commit` only,
after the step was applied. Q is part of the state that a newcomer downloads; its error begins at zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarmtrain.codec.errors import CodecError
from swarmtrain.codec.lowrank import orthonormal
from swarmtrain.codec.tensors import check_finite

_WORTH = 0.5  # factors must take at most this share of the matrix

Matrices = Mapping[str, torch.Tensor]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the matrix view: the first axis against all others."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape), 1)


def is_worth_it(shape: Sequence[int], rank: int) -> bool:
    """True if two factors take at most half of the numbers. False for vectors."""
    rows, columns = matrix_shape(shape)
    return len(shape) > 1 and rank * (rows + columns) <= _WORTH * rows * columns


def initial_right_factor(name: str, shape: Sequence[int], rank: int) -> torch.Tensor:
    """The Q (columns, rank) that every peer starts with: a function of the parameter's name."""
    seed = hashlib.blake2b(f"powersgd {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
    return torch.randn(matrix_shape(shape)[1], rank, generator=generator)


@dataclass(slots=True)
class PowerSGDState:
    """What one peer keeps between steps, for the parameters that are worth it."""

    right: dict[str, torch.Tensor]  # shared by all peers, name -> (columns, rank)
    error: dict[str, torch.Tensor]  # this peer's own, name -> (rows, columns)

    @staticmethod
    def fresh(shapes: Mapping[str, Sequence[int]], rank: int) -> PowerSGDState:
        """For the parameters of a stage, by name; those not worth it are left out and reduced as they are."""
        chosen = {name: shape for name, shape in shapes.items() if is_worth_it(shape, rank)}
        right = {name: initial_right_factor(name, shape, rank) for name, shape in chosen.items()}
        return PowerSGDState(right, {name: torch.zeros(matrix_shape(shape)) for name, shape in chosen.items()})


class PowerSGDRound:
    """One step's all-reduce at one peer: `left`, then `right`, then `result`; `commit` once the step is applied.

    A round that is not committed leaves no trace.
    """

    def __init__(self, state: PowerSGDState, gradients: Matrices) -> None:
        """`gradients` holds this peer's sums for every name in the state. Raises NonFiniteTensor."""
        self._state = state
        self._wanted: dict[str, torch.Tensor] = {}
        for name, error in state.error.items():
            gradient = gradients[name].detach().to("cpu", torch.float32)
            check_finite(gradient)
            self._wanted[name] = gradient.reshape(error.shape) + error  # (rows, columns)
        self._left: dict[str, torch.Tensor] = {}
        self._own_right: dict[str, torch.Tensor] = {}
        self._reduced_right: dict[str, torch.Tensor] = {}

    def left(self) -> dict[str, torch.Tensor]:
        """This peer's M_i Q (rows, rank) by name: to be summed, then made orthonormal by `orthonormal`."""
        return {name: wanted @ self._state.right[name] for name, wanted in self._wanted.items()}

    def right(self, left: Matrices) -> dict[str, torch.Tensor]:
        """This peer's M_iᵀ P (columns, rank) by name: to be summed. `left` holds the P that everyone received."""
        for name, wanted in self._wanted.items():
            if left[name].shape != (wanted.shape[0], self._state.right[name].shape[1]):
                raise CodecError(f"{name}: a left factor has shape {tuple(left[name].shape)}")
        self._left = dict(left)
        self._own_right = {name: wanted.T @ left[name] for name, wanted in self._wanted.items()}
        return dict(self._own_right)

    def result(self, right: Matrices) -> dict[str, torch.Tensor]:
        """The reduced gradients P Qᵀ (rows, columns) by name, the same at every peer that uses the same bytes."""
        return dict(self.results(right))

    def results(self, right: Matrices) -> Iterator[tuple[str, torch.Tensor]]:
        """The same one by one: so one matrix is there at a time."""
        self._keep_result(right)
        for name in self._own_right:
            yield name, self._product(name, right[name])

    def commit(self) -> None:
        """The step was applied: keep the error and the new Q. Nothing happens before `result`, or a second time."""
        for name, reduced in self._reduced_right.items():
            self._state.error[name] = self._error(name)
            if bool(reduced.any()):  # a gradient of zeros says nothing about the next one
                self._state.right[name] = _normalised(reduced)
        self._reduced_right = {}

    def _keep_result(self, right: Matrices) -> None:
        for name, own in self._own_right.items():
            if right[name].shape != own.shape:
                raise CodecError(f"{name}: a right factor has shape {tuple(right[name].shape)}")
        self._reduced_right = dict(right)

    def _product(self, name: str, right: torch.Tensor) -> torch.Tensor:
        """P Qᵀ of one matrix."""
        return self._left[name] @ right.T

    def _error(self, name: str) -> torch.Tensor:
        """What this peer's part of the gradient lacks of what it wanted (rows, columns), in the place of that."""
        return self._wanted.pop(name).sub_(self._left[name] @ self._own_right[name].T)


def orthonormal_left(summed: Matrices) -> dict[str, torch.Tensor]:
    """What an owner sends for the summed left factors it owns (rows, rank)."""
    return {name: orthonormal(left) for name, left in summed.items()}


def _normalised(right: torch.Tensor) -> torch.Tensor:
    """Q times a power of two, largest magnitude in [0.5, 1). Only its direction matters, and this is exact anywhere."""
    exponent = math.frexp(float(right.abs().max()))[1]
    half = exponent // 2
    return (right * 2.0**-half) * 2.0 ** (half - exponent)
